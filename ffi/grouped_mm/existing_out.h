// The operand that products are added to, for the CUDA handlers.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>

#include "common/buffer.h"
#include "common/check.h"
#include "common/cuda_error.h"
#include "grouped_mm/metadata_bind.h"

namespace jgg {

// Take the next operand as what the result holds before the kernel runs. The call asks XLA for the
// same memory for both; where XLA has the call read and write slices of larger arrays, as in the
// loop of a scan, they are two places, and the operand is copied.
inline xla::ffi::Error BindExistingOut(const char* op, cudaStream_t stream, Operands* operands,
                                       xla::ffi::AnyBuffer out) {
  const auto existing_out = operands->Take("existing_out");
  if (!existing_out) return existing_out.error();
  const auto has = existing_out->dimensions(), wanted = out.dimensions();
  if (existing_out->element_type() != out.element_type() || has.size() != wanted.size() ||
      !std::equal(has.begin(), has.end(), wanted.begin())) {
    return InvalidArgument(op, "existing_out must have the result's shape and dtype");
  }
  if (existing_out->untyped_data() == out.untyped_data()) return xla::ffi::Error::Success();
  return FromCuda(op, cudaMemcpyAsync(out.untyped_data(), existing_out->untyped_data(),
                                      out.size_bytes(), cudaMemcpyDeviceToDevice, stream));
}

}  // namespace jgg
