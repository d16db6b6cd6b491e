#include "fp8/quantize_lines_sm80.h"

#include "fp8/device/quantize_lines.cuh"
#include "fp8/launch_sm80.cuh"

namespace jgg {

using namespace fp8;
using namespace fp8::device;

cudaError_t LaunchFp8QuantizeLinesSm80(cudaStream_t stream, const Fp8QuantizeLinesSm80& args) {
  LinesParams p{};
  p.by_rows = ParamsOf(args.by_rows, args.columns);
  p.by_rows.x = static_cast<const uint8_t*>(args.x);
  p.by_rows.rows = args.rows;
  p.by_rows.columns = args.columns;
  p.by_columns = ParamsOf(args.by_columns, args.along);
  p.by_columns.rows = args.rows;
  if (cudaError_t error = FindGroups(stream, args.sizes, args.groups, args.workspace, &p.by_columns,
                                     p.by_columns.blocks)) {
    return error;
  }
  const int64_t blocks = LinesBlocks(p);
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  LinesKernel<DType::kBF16><<<static_cast<unsigned>(blocks), kSquareThreads, 0, stream>>>(p);
  return cudaGetLastError();
}

}  // namespace jgg
