// From run-time modes to instances of a Hopper kernel of quantized weights, which CMakeLists.txt
// compiles one by one.
#pragma once

#include <cuda_runtime_api.h>

#include "common/sample.h"
#include "quantized/quantized.h"

namespace jgg {

template <Mode kMode_, int kBits_>
struct InstanceSm90 {
  static constexpr Mode kMode = kMode_;
  static constexpr int kBits = kBits_;
};

// launch(InstanceSm90), of the one for a coding.
template <typename Launch>
cudaError_t LaunchInstanceSm90(Mode mode, int bits, Launch launch) {
  if (mode == Mode::kNvfp4) return launch(InstanceSm90<Mode::kNvfp4, 4>{});
  if (mode == Mode::kMxfp8) return launch(InstanceSm90<Mode::kMxfp8, 8>{});
  if (mode == Mode::kFp8) return launch(InstanceSm90<Mode::kFp8, 8>{});
  if (mode == Mode::kAffine && bits == 3) return launch(InstanceSm90<Mode::kAffine, 3>{});
  if constexpr (kSample) {
    return cudaErrorNoKernelImageForDevice;
  } else {
    if (mode == Mode::kMxfp4) return launch(InstanceSm90<Mode::kMxfp4, 4>{});
    switch (bits) {
      case 2: return launch(InstanceSm90<Mode::kAffine, 2>{});
      case 4: return launch(InstanceSm90<Mode::kAffine, 4>{});
      case 5: return launch(InstanceSm90<Mode::kAffine, 5>{});
      case 6: return launch(InstanceSm90<Mode::kAffine, 6>{});
      case 8: return launch(InstanceSm90<Mode::kAffine, 8>{});
    }
    return cudaErrorInvalidValue;
  }
}

}  // namespace jgg
