// CUDA handler of route: bind, check, launch.
#include "common/arch.h"
#include "common/check.h"
#include "common/cuda_error.h"
#include "handlers.h"
#include "moe/route_sm80.h"
#include "moe/rules.h"

namespace jgg {
namespace ffi = xla::ffi;

static ffi::Error Route(cudaStream_t stream, ffi::Buffer<ffi::S32> index, ffi::RemainingArgs rest,
                        ffi::Result<ffi::Buffer<ffi::S32>> order,
                        ffi::Result<ffi::Buffer<ffi::S32>> place,
                        ffi::Result<ffi::Buffer<ffi::S32>> sizes,
                        ffi::Result<ffi::Buffer<ffi::S32>> overflow,
                        ffi::Result<ffi::Buffer<ffi::S32>> workspace) {
  constexpr const char* op = "moe_route";
  JGG_RETURN_IF_ERROR(CheckShape(op, "expert_index", "(P,)", index, {-1}));
  JGG_RETURN_IF_ERROR(CheckShape(op, "order", "(R,)", *order, {-1}));
  JGG_RETURN_IF_ERROR(CheckShape(op, "group_sizes", "(E,)", *sizes, {-1}));
  const int64_t pairs = index.dimensions()[0], rows = order->dimensions()[0];
  const int64_t experts = sizes->dimensions()[0];
  JGG_RETURN_IF_ERROR(CheckSmall(op, {pairs}));
  JGG_RETURN_IF_ERROR(CheckSmall(op, {rows}, 0));
  if (rows > pairs) return InvalidArgument(op, "has ", rows, " rows for ", pairs, " pairs");
  if (auto reason = rules::MoeRouteProblem(pairs, experts)) return Unimplemented(op, *reason);
  const int64_t blocks = rules::MoeRouteBlocks(pairs);
  JGG_RETURN_IF_ERROR(CheckShape(op, "place", "(P,)", *place, {pairs}));
  JGG_RETURN_IF_ERROR(CheckShape(op, "overflow", "()", *overflow, {}));
  JGG_RETURN_IF_ERROR(CheckShape(op, "workspace", "(E, blocks)", *workspace, {experts, blocks}));
  if (rest.size() > 1) return InvalidArgument(op, "has ", 1 + rest.size(), " operands, at most 2");
  const int32_t* offset = nullptr;
  if (rest.size() == 1) {
    auto buffer = rest.get<ffi::Buffer<ffi::S32>>(0);
    if (!buffer) return buffer.error();
    JGG_RETURN_IF_ERROR(CheckShape(op, "expert_offset", "()", *buffer, {}));
    offset = buffer->typed_data();
  }
  if (auto reason = NeedsComputeCapability(80, ComputeCapability())) {
    return Unimplemented(op, *reason);
  }
  const RouteArgs args{index.typed_data(),          offset,
                       order->typed_data(),         place->typed_data(),
                       sizes->typed_data(),         overflow->typed_data(),
                       workspace->typed_data(),     static_cast<int32_t>(pairs),
                       static_cast<int32_t>(rows),  static_cast<int32_t>(experts),
                       static_cast<int32_t>(blocks)};
  return FromCuda(op, route_sm80(stream, args));
}

XLA_FFI_DEFINE_HANDLER(kRoute, Route,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::Buffer<ffi::S32>>()   // expert_index
                           .RemainingArgs()                // expert_offset
                           .Ret<ffi::Buffer<ffi::S32>>()   // order
                           .Ret<ffi::Buffer<ffi::S32>>()   // place
                           .Ret<ffi::Buffer<ffi::S32>>()   // group_sizes
                           .Ret<ffi::Buffer<ffi::S32>>()   // overflow
                           .Ret<ffi::Buffer<ffi::S32>>(),  // workspace
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggMoeRoute(XLA_FFI_CallFrame* call_frame) { return kRoute(call_frame); }

}  // namespace jgg
