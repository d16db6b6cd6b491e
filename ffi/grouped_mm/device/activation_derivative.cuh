// Activations and their derivatives, of float32 values. At a corner the derivative is JAX's.
#pragma once

#include "grouped_mm/device/activation.cuh"

namespace jgg::device {

// An activation of x, or of x and what it lets through, and what its cotangent is multiplied by.
struct Activated {
  float value, by_x, by_up;
};

// TimesLogistic<true>(1, y) by two instructions less: an exponential that is not normal may be zero
// as well, since it is added to one.
__device__ inline float Logistic(float y) {
#ifdef __CUDA_ARCH__
  float exponential;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(y * -1.4426950408889634f));
  return __fdividef(1.0f, 1.0f + exponential);
#else
  return TimesLogistic<true>(1.0f, y);
#endif
}

// f(x) = x * l(y(x)), where l is the logistic function and dy is y'.
__device__ inline float LogisticDerivative(float x, float logistic, float dy) {
  return logistic + x * logistic * (1.0f - logistic) * dy;
}

template <Activation kActivation>
__device__ Activated Differentiate(float x, float up) {
  const auto logistic = [](float y) { return Logistic(y); };
  Activated f{0.0f, 0.0f, 0.0f};  // of x alone
  switch (kActivation) {
    case Activation::kSilu:
    case Activation::kSwiglu: {
      const float l = logistic(x);
      f = {x * l, LogisticDerivative(x, l, 1.0f), 0.0f};
      break;
    }
    case Activation::kGelu:
    case Activation::kGeglu: {
      constexpr float kScale = 1.5957691216057308f;
      const float l = logistic(kScale * (x + 0.044715f * x * x * x));
      f = {x * l, LogisticDerivative(x, l, kScale * (1.0f + 0.134145f * x * x)), 0.0f};
      break;
    }
    case Activation::kGeluErf: {
      const float l = Normal(x);
      f = {x * l, l + x * 0.3989422804014327f * __expf(-0.5f * x * x), 0.0f};
      break;
    }
    case Activation::kRelu:
    case Activation::kReglu: f = {Relu(x), x > 0.0f ? 1.0f : 0.0f, 0.0f}; break;
    case Activation::kRelu2: f = {Relu(x) * Relu(x), 2.0f * Relu(x), 0.0f}; break;
    case Activation::kTanh: {
      const float t = tanhf(x);
      f = {t, 1.0f - t * t, 0.0f};
      break;
    }
    case Activation::kSwigluOai: {
      // At the edge of a range both sides have half.
      const auto inside = [](float distance) {
        return distance > 0.0f ? 1.0f : distance == 0.0f ? 0.5f : 0.0f;
      };
      const float gate = AtMost(x, 7.0f), l = logistic(1.702f * gate);
      const float through = AtLeast(AtMost(up, 7.0f), -7.0f) + 1.0f;
      return {through * gate * l, inside(7.0f - x) * through * LogisticDerivative(gate, l, 1.702f),
              inside(7.0f - fabsf(up)) * gate * l};
    }
    case Activation::kNone: break;
  }
  if constexpr (IsGated(kActivation)) return {f.value * up, f.by_x * up, f.value};
  return f;
}

}  // namespace jgg::device
