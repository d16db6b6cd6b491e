// All attributes of nvfp4_quantize.
#pragma once

#include "common/attributes.h"

JGG_ATTRIBUTES(Nvfp4QuantizeAttrs,  //
               (bool, along_rows),  // blocks lie along R, and are stored transposed
               (bool, scale_2d),    // a scale is for 16 x 16 elements
               (bool, hadamard));   // blocks are rotated before they are rounded
