// Segments of few rows on XLA's threads: a task reads lines of w once and in order, and each meets
// all rows. Other segments are products of matrices.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/grouped.h"
#include "cpu/lines.h"

namespace jgg::cpu {

// Of a segment with few rows: lines of a task, or the least elements of all lines.
constexpr int64_t kTaskLines = 128, kTaskElements = 512;
constexpr int64_t kTaskSums = std::max(kMostAdds, kMostFewRows* kTaskLines);
// Numbers that this thread copies sooner than another one wakes up.
constexpr int64_t kFewCopies = 1 << 16;
static_assert(kMostAddRows * kTaskElements <= kMostAdds);

inline int64_t WholeUnits(int64_t count) { return (count + kUnit - 1) / kUnit * kUnit; }

// Parts of few rows, and the tasks that they have.
class FewRowsParts {
 public:
  FewRowsParts(const MmArgs& args, const Lines& lines, bool transpose_w)
      : args_(args),
        lines_(lines),
        transpose_w_(transpose_w),
        most_(transpose_w   ? BestLines().few_rows
              : lines.array ? kMostArrayAddRows
                            : kMostAddRows) {}

  bool Takes(const Part& part) const { return part.weight >= 0 && part.rows <= most_; }

  void Push(const Part& part) { parts_.push_back(part); }

  int64_t Tasks() const { return static_cast<int64_t>(parts_.size()) * TasksOfOne(); }

  // Tasks for these threads, and rows of x as float32, in order and in whole units: as they are, or
  // copies.
  template <typename Pool>
  void Prepare(Pool& pool) {
    if (!transpose_w_) ChooseWidth(std::max<int64_t>(pool.num_threads(), 1));
    const bool whole = !transpose_w_ || args_.k % kUnit == 0;
    const bool as_it_is = args_.dtype == DType::kF32 && whole && args_.x_list.list == nullptr;
    if (parts_.empty() || as_it_is) return;
    stride_ = WholeUnits(args_.k);
    int64_t rows = 0;
    for (const Part& part : parts_) {
      first_.push_back(rows);
      rows += part.rows;
    }
    copies_.resize(rows * stride_);
    const auto copy = [&](int64_t i) {
      const Part& part = parts_[i];
      const int32_t* const list = From(args_.x_list, part.x_row);
      for (int64_t r = 0; r < part.rows; ++r) {
        const int64_t row = list == nullptr ? part.x_row + r : list[r];
        if (list != nullptr && (row < 0 || row >= args_.x_list.count)) continue;  // zeros
        BestLines().widen(static_cast<const char*>(args_.x) + row * args_.k * Size(args_.dtype),
                          args_.dtype, args_.k, copies_.data() + (first_[i] + r) * stride_);
      }
    };
    const auto parts = static_cast<int64_t>(parts_.size());
    if (rows * stride_ <= kFewCopies) {
      for (int64_t i = 0; i < parts; ++i) copy(i);
    } else {
      ParallelFor(pool, parts, copy);
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
      BestLines().multiply(lines_, line + begin, count, x, sums, width_);
    } else {
      BestLines().add(lines_, line, args_.k, begin, count, x, sums, width_);
    }
    for (int64_t r = 0; r < part.rows; ++r) {
      const int64_t at = (part.row + r) * args_.n + begin;
      BestLines().narrow(sums + r * width_, count, args_.out_dtype,
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
      return rows * width <= kMostAdds && Tasks() >= 2 * threads;
    };
    int64_t width = kTaskElements;
    while (width < args_.n && fits(2 * width)) width *= 2;
    width_ = width;
  }

  int64_t TasksOfOne() const { return (args_.n + width_ - 1) / width_; }

  const MmArgs& args_;
  const Lines& lines_;
  bool transpose_w_;
  int64_t most_;  // rows of a part
  std::vector<Part> parts_;
  std::vector<float> copies_;
  std::vector<int64_t> first_;  // a part's first row among the copies
  int64_t stride_ = 0;
  int64_t width_ = kTaskLines;  // columns of a task: lines, or elements of all lines
};

// All of a call. `lines` are those of w, along K (transpose_w) or along N; w_at as Grouped has it.
// Without `by_rows` few rows are no other than many.
template <typename Pool, typename WAt>
void RunByLines(Pool& pool, const MmArgs& args, const WAt& w_at, const Lines& lines,
                bool transpose_w, bool by_rows = true) {
  const Grouped grouped(args, w_at);
  std::vector<Part> all, many;
  if (!args.in_order || !CutInOrder(args, &all)) return grouped.RunOverlapping(pool);
  FewRowsParts few(args, lines, transpose_w);
  for (const Part& part : all) {
    if (by_rows && few.Takes(part)) {
      few.Push(part);
    } else {
      many.push_back(part);
    }
  }
  few.Prepare(pool);
  const int64_t few_tasks = few.Tasks(), tasks = grouped.Tasks();
  ParallelFor(pool, few_tasks + static_cast<int64_t>(many.size()) * tasks, [&](int64_t i) {
    if (i < few_tasks) return few.Run(i);
    i -= few_tasks;
    grouped.RunPart(many[i / tasks], i % tasks);
  });
}

}  // namespace jgg::cpu
