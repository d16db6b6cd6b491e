#include "grouped_mm/lora_sm80.h"

#include <type_traits>

#include "common/sample.h"
#include "grouped_mm/device/lora_sm80.cuh"
#include "grouped_mm/rules.h"

namespace jgg {
namespace {

template <DType kX, int kRank, int kTall = 1>
cudaError_t Launch(cudaStream_t stream, const Lora& lora) {
  const auto blocks = static_cast<unsigned>((lora.rows + lora.span - 1) / lora.span);
  if (lora.turned) {
    device::LoraSm80Kernel<kX, kRank, true, kTall>
        <<<blocks, device::kLoraThreads, 0, stream>>>(lora);
  } else {
    device::LoraSm80Kernel<kX, kRank, false, kTall>
        <<<blocks, device::kLoraThreads, 0, stream>>>(lora);
  }
  return cudaGetLastError();
}

template <DType kX>
cudaError_t LaunchOf(cudaStream_t stream, const Lora& lora) {
  const bool tall = rules::LoraIsTall(lora.rows, lora.pairs);
  switch (lora.rank) {
    case 8: return Launch<kX, 8>(stream, lora);
    case 16: return tall ? Launch<kX, 16, 2>(stream, lora) : Launch<kX, 16>(stream, lora);
    case 32: return tall ? Launch<kX, 32, 2>(stream, lora) : Launch<kX, 32>(stream, lora);
    case 64: return Launch<kX, 64>(stream, lora);
    default: return cudaErrorInvalidValue;
  }
}

}  // namespace

cudaError_t LaunchLoraSm80(cudaStream_t stream, DType dtype, Lora lora) {
  lora.span = rules::LoraSpan(lora.rows);
  if (dtype == DType::kBF16) return LaunchOf<DType::kBF16>(stream, lora);
  if constexpr (kSample) {
    return cudaErrorNoKernelImageForDevice;
  } else {
    return LaunchOf<DType::kF16>(stream, lora);
  }
}

}  // namespace jgg
