// out[y_start_s + i] += x[x_start_s + i] @ w[weight_s] on XLA's threads, of any w: its matrices
// come from a function.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/gemm.h"
#include "cpu/operands.h"
#include "cpu/parallel.h"
#include "grouped_mm/metadata_bind.h"
#include "grouped_mm/mm.h"

namespace jgg::cpu {

// Part of one segment, or of the rows between two: those have no weight.
struct Part {
  int64_t row, rows, x_row, weight;
};

// All rows of the result in parts of one task each; false where segments' rows there are not
// ascending and disjoint, whatever the call says.
inline bool CutInOrder(const MmArgs& args, std::vector<Part>* parts) {
  const auto cut = [&](int64_t row, int64_t rows, int64_t x_row, int64_t weight) {
    for (int64_t first = 0; first < rows; first += kTaskRows) {
      parts->push_back({row + first, std::min(kTaskRows, rows - first), x_row + first, weight});
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

// Products of one call. w_at(weight, column) is the matrix w[weight] from that column on.
template <typename WAt>
class Grouped {
 public:
  Grouped(const MmArgs& args, const WAt& w_at) : args_(args), w_at_(w_at) {}

  // So many tasks of a part. Each writes its elements once, those of no segment with zeros.
  int64_t Tasks() const { return (args_.n + kBlockN - 1) / kBlockN; }

  void RunPart(const Part& part, int64_t task) const {
    const int64_t column = task * kBlockN;
    RunTask(part.row, part.rows, column, kBlockN, part.weight < 0 ? 0 : 1,
            [&](int64_t) { return ProductOf(0, part.rows, part.x_row, part.weight, column); });
  }

  // Rows that may meet: a task owns rows and columns of the result, and adds the segments that
  // reach them, in order, to be rounded once.
  template <typename Pool>
  void RunOverlapping(Pool& pool) const {
    const int64_t row_tasks = (args_.rows_y + kTaskRows - 1) / kTaskRows;
    const auto for_each_reached = [&](auto body) {
      for (int64_t i = 0; i < args_.metadata.count; ++i) {
        const Segment& s = args_.metadata.table()[i];
        if (!HasRows(s, args_.groups)) continue;
        const int64_t last = (int64_t{s.y_start} + s.length - 1) / kTaskRows;
        for (int64_t task = s.y_start / kTaskRows; task <= last; ++task) body(task, i);
      }
    };
    // Segments by the task that they reach: those of task r are order[begin[r] .. begin[r + 1]).
    std::vector<int64_t> begin(row_tasks + 1, 0);
    for_each_reached([&](int64_t task, int64_t) { ++begin[task + 1]; });
    for (int64_t task = 0; task < row_tasks; ++task) begin[task + 1] += begin[task];
    std::vector<int32_t> order(begin[row_tasks]);
    std::vector<int64_t> next(begin.begin(), begin.end() - 1);
    for_each_reached(
        [&](int64_t task, int64_t i) { order[next[task]++] = static_cast<int32_t>(i); });
    // Few rows are shared out by columns: four tasks for a thread, or all columns for all threads.
    // An element's sum does not depend on how.
    constexpr int64_t kLeast = 16;
    const int64_t threads = std::max<int64_t>(pool.num_threads(), 1);
    const int64_t share =
        std::max((args_.n + threads - 1) / threads, args_.n * row_tasks / (4 * threads));
    const int64_t width = std::clamp((share + kLeast - 1) / kLeast * kLeast, kLeast, kBlockN);
    const int64_t column_tasks = (args_.n + width - 1) / width;
    ParallelFor(pool, row_tasks * column_tasks, [&](int64_t task) {
      const int64_t row_task = task / column_tasks, first = row_task * kTaskRows;
      const int64_t column = task % column_tasks * width;
      const int64_t count = begin[row_task + 1] - begin[row_task];
      RunTask(first, std::min(kTaskRows, args_.rows_y - first), column, width, count,
              [&](int64_t i) {
                const Segment& s = args_.metadata.table()[order[begin[row_task] + i]];
                return ProductOf(s.y_start - first, s.length, s.x_start, s.weight, column);
              });
    });
  }

 private:
  // Rows of the product of one segment: row `row` of the result is row x_row of x times w[weight].
  Product ProductOf(int64_t row, int64_t rows, int64_t x_row, int64_t weight,
                    int64_t column) const {
    const int32_t* const list = From(args_.x_list, x_row);
    Matrix x = At(args_.x, list == nullptr ? x_row * args_.strides.x_row : 0, args_.strides.x_row,
                  args_.strides.x_k, args_.dtype);
    x.rows = list;
    x.lines = args_.x_list.count;
    return Product{row, rows, args_.k, x, w_at_(weight, column)};
  }

  // Rows [row, row + rows) of the result, and `columns` columns at most: the sum of so many
  // products.
  template <typename MakeProduct>
  void RunTask(int64_t row, int64_t rows, int64_t column, int64_t columns, int64_t count,
               const MakeProduct& product) const {
    columns = std::min(columns, args_.n - column);
    const Matrix out = At(args_.out, row * args_.strides.out_row + column * args_.strides.out_n,
                          args_.strides.out_row, args_.strides.out_n, args_.out_dtype);
    BestGemm()(rows, columns, ProductsOf(count, product), out, ThreadScratch());
  }

  const MmArgs& args_;
  const WAt& w_at_;
};

}  // namespace jgg::cpu
