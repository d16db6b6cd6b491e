// Attributes of nvfp4_quantize, all that there are.
#pragma once

#include "common/attributes.h"

JGG_ATTRIBUTES(Nvfp4QuantizeAttrs,  //
               (bool, along_rows),  // blocks lie along R, and are stored transposed
               (bool, scale_2d),    // a scale is that of 16 x 16
               (bool, hadamard));   // blocks are rotated before they are rounded
