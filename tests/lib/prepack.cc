// The kernel of prepack on the host, for test_prepack_host.py.
#include "cuda_on_host.h"
//
#include "quantized/prepack_sm80.cuh"

using namespace jgg;

// Sizes are in bytes.
extern "C" void prepack_kernel(int mode, int bits, int group_size, int scale_dtype, long rows,
                               long k, void* weight, long weight_size, void* scales,
                               long scales_size, void* biases, void* out, void* out_scales) {
  const Coding coding{static_cast<Mode>(mode), bits, static_cast<DType>(scale_dtype)};
  const QuantizedArray q{coding, group_size, rows * k, weight, scales, biases, nullptr, 0};
  const PrepackArgs args{q, rows, k, out, out_scales};
  readable.clear();
  readable.emplace_back(static_cast<const char*>(weight), weight_size);
  readable.emplace_back(static_cast<const char*>(scales), scales_size);
  if (biases) readable.emplace_back(static_cast<const char*>(biases), scales_size);
  const auto launch = [](auto mode, auto bits, auto words, unsigned blocks,
                         const device::PrepackParams& p) {
    constexpr auto kernel = device::PrepackKernelOf<mode.value, bits.value, words.value>();
    Run(blocks, device::kPrepackThreads, [&] { kernel(p); });
    return 0;
  };
  LaunchPrepack(args, launch);
  if (!PrepacksScalesAlone(q)) return;
  LaunchPrepackScales(args, [](unsigned blocks, const device::PrepackScalesParams& p) {
    Run(blocks, device::kPrepackThreads, [&] { device::PrepackScalesKernel(p); });
    return 0;
  });
}
