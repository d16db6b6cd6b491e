#include "grouped_mm/lora_sm80.h"

#include <type_traits>

#include "common/sample.h"
#include "grouped_mm/device/lora_sm80.cuh"
#include "grouped_mm/rules.h"

namespace jgg {
namespace {

using Kind = device::LoraKind;

template <DType kX, int kRank, bool kTurned, Kind kKind>
cudaError_t Launch(cudaStream_t stream, const Lora& lora) {
  const auto blocks = static_cast<unsigned>((lora.rows + lora.span - 1) / lora.span);
  device::LoraSm80Kernel<kX, kRank, kTurned, kKind>
      <<<blocks, device::kLoraThreads, 0, stream>>>(lora);
  return cudaGetLastError();
}

template <DType kX, int kRank>
cudaError_t LaunchKind(cudaStream_t stream, const Lora& lora) {
  if (lora.turned) return Launch<kX, kRank, true, Kind::kShort>(stream, lora);
  if constexpr (kRank > 8) {
    if (rules::LoraIsDeep(lora.rows, lora.pairs)) {
      return Launch<kX, kRank, false, Kind::kDeep>(stream, lora);
    }
  }
  return Launch<kX, kRank, false, Kind::kShort>(stream, lora);
}

template <DType kX>
cudaError_t LaunchOf(cudaStream_t stream, const Lora& lora) {
  switch (lora.rank) {
    case 8: return LaunchKind<kX, 8>(stream, lora);
    case 16: return LaunchKind<kX, 16>(stream, lora);
    case 32: return LaunchKind<kX, 32>(stream, lora);
    case 64: return LaunchKind<kX, 64>(stream, lora);
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
