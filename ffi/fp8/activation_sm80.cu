#include "fp8/activation_sm80.h"

#include "common/blocks_that_fit.h"
#include "common/dispatch.h"
#include "fp8/device/activation.cuh"
#include "fp8/dispatch_gated.h"
#include "fp8/launch_sm80.cuh"
#include "fp8/rules.h"

namespace jgg {

using namespace fp8;
using namespace fp8::device;

cudaError_t LaunchFp8ActivationSm80(cudaStream_t stream, const Fp8ActivationSm80& args,
                                    const Fp8Codes& to) {
  QuantizeParams p = ParamsOf(to, args.columns);
  p.x = static_cast<const uint8_t*>(args.h);
  p.rows = args.rows;
  p.columns = args.columns;
  if (cudaError_t error = FindGroups(stream, args.sizes, args.groups, args.workspace, &p, 0)) {
    return error;
  }
  return DispatchGated(args.activation, [&](auto of) {
    using Source = ActivatedRow<DType::kBF16, decltype(of)::kActivation>;
    return LaunchQuantize(stream, p, RowsKernel<DType::kBF16, Element::kE4M3, false, true, Source>,
                          RowsBlocks<DType::kBF16>(p), 1, kRowsThreads);
  });
}

cudaError_t LaunchFp8ActivationBackwardSm80(cudaStream_t stream,
                                            const Fp8ActivationBackwardSm80& args) {
  ActivationParams p{};
  p.h = static_cast<const uint8_t*>(args.of.h);
  p.d = static_cast<const uint8_t*>(args.d);
  p.row_scale = args.row_scale;
  p.rows = args.of.rows;
  p.columns = args.of.columns;
  p.sums = args.sums;
  p.by_rows = ParamsOf(args.by_rows, 2 * p.columns);
  p.by_columns = ParamsOf(args.by_columns, args.along);
  p.activated = ParamsOf(args.activated, args.along);
  QuantizeParams groups = p.activated;
  groups.rows = p.rows;
  if (cudaError_t error = FindGroups(stream, args.of.sizes, args.of.groups, args.of.workspace,
                                     &groups, groups.blocks)) {
    return error;
  }
  p.groups = groups.groups;
  const int64_t blocks = groups.blocks * (p.columns / kBlock);
  if (blocks > INT32_MAX) return cudaErrorInvalidConfiguration;
  return DispatchGated(args.of.activation, [&](auto of) {
    return DispatchBool(args.by_rows.seed != nullptr, [&](auto stochastic) {
      constexpr int kBytes = sizeof(ActivationShared<kSplits<DType::kBF16, stochastic.value>>);
      const auto kernel =
          ActivationBackwardKernel<DType::kBF16, decltype(of)::kActivation, stochastic.value>;
      static_assert(kBytes <= rules::kFp8ActivationBackwardBytes);
      if (cudaError_t error = AllowBytes(kernel, kBytes)) return error;
      kernel<<<static_cast<unsigned>(blocks), kActivationThreads, kBytes, stream>>>(p);
      return cudaGetLastError();
    });
  });
}

}  // namespace jgg
