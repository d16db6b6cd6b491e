// prepack: weights in layout "linear" to layout "sm90".
#include "quantized/prepack_sm80.h"

#include "common/arch.h"
#include "quantized/prepack_sm80.cuh"

namespace jgg {

std::optional<std::string> prepack_sm80_unsupported(const PrepackArgs& args,
                                                    int compute_capability) {
  const QuantizedArray& q = args.q;
  const FormatFacts& format = q.coding.Facts();
  if (!format.is_prepacked) return "codes are " + std::string(format.name);
  const void* operands[] = {q.weight, q.scales, q.biases, args.weight, args.scales};
  for (const void* data : operands) {
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return "an operand is not 16-byte aligned";
  }
  return NeedsComputeCapability(80, compute_capability);
}

cudaError_t prepack_sm80(cudaStream_t stream, const PrepackArgs& args) {
  if (args.q.elements == 0) return cudaSuccess;
  const auto launch = [&](auto mode, auto bits, auto words, unsigned blocks,
                          const device::PrepackParams& p) {
    constexpr auto kernel = device::PrepackKernelOf<mode.value, bits.value, words.value>();
    kernel<<<blocks, device::kPrepackThreads, 0, stream>>>(p);
    return cudaGetLastError();
  };
  if (cudaError_t error = LaunchPrepack(args, launch)) return error;
  if (!PrepacksScalesAlone(args.q)) return cudaSuccess;
  return LaunchPrepackScales(args, [&](unsigned blocks, const device::PrepackScalesParams& p) {
    device::PrepackScalesKernel<<<blocks, device::kPrepackThreads, 0, stream>>>(p);
    return cudaGetLastError();
  });
}

}  // namespace jgg
