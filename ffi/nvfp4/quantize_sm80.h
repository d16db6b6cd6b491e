// The kernels of nvfp4_quantize, on any GPU: x (M, R, C) to codes and scales, in blocks of 16 along
// C, or along R and stored transposed; R may be grouped, where M is 1.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dtype.h"

namespace jgg {

struct Nvfp4QuantizeSm80 {
  DType dtype;
  const void* x;
  int64_t matrices, rows, columns;
  bool along_rows;
  bool scale_2d, hadamard;
  const int32_t* sizes;  // (G,), or null
  int64_t groups;
  const uint32_t* seed;  // two words, or null: round to nearest
  int64_t blocks;        // to a line of the result
  void* weight;          // lines of blocks of 8 bytes
  void* scales;          // and of a byte
  float* global_scale;   // (M,)
  void* workspace;       // 4 * workspace_words() bytes, aligned to 8

  // Each matrix takes three words, each group two, and so does the end of all groups.
  int64_t workspace_words() const {
    return 3 * matrices + (sizes == nullptr ? 0 : 2 * (groups + 1));
  }
};

template <DType kOf>
cudaError_t LaunchNvfp4QuantizeSm80Instance(cudaStream_t stream, const Nvfp4QuantizeSm80& args);

cudaError_t LaunchNvfp4QuantizeSm80(cudaStream_t stream, const Nvfp4QuantizeSm80& args);

}  // namespace jgg
