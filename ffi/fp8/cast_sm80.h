// The kernels of matrices with one scale each, on any GPU: x (M, R, C) to codes with a scale that
// is known, and x's largest magnitudes, see device/cast.cuh. R may be grouped, where M is 1.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dtype.h"
#include "fp8/groups.h"

namespace jgg {

struct Fp8CastSm80 {
  DType dtype;
  bool e5m2;
  bool of_codes;  // x are the codes, of one matrix; then there is no dtype, scale or `largest`
  const void* x;  // (M, R, C), or with a list (1, x_lines, C)
  int64_t matrices, rows, columns;
  const float* scales;   // (M,), where there are codes
  const int32_t* sizes;  // (G,), or null
  int64_t groups;
  const int32_t* list;  // (R,): the line of x that each row is, or null
  int64_t x_lines;
  int64_t along;  // R, of groups padded: elements of a line of `turned`
  void* codes;    // (M, R, C), or null
  void* turned;   // (M, C, along), or null
  void* largest;  // (M, parts, 2), or null
  int64_t parts;  // blocks() where there are codes
  const int32_t*
      wanted;       // (1,): whether anyone asks for `largest`, where there are no codes; or null
  void* workspace;  // 4 * workspace_words() bytes

  bool has_codes() const { return codes != nullptr || turned != nullptr; }
  int64_t tiles() const { return ((turned != nullptr ? along : rows) + 127) / 128; }
  int64_t blocks() const { return tiles() * ((columns + 127) / 128); }
  int64_t workspace_words() const {
    return sizes == nullptr ? 0 : Fp8GroupsWords(groups, turned != nullptr ? tiles() : 0);
  }
};

template <DType kOf>
cudaError_t LaunchFp8CastSm80Instance(cudaStream_t stream, const Fp8CastSm80& args);

cudaError_t LaunchFp8CodesSm80(cudaStream_t stream, const Fp8CastSm80& args);

cudaError_t LaunchFp8CastSm80(cudaStream_t stream, const Fp8CastSm80& args);

}  // namespace jgg
