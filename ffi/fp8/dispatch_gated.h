// From an activation to its type, of gated ones.
#pragma once

#include <cuda_runtime_api.h>

#include "common/dispatch.h"
#include "common/sample.h"
#include "grouped_mm/activations.h"

namespace jgg {

// function(ActivationOf<activation>{}). A sample has the first that is gated.
template <typename Function>
cudaError_t DispatchGated(Activation activation, Function function) {
  cudaError_t error = cudaErrorNoKernelImageForDevice;
  DispatchActivation<true>(activation, [&](auto of) {
    if constexpr (!kSample || decltype(of)::kActivation == kFirstGated) error = function(of);
  });
  return error;
}

}  // namespace jgg
