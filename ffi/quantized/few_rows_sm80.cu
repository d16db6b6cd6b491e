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
  if (w.coding.HasFloatScales() && w.coding.scale_dtype == DType::kF16) return false;
  return HasLowTiles(gemm) && w.elements % (w.coding.bits == 8 ? 32 : 64) == 0 &&
         gemm.gemm.a_width == 8 && aligned(w.packed, 16) && aligned(w.scales, 4) &&
         aligned(w.biases, 4);
}

template <typename Format, int kCopy = 16>
static cudaError_t LaunchFewRowsConfig(cudaStream_t stream, QuantizedGemmSm80 gemm) {
  using Weights = device::FewRowsWeights<Format::kMode, Format::kBits, kCopy>;
  using Config = device::FewRowsConfig<Weights>;
  gemm.slice.scale_bytes = gemm.w.coding.ScaleBytes();
  gemm.slice.scale_line = gemm.w.elements / gemm.w.group_size * gemm.slice.scale_bytes;
  gemm.slice.group_bits = device::Log2(gemm.w.group_size);
  static KnownBlocks known{};
  return LaunchTiles<Config>(stream, device::FewRowsSm80Kernel<Config>, gemm, gemm.gemm,
                             sizeof(typename Config::SharedMemory), known);
}

cudaError_t LaunchFewRowsSm80(cudaStream_t stream, const QuantizedGemmSm80& gemm) {
  const Coding& coding = gemm.w.coding;
  return LinearFormats::Dispatch(coding.mode, coding.bits, [&](auto format) -> cudaError_t {
    using Format = decltype(format);
    // A build of samples has all codes of four bits, so that CI compiles every mode.
    if constexpr (Format::kHasKernels || Format::kBits == 4) {
      // Lines of 3 or 5 bits may begin at odd multiples of 8 bytes.
      if constexpr (Format::kBits % 2 != 0) {
        if (gemm.w.elements % 128 != 0) return LaunchFewRowsConfig<Format, 8>(stream, gemm);
      }
      return LaunchFewRowsConfig<Format>(stream, gemm);
    } else {
      return cudaErrorNoKernelImageForDevice;
    }
  });
}

}  // namespace jgg
