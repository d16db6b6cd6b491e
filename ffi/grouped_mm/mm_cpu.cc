// CPU handler of mm: out[y_start_s + i] += x[x_start_s + i] @ w[weight_s]; T (rows) is grouped.
// Rows of x may come by list.

#include "cpu/few_rows.h"
#include "cpu/pages.h"
#include "grouped_mm/lists_bind.h"
#include "grouped_mm/mm_bind.h"
#include "handlers.h"

namespace jgg {
namespace ffi = xla::ffi;
namespace {

// w as (G, N, K), whose lines run along K, or as (G, K, N), along N.
cpu::Lines LinesOf(const MmArgs& args, bool along_k) {
  cpu::Lines lines{};
  lines.array = true;
  lines.scale_dtype = args.dtype;
  lines.lines = along_k ? args.n : args.k;
  lines.elements = along_k ? args.k : args.n;
  lines.line_bytes = lines.elements * Size(args.dtype);
  lines.codes = static_cast<const uint8_t*>(args.w);
  return lines;
}

ffi::Error MmCpu(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                 ffi::BufferR2<ffi::S32> segments, ffi::RemainingArgs rest,
                 ffi::Result<ffi::AnyBuffer> out, MmAttrs attrs, RowsAttrs rows) {
  MmArgs args;
  JGG_RETURN_IF_ERROR(BindMm(x, w, *out, attrs, Activation::kNone, &args));
  Operands operands("mm", rest);
  if (rows.y_rows) return Unimplemented("mm", "y_rows need sm90");
  if (rows.x_rows) {
    if (attrs.transpose_x) return Unimplemented("mm", "x_rows need x as (T, K)");
    JGG_RETURN_IF_ERROR(BindRows("mm", "x_rows", &operands, &args.x_list, &args.rows_x));
  }
  JGG_RETURN_IF_ERROR(operands.End());
  JGG_RETURN_IF_ERROR(
      BindTable("mm", segments, args.rows_x, args.rows_y, args.groups, &args.metadata));
  cpu::AskForHugePages(args.out, out->size_bytes());
  const auto w_at = [&](int64_t weight, int64_t column) {
    return cpu::At(args.w, weight * args.strides.w_group + column * args.strides.w_n,
                   args.strides.w_k, args.strides.w_n, args.dtype);
  };
  // Few rows have no kernel for columns of x or of the result.
  const bool by_rows = args.strides.x_k == 1 && args.strides.out_n == 1;
  cpu::RunByLines(pool, args, w_at, LinesOf(args, attrs.transpose_w), attrs.transpose_w, by_rows);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kMmCpu, MmCpu,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()           // x
                           .Arg<ffi::AnyBuffer>()           // w
                           .Arg<ffi::BufferR2<ffi::S32>>()  // segments
                           .RemainingArgs()                 // x_rows
                           .Ret<ffi::AnyBuffer>()           // out
                           .Attr<MmAttrs>("mm")
                           .Attr<RowsAttrs>("rows"));

}  // namespace

XLA_FFI_Error* JggMmCpu(XLA_FFI_CallFrame* call_frame) { return kMmCpu(call_frame); }

}  // namespace jgg
