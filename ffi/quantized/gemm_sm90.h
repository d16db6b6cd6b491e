// The Hopper kernel of qmm: the tiles, schedule and epilogue of grouped_mm/gemm_sm90.h. Weights
// come packed in the order in which the tensor cores' registers take them, and are decoded there.
//
// Layout "sm90": tiles of 64 columns (of the result) x 64 k, tiles of k fastest. Thread t of a
// warpgroup has row t / 32 * 16 + t % 32 / 4 of a tile and the one 8 below, and of every 16 k the
// four k, k + 1, k + 8, k + 9, k = t % 4 * 2. Its codes are one piece of 16 bytes, a word for every
// 16 k; how a word holds the four pairs of codes is in device/weights_sm90.cuh. The scales of its
// two rows lie beside each other, one or two words each.
#pragma once

#include <cuda_runtime_api.h>

#include "grouped_mm/gemm_sm90.h"
#include "quantized/quantized.h"

namespace jgg {

struct QuantizedGemmSm90 {
  GemmSm90 gemm;  // L (x) and the result; R is not used
  const void* codes;
  const void* scales;
  int column_tiles, k_tiles;  // of a weight
  const float* global_scale;  // null where there is none
  int64_t global_scale_group, global_scale_column;
};

// Choose a tile, encode the tensor maps, launch. scale_words: of a row of a tile.
cudaError_t LaunchQuantizedGemmSm90(cudaStream_t stream, QuantizedGemmSm90& quantized, Mode mode,
                                    int scale_words, const OperandsSm90& operands);

// One instance per translation unit: gemm_sm90_instance.cu.
template <Mode kMode, int kScaleWords>
cudaError_t LaunchQuantizedInstanceSm90(cudaStream_t stream, QuantizedGemmSm90& quantized,
                                        const OperandsSm90& operands);

}  // namespace jgg
