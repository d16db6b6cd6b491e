// What the programs of both kinds of kernels of a few tokens' experts share. Include it after
// cuda_on_host.h and warp_on_host.h.
#pragma once

#include "moe/few_tokens.h"
#include "quantized/device/instructions.cuh"

namespace {

// Biases and results are float32, or 16 bits as `a` is; of the activations there are two.
struct Finish {
  static float Load(const void* data, int64_t at, jgg::DType) {
    return static_cast<const float*>(data)[at];
  }
  static void Store(void* data, int64_t at, jgg::DType dtype, float value) {
    using jgg::device::Round2;
    const auto bits = [&](auto of) { static_cast<uint16_t*>(data)[at] = of & 0xffff; };
    if (dtype == jgg::DType::kF32) {
      static_cast<float*>(data)[at] = value;
    } else if (dtype == jgg::DType::kBF16) {
      bits(Round2<jgg::DType::kBF16>(value, 0.0f));
    } else {
      bits(Round2<jgg::DType::kF16>(value, 0.0f));
    }
  }
  template <bool kGated>
  static float Activate(jgg::Activation, float value, float other) {
    return kGated ? value / (1.0f + std::exp(-value)) * other : std::fmax(value, 0.0f);
  }
};

// What a test's problem says of the experts, but for their weights.
template <typename Problem>
jgg::FewTokens ExpertsOf(const Problem& p) {
  jgg::FewTokens few{};
  few.x = static_cast<const char*>(p.x);
  few.a = static_cast<char*>(p.a);
  few.out = p.out;
  few.expert_index = p.index;
  few.expert_offset = p.offset;
  few.expert_weight = p.weight;
  few.tokens = p.tokens;
  few.k = p.k;
  few.experts = p.experts;
  few.d = p.d;
  few.f = p.f;
  few.out_dtype = jgg::DType::kF32;
  few.activation = p.gated ? jgg::Activation::kSwiglu : jgg::Activation::kRelu;
  few.w.bias = p.bias;
  return few;
}

}  // namespace
