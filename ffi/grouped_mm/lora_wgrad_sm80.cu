#include "grouped_mm/lora_wgrad_sm80.h"

#include "grouped_mm/device/lora_wgrad_sm80.cuh"
#include "grouped_mm/lora_rank.h"
#include "grouped_mm/rules.h"

namespace jgg {
namespace {

template <DType kX, int kRank>
cudaError_t Launch(cudaStream_t stream, const LoraWgrad& lora) {
  const dim3 blocks(static_cast<unsigned>(lora.pairs),
                    static_cast<unsigned>(lora.parts[0] + lora.parts[1]));
  device::LoraWgradSm80Kernel<kX, kRank><<<blocks, device::kLoraWgradThreads, 0, stream>>>(lora);
  return cudaGetLastError();
}

}  // namespace

cudaError_t LaunchLoraWgradSm80(cudaStream_t stream, DType dtype, LoraWgrad lora) {
  for (int i = 0; i < 2; ++i) lora.parts[i] = rules::LoraWgradParts(lora.length[i]);
  const unsigned blocks = static_cast<unsigned>(lora.pairs) / device::kLoraWgradThreads + 1;
  device::LoraBeginsKernel<<<blocks, device::kLoraWgradThreads, 0, stream>>>(lora);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) return error;
  return DispatchLora(dtype, lora.rank, [&](auto x, auto rank) {
    return Launch<decltype(x)::value, decltype(rank)::value>(stream, lora);
  });
}

}  // namespace jgg
