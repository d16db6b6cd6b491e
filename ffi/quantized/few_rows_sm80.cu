// Host side of device/few_rows_sm80.cuh: what it takes, choice of the coding, launch.
#include "grouped_mm/gemm_sm80.cuh"
#include "quantized/device/few_rows_sm80.cuh"
#include "quantized/gemm_sm80.h"

namespace jgg {

bool HasFewRowsSm80(const QuantizedGemmSm80& gemm) {
  const QuantizedWeight& w = gemm.w;
  const auto aligned = [](const void* data, uintptr_t bytes) {
    return reinterpret_cast<uintptr_t>(data) % bytes == 0;
  };
  if (w.coding.mode == Mode::kAffine && w.coding.scale_dtype != DType::kBF16) return false;
  return HasLowTiles(gemm) && w.elements % (w.coding.bits == 8 ? 32 : 64) == 0 &&
         gemm.gemm.a_width == 8 && aligned(w.packed, 16) && aligned(w.scales, 4) &&
         aligned(w.biases, 4);
}

template <Mode kMode, int kBits, int kCopy = 16>
static cudaError_t LaunchFewRowsConfig(cudaStream_t stream, QuantizedGemmSm80 gemm) {
  using Config = device::FewRowsConfig<device::FewRowsWeights<kMode, kBits, kCopy>>;
  gemm.slice.scale_line = gemm.w.elements / gemm.w.group_size * gemm.w.coding.ScaleBytes();
  gemm.slice.group_bits = device::Log2(gemm.w.group_size);
  static KnownBlocks known{};
  return LaunchTiles<Config>(stream, device::FewRowsSm80Kernel<Config>, gemm, gemm.gemm,
                             sizeof(typename Config::SharedMemory), known);
}

// Lines of 3 or 5 bits may begin at odd multiples of 8 bytes.
template <int kBits>
static cudaError_t LaunchOddBits(cudaStream_t stream, const QuantizedGemmSm80& gemm) {
  return gemm.w.elements % 128 == 0 ? LaunchFewRowsConfig<Mode::kAffine, kBits>(stream, gemm)
                                    : LaunchFewRowsConfig<Mode::kAffine, kBits, 8>(stream, gemm);
}

cudaError_t LaunchFewRowsSm80(cudaStream_t stream, const QuantizedGemmSm80& gemm) {
  switch (gemm.w.coding.mode) {
    case Mode::kNvfp4: return LaunchFewRowsConfig<Mode::kNvfp4, 4>(stream, gemm);
    case Mode::kMxfp4: return LaunchFewRowsConfig<Mode::kMxfp4, 4>(stream, gemm);
    case Mode::kMxfp8: return LaunchFewRowsConfig<Mode::kMxfp8, 8>(stream, gemm);
    case Mode::kFp8:  // it has no linear layout here
    case Mode::kAffine: break;
  }
  switch (gemm.w.coding.bits) {
    case 3: return LaunchOddBits<3>(stream, gemm);
    case 4: return LaunchFewRowsConfig<Mode::kAffine, 4>(stream, gemm);
#ifndef JGG_SAMPLE
    case 2: return LaunchFewRowsConfig<Mode::kAffine, 2>(stream, gemm);
    case 5: return LaunchOddBits<5>(stream, gemm);
    case 6: return LaunchFewRowsConfig<Mode::kAffine, 6>(stream, gemm);
    case 8: return LaunchFewRowsConfig<Mode::kAffine, 8>(stream, gemm);
#endif
  }
  return cudaErrorNoKernelImageForDevice;
}

}  // namespace jgg
