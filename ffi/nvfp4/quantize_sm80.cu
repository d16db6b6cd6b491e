#include "nvfp4/quantize_sm80.h"

#include <algorithm>

#include "common/blocks_that_fit.h"
#include "common/dispatch.h"
#include "nvfp4/device/quantize_columns.cuh"

namespace jgg {

using nvfp4::CeilDiv;
using namespace nvfp4::device;

using Kernel = void (*)(QuantizeParams);

static cudaError_t Launch(cudaStream_t stream, const QuantizeParams& p, Kernel kernel,
                          int64_t blocks, int threads = kQuantizeThreads) {
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  const dim3 grid(static_cast<unsigned>(blocks),
                  static_cast<unsigned>(std::min<int64_t>(p.matrices, 65535)));
  kernel<<<grid, threads, 0, stream>>>(p);
  return cudaGetLastError();
}

template <DType kOf>
static cudaError_t LaunchAmax(cudaStream_t stream, const QuantizeParams& p,
                              const Nvfp4QuantizeSm80& args) {
  if (args.hadamard && args.along_rows) {
    return Launch(stream, p, ColumnsAmaxKernel<kOf>, ColumnsBlocks<kOf>(p), kColumnsThreads);
  }
  if (args.hadamard) return Launch(stream, p, RowsKernel<kOf, true, false, true>, RowsBlocks(p));
  const int64_t vectors = p.rows * p.columns * kElementBytes<kOf> / 16;
  const int64_t blocks = CeilDiv(vectors + 1, 4 * kQuantizeThreads);
  // No more blocks than run at one time, so that they read the end of x last.
  static KnownBlocks known{};
  int fit = 0;
  if (cudaError_t error = BlocksThatFit(reinterpret_cast<const void*>(AmaxKernel<kOf>),
                                        kQuantizeThreads, 0, known, &fit)) {
    return error;
  }
  const int64_t together = fit / std::min<int64_t>(p.matrices, 65535);
  return Launch(stream, p, AmaxKernel<kOf>, std::min(blocks, std::max<int64_t>(1, together)));
}

template <DType kOf, bool kStochastic>
static cudaError_t LaunchBlocks(cudaStream_t stream, const QuantizeParams& p,
                                const Nvfp4QuantizeSm80& args) {
  if (!args.along_rows) {
    if (args.scale_2d) {
      const int64_t blocks = CeilDiv(p.rows, kBlock) * CeilDiv(p.blocks, 32);
      return Launch(stream, p, SquaresKernel<kOf, kStochastic>, blocks, kSquareThreads);
    }
    return DispatchBool(args.hadamard, [&](auto hadamard) {
      return Launch(stream, p, RowsKernel<kOf, hadamard.value, kStochastic, false>, RowsBlocks(p));
    });
  }
  const int64_t blocks = ColumnsBlocks<kOf>(p);
  if (args.scale_2d) {
    return Launch(stream, p, ColumnsKernel<kOf, Blocks::kSquare, kStochastic>, blocks,
                  kColumnsThreads);
  }
  if (args.hadamard) {
    return Launch(stream, p, ColumnsKernel<kOf, Blocks::kHadamard, kStochastic>, blocks,
                  kColumnsThreads);
  }
  return Launch(stream, p, ColumnsKernel<kOf, Blocks::kOwn, kStochastic>, blocks, kColumnsThreads);
}

template <DType kOf>
cudaError_t LaunchNvfp4QuantizeSm80Instance(cudaStream_t stream, const Nvfp4QuantizeSm80& args) {
  auto* matrix_scales = static_cast<MatrixScales*>(args.workspace);
  auto* amax = reinterpret_cast<uint32_t*>(matrix_scales + args.matrices);
  auto* starts = reinterpret_cast<int32_t*>(amax + args.matrices);
  int32_t* tiles = starts + args.groups + 1;
  const bool grouped = args.sizes != nullptr;
  QuantizeParams p{};
  p.x = static_cast<const uint8_t*>(args.x);
  p.matrices = args.matrices;
  p.rows = args.rows;
  p.columns = args.columns;
  p.blocks = args.blocks;
  p.starts = starts;
  p.tiles = tiles;
  p.groups = grouped ? static_cast<int32_t>(args.groups) : 0;
  p.seed = args.seed;
  p.amax = amax;
  p.matrix_scales = matrix_scales;
  p.weight = static_cast<uint8_t*>(args.weight);
  p.scales = static_cast<uint8_t*>(args.scales);

  if (grouped) {  // one matrix
    StartsKernel<<<1, kScanThreads, 0, stream>>>(args.sizes, p.groups, static_cast<int32_t>(p.rows),
                                                 starts, tiles, amax);
    if (cudaError_t error = cudaGetLastError()) return error;
  } else {
    const size_t bytes = sizeof(uint32_t) * args.matrices;
    if (cudaError_t error = cudaMemsetAsync(amax, 0, bytes, stream)) return error;
  }
  if (cudaError_t error = LaunchAmax<kOf>(stream, p, args)) return error;
  const int64_t blocks = CeilDiv(p.matrices, kQuantizeThreads);
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  MatrixScalesKernel<<<static_cast<unsigned>(blocks), kQuantizeThreads, 0, stream>>>(
      amax, p.matrices, matrix_scales, args.global_scale);
  if (cudaError_t error = cudaGetLastError()) return error;
  return DispatchBool(args.seed != nullptr, [&](auto stochastic) {
    return LaunchBlocks<kOf, stochastic.value>(stream, p, args);
  });
}

template cudaError_t LaunchNvfp4QuantizeSm80Instance<DType::kF32>(cudaStream_t,
                                                                  const Nvfp4QuantizeSm80&);
template cudaError_t LaunchNvfp4QuantizeSm80Instance<DType::kBF16>(cudaStream_t,
                                                                   const Nvfp4QuantizeSm80&);
template cudaError_t LaunchNvfp4QuantizeSm80Instance<DType::kF16>(cudaStream_t,
                                                                  const Nvfp4QuantizeSm80&);

}  // namespace jgg
