#include "common/tensor_map.h"

namespace jgg {

// The driver's function, found when first needed: the module imports without a driver.
static decltype(&cuTensorMapEncodeTiled) Encoder() {
  static const auto encoder = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &found);
    if (error != cudaSuccess || found != cudaDriverEntryPointSuccess) function = nullptr;
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
  }();
  return encoder;
}

cudaError_t EncodeTensorMap(const TensorMapSpec& spec, CUtensorMap* map) {
  if (TensorMapProblem(spec) != nullptr) return cudaErrorNotSupported;
  const auto encode = Encoder();
  if (encode == nullptr) return cudaErrorNotSupported;
  const cuuint64_t sizes[3] = {static_cast<cuuint64_t>(spec.inner),
                               static_cast<cuuint64_t>(spec.lines),
                               static_cast<cuuint64_t>(spec.groups)};
  const int width = Size(spec.dtype);
  const cuuint64_t bytes[2] = {static_cast<cuuint64_t>(spec.line) * width,
                               static_cast<cuuint64_t>(spec.group) * width};
  const cuuint32_t box[3] = {static_cast<cuuint32_t>(spec.box_inner),
                             static_cast<cuuint32_t>(spec.box_lines),
                             static_cast<cuuint32_t>(spec.box_groups)};
  const cuuint32_t steps[3] = {1, 1, 1};
  const int box_bytes = spec.box_inner * width;
  const CUresult result = encode(
      map,
      spec.dtype == DType::kF32    ? CU_TENSOR_MAP_DATA_TYPE_FLOAT32
      : spec.dtype == DType::kBF16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
                                   : CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
      3, const_cast<void*>(spec.data), sizes, bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
      box_bytes == 128  ? CU_TENSOR_MAP_SWIZZLE_128B
      : box_bytes == 64 ? CU_TENSOR_MAP_SWIZZLE_64B
                        : CU_TENSOR_MAP_SWIZZLE_NONE,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace jgg
