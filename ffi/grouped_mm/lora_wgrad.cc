// CUDA handler of low rank's weight gradients: bind, check, launch.
#include "common/arch.h"
#include "common/buffer.h"
#include "common/check.h"
#include "common/cuda_error.h"
#include "grouped_mm/lora_bind.h"
#include "grouped_mm/lora_wgrad_sm80.h"
#include "grouped_mm/metadata_bind.h"
#include "grouped_mm/rules.h"
#include "handlers.h"

namespace jgg {
namespace ffi = xla::ffi;

static constexpr const char* kOp = "lora_wgrad";

static ffi::Error CheckNumbers(const char* name, const ffi::AnyBuffer& numbers, int64_t count) {
  JGG_RETURN_IF_ERROR(CheckDtype(kOp, name, numbers, ffi::S32, "int32"));
  return CheckShape(kOp, name, "their", numbers, {count});
}

template <typename T>
static T* Data(const ffi::AnyBuffer& buffer) {
  return static_cast<T*>(buffer.untyped_data());
}

static ffi::Error LoraWgradHandler(cudaStream_t stream, ffi::AnyBuffer dh, ffi::AnyBuffer x,
                                   ffi::AnyBuffer ct, ffi::AnyBuffer h, ffi::AnyBuffer pair_of,
                                   ffi::AnyBuffer row_of, ffi::Result<ffi::AnyBuffer> da,
                                   ffi::Result<ffi::AnyBuffer> db,
                                   ffi::Result<ffi::AnyBuffer> begins) {
  const ffi::DataType dtype = x.element_type();
  if (dtype != ffi::BF16 && dtype != ffi::F16) {
    return InvalidArgument(kOp, "x must be bfloat16 or float16");
  }
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "x", "(T, K)", x, {-1, -1}));
  JGG_RETURN_IF_ERROR(CheckShape(kOp, "db", "(P, N, R)", *db, {-1, -1, -1}));
  const int64_t rows = x.dimensions()[0], k = x.dimensions()[1];
  const int64_t pairs = db->dimensions()[0], n = db->dimensions()[1], rank = db->dimensions()[2];
  JGG_RETURN_IF_ERROR(CheckSmall(kOp, {rows, k, n, pairs}));
  if (auto reason = rules::LoraProblem(rank, k, n)) return Unimplemented(kOp, *reason);
  JGG_RETURN_IF_ERROR(CheckLoraLines(kOp, "dh", "(T, R)", dh, dtype, {rows, rank}));
  JGG_RETURN_IF_ERROR(CheckLoraLines(kOp, "x", "(T, K)", x, dtype, {rows, k}));
  JGG_RETURN_IF_ERROR(CheckLoraLines(kOp, "ct", "(T, N)", ct, dtype, {rows, n}));
  JGG_RETURN_IF_ERROR(CheckLoraLines(kOp, "h", "(T, R)", h, dtype, {rows, rank}));
  JGG_RETURN_IF_ERROR(CheckLoraLines(kOp, "da", "(P, R, K)", *da, dtype, {pairs, rank, k}));
  JGG_RETURN_IF_ERROR(CheckLoraLines(kOp, "db", "(P, N, R)", *db, dtype, {pairs, n, rank}));
  JGG_RETURN_IF_ERROR(CheckNumbers("pair_of", pair_of, rows));
  JGG_RETURN_IF_ERROR(CheckNumbers("row_of", row_of, rows));
  JGG_RETURN_IF_ERROR(CheckNumbers("begins", *begins, pairs + 1));
  LoraWgrad lora{};
  lora.wide[0] = Data<char>(x), lora.narrow[0] = Data<char>(dh), lora.out[0] = Data<char>(*da);
  lora.wide[1] = Data<char>(ct), lora.narrow[1] = Data<char>(h), lora.out[1] = Data<char>(*db);
  lora.length[0] = static_cast<int>(k), lora.length[1] = static_cast<int>(n);
  lora.pair_of = Data<int32_t>(pair_of);
  lora.row_of = Data<int32_t>(row_of);
  lora.begins = Data<int32_t>(*begins);
  lora.rows = static_cast<int>(rows);
  lora.rank = static_cast<int>(rank);
  lora.pairs = static_cast<int>(pairs);
  if (auto reason = NeedsComputeCapability(80, ComputeCapability())) {
    return Unimplemented(kOp, *reason);
  }
  return FromCuda(kOp, LaunchLoraWgradSm80(stream, *ToDType(dtype), lora));
}

XLA_FFI_DEFINE_HANDLER(kLoraWgrad, LoraWgradHandler,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .Arg<ffi::AnyBuffer>()   // dh
                           .Arg<ffi::AnyBuffer>()   // x
                           .Arg<ffi::AnyBuffer>()   // ct
                           .Arg<ffi::AnyBuffer>()   // h
                           .Arg<ffi::AnyBuffer>()   // pair_of
                           .Arg<ffi::AnyBuffer>()   // row_of
                           .Ret<ffi::AnyBuffer>()   // da
                           .Ret<ffi::AnyBuffer>()   // db
                           .Ret<ffi::AnyBuffer>(),  // begins
                       {ffi::Traits::kCmdBufferCompatible});

XLA_FFI_Error* JggLoraWgrad(XLA_FFI_CallFrame* call_frame) { return kLoraWgrad(call_frame); }

}  // namespace jgg
