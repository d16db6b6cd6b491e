// Attributes that the handlers of quantized arrays share: dictionaries of a call, by name.
#pragma once

#include "common/attributes.h"

// "quantized": what a quantized array is, as jax_groupgemm's class Quantized has it, and which of
// its optional leaves there are.
JGG_ATTRIBUTES(QuantizedAttrs,              //
               (std::string_view, mode),    // "affine", "mxfp4", "mxfp8", "nvfp4" or "fp8"
               (int32_t, bits),             // of a code
               (int32_t, group_size),       // codes that share a scale
               (std::string_view, layout),  // "linear" or "sm90"
               (bool, biases),              //
               (bool, global_scale));

// "block": rows and columns that share a scale, in mode "fp8".
JGG_ATTRIBUTES(BlockAttrs,       //
               (int32_t, rows),  //
               (int32_t, columns));

// "qmm": how the matrices lie, the segments' rows in the result, and the arithmetic.
JGG_ATTRIBUTES(QmmAttrs,             //
               (bool, transpose_w),  // lines of w are columns of W
               (bool, planned),      // x is as QmmArgs says for the Hopper kernel
               (bool, in_order),     // rows in the result are ascending and disjoint
               (bool, tf32));        // float32 operands may be rounded to TensorFloat-32

// "plan": how the Hopper kernels multiply (plan.h), or that the generic one does.
JGG_ATTRIBUTES(QmmPlanAttrs,             //
               (std::string_view, way),  // "tiles", "warps", "direct", "scaled" or "generic"
               (int32_t, tile),          // rows of a tile, or of a block
               (int32_t, parts),         // blocks that share out a tile's k
               (bool, pairs),            // a warp has two columns' tiles
               (int32_t, planes));       // of x, beside each other: way "scaled"
