// Tensor maps: what TMA needs to know of an operand.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dtype.h"

namespace jgg {

// Matrices contiguous along one axis: `inner` elements to a line, `lines` lines `line` elements
// apart, `groups` matrices `group` elements apart; copied in boxes of box_inner x
// box_lines x box_groups, in shared memory swizzled by line where box_inner is 128 or 64 bytes.
// Zeros are copied from outside.
struct TensorMapSpec {
  const void* data;
  DType dtype;
  int64_t inner, lines, groups;
  int64_t line, group;
  int box_lines = 0, box_inner = 64, box_groups = 1;
};

// cudaErrorNotSupported where TMA cannot describe the operand: see TensorMapProblem.
cudaError_t EncodeTensorMap(const TensorMapSpec& spec, CUtensorMap* map);

// Why TMA cannot describe the operand, or null.
inline const char* TensorMapProblem(const TensorMapSpec& spec) {
  if (reinterpret_cast<uintptr_t>(spec.data) % 16 != 0) return "an operand is not 16-byte aligned";
  const int width = Size(spec.dtype);
  if (spec.line * width % 16 != 0 || spec.group * width % 16 != 0) {
    return "an operand's lines are not a multiple of 16 bytes long";
  }
  constexpr int64_t kMost = int64_t{1} << 31;
  if (spec.inner < 1 || spec.lines < 1 || spec.groups < 1) return "an operand is empty";
  if (spec.inner >= kMost || spec.lines >= kMost || spec.groups >= kMost) {
    return "an operand has more than 2^31 - 1 rows, columns or matrices";
  }
  if (spec.line * width >= int64_t{1} << 40 || spec.group * width >= int64_t{1} << 40) {
    return "an operand's matrices are 2^40 bytes or more";
  }
  return nullptr;
}

}  // namespace jgg
