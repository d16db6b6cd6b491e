// FFI handler of mm: bind, check, choose, launch.

#include "grouped_mm/mm.h"

#include "common/arch.h"
#include "common/buffer.h"
#include "common/check.h"
#include "handlers.h"

namespace jgg {
namespace ffi = xla::ffi;

static ffi::Error Mm(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer w,
                     ffi::BufferR2<ffi::S32> segments, ffi::Result<ffi::AnyBuffer> out,
                     bool transpose_x, bool transpose_w, bool transpose_out) {
  constexpr const char* op = "mm";
  JGG_RETURN_IF_ERROR(CheckFloat(op, "x", x.element_type()));
  JGG_RETURN_IF_ERROR(CheckFloat(op, "out", out->element_type()));
  if (w.element_type() != x.element_type()) {
    return InvalidArgument(op, "x and w must have one dtype");
  }
  JGG_RETURN_IF_ERROR(CheckShape(op, "x", transpose_x ? "(K, T)" : "(T, K)", x, {-1, -1}));
  const int64_t rows_x = x.dimensions()[transpose_x ? 1 : 0];
  const int64_t k = x.dimensions()[transpose_x ? 0 : 1];
  JGG_RETURN_IF_ERROR(CheckShape(op, "w", transpose_w ? "(G, N, K)" : "(G, K, N)", w,
                                 {-1, transpose_w ? -1 : k, transpose_w ? k : -1}));
  const int64_t n = w.dimensions()[transpose_w ? 1 : 2];
  JGG_RETURN_IF_ERROR(CheckShape(op, "out", transpose_out ? "(N, T)" : "(T, N)", *out,
                                 {transpose_out ? n : -1, transpose_out ? -1 : n}));
  const int64_t rows = out->dimensions()[transpose_out ? 1 : 0];
  JGG_RETURN_IF_ERROR(CheckShape(op, "segments", "(S, 4)", segments, {-1, 4}));

  MmArgs args{};
  args.x = x.untyped_data();
  args.w = w.untyped_data();
  args.segments = reinterpret_cast<const Segment*>(segments.typed_data());
  args.out = out->untyped_data();
  args.dtype = *ToDType(x.element_type());
  args.out_dtype = *ToDType(out->element_type());
  args.rows_x = rows_x;
  args.rows = rows;
  args.k = k;
  args.n = n;
  args.groups = w.dimensions()[0];
  args.num_segments = segments.dimensions()[0];
  args.x_row = transpose_x ? 1 : k;
  args.x_k = transpose_x ? rows_x : 1;
  args.w_group = k * n;
  args.w_k = transpose_w ? 1 : n;
  args.w_n = transpose_w ? k : 1;
  args.out_row = transpose_out ? 1 : n;
  args.out_n = transpose_out ? rows : 1;

  if (auto reason = mm_sm80_unsupported(args, ComputeCapability())) {
    return Unimplemented(op, *reason);
  }
  return FromCuda(op, mm_sm80(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kMm, Mm,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()           // x
                           .Arg<ffi::AnyBuffer>()           // w
                           .Arg<ffi::BufferR2<ffi::S32>>()  // segments
                           .Ret<ffi::AnyBuffer>()           // out
                           .Attr<bool>("transpose_x")
                           .Attr<bool>("transpose_w")
                           .Attr<bool>("transpose_out"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggMm(XLA_FFI_CallFrame* call_frame) { return kMm(call_frame); }

}  // namespace jgg
