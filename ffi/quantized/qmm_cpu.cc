// CPU handlers of qmm: out[y_start_s + i] += x[x_start_s + i] @ W[weight_s], W quantized; T (rows)
// is grouped.
//
// Segments of few rows read lines as they are stored: a line is decoded, and meets its rows at
// once. Segments of many rows are products of matrices, whose lines are decoded when they are
// packed.

#include "cpu/few_rows.h"
#include "cpu/pages.h"
#include "handlers.h"
#include "quantized/lines_cpu.h"
#include "quantized/qmm_bind.h"

namespace jgg {
namespace ffi = xla::ffi;
namespace {

// As the handler of mm has them. There is no w: see `lines`.
MmArgs MmArgsOf(const QmmArgs& qmm) {
  MmArgs args{};
  args.x = qmm.x;
  args.out = qmm.out;
  args.dtype = qmm.dtype;
  args.out_dtype = qmm.out_dtype;
  args.rows_x = args.x_list.count = qmm.rows_x;
  args.rows_y = qmm.rows_y;
  args.k = qmm.k;
  args.n = qmm.n;
  args.groups = qmm.w.groups;
  args.strides.x_row = qmm.k;
  args.strides.x_k = 1;
  args.strides.out_row = qmm.n;
  args.strides.out_n = 1;
  args.metadata = qmm.metadata;
  args.in_order = qmm.in_order;
  return args;
}

void RunQmm(ffi::ThreadPool& pool, const QmmArgs& qmm) {
  const MmArgs args = MmArgsOf(qmm);
  const bool rounds = qmm.w.coding.Facts().scale != ScaleType::kFloat32;
  const cpu::Lines lines = LinesOf(qmm.w, rounds ? qmm.dtype : DType::kF32);
  const cpu::Source source{cpu::BestLines().decoder(lines), &lines};
  const auto w_at = [&](int64_t weight, int64_t column) {
    cpu::Matrix w{nullptr, qmm.transpose_w, !qmm.transpose_w, DType::kF32};
    w.source = &source;
    w.line = weight * lines.lines + (qmm.transpose_w ? column : 0);
    w.element = qmm.transpose_w ? 0 : column;
    return w;
  };
  cpu::RunByLines(pool, args, w_at, lines, qmm.transpose_w);
}

ffi::Error QmmCpu(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                  ffi::AnyBuffer scales, ffi::BufferR2<ffi::S32> segments, ffi::RemainingArgs rest,
                  ffi::Result<ffi::AnyBuffer> out, QuantizedAttrs quantized, QmmAttrs attrs) {
  constexpr const char* op = "qmm";
  if (attrs.planned) return Unimplemented(op, "x in another order needs sm90");
  QmmArgs args{};
  JGG_RETURN_IF_ERROR(BindCoding(op, quantized, "linear", &args.w));
  JGG_RETURN_IF_ERROR(BindQmm(x, weight, scales, *out, attrs, Activation::kNone, &args));
  Operands operands(op, rest);
  if (quantized.biases) JGG_RETURN_IF_ERROR(BindBiases(op, scales, &operands, &args.w));
  if (quantized.global_scale) {
    JGG_RETURN_IF_ERROR(
        BindGlobalScale(op, args.w.groups, args.n, &operands, &args.w.global_scale));
    if (args.w.global_scale.column != 0) {
      return Unimplemented(op, "a global scale of each column needs CUDA");
    }
  }
  JGG_RETURN_IF_ERROR(operands.End());
  JGG_RETURN_IF_ERROR(
      BindTable(op, segments, args.rows_x, args.rows_y, args.w.groups, &args.metadata));
  cpu::AskForHugePages(args.out, out->size_bytes());
  RunQmm(pool, args);
  return ffi::Error::Success();
}

ffi::Error QmmFp8Cpu(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer weight,
                     ffi::AnyBuffer scales, ffi::BufferR2<ffi::S32> segments,
                     ffi::Result<ffi::AnyBuffer> out, BlockAttrs block, QmmAttrs attrs) {
  constexpr const char* op = "qmm_fp8";
  if (attrs.planned) return Unimplemented(op, "x in another order needs sm90");
  QmmArgs args{};
  QuantizedWeight& w = args.w;
  JGG_RETURN_IF_ERROR(CheckFloat(op, "x", x.element_type()));
  JGG_RETURN_IF_ERROR(CheckFloat(op, "out", out->element_type()));
  JGG_RETURN_IF_ERROR(BindFp8Weight(op, weight, scales, block, cpu::kUnit, &w));
  const bool along_k = args.transpose_w = attrs.transpose_w;
  args.k = along_k ? w.elements : w.lines;
  args.n = along_k ? w.lines : w.elements;
  JGG_RETURN_IF_ERROR(CheckShape(op, "x", "(T, K)", x, {-1, args.k}));
  JGG_RETURN_IF_ERROR(CheckShape(op, "out", "(T, N)", *out, {-1, args.n}));
  args.x = x.untyped_data();
  args.out = out->untyped_data();
  args.dtype = *ToDType(x.element_type());
  args.out_dtype = *ToDType(out->element_type());
  args.rows_x = x.dimensions()[0];
  args.rows_y = out->dimensions()[0];
  args.in_order = attrs.in_order;
  JGG_RETURN_IF_ERROR(BindTable(op, segments, args.rows_x, args.rows_y, w.groups, &args.metadata));
  cpu::AskForHugePages(args.out, out->size_bytes());
  RunQmm(pool, args);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kQmmCpu, QmmCpu,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()           // x
                           .Arg<ffi::AnyBuffer>()           // weight
                           .Arg<ffi::AnyBuffer>()           // scales
                           .Arg<ffi::BufferR2<ffi::S32>>()  // segments
                           .RemainingArgs()                 // biases, global_scale
                           .Ret<ffi::AnyBuffer>()           // out
                           .Attr<QuantizedAttrs>("quantized")
                           .Attr<QmmAttrs>("qmm"));

XLA_FFI_DEFINE_HANDLER(kQmmFp8Cpu, QmmFp8Cpu,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()           // x
                           .Arg<ffi::AnyBuffer>()           // weight
                           .Arg<ffi::AnyBuffer>()           // scales
                           .Arg<ffi::BufferR2<ffi::S32>>()  // segments
                           .Ret<ffi::AnyBuffer>()           // out
                           .Attr<BlockAttrs>("block")
                           .Attr<QmmAttrs>("qmm"));

}  // namespace

XLA_FFI_Error* JggQmmCpu(XLA_FFI_CallFrame* call_frame) { return kQmmCpu(call_frame); }
XLA_FFI_Error* JggQmmFp8Cpu(XLA_FFI_CallFrame* call_frame) { return kQmmFp8Cpu(call_frame); }

}  // namespace jgg
