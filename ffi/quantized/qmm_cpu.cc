// CPU handlers of qmm: out[y_start_s + i] += x[x_start_s + i] @ W[weight_s], W quantized; T (rows)
// is grouped.
//
// Segments of few rows read lines as they are stored: a line is decoded, and meets its rows at
// once. Segments of many rows are products of matrices, whose lines are decoded when they are
// packed.

#include <vector>

#include "cpu/grouped.h"
#include "cpu/lines.h"
#include "cpu/pages.h"
#include "handlers.h"
#include "quantized/lines_cpu.h"
#include "quantized/qmm_bind.h"

namespace jgg {
namespace ffi = xla::ffi;
namespace {

using cpu::FewRows;
using cpu::Lines;
using cpu::Part;

// Of a segment with few rows: lines of a task, or the least elements of all lines.
constexpr int64_t kTaskLines = 128, kTaskElements = 512;
constexpr int64_t kTaskSums = std::max(cpu::kMostAdds, cpu::kMostFewRows* kTaskLines);
// Numbers that this thread copies sooner than another one wakes up.
constexpr int64_t kFewCopies = 1 << 16;
static_assert(cpu::kMostAddRows * kTaskElements <= cpu::kMostAdds);

int64_t WholeUnits(int64_t count) { return (count + cpu::kUnit - 1) / cpu::kUnit * cpu::kUnit; }

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

// Parts of few rows, and the tasks that they have.
class FewRowsParts {
 public:
  FewRowsParts(const MmArgs& args, const Lines& lines, bool transpose_w)
      : args_(args), lines_(lines), transpose_w_(transpose_w) {}

  bool Takes(const Part& part) const {
    const int64_t most = transpose_w_ ? cpu::BestLines().few_rows : cpu::kMostAddRows;
    return part.weight >= 0 && part.rows <= most;
  }

  void Push(const Part& part) { parts_.push_back(part); }

  int64_t Tasks() const { return static_cast<int64_t>(parts_.size()) * TasksOfOne(); }

  // Tasks for these threads, and rows of x as float32, in whole units: as they are, or copies.
  template <typename Pool>
  void Prepare(Pool& pool) {
    if (!transpose_w_) ChooseWidth(std::max<int64_t>(pool.num_threads(), 1));
    const bool whole = !transpose_w_ || args_.k % cpu::kUnit == 0;
    if (parts_.empty() || (args_.dtype == DType::kF32 && whole)) return;
    stride_ = WholeUnits(args_.k);
    int64_t rows = 0;
    for (const Part& part : parts_) {
      first_.push_back(rows);
      rows += part.rows;
    }
    copies_.resize(rows * stride_);
    const auto copy = [&](int64_t i) {
      const Part& part = parts_[i];
      for (int64_t r = 0; r < part.rows; ++r) {
        const char* const row =
            static_cast<const char*>(args_.x) + (part.x_row + r) * args_.k * Size(args_.dtype);
        cpu::BestLines().widen(row, args_.dtype, args_.k,
                               copies_.data() + (first_[i] + r) * stride_);
      }
    };
    const auto parts = static_cast<int64_t>(parts_.size());
    if (rows * stride_ <= kFewCopies) {
      for (int64_t i = 0; i < parts; ++i) copy(i);
    } else {
      cpu::ParallelFor(pool, parts, copy);
    }
  }

  void Run(int64_t task) const {
    const int64_t i = task / TasksOfOne(), begin = task % TasksOfOne() * width_;
    const Part& part = parts_[i];
    const int64_t count = std::min(width_, args_.n - begin);
    const FewRows x =
        copies_.empty()
            ? FewRows{static_cast<const float*>(args_.x) + part.x_row * args_.k, args_.k, part.rows}
            : FewRows{copies_.data() + first_[i] * stride_, stride_, part.rows};
    float sums[kTaskSums];
    const int64_t line = part.weight * lines_.lines;
    if (transpose_w_) {
      cpu::BestLines().multiply(lines_, line + begin, count, x, sums, width_);
    } else {
      cpu::BestLines().add(lines_, line, args_.k, begin, count, x, sums, width_);
    }
    for (int64_t r = 0; r < part.rows; ++r) {
      const int64_t at = (part.row + r) * args_.n + begin;
      cpu::BestLines().narrow(sums + r * width_, count, args_.out_dtype,
                              static_cast<char*>(args_.out) + at * Size(args_.out_dtype));
    }
  }

 private:
  // Along N a task has all lines. It reads as much of each as leaves two tasks for a thread:
  // processors fetch ahead what lies in a row.
  void ChooseWidth(int64_t threads) {
    int64_t rows = 1;
    for (const Part& part : parts_) rows = std::max(rows, part.rows);
    const auto fits = [&](int64_t width) {
      width_ = width;
      return rows * width <= cpu::kMostAdds && Tasks() >= 2 * threads;
    };
    int64_t width = kTaskElements;
    while (width < args_.n && fits(2 * width)) width *= 2;
    width_ = width;
  }

  int64_t TasksOfOne() const { return (args_.n + width_ - 1) / width_; }

  const MmArgs& args_;
  const Lines& lines_;
  bool transpose_w_;
  std::vector<Part> parts_;
  std::vector<float> copies_;
  std::vector<int64_t> first_;  // a part's first row among the copies
  int64_t stride_ = 0;
  int64_t width_ = kTaskLines;  // columns of a task: lines, or elements of all lines
};

void RunQmm(ffi::ThreadPool& pool, const QmmArgs& qmm) {
  const MmArgs args = MmArgsOf(qmm);
  const bool rounds = qmm.w.coding.Facts().scale != ScaleType::kFloat32;
  const Lines lines = LinesOf(qmm.w, rounds ? qmm.dtype : DType::kF32);
  const cpu::Source source{cpu::BestLines().decoder(lines), &lines};
  const auto w_at = [&](int64_t weight, int64_t column) {
    cpu::Matrix w{nullptr, qmm.transpose_w, !qmm.transpose_w, DType::kF32};
    w.source = &source;
    w.line = weight * lines.lines + (qmm.transpose_w ? column : 0);
    w.element = qmm.transpose_w ? 0 : column;
    return w;
  };
  const cpu::Grouped grouped(args, w_at);
  std::vector<Part> all, many;
  if (!args.in_order || !cpu::CutInOrder(args, &all)) return grouped.RunOverlapping(pool);
  FewRowsParts few(args, lines, qmm.transpose_w);
  for (const Part& part : all) {
    if (few.Takes(part)) {
      few.Push(part);
    } else {
      many.push_back(part);
    }
  }
  few.Prepare(pool);
  const int64_t few_tasks = few.Tasks(), tasks = grouped.Tasks();
  cpu::ParallelFor(pool, few_tasks + static_cast<int64_t>(many.size()) * tasks, [&](int64_t i) {
    if (i < few_tasks) return few.Run(i);
    i -= few_tasks;
    grouped.RunPart(many[i / tasks], i % tasks);
  });
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
