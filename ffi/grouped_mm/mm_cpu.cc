// CPU handler of mm: out[y_start_s + i] += x[x_start_s + i] @ w[weight_s]; T (rows) is grouped.
// Rows of x may come by list.

#include <vector>

#include "cpu/gemm.h"
#include "cpu/operands.h"
#include "cpu/pages.h"
#include "cpu/parallel.h"
#include "grouped_mm/lists_bind.h"
#include "grouped_mm/mm_bind.h"
#include "handlers.h"

namespace jgg {
namespace ffi = xla::ffi;
namespace {

using cpu::At;
using cpu::Matrix;

// Rows of the product of one segment: row `row` of the result is row x_row of x times w[weight].
cpu::Product ProductOf(const MmArgs& args, int64_t row, int64_t rows, int64_t x_row, int64_t weight,
                       int64_t column) {
  const int32_t* const list = cpu::From(args.x_list, x_row);
  Matrix x = At(args.x, list == nullptr ? x_row * args.strides.x_row : 0, args.strides.x_row,
                args.strides.x_k, args.dtype);
  x.rows = list;
  x.lines = args.x_list.count;
  const Matrix w = At(args.w, weight * args.strides.w_group + column * args.strides.w_n,
                      args.strides.w_k, args.strides.w_n, args.dtype);
  return cpu::Product{row, rows, args.k, x, w};
}

// Rows [row, row + rows) of the result, and `columns` columns at most: the sum of so many products.
template <typename MakeProduct>
void RunTask(const MmArgs& args, int64_t row, int64_t rows, int64_t column, int64_t columns,
             int64_t count, const MakeProduct& product) {
  columns = std::min(columns, args.n - column);
  const Matrix out = At(args.out, row * args.strides.out_row + column * args.strides.out_n,
                        args.strides.out_row, args.strides.out_n, args.out_dtype);
  cpu::BestGemm()(rows, columns, cpu::ProductsOf(count, product), out, cpu::ThreadScratch());
}

// Part of one segment, or of the rows between two: those have no weight.
struct Part {
  int64_t row, rows, x_row, weight;
};

// All rows of the result in parts of one task each; false where segments' rows there are not
// ascending and disjoint, whatever the call says.
bool CutInOrder(const MmArgs& args, std::vector<Part>* parts) {
  const auto cut = [&](int64_t row, int64_t rows, int64_t x_row, int64_t weight) {
    for (int64_t first = 0; first < rows; first += cpu::kTaskRows) {
      parts->push_back(
          {row + first, std::min(cpu::kTaskRows, rows - first), x_row + first, weight});
    }
  };
  int64_t end = 0;  // rows before this are dealt with
  for (int64_t i = 0; i < args.metadata.count; ++i) {
    const Segment& s = args.metadata.table()[i];
    if (!HasRows(s, args.groups)) continue;
    if (s.y_start < end) return false;
    cut(end, s.y_start - end, 0, -1);
    cut(s.y_start, s.length, s.x_start, s.weight);
    end = int64_t{s.y_start} + s.length;
  }
  cut(end, args.rows_y - end, 0, -1);
  return true;
}

// Every element is written once, those of no segment with zeros.
void RunInOrder(ffi::ThreadPool& pool, const MmArgs& args, const std::vector<Part>& parts) {
  const int64_t column_tasks = (args.n + cpu::kBlockN - 1) / cpu::kBlockN;
  cpu::ParallelFor(pool, static_cast<int64_t>(parts.size()) * column_tasks, [&](int64_t task) {
    const Part& part = parts[task / column_tasks];
    const int64_t column = task % column_tasks * cpu::kBlockN;
    const int64_t count = part.weight < 0 ? 0 : 1;
    RunTask(args, part.row, part.rows, column, cpu::kBlockN, count, [&](int64_t) {
      return ProductOf(args, 0, part.rows, part.x_row, part.weight, column);
    });
  });
}

// Rows that may meet: a task owns rows and columns of the result, and adds the segments that reach
// them, in order, to be rounded once.
void RunOverlapping(ffi::ThreadPool& pool, const MmArgs& args) {
  const int64_t row_tasks = (args.rows_y + cpu::kTaskRows - 1) / cpu::kTaskRows;
  const auto for_each_reached = [&](auto body) {
    for (int64_t i = 0; i < args.metadata.count; ++i) {
      const Segment& s = args.metadata.table()[i];
      if (!HasRows(s, args.groups)) continue;
      const int64_t last = (int64_t{s.y_start} + s.length - 1) / cpu::kTaskRows;
      for (int64_t task = s.y_start / cpu::kTaskRows; task <= last; ++task) body(task, i);
    }
  };
  // Segments by the task that they reach: those of task r are order[begin[r] .. begin[r + 1]).
  std::vector<int64_t> begin(row_tasks + 1, 0);
  for_each_reached([&](int64_t task, int64_t) { ++begin[task + 1]; });
  for (int64_t task = 0; task < row_tasks; ++task) begin[task + 1] += begin[task];
  std::vector<int32_t> order(begin[row_tasks]);
  std::vector<int64_t> next(begin.begin(), begin.end() - 1);
  for_each_reached([&](int64_t task, int64_t i) { order[next[task]++] = static_cast<int32_t>(i); });
  // Few rows are shared out by columns: four tasks for a thread, or all columns for all threads. An
  // element's sum does not depend on how.
  constexpr int64_t kLeast = 16;
  const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
  const int64_t share =
      std::max((args.n + threads - 1) / threads, args.n * row_tasks / (4 * threads));
  const int64_t width = std::clamp((share + kLeast - 1) / kLeast * kLeast, kLeast, cpu::kBlockN);
  const int64_t column_tasks = (args.n + width - 1) / width;
  cpu::ParallelFor(pool, row_tasks * column_tasks, [&](int64_t task) {
    const int64_t row_task = task / column_tasks, first = row_task * cpu::kTaskRows;
    const int64_t column = task % column_tasks * width;
    const int64_t count = begin[row_task + 1] - begin[row_task];
    RunTask(args, first, std::min(cpu::kTaskRows, args.rows_y - first), column, width, count,
            [&](int64_t i) {
              const Segment& s = args.metadata.table()[order[begin[row_task] + i]];
              return ProductOf(args, s.y_start - first, s.length, s.x_start, s.weight, column);
            });
  });
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
  std::vector<Part> parts;
  if (args.in_order && CutInOrder(args, &parts)) {
    RunInOrder(pool, args, parts);
  } else {
    RunOverlapping(pool, args);
  }
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
