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

// Dimensions that the kernel counts in int32, with room for a tile.
inline xla::ffi::Error CheckSmall(const char* op, std::initializer_list<int64_t> sizes) {
  for (int64_t size : sizes) {
    if (size < 1 || size > INT32_MAX - 1024) {
      return InvalidArgument(op, "an axis has length ", size, ", expected 1 to 2^31 - 1025");
    }
  }
  return xla::ffi::Error::Success();
}

}  // namespace jgg
