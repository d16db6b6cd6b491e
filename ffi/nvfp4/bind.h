// From XLA's buffers to operands, for the handlers of NVFP4 products.
#pragma once

#include "common/buffer.h"
#include "common/check.h"
#include "nvfp4/gemm_sm100.h"

namespace jgg {

// Codes: eight of a line to a uint32, lines of a multiple of 16 codes.
inline xla::ffi::Error CheckCodes(const char* op, const char* name,
                                  const xla::ffi::AnyBuffer& codes, size_t rank,
                                  const char* letters) {
  JGG_RETURN_IF_ERROR(CheckDtype(op, name, codes, xla::ffi::U32, "uint32"));
  if (codes.dimensions().size() == rank && codes.dimensions()[rank - 1] % 2 == 0) {
    return xla::ffi::Error::Success();
  }
  return InvalidArgument(op, name, " has shape ", ShapeText(codes), ", expected ", letters,
                         " with a multiple of 16 codes to a line");
}

}  // namespace jgg
