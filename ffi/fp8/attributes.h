// Attributes of fp8_quantize, all that there are.
#pragma once

#include "common/attributes.h"

JGG_ATTRIBUTES(Fp8QuantizeAttrs,       //
               (bool, along_rows),     // blocks lie along R, and are stored transposed
               (bool, square),         // a scale is that of 128 x 128, not of 1 x 128
               (bool, power_of_two));  // scales are rounded up to powers of two
