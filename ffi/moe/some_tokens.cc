// CUDA handlers of some tokens' experts on Hopper: bind, check, launch. Rows are sorted by expert,
// multiplied twice and added up, by three or four kernels.
#include "common/arch.h"
#include "common/cuda_error.h"
#include "grouped_mm/mm_sm90.h"
#include "handlers.h"
#include "moe/experts_bind.h"
#include "moe/few_tokens_bind.h"
#include "moe/rows_sm80.h"
#include "moe/rules.h"
#include "quantized/gemm_sm90.h"
#include "quantized/up_and_down_sm90.h"

// "some_tokens", "some_dense": the activation between the products, whether K is the weights' last
// axis, and which optional operand is there.
JGG_ATTRIBUTES(SomeTokensAttrs,                 //
               (std::string_view, activation),  //
               (bool, transpose_w),             //
               (bool, expert_offset));

namespace jgg {
namespace ffi = xla::ffi;

namespace {

struct SomeTokens {
  FewTokens few;  // all but the weights
  SomeRows rows;
  void* y;  // (tokens * k, d): rows behind the down product
  DType dtype;

  int64_t Pairs() const { return int64_t{few.tokens} * few.k; }
};

// Results that kernels hand on to each other: x in the order of experts, the activation, rows
// behind the down product, the row of each pair, and sizes of experts.
struct Handed {
  const ffi::AnyBuffer &rows, &a, &y, &place, &sizes;
};

ffi::Error BindSomeTokens(const char* op, const ffi::AnyBuffer& x, const ffi::AnyBuffer& index,
                          const ffi::AnyBuffer& weight, const ffi::AnyBuffer& out,
                          const Handed& handed, int64_t experts, const SomeTokensAttrs& attrs,
                          Operands* operands, SomeTokens* some) {
  FewTokens& few = some->few;
  const ffi::DataType dtype = x.element_type();
  JGG_RETURN_IF_ERROR(
      BindFewTokens(op, x, index, weight, out, handed.a, experts, attrs.activation, &few));
  if (!IsGated(few.activation)) return Unimplemented(op, "needs a gated activation");
  const int64_t pairs = some->Pairs(), d = few.d;
  if (auto reason = rules::MoeSomeTokensProblem(pairs, few.k, experts, d, few.f)) {
    return Unimplemented(op, *reason);
  }
  JGG_RETURN_IF_ERROR(CheckDtype(op, "rows", handed.rows, dtype, "that of x"));
  JGG_RETURN_IF_ERROR(CheckDtype(op, "a", handed.a, dtype, "that of x"));
  JGG_RETURN_IF_ERROR(CheckDtype(op, "y", handed.y, dtype, "that of x"));
  JGG_RETURN_IF_ERROR(CheckDtype(op, "place", handed.place, ffi::S32, "int32"));
  JGG_RETURN_IF_ERROR(CheckDtype(op, "sizes", handed.sizes, ffi::S32, "int32"));
  JGG_RETURN_IF_ERROR(CheckShape(op, "rows", "(T * k, D)", handed.rows, {pairs, d}));
  JGG_RETURN_IF_ERROR(CheckShape(op, "y", "(T * k, D)", handed.y, {pairs, d}));
  JGG_RETURN_IF_ERROR(CheckShape(op, "place", "(T, k)", handed.place, {few.tokens, few.k}));
  JGG_RETURN_IF_ERROR(CheckShape(op, "sizes", "(E,)", handed.sizes, {experts}));
  some->dtype = *ToDType(dtype);
  if (few.out_dtype != some->dtype && few.out_dtype != DType::kF32) {
    return InvalidArgument(op, "the result must be float32, or as x");
  }
  if (attrs.expert_offset) JGG_RETURN_IF_ERROR(BindExpertOffset(op, operands, &few));
  for (const ffi::AnyBuffer* buffer : {&out, &handed.rows, &handed.y}) {
    if (reinterpret_cast<uintptr_t>(buffer->untyped_data()) % 16 != 0) {
      return Unimplemented(op, "a result is not 16-byte aligned");
    }
  }
  some->y = handed.y.untyped_data();
  some->rows = {x.untyped_data(),
                few.expert_index,
                few.expert_offset,
                handed.rows.untyped_data(),
                static_cast<int32_t*>(handed.place.untyped_data()),
                static_cast<int32_t*>(handed.sizes.untyped_data()),
                few.tokens,
                few.k,
                few.experts,
                static_cast<int32_t>(d / 8)};
  return ffi::Error::Success();
}

Metadata SizesOf(const SomeTokens& some) {
  Metadata metadata{};
  metadata.kind = MetadataKind::kSizes;
  metadata.data = some.rows.sizes;
  metadata.count = some.few.experts;
  metadata.clears_rest = false;
  return metadata;
}

Epilogue EpilogueOf(const SomeTokens& some, bool up) {
  Epilogue epilogue{};
  if (up) epilogue.activation = some.few.activation;
  epilogue.rounds_preactivation = up;
  return epilogue;
}

// A program of an earlier version has no turns.
ffi::Error BindTurns(const char* op, ffi::RemainingRets more, SomeTokens* some) {
  if (more.size() == 0) return ffi::Error::Success();
  auto turns = more.get<ffi::AnyBuffer>(0);
  if (!turns || more.size() > 1) return InvalidArgument(op, "expected one result, turns");
  const int64_t count = TurnsOfUpAndDown(some->Pairs());
  JGG_RETURN_IF_ERROR(CheckDtype(op, "turns", **turns, ffi::S32, "int32"));
  JGG_RETURN_IF_ERROR(CheckShape(op, "turns", "(T * k + 1,)", **turns, {count}));
  some->rows.turns = static_cast<int32_t*>((*turns)->untyped_data());
  some->rows.turns_count = static_cast<int32_t>(count);
  return ffi::Error::Success();
}

// All kernels; products() launches the two products.
template <typename Products>
ffi::Error Launch(const char* op, cudaStream_t stream, const SomeTokens& some, Products products) {
  const FewTokens& few = some.few;
  JGG_RETURN_IF_ERROR(FromCuda(op, some_rows_sm80(stream, some.rows)));
  JGG_RETURN_IF_ERROR(FromCuda(op, products()));
  const PairRows pairs{
      nullptr,         some.rows.place, few.tokens, few.k, static_cast<int32_t>(some.Pairs()),
      some.rows.pieces};
  return FromCuda(op, combine_sm80(stream, {pairs, some.dtype, few.out_dtype, some.y,
                                            few.expert_weight, few.out}));
}

}  // namespace

// ---- prepacked weights
// ---------------------------------------------------------------------------

namespace {

constexpr const char* kPacked = "moe_some_tokens";

// w (E, n, k), behind what Launch writes before it.
ffi::Error BindPackedProduct(const SomeTokens& some, bool up, const ffi::AnyBuffer& weight,
                             const ffi::AnyBuffer& scales, const QuantizedAttrs& attrs,
                             Operands* operands, PackedProductSm90* bound) {
  const FewTokens& few = some.few;
  const int64_t pairs = some.Pairs(), k = up ? few.d : few.f, n = up ? 2 * few.f : few.d;
  PackedCodesSm90 packed{};
  JGG_RETURN_IF_ERROR(BindPackedExperts(kPacked, weight, scales, attrs, few.experts, n, k,
                                        &bound->coding, &packed));
  QmmSm90 qmm{};
  ProductSm90& product = qmm.mm.product;
  product.metadata = SizesOf(some);
  product.epilogue = EpilogueOf(some, up);
  product.out = up ? static_cast<void*>(few.a) : some.y;
  product.out_dtype = some.dtype;
  product.out_line = up ? n / 2 : n;
  product.rows_x = product.rows_y = pairs;
  product.n = n;
  product.groups = few.experts;
  qmm.mm.k = k;
  qmm.scales = scales.untyped_data();
  if (attrs.global_scale) {
    JGG_RETURN_IF_ERROR(BindGlobalScale(kPacked, few.experts, n, operands, &qmm.global_scale));
  }
  JGG_RETURN_IF_ERROR(
      CheckMm(kPacked, product.metadata, pairs, pairs, product.groups, product.n, k));
  if (auto reason = rules::QmmPackedProblem(n, up)) return Unimplemented(kPacked, *reason);
  const FormatFacts& format = FactsOf(bound->coding.mode, bound->coding.bits);
  bound->plan = rules::PlanQmmSm90(format, {k, n, up, true}, {pairs, pairs, few.experts});
  bound->operands.dtype = some.dtype;
  bound->operands.l_k_major = true;
  const void* const x = up ? some.rows.rows : static_cast<void*>(few.a);
  bound->operands.l = {x, some.dtype, k, pairs, 1, k, k};
  if (const char* problem = TensorMapProblem(bound->operands.l)) {
    return Unimplemented(kPacked, problem);
  }
  bound->quantized = MakeQuantizedGemmSm90(qmm);
  bound->quantized.packed = packed;
  bound->quantized.planes = 1;
  return ffi::Error::Success();
}

}  // namespace

static ffi::Error SomeTokensHandler(
    cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer up, ffi::AnyBuffer up_scales,
    ffi::AnyBuffer down, ffi::AnyBuffer down_scales, ffi::AnyBuffer index, ffi::AnyBuffer weight,
    ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out, ffi::Result<ffi::AnyBuffer> a,
    ffi::Result<ffi::AnyBuffer> rows, ffi::Result<ffi::AnyBuffer> y,
    ffi::Result<ffi::AnyBuffer> place, ffi::Result<ffi::AnyBuffer> sizes, ffi::RemainingRets more,
    QuantizedAttrs up_attrs, QuantizedAttrs down_attrs, SomeTokensAttrs attrs) {
  JGG_RETURN_IF_ERROR(CheckDtype(kPacked, "x", x, ffi::BF16, "bfloat16"));
  JGG_RETURN_IF_ERROR(CheckShape(kPacked, "up", "(E, N/64, K/64, words)", up, {-1, -1, -1, -1}));
  if (!attrs.transpose_w) return InvalidArgument(kPacked, "weights are (E, N, K)");
  Operands operands(kPacked, rest);
  SomeTokens some{};
  JGG_RETURN_IF_ERROR(BindSomeTokens(kPacked, x, index, weight, *out,
                                     {*rows, *a, *y, *place, *sizes}, up.dimensions()[0], attrs,
                                     &operands, &some));
  PackedProductSm90 of_up{}, of_down{};
  JGG_RETURN_IF_ERROR(BindPackedProduct(some, true, up, up_scales, up_attrs, &operands, &of_up));
  JGG_RETURN_IF_ERROR(
      BindPackedProduct(some, false, down, down_scales, down_attrs, &operands, &of_down));
  JGG_RETURN_IF_ERROR(operands.End());
  JGG_RETURN_IF_ERROR(CheckPackedGpu(kPacked));
  JGG_RETURN_IF_ERROR(BindTurns(kPacked, more, &some));
  if (some.rows.turns != nullptr && HasUpAndDownSm90(of_up, of_down)) {
    return Launch(kPacked, stream, some,
                  [&] { return LaunchUpAndDownSm90(stream, of_up, of_down, some.rows.turns); });
  }
  const auto product = [&](PackedProductSm90& of) {
    return LaunchPackedGemmSm90(stream, of.quantized, of.coding, of.plan, of.operands);
  };
  return Launch(kPacked, stream, some, [&] {
    if (some.rows.turns != nullptr && HasUpAndDownSm90(of_up, of_down)) {
      return LaunchUpAndDownSm90(stream, of_up, of_down, some.rows.turns);
    }
    const cudaError_t error = product(of_up);
    return error ? error : product(of_down);
  });
}

XLA_FFI_DEFINE_HANDLER(kSomeTokens, SomeTokensHandler,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // up
                           .Arg<ffi::AnyBuffer>()  // its scales
                           .Arg<ffi::AnyBuffer>()  // down
                           .Arg<ffi::AnyBuffer>()  // its scales
                           .Arg<ffi::AnyBuffer>()  // expert_index
                           .Arg<ffi::AnyBuffer>()  // expert_weight
                           .RemainingArgs()        // expert_offset, global_scale of up, of down
                           .Ret<ffi::AnyBuffer>()  // out
                           .Ret<ffi::AnyBuffer>()  // a, and so on: Handed
                           .Ret<ffi::AnyBuffer>()  // rows
                           .Ret<ffi::AnyBuffer>()  // y
                           .Ret<ffi::AnyBuffer>()  // place
                           .Ret<ffi::AnyBuffer>()  // sizes
                           .RemainingRets()        // turns
                           .Attr<QuantizedAttrs>("up")
                           .Attr<QuantizedAttrs>("down")
                           .Attr<SomeTokensAttrs>("some_tokens"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggMoeSomeTokens(XLA_FFI_CallFrame* call_frame) { return kSomeTokens(call_frame); }

// ---- weights of 16 bits ----

namespace {

constexpr const char* kDense = "moe_some_dense";

// w (E, k, n), or transposed.
ffi::Error BindDenseProduct(const SomeTokens& some, bool up, const ffi::AnyBuffer& w,
                            bool transposed, int compute_capability, MmArgs* args) {
  const FewTokens& few = some.few;
  const int64_t pairs = some.Pairs(), k = up ? few.d : few.f, n = up ? 2 * few.f : few.d;
  if (ToDType(w.element_type()) != some.dtype) {
    return InvalidArgument(kDense, "x and weights must have one dtype");
  }
  JGG_RETURN_IF_ERROR(
      CheckDenseExperts(kDense, up ? "up" : "down", w, few.experts, k, n, transposed));
  *args = MmArgs{};
  args->x = up ? some.rows.rows : few.a;
  args->w = w.untyped_data();
  args->out = up ? static_cast<void*>(few.a) : some.y;
  args->dtype = args->out_dtype = some.dtype;
  args->rows_x = args->rows_y = args->x_list.count = args->y_list.count = pairs;
  args->k = k;
  args->n = n;
  args->groups = few.experts;
  args->strides.x_row = k;
  args->strides.x_k = args->strides.out_n = 1;
  args->strides.w_group = k * n;
  args->strides.w_k = transposed ? 1 : n;
  args->strides.w_n = transposed ? k : 1;
  args->strides.out_row = up ? n / 2 : n;
  args->metadata = SizesOf(some);
  args->in_order = true;
  args->epilogue = EpilogueOf(some, up);
  JGG_RETURN_IF_ERROR(CheckMm(kDense, args->metadata, pairs, pairs, args->groups, n, k));
  if (auto reason = mm_sm90_unsupported(*args, compute_capability)) {
    return Unimplemented(kDense, *reason);
  }
  args->plan = mm_sm90_plan(*args);
  return ffi::Error::Success();
}

}  // namespace

static ffi::Error SomeDenseHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer up,
                                   ffi::AnyBuffer down, ffi::AnyBuffer index, ffi::AnyBuffer weight,
                                   ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                                   ffi::Result<ffi::AnyBuffer> a, ffi::Result<ffi::AnyBuffer> rows,
                                   ffi::Result<ffi::AnyBuffer> y, ffi::Result<ffi::AnyBuffer> place,
                                   ffi::Result<ffi::AnyBuffer> sizes, ffi::RemainingRets more,
                                   SomeTokensAttrs attrs) {
  JGG_RETURN_IF_ERROR(CheckDense(kDense, x, up));
  Operands operands(kDense, rest);
  SomeTokens some{};
  JGG_RETURN_IF_ERROR(BindSomeTokens(kDense, x, index, weight, *out,
                                     {*rows, *a, *y, *place, *sizes}, up.dimensions()[0], attrs,
                                     &operands, &some));
  JGG_RETURN_IF_ERROR(operands.End());
  MmArgs of_up, of_down;
  const int capability = ComputeCapability();
  JGG_RETURN_IF_ERROR(BindDenseProduct(some, true, up, attrs.transpose_w, capability, &of_up));
  JGG_RETURN_IF_ERROR(BindDenseProduct(some, false, down, attrs.transpose_w, capability, &of_down));
  JGG_RETURN_IF_ERROR(BindTurns(kDense, more, &some));
  return Launch(kDense, stream, some, [&] {
    if (some.rows.turns != nullptr && mm_sm90_has_up_and_down(of_up, of_down)) {
      return mm_sm90_up_and_down(stream, of_up, of_down, some.rows.turns);
    }
    const cudaError_t error = mm_sm90(stream, of_up);
    return error ? error : mm_sm90(stream, of_down);
  });
}

XLA_FFI_DEFINE_HANDLER(kSomeDense, SomeDenseHandler,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()  // x
                           .Arg<ffi::AnyBuffer>()  // up
                           .Arg<ffi::AnyBuffer>()  // down
                           .Arg<ffi::AnyBuffer>()  // expert_index
                           .Arg<ffi::AnyBuffer>()  // expert_weight
                           .RemainingArgs()        // expert_offset
                           .Ret<ffi::AnyBuffer>()  // out
                           .Ret<ffi::AnyBuffer>()  // a, and so on: Handed
                           .Ret<ffi::AnyBuffer>()  // rows
                           .Ret<ffi::AnyBuffer>()  // y
                           .Ret<ffi::AnyBuffer>()  // place
                           .Ret<ffi::AnyBuffer>()  // sizes
                           .RemainingRets()        // turns
                           .Attr<SomeTokensAttrs>("some_dense"),
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggMoeSomeDense(XLA_FFI_CallFrame* call_frame) { return kSomeDense(call_frame); }

}  // namespace jgg
