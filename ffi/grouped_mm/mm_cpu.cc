// CPU handler of mm: out[y_start_s + i] += x[x_start_s + i] @ w[weight_s]; T (rows) is grouped.

#include <vector>

#include "cpu/gemm.h"
#include "cpu/operands.h"
#include "cpu/parallel.h"
#include "grouped_mm/mm_bind.h"
#include "handlers.h"

namespace jgg {
namespace ffi = xla::ffi;
namespace {

using cpu::At;
using cpu::Matrix;

// Part of one segment: `rows` rows from `first`.
struct Part {
  const Segment* segment;
  int64_t first, rows;
};

void Add(const MmArgs& args, const Part& part, int64_t column, int64_t columns, const Matrix& out,
         bool accumulate) {
  const Segment& s = *part.segment;
  const Matrix x = At(args.x, (s.x_start + part.first) * args.strides.x_row, args.strides.x_row,
                      args.strides.x_k, args.dtype);
  const Matrix w = At(args.w, s.weight * args.strides.w_group + column * args.strides.w_n,
                      args.strides.w_k, args.strides.w_n, args.dtype);
  cpu::BestGemm()(part.rows, columns, args.k, x, w, out, accumulate, cpu::ThreadScratch());
}

bool HasRows(const MmArgs& args, const Segment& s) {
  return s.length > 0 && s.weight >= 0 && s.weight < args.groups;
}

// Disjoint ascending rows: every element is written once, those of no segment with zeros.
void RunInOrder(ffi::ThreadPool& pool, const MmArgs& args) {
  std::vector<Part> parts;
  int64_t end = 0;  // rows before this are dealt with
  const auto cut = [&](const Segment* segment, int64_t length) {
    for (int64_t first = 0; first < length; first += cpu::kTaskRows) {
      parts.push_back({segment, first, std::min(cpu::kTaskRows, length - first)});
    }
  };
  std::vector<Segment> gaps;
  gaps.reserve(args.metadata.count + 1);  // parts point into it
  const auto gap = [&](int64_t until) {
    if (until <= end) return;
    gaps.push_back({0, static_cast<int32_t>(end), static_cast<int32_t>(until - end), -1});
    cut(&gaps.back(), until - end);
  };
  for (int64_t i = 0; i < args.metadata.count; ++i) {
    const Segment& s = args.metadata.table()[i];
    if (!HasRows(args, s)) continue;
    gap(s.y_start);
    cut(&s, s.length);
    end = s.y_start + s.length;
  }
  gap(args.rows_y);
  const int64_t column_tasks = (args.n + cpu::kBlockN - 1) / cpu::kBlockN;
  cpu::ParallelFor(pool, static_cast<int64_t>(parts.size()) * column_tasks, [&](int64_t task) {
    const Part& part = parts[task / column_tasks];
    const int64_t column = task % column_tasks * cpu::kBlockN;
    const int64_t columns = std::min(cpu::kBlockN, args.n - column);
    const int64_t row = part.segment->y_start + part.first;
    const Matrix out = At(args.out, row * args.strides.out_row + column * args.strides.out_n,
                          args.strides.out_row, args.strides.out_n, args.out_dtype);
    if (part.segment->weight >= 0) {
      Add(args, part, column, columns, out, false);
    } else {
      cpu::BestGemm()(part.rows, columns, 0, Matrix{}, Matrix{}, out, false, cpu::ThreadScratch());
    }
  });
}

// Rows that may meet: each task owns some columns of every row and adds segments in order, as
// float32, to be rounded once.
void RunOverlapping(ffi::ThreadPool& pool, const MmArgs& args) {
  constexpr int64_t kLeast = 16;
  const int64_t share = (args.n + pool.num_threads() - 1) / pool.num_threads();
  const int64_t width = (share + kLeast - 1) / kLeast * kLeast;
  cpu::ParallelFor(pool, (args.n + width - 1) / width, [&](int64_t task) {
    const int64_t column = task * width;
    const int64_t columns = std::min(width, args.n - column);
    std::vector<float> sums(args.rows_y * columns);
    for (int64_t i = 0; i < args.metadata.count; ++i) {
      const Segment& s = args.metadata.table()[i];
      if (!HasRows(args, s)) continue;
      const Matrix rows{sums.data() + s.y_start * columns, columns, 1, DType::kF32};
      Add(args, {&s, 0, s.length}, column, columns, rows, true);
    }
    for (int64_t row = 0; row < args.rows_y; ++row) {
      const float* from = sums.data() + row * columns;
      for (int64_t j = 0; j < columns; ++j) {
        const int64_t to = row * args.strides.out_row + (column + j) * args.strides.out_n;
        if (args.out_dtype != DType::kF32) {
          cpu::Round(from + j, 1, args.out_dtype, static_cast<uint16_t*>(args.out) + to);
        } else {
          static_cast<float*>(args.out)[to] = from[j];
        }
      }
    }
  });
}

ffi::Error MmCpu(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer w,
                 ffi::BufferR2<ffi::S32> segments, ffi::Result<ffi::AnyBuffer> out, MmAttrs attrs) {
  MmArgs args;
  JGG_RETURN_IF_ERROR(BindMm(x, w, *out, attrs, Activation::kNone, &args));
  JGG_RETURN_IF_ERROR(BindTable("mm", segments, &args.metadata));
  (args.in_order ? RunInOrder : RunOverlapping)(pool, args);
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kMmCpu, MmCpu,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()           // x
                           .Arg<ffi::AnyBuffer>()           // w
                           .Arg<ffi::BufferR2<ffi::S32>>()  // segments
                           .Ret<ffi::AnyBuffer>()           // out
                           .Attr<MmAttrs>("mm"));

}  // namespace

XLA_FFI_Error* JggMmCpu(XLA_FFI_CallFrame* call_frame) { return kMmCpu(call_frame); }

}  // namespace jgg
