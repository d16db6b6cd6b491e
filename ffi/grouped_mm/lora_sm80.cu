#include "grouped_mm/lora_sm80.h"

#include "grouped_mm/device/lora_sm80.cuh"
#include "grouped_mm/lora_rank.h"
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

}  // namespace

cudaError_t LaunchLoraSm80(cudaStream_t stream, DType dtype, Lora lora) {
  lora.span = rules::LoraSpan(lora.rows);
  return DispatchLora(dtype, lora.rank, [&](auto x, auto rank) {
    return LaunchKind<decltype(x)::value, decltype(rank)::value>(stream, lora);
  });
}

}  // namespace jgg
