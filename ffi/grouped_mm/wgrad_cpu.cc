// CPU handler of wgrad: out[weight_s] += x_s^T @ y_s over the rows of segment s; T is grouped. Rows
// of x or y may come by list.

#include <vector>

#include "cpu/gemm.h"
#include "cpu/operands.h"
#include "cpu/pages.h"
#include "cpu/parallel.h"
#include "grouped_mm/lists_bind.h"
#include "grouped_mm/wgrad_bind.h"
#include "handlers.h"

namespace jgg {
namespace ffi = xla::ffi;
namespace {

using cpu::At;
using cpu::Matrix;

// Segments by the weight that they name: those of weight g are order[begin[g] .. begin[g + 1]).
struct ByWeight {
  std::vector<int64_t> begin, order;
};

ByWeight Sort(const WgradArgs& args) {
  ByWeight sorted;
  sorted.begin.assign(args.groups + 1, 0);
  const Segment* table = args.metadata.table();
  for (int64_t i = 0; i < args.metadata.count; ++i) {
    if (HasRows(table[i], args.groups)) ++sorted.begin[table[i].weight + 1];
  }
  for (int64_t g = 0; g < args.groups; ++g) sorted.begin[g + 1] += sorted.begin[g];
  sorted.order.resize(sorted.begin[args.groups]);
  std::vector<int64_t> next(sorted.begin.begin(), sorted.begin.end() - 1);
  for (int64_t i = 0; i < args.metadata.count; ++i) {
    if (HasRows(table[i], args.groups)) sorted.order[next[table[i].weight]++] = i;
  }
  return sorted;
}

// Rows [first, first + rows) of one matrix of the result: one sum over its segments.
void RunTask(const WgradArgs& args, const ByWeight& sorted, int64_t group, int64_t first,
             int64_t rows) {
  const int64_t begin = sorted.begin[group], count = sorted.begin[group + 1] - begin;
  const auto product = [&](int64_t i) {
    const Segment& s = args.metadata.table()[sorted.order[begin + i]];
    const int32_t* const x_list = cpu::From(args.x_list, s.x_start);
    const int32_t* const y_list = cpu::From(args.y_list, s.y_start);
    const int64_t x_row = x_list == nullptr ? s.x_start : 0;
    Matrix x = At(args.x, x_row * args.strides.x_row + first * args.strides.x_a, args.strides.x_a,
                  args.strides.x_row, args.dtype);
    Matrix y = At(args.y, (y_list == nullptr ? s.y_start : 0) * args.strides.y_row,
                  args.strides.y_row, args.strides.y_b, args.dtype);
    x.columns = x_list;
    x.lines = args.x_list.count;
    y.rows = y_list;
    y.lines = args.y_list.count;
    return cpu::Product{0, rows, s.length, x, y};
  };
  const Matrix out = At(args.out, (group * args.a + first) * args.b, args.b, 1, args.out_dtype);
  cpu::BestGemm()(rows, args.b, cpu::ProductsOf(count, product), out, cpu::ThreadScratch());
}

ffi::Error WgradCpu(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer y,
                    ffi::BufferR2<ffi::S32> segments, ffi::RemainingArgs rest,
                    ffi::Result<ffi::AnyBuffer> out, WgradAttrs attrs, RowsAttrs rows) {
  constexpr const char* op = "wgrad";
  WgradArgs args;
  JGG_RETURN_IF_ERROR(BindWgrad(x, y, *out, attrs, &args));
  Operands operands(op, rest);
  if ((rows.x_rows && attrs.transpose_x) || (rows.y_rows && attrs.transpose_y)) {
    return Unimplemented(op, "rows by list need x as (T, A) and y as (T, B)");
  }
  if (rows.x_rows) {
    JGG_RETURN_IF_ERROR(BindRows(op, "x_rows", &operands, &args.x_list, &args.rows_x));
  }
  if (rows.y_rows) {
    JGG_RETURN_IF_ERROR(BindRows(op, "y_rows", &operands, &args.y_list, &args.rows_y));
  }
  JGG_RETURN_IF_ERROR(operands.End());
  JGG_RETURN_IF_ERROR(
      BindTable("wgrad", segments, args.rows_x, args.rows_y, args.groups, &args.metadata));
  cpu::AskForHugePages(args.out, out->size_bytes());
  const ByWeight sorted = Sort(args);
  const int64_t tasks = (args.a + cpu::kTaskRows - 1) / cpu::kTaskRows;
  cpu::ParallelFor(pool, args.groups * tasks, [&](int64_t task) {
    const int64_t first = task % tasks * cpu::kTaskRows;
    RunTask(args, sorted, task / tasks, first, std::min(cpu::kTaskRows, args.a - first));
  });
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kWgradCpu, WgradCpu,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::ThreadPool>()
                           .Arg<ffi::AnyBuffer>()           // x
                           .Arg<ffi::AnyBuffer>()           // y
                           .Arg<ffi::BufferR2<ffi::S32>>()  // segments
                           .RemainingArgs()                 // x_rows, y_rows
                           .Ret<ffi::AnyBuffer>()           // out
                           .Attr<WgradAttrs>("wgrad")
                           .Attr<RowsAttrs>("rows"));

}  // namespace

XLA_FFI_Error* JggWgradCpu(XLA_FFI_CallFrame* call_frame) { return kWgradCpu(call_frame); }

}  // namespace jgg
