// Attributes that the handlers of mm, wgrad and qmm share: dictionaries of a call, by name.
#pragma once

#include "common/attributes.h"

// "metadata": the form in which the call's grouping metadata comes, see segments.h.
JGG_ATTRIBUTES(MetadataAttrs,             //
               (std::string_view, kind),  // "sizes", "spans" or "segments"
               (bool, swapped),           // segments: the first two columns are (y_start, x_start)
               (bool, group_offset));     // sizes: an operand says which group weight 0 is

// "mm": how the matrices lie, and the segments' rows in the result.
JGG_ATTRIBUTES(MmAttrs,                //
               (bool, transpose_x),    // x is (K, T)
               (bool, transpose_w),    // w is (G, N, K)
               (bool, transpose_out),  // the result is (N, T)
               (bool, in_order),       // rows in the result are ascending and disjoint
               (bool, clears_rest));   // rows of no segment become zeros

// "rows": which lists of rows are among the operands.
JGG_ATTRIBUTES(RowsAttrs,       //
               (bool, x_rows),  //
               (bool, y_rows));

// "epilogue": the activation, which of its operands there are, and what becomes of the sums before
// it: see Epilogue.
JGG_ATTRIBUTES(EpilogueAttrs,                   //
               (bool, bias),                    //
               (std::string_view, activation),  // "" for none
               (bool, row_scale),               //
               (bool, existing_out),            //
               (bool, preactivation),           //
               (bool, rounds_preactivation));

// "wgrad": how the matrices lie.
JGG_ATTRIBUTES(WgradAttrs,            //
               (bool, transpose_x),   // x is (A, T)
               (bool, transpose_y));  // y is (B, T)

// "epilogue" of wgrad: which of its operands there are.
JGG_ATTRIBUTES(WgradEpilogueAttrs,  //
               (bool, scale),       //
               (bool, existing_out));

// "plan": which kernel multiplies, and how. "sm90" follows plan.h; "sm80" looks at tf32 alone.
// "sm100" has one plan, and a workspace among the results.
JGG_ATTRIBUTES(PlanAttrs,                   //
               (std::string_view, kernel),  // "sm100", "sm90" or "sm80", or "" for the first but
                                            // "sm100" that can
               (std::string_view, rows),    // "in order", "by list" or "operand by list"
               (int32_t, tile),             // rows of a tile
               (bool, pairs),               // of planes: blocks come in pairs
               (int32_t, planes),           // bfloat16 planes of float32 operands, or 1
               (bool, tf32));               // float32 operands may be rounded to TensorFloat-32
