// Activations of float32 values: a struct for each, and a list of them. Handlers, instances of
// kernels, device code and Python (ffi/rules.cc) take them from there. A struct has
//   kName                   its name in calls and in Python;
//   Value<kFast>(x[, up])   kFast: by fewer instructions, which round less well;
//   Differentiate(x[, up])  the value and its derivatives. At a corner they are JAX's.
// One that is gated takes `up`, which x lets through. All are 0 of zeros. Those that are not gated
// keep NaN.
#pragma once

#include <cmath>
#include <optional>
#include <string_view>

#ifdef __CUDACC__
#define JGG_DEVICE __device__
#else  // handlers take names only, and tests run kernels on the host
#define JGG_DEVICE
#endif

namespace jgg {

// An activation of x, or of x and up, and what its cotangent is multiplied by.
struct Activated {
  float value, by_x, by_up;
};

namespace activations {

// ---- what they are made of ----

JGG_DEVICE inline float FastQuotient(float x, float y) {
#ifdef __CUDA_ARCH__
  return __fdividef(x, y);
#else
  return x / y;
#endif
}

JGG_DEVICE inline float FastExp(float x) {
#ifdef __CUDA_ARCH__
  return __expf(x);
#else
  return expf(x);
#endif
}

// x times the logistic function of y. kFast: in six instructions, whose error is that of the
// argument of 2^y, |y| * 2^-24 of the result.
template <bool kFast>
JGG_DEVICE float TimesLogistic(float x, float y) {
  return kFast ? FastQuotient(x, 1.0f + FastExp(-y)) : x / (1.0f + expf(-y));
}

// TimesLogistic<true>(1, y) by two instructions less: an exponential that is not normal may be zero
// as well, since it is added to one.
JGG_DEVICE inline float Logistic(float y) {
#ifdef __CUDA_ARCH__
  float exponential;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(exponential) : "f"(y * -1.4426950408889634f));
  return __fdividef(1.0f, 1.0f + exponential);
#else
  return TimesLogistic<true>(1.0f, y);
#endif
}

// f(x) = x * l(y(x)), where l is the logistic function and dy is y'.
JGG_DEVICE inline float LogisticDerivative(float x, float logistic, float dy) {
  return logistic + x * logistic * (1.0f - logistic) * dy;
}

// The normal distribution's integral up to x, of relative error 1.2e-7: the complementary error
// function of z is t * exp(-z^2 + a polynomial of t), where t = 1 / (1 + z / 2) (Press et al.,
// Numerical Recipes, section 6.2). CUDA's own takes more registers than these kernels have.
JGG_DEVICE inline float Normal(float x) {
  const float z = 0.7071067811865476f * fabsf(x), t = FastQuotient(1.0f, 1.0f + 0.5f * z);
  float p = 0.17087277f;
  p = p * t - 0.82215223f;
  p = p * t + 1.48851587f;
  p = p * t - 1.13520398f;
  p = p * t + 0.27886807f;
  p = p * t - 0.18628806f;
  p = p * t + 0.09678418f;
  p = p * t + 0.37409196f;
  p = p * t + 1.00002368f;
  p = p * t - 1.26551223f;
  const float tail = 0.5f * t * expf(p - z * z);
  return x < 0.0f ? tail : 1.0f - tail;
}

// min and max that keep NaN.
JGG_DEVICE inline float AtMost(float x, float most) { return x > most ? most : x; }
JGG_DEVICE inline float AtLeast(float x, float least) { return x < least ? least : x; }

// An activation of x times up.
template <typename Of>
struct GatedBy {
  template <bool kFast>
  JGG_DEVICE static float Value(float x, float up) {
    return Of::template Value<kFast>(x) * up;
  }

  JGG_DEVICE static Activated Differentiate(float x, float up) {
    const Activated f = Of::Differentiate(x);
    return {f.value * up, f.by_x * up, f.value};
  }
};

// ---- the activations ----

struct Silu {
  static constexpr std::string_view kName = "silu";

  template <bool kFast>
  JGG_DEVICE static float Value(float x) {
    return TimesLogistic<kFast>(x, x);
  }

  JGG_DEVICE static Activated Differentiate(float x) {
    const float l = Logistic(x);
    return {x * l, LogisticDerivative(x, l, 1.0f), 0.0f};
  }
};

struct Gelu {  // the tanh form
  static constexpr std::string_view kName = "gelu";

  template <bool kFast>
  JGG_DEVICE static float Value(float x) {
    const float y = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return kFast ? TimesLogistic<true>(x, 2.0f * y) : 0.5f * x * (1.0f + tanhf(y));
  }

  JGG_DEVICE static Activated Differentiate(float x) {
    constexpr float kScale = 1.5957691216057308f;
    const float l = Logistic(kScale * (x + 0.044715f * x * x * x));
    return {x * l, LogisticDerivative(x, l, kScale * (1.0f + 0.134145f * x * x)), 0.0f};
  }
};

struct GeluErf {
  static constexpr std::string_view kName = "gelu_erf";

  template <bool kFast>
  JGG_DEVICE static float Value(float x) {
    return x * Normal(x);
  }

  JGG_DEVICE static Activated Differentiate(float x) {
    const float l = Normal(x);
    return {x * l, l + x * 0.3989422804014327f * FastExp(-0.5f * x * x), 0.0f};
  }
};

struct Relu {
  static constexpr std::string_view kName = "relu";

  template <bool kFast>
  JGG_DEVICE static float Value(float x) {
    return AtLeast(x, 0.0f);
  }

  JGG_DEVICE static Activated Differentiate(float x) {
    return {AtLeast(x, 0.0f), x > 0.0f ? 1.0f : 0.0f, 0.0f};
  }
};

struct Relu2 {
  static constexpr std::string_view kName = "relu2";

  template <bool kFast>
  JGG_DEVICE static float Value(float x) {
    return AtLeast(x, 0.0f) * AtLeast(x, 0.0f);
  }

  JGG_DEVICE static Activated Differentiate(float x) {
    return {Value<true>(x), 2.0f * AtLeast(x, 0.0f), 0.0f};
  }
};

struct Tanh {
  static constexpr std::string_view kName = "tanh";

  template <bool kFast>
  JGG_DEVICE static float Value(float x) {
    return tanhf(x);
  }

  JGG_DEVICE static Activated Differentiate(float x) {
    const float t = tanhf(x);
    return {t, 1.0f - t * t, 0.0f};
  }
};

struct Swiglu : GatedBy<Silu> {
  static constexpr std::string_view kName = "swiglu";
};

struct Geglu : GatedBy<Gelu> {
  static constexpr std::string_view kName = "geglu";
};

struct Reglu : GatedBy<Relu> {
  static constexpr std::string_view kName = "reglu";
};

struct SwigluOai {
  static constexpr std::string_view kName = "swiglu_oai";

  template <bool kFast>
  JGG_DEVICE static float Value(float x, float up) {
    x = AtMost(x, 7.0f);
    return (AtLeast(AtMost(up, 7.0f), -7.0f) + 1.0f) * TimesLogistic<kFast>(x, 1.702f * x);
  }

  JGG_DEVICE static Activated Differentiate(float x, float up) {
    // At the edge of a range both sides have half.
    const auto inside = [](float distance) {
      return distance > 0.0f ? 1.0f : distance == 0.0f ? 0.5f : 0.0f;
    };
    const float gate = AtMost(x, 7.0f), l = Logistic(1.702f * gate);
    const float through = AtLeast(AtMost(up, 7.0f), -7.0f) + 1.0f;
    return {through * gate * l, inside(7.0f - x) * through * LogisticDerivative(gate, l, 1.702f),
            inside(7.0f - fabsf(up)) * gate * l};
  }
};

}  // namespace activations

// ---- the list ----

// In the order in which Python names them.
#define JGG_PLAIN_ACTIVATIONS(Each) \
  Each(Silu) Each(Gelu) Each(GeluErf) Each(Relu) Each(Relu2) Each(Tanh)
#define JGG_GATED_ACTIVATIONS(Each) Each(Swiglu) Each(Geglu) Each(Reglu) Each(SwigluOai)
#define JGG_ACTIVATIONS(Each) JGG_PLAIN_ACTIVATIONS(Each) JGG_GATED_ACTIVATIONS(Each)

#define JGG_ENUMERATOR(Name) k##Name,
enum class Activation { kNone, JGG_ACTIVATIONS(JGG_ENUMERATOR) };
#undef JGG_ENUMERATOR

#define JGG_ONE(Name) +1
inline constexpr Activation kFirstGated{1 JGG_PLAIN_ACTIVATIONS(JGG_ONE)};
#undef JGG_ONE

constexpr bool IsGated(Activation activation) { return activation >= kFirstGated; }

// The struct of an activation.
template <Activation kActivation>
struct ActivationOf;
#define JGG_ACTIVATION_OF(Name)                                    \
  template <>                                                      \
  struct ActivationOf<Activation::k##Name> : activations::Name {   \
    static constexpr Activation kActivation = Activation::k##Name; \
  };
JGG_ACTIVATIONS(JGG_ACTIVATION_OF)
#undef JGG_ACTIVATION_OF

// An activation's name in calls and in Python.
struct NamedActivation {
  std::string_view name;
  Activation activation;
};
#define JGG_NAMED(Name) {activations::Name::kName, Activation::k##Name},
inline constexpr NamedActivation kActivations[] = {JGG_ACTIVATIONS(JGG_NAMED)};
#undef JGG_NAMED

// "" is none.
constexpr std::optional<Activation> ToActivation(std::string_view name) {
  if (name.empty()) return Activation::kNone;
  for (const NamedActivation& known : kActivations) {
    if (known.name == name) return known.activation;
  }
  return std::nullopt;
}

// function(ActivationOf<activation>{}), of those that are gated, or of those that are not.
template <bool kGated, typename Function>
constexpr void DispatchActivation(Activation activation, Function&& function) {
#define JGG_CASE(Name) \
  case Activation::k##Name: return function(ActivationOf<Activation::k##Name>{});
  if constexpr (kGated) {
    switch (activation) {
      JGG_GATED_ACTIVATIONS(JGG_CASE)
      default: return;
    }
  } else {
    switch (activation) {
      JGG_PLAIN_ACTIVATIONS(JGG_CASE)
      default: return;
    }
  }
#undef JGG_CASE
}

#undef JGG_ACTIVATIONS
#undef JGG_GATED_ACTIVATIONS
#undef JGG_PLAIN_ACTIVATIONS
#undef JGG_DEVICE

}  // namespace jgg
