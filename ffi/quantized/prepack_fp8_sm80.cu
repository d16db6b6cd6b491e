// prepack of mode "fp8": weights in layout "linear" to layout "sm90".
#include "quantized/prepack_fp8_sm80.cuh"

#include "common/arch.h"
#include "quantized/prepack_fp8_sm80.h"

namespace jgg {

std::optional<std::string> prepack_fp8_sm80_unsupported(const PrepackFp8Args& args,
                                                        int compute_capability) {
  for (const void* data : {args.weight, static_cast<const void*>(args.out)}) {
    if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return "an operand is not 16-byte aligned";
  }
  return NeedsComputeCapability(80, compute_capability);
}

cudaError_t prepack_fp8_sm80(cudaStream_t stream, const PrepackFp8Args& args) {
  if (args.groups * args.n * args.k == 0) return cudaSuccess;
  return LaunchPrepackFp8(args, [&](unsigned blocks, const device::PrepackFp8Params& p) {
    device::PrepackFp8Kernel<<<blocks, device::kPrepackFp8Threads, 0, stream>>>(p);
    return cudaGetLastError();
  });
}

}  // namespace jgg
