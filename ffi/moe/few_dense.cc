// CUDA handler of a few tokens' experts with 16-bit weights: bind, check, launch.
#include "common/arch.h"
#include "common/cuda_error.h"
#include "common/sample.h"
#include "handlers.h"
#include "moe/experts_bind.h"
#include "moe/few_dense_sm80.h"
#include "moe/few_tokens_bind.h"
#include "moe/rules.h"

// "few_dense": the activation between the products, whether K is the weights' last axis, and which
// optional operands are there.
JGG_ATTRIBUTES(FewDenseAttrs,                   //
               (std::string_view, activation),  //
               (bool, transpose_w),             //
               (bool, up_bias),                 //
               (bool, down_bias),               //
               (bool, expert_offset));

namespace jgg {
namespace ffi = xla::ffi;

static constexpr const char* kOp = "moe_few_dense";

// w (E, k, n), or transposed.
static ffi::Error BindFewDenseWeight(const char* name, const ffi::AnyBuffer& w, ffi::DataType dtype,
                                     int64_t experts, int64_t k, int64_t n, bool transposed) {
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, name, w, dtype, "that of x"));
  JGG_RETURN_IF_ERROR(CheckDenseExperts(kOp, name, w, experts, k, n, transposed));
  if (reinterpret_cast<uintptr_t>(w.untyped_data()) % 16 == 0) return ffi::Error::Success();
  return Unimplemented(kOp, std::string(name) + " is not 16-byte aligned");
}

template <DType kX>
static ffi::Error LaunchFewDense(cudaStream_t stream, const FewDense& up, const FewDense& down,
                                 bool transposed) {
  JGG_RETURN_IF_ERROR(FromCuda(kOp, LaunchFewDenseUpSm80<kX>(stream, up, transposed)));
  return FromCuda(kOp, LaunchFewDenseDownSm80<kX>(stream, down, transposed));
}

static ffi::Error FewDenseHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer up,
                                  ffi::AnyBuffer down, ffi::AnyBuffer index, ffi::AnyBuffer weight,
                                  ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                                  ffi::Result<ffi::AnyBuffer> a, FewDenseAttrs attrs) {
  JGG_RETURN_IF_ERROR(CheckDense(kOp, x, up));
  const ffi::DataType dtype = x.element_type();
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, "a", *a, dtype, "that of x"));
  const int64_t experts = up.dimensions()[0];
  FewDense first{};
  FewTokens& few = first.experts;
  JGG_RETURN_IF_ERROR(
      BindFewTokens(kOp, x, index, weight, *out, *a, experts, attrs.activation, &few));
  const int64_t d = few.d, f = few.f, columns = IsGated(few.activation) ? 2 * f : f;
  const int64_t pairs = int64_t{few.tokens} * few.k;
  if (auto reason = rules::MoeFewDenseProblem(pairs, few.k, d, f)) {
    return Unimplemented(kOp, *reason);
  }
  const bool transposed = attrs.transpose_w;
  JGG_RETURN_IF_ERROR(BindFewDenseWeight("up", up, dtype, experts, d, columns, transposed));
  JGG_RETURN_IF_ERROR(BindFewDenseWeight("down", down, dtype, experts, f, d, transposed));
  Operands operands(kOp, rest);
  if (attrs.expert_offset) JGG_RETURN_IF_ERROR(BindExpertOffset(kOp, &operands, &few));
  FewDense second = first;
  first.w = up.untyped_data();
  second.w = down.untyped_data();
  if (attrs.up_bias) {
    JGG_RETURN_IF_ERROR(BindFewBias(kOp, &operands, experts, columns, &few.w));
  }
  if (attrs.down_bias) {
    JGG_RETURN_IF_ERROR(BindFewBias(kOp, &operands, experts, d, &second.experts.w));
  }
  JGG_RETURN_IF_ERROR(operands.End());
  if (auto reason = NeedsComputeCapability(80, ComputeCapability())) {
    return Unimplemented(kOp, *reason);
  }
  if (dtype == ffi::BF16) return LaunchFewDense<DType::kBF16>(stream, first, second, transposed);
  if constexpr (kSample) {
    return FromCuda(kOp, cudaErrorNoKernelImageForDevice);
  } else {
    return LaunchFewDense<DType::kF16>(stream, first, second, transposed);
  }
}

XLA_FFI_DEFINE_HANDLER(kFewDense, FewDenseHandler,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // up
                           .Arg<ffi::AnyBuffer>()  // down
                           .Arg<ffi::AnyBuffer>()  // expert_index
                           .Arg<ffi::AnyBuffer>()  // expert_weight
                           .RemainingArgs()        // expert_offset, bias of up, of down
                           .Ret<ffi::AnyBuffer>()  // out
                           .Ret<ffi::AnyBuffer>()  // a, for the second kernel
                           .Attr<FewDenseAttrs>("few_dense"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggMoeFewDense(XLA_FFI_CallFrame* call_frame) { return kFewDense(call_frame); }

}  // namespace jgg
