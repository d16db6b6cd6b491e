// What rules ask of the calls of mm and wgrad.
#pragma once

#include "grouped_mm/mm.h"
#include "grouped_mm/rules.h"
#include "grouped_mm/wgrad.h"

namespace jgg {

inline rules::MmShape DescribeShape(const MmArgs& args) {
  rules::MmShape shape{args.k, args.n};
  shape.element_bytes = Size(args.dtype);
  shape.planes = args.planes;
  shape.transpose_x = args.strides.x_k != 1;
  shape.transpose_w = args.strides.w_n != 1;
  shape.transpose_out = args.strides.out_n != 1;
  shape.in_order = args.in_order;
  shape.gated = IsGated(args.epilogue.activation);
  shape.by_list = args.ByList();
  const Epilogue& epilogue = args.epilogue;
  shape.preactivation = epilogue.HasPreactivation();
  shape.more_options = epilogue.row_scale != nullptr || epilogue.accumulate ||
                       (shape.by_list && epilogue.bias != nullptr);
  shape.same_dtype = args.out_dtype == args.dtype;
  return shape;
}

inline rules::WgradShape DescribeShape(const WgradArgs& args) {
  rules::WgradShape shape{args.rows_x, args.rows_y, args.a, args.b};
  shape.element_bytes = Size(args.dtype);
  shape.transpose_x = args.strides.x_row == 1 && args.strides.x_a != 1;
  shape.transpose_y = args.strides.y_row == 1 && args.strides.y_b != 1;
  shape.own_weight = args.own_weight;
  shape.segments = args.metadata.kind == MetadataKind::kSegments;
  shape.planes = args.planes;
  shape.x_by_list = args.x_list.list != nullptr;
  shape.y_by_list = args.y_list.list != nullptr;
  shape.more_options = args.HasEpilogue();
  shape.same_dtype = args.out_dtype == args.dtype;
  return shape;
}

}  // namespace jgg
