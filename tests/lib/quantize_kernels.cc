// The kernels of quantize and dequantize on the host, for test_quantize_kernels.py.
#include "cuda_on_host.h"
//
#include "quantized/dequantize_sm80.cuh"
#include "quantized/quantize_sm80.cuh"

using namespace jgg;

namespace {

// Two element types stand for all three.
template <typename Function>
int Dispatch(int dtype, Function function) {
  if (static_cast<DType>(dtype) == DType::kF32) {
    return function(std::integral_constant<DType, DType::kF32>{});
  }
  return function(std::integral_constant<DType, DType::kBF16>{});
}

}  // namespace

// Sizes are in bytes; `most` elements to a launch.
struct Operands {
  const void* w;
  const float* global_scale;
  void *weight, *scales, *biases, *out;
  int64_t sizes[6];
  int64_t elements, global_scales, most;
  int32_t mode, bits, group_size, scale_dtype, dtype, processors, ordered;
};

static QuantizedArray Array(const Operands& o) {
  readable.clear();
  const void* data[] = {o.w, o.global_scale, o.weight, o.scales, o.biases, o.out};
  for (int i = 0; i < 6; ++i) {
    if (data[i]) readable.emplace_back(static_cast<const char*>(data[i]), o.sizes[i]);
  }
  const Coding coding{static_cast<Mode>(o.mode), o.bits, static_cast<DType>(o.scale_dtype)};
  return {coding,   o.group_size, o.elements,     o.weight,
          o.scales, o.biases,     o.global_scale, o.global_scales};
}

extern "C" int quantize_kernel(const Operands* o) {
  const QuantizeArgs args{o->w, static_cast<DType>(o->dtype), Array(*o)};
  const auto launch = [](auto coder, int blocks, const device::QuantizeParams& p) {
    Run(blocks, device::kQuantizeThreads, [&] { device::QuantizeKernel<decltype(coder)>(p); });
    return 0;
  };
  return Dispatch(o->dtype, [&](auto dtype) {
    return LaunchQuantize<dtype.value>(args, o->processors, launch, o->most);
  });
}

extern "C" int dequantize_kernel(const Operands* o) {
  const DequantizeArgs args{Array(*o), o->out, static_cast<DType>(o->dtype), o->ordered != 0};
  const auto launch = [](auto decoder, int blocks, const device::DequantizeParams& p) {
    Run(blocks, device::kDequantizeThreads,
        [&] { device::DequantizeKernel<decltype(decoder)>(p); });
    return 0;
  };
  return Dispatch(o->dtype, [&](auto dtype) {
    return LaunchDequantize<dtype.value>(args, o->processors, launch, o->most);
  });
}
