// Attributes of fp8_quantize, all that there are.
#pragma once

#include "common/attributes.h"

JGG_ATTRIBUTES(Fp8QuantizeAttrs,       //
               (bool, along_rows),     // blocks lie along R, and are stored transposed
               (bool, square),         // a scale is that of 128 x 128, not of 1 x 128
               (bool, power_of_two));  // scales are rounded up to powers of two

// Attributes of fp8_grouped_wgrad, all that there are.
JGG_ATTRIBUTES(Fp8WgradAttrs,         //
               (bool, existing_out),  // it is an operand
               (bool, powers));       // scales of dy are powers of two, or NaN where codes are 0

// Attributes of fp8_activation_backward, all that there are.
JGG_ATTRIBUTES(Fp8ActivationBackwardAttrs,      //
               (std::string_view, activation),  //
               (bool, power_of_two));           // scales of blocks along rows are
