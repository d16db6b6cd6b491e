// Attributes of fp8_quantize, and of fp8_cast: all that there are. The first two say which codes
// are results.
#pragma once

#include "common/attributes.h"

JGG_ATTRIBUTES(Fp8QuantizeAttrs,       //
               (bool, along_columns),  // blocks lie along C, stored as x is
               (bool, along_rows),     // blocks lie along R, stored transposed
               (bool, square),         // a scale is that of 128 x 128, not of 1 x 128
               (bool, power_of_two));  // scales are rounded up to powers of two

JGG_ATTRIBUTES(Fp8CastAttrs,           //
               (bool, along_columns),  // codes stored as x is
               (bool, along_rows),     // codes stored transposed
               (bool, largest));       // magnitudes
