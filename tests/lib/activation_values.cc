// The activations that kernels have (ffi/grouped_mm/activations.h), on the host, for
// test_activations.py. They are numbered as the list has them.
#include <iterator>

#include "grouped_mm/activations.h"

using namespace jgg;

extern "C" int activations() { return static_cast<int>(std::size(kActivations)); }

extern "C" const char* name_of(int i) { return kActivations[i].name.data(); }

extern "C" bool is_gated(int i) { return IsGated(kActivations[i].activation); }

// Of n numbers. `up` is for those that are gated.
extern "C" void values_of(int i, int n, const float* x, const float* up, float* value, float* fast,
                          Activated* differentiated) {
  const Activation activation = kActivations[i].activation;
  DispatchActivation<false>(activation, [&](auto of) {
    using Of = decltype(of);
    for (int j = 0; j < n; ++j) {
      value[j] = Of::template Value<false>(x[j]);
      fast[j] = Of::template Value<true>(x[j]);
      differentiated[j] = Of::Differentiate(x[j]);
    }
  });
  DispatchActivation<true>(activation, [&](auto of) {
    using Of = decltype(of);
    for (int j = 0; j < n; ++j) {
      value[j] = Of::template Value<false>(x[j], up[j]);
      fast[j] = Of::template Value<true>(x[j], up[j]);
      differentiated[j] = Of::Differentiate(x[j], up[j]);
    }
  });
}
