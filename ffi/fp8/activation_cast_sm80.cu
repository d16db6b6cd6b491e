#include "fp8/activation_cast_sm80.h"

#include "common/blocks_that_fit.h"
#include "common/dispatch.h"
#include "common/processors.h"
#include "fp8/device/cast_activation_backward.cuh"
#include "fp8/dispatch_gated.h"
#include "fp8/launch_sm80.cuh"

namespace jgg {

using namespace fp8;
using namespace fp8::device;

// Pieces are counted in 32 bits, and those that nobody has, too.
static bool CountsPieces(int64_t pieces, int64_t parts) {
  return pieces <= INT32_MAX && parts <= INT32_MAX / (kLargestThreads * 8);
}

cudaError_t LaunchFp8ActivationCastSm80(cudaStream_t stream, const Fp8ActivationCastSm80& args) {
  ActivatedParams cast{};
  QuantizeParams& p = cast.of;
  p = ParamsOf(Fp8Codes{args.codes, nullptr, nullptr}, args.of.columns);
  p.x = static_cast<const uint8_t*>(args.of.h);
  p.rows = args.of.rows;
  p.columns = args.of.columns;
  cast.known = args.scales;
  cast.largest = static_cast<uint2*>(args.largest);
  if (!CountsPieces(p.rows * p.columns / 8, args.parts)) return cudaErrorInvalidConfiguration;
  if (cudaError_t error =
          FindGroups(stream, args.of.sizes, args.of.groups, args.of.workspace, &p, 0)) {
    return error;
  }
  return DispatchGated(args.of.activation, [&](auto of) {
    return LaunchQuantize(stream, cast, ActivatedKernel<DType::kBF16, decltype(of)::kActivation>,
                          args.parts, 1, kLargestThreads);
  });
}

cudaError_t LaunchFp8ActivationCastBackwardSm80(cudaStream_t stream,
                                                const Fp8ActivationCastBackwardSm80& args) {
  ActivationCastParams p{};
  p.h = static_cast<const uint8_t*>(args.of.h);
  p.d = static_cast<const uint8_t*>(args.d);
  p.row_scale = args.row_scale;
  p.rows = args.of.rows;
  p.columns = args.of.columns;
  p.along = args.along;
  p.known = args.scales;
  p.codes = static_cast<uint8_t*>(args.codes);
  p.turned = static_cast<uint8_t*>(args.turned);
  p.activated = static_cast<uint8_t*>(args.activated);
  p.sums = args.sums;
  p.largest = static_cast<uint2*>(args.largest);
  QuantizeParams groups = ParamsOf(Fp8Codes{}, args.along);
  groups.rows = p.rows;
  const int64_t tiles = args.scales != nullptr ? groups.blocks : 0;
  if (cudaError_t error =
          FindGroups(stream, args.of.sizes, args.of.groups, args.of.workspace, &groups, tiles)) {
    return error;
  }
  p.inside = groups.inside;
  p.groups = groups.groups;
  if (args.scales == nullptr) {
    if (!CountsPieces(p.rows * p.columns / 8, args.parts)) return cudaErrorInvalidConfiguration;
    return DispatchGated(args.of.activation, [&](auto of) {
      return LaunchQuantize(stream, p,
                            DifferentiatedKernel<DType::kBF16, decltype(of)::kActivation>,
                            args.parts, 1, kLargestThreads);
    });
  }
  return DispatchGated(args.of.activation, [&](auto of) {
    return DispatchBool(args.e5m2, [&](auto e5m2) {
      constexpr Element kElement = e5m2.value ? Element::kE5M2 : Element::kE4M3;
      const auto kernel = ActivationCastKernel<DType::kBF16, decltype(of)::kActivation, kElement>;
      constexpr int kBytes = sizeof(ActivationCastShared);
      static_assert(kBytes <= kLeastSharedMemory);
      if (cudaError_t error = AllowBytes(kernel, kBytes)) return error;
      kernel<<<static_cast<unsigned>(args.parts), kActivationThreads, kBytes, stream>>>(p);
      return cudaGetLastError();
    });
  });
}

}  // namespace jgg
