// The Hopper kernel of mm and wgrad: TMA, WGMMA, bf16 and f16; float32 as bf16 planes, see
// device/split_products_sm90.cuh.
//
// Both products are tiles of out[r, c] = sum_k L[r, k] R[c, k]:
//   mm     r: rows of x         c: columns of w   k: all of K            (ragged rows)
//   wgrad  r: columns of x      c: columns of y   k: rows of a segment   (ragged K)
// On the tensor cores r is the N side, whose products may have any multiple of 8 rows up to 256,
// and c the M side; so few rows cost little, and weights stream through the wide side.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "common/tensor_map.h"
#include "grouped_mm/mm.h"
#include "grouped_mm/wgrad.h"

namespace jgg {

constexpr int kMostRankedMatrices = 128;
constexpr int kMostBalancedClusters = 72;  // pairs of a GPU's multiprocessors
// As cute::TMA::CacheHintSm90 has them.
constexpr uint64_t kEvictNormal = 0x1000000000000000, kEvictFirst = 0x12F0000000000000;
constexpr int kMostParts = 2;  // of a tile's k

// A product, as a handler describes it. The launch makes a GemmSm90 of it, and adds what depends on
// the tile: tensor maps, and how results are stored.
struct ProductSm90 {
  Metadata metadata;
  Epilogue epilogue;
  void* out;
  DType out_dtype;
  int64_t out_line;        // elements from one row of the result to the next
  int64_t rows_x, rows_y;  // mm: of x and the result; wgrad: of x and y
  int64_t n, groups;       // columns of w, or of y; weights, or matrices of the result
};

struct MmSm90 {
  ProductSm90 product;
  int64_t k;
};

struct WgradSm90 {
  ProductSm90 product;
  int64_t m;                  // columns of x: rows of a matrix of the result
  int64_t out_group;          // elements from one matrix of the result to the next
  bool matrices;              // matrix g has segment g, so nothing has to be scanned
  const float* matrix_scale;  // of each matrix's sums, or null: 1
};

// Tensor maps of smaller boxes of the operands. wgrad, MN-major: of 16 and of 32 k. qmm: of L, of
// fewer rows.
struct RestMapsSm90 {
  CUtensorMap l[2], r[2];
};

// Tensor maps that only mm has.
struct MmMapsSm90 {
  CUtensorMap out_rest;       // of the result: boxes of 8 rows
  CUtensorMap preactivation;  // of the second result; its halves are matrices
};

// How the schedule of wgrad goes about its matrices.
struct WgradOrderSm90 {
  bool matrices;  // matrix g has segment g, so nothing has to be scanned
  bool ranks;  // there are few tiles, but more than run at a time: the longest matrices come first
  bool balances;  // there are many: clusters share out each matrix by the work that they have had
};

// The kernel's argument, for either product: a kernel with K-major L takes both. The parts of one
// product have types of their own. Other members stand in the order in which kernels read them
// together, so those of one product are among them.
struct GemmSm90 {
  CUtensorMap l_map, r_map, out_map;
  RestMapsSm90 rest_maps;
  MmMapsSm90 mm_maps;
  bool wgrad;  // which product
  WgradOrderSm90 order;
  bool l_k_major, r_k_major;
  int l_plane, r_plane;  // elements of a line from one plane to the next
  Metadata metadata;
  Epilogue epilogue;
  const float* matrix_scale = nullptr;  // wgrad: of each matrix's sums, or null: 1
  void* out;
  DType out_dtype;
  bool stores_boxes;  // whether TMA can write the result
  bool store_warp;    // ... and a warp of its own does: see device/store_sm90.cuh
  uint64_t store_policy = kEvictNormal;  // of L2, for stores by TMA
  int out_width;       // elements per store that alignment allows: those of 16 bytes, or 1
  int64_t out_line;    // elements from one row of the result to the next
  int64_t out_group;   // wgrad: elements from one matrix of the result to the next
  int rows_x, rows_y;  // mm: of x and the result; wgrad: of x and y
  int m, n, k;         // wgrad: m x n per matrix; mm: n columns (of w), k
  int groups;          // weights
  int parts = 1;       // qmm of few rows: blocks that share out a tile's k
};

// L and R in memory. box_lines is set when the tile is known. Planes follow each other within a
// line.
struct OperandsSm90 {
  DType dtype;
  int planes;
  rules::PlanSm90 plan;
  bool l_k_major, r_k_major;
  TensorMapSpec l, r;
};

// Why no call of this dtype can run on this device, or null.
inline const char* GemmSm90Problem(DType dtype, int compute_capability) {
#ifndef JGG_SM90
  return "this build has no code for sm_90a";
#endif
  if (compute_capability != 90) return "needs compute capability 9.0";
  if (dtype == DType::kF32) return "operands are float32";
  return nullptr;
}

GemmSm90 MakeGemmSm90(const MmSm90& mm);
GemmSm90 MakeGemmSm90(const WgradSm90& wgrad);

// Encode the tensor maps, launch.
cudaError_t LaunchGemmSm90(cudaStream_t stream, GemmSm90& gemm, const OperandsSm90& operands);

// One instance per translation unit: gemm_sm90_instance.cu.
template <typename Element, bool kLKMajor>
cudaError_t LaunchGemmSm90Instance(cudaStream_t stream, GemmSm90& gemm,
                                   const OperandsSm90& operands);

// Instantiated in gemm_sm90_split.cu.
template <bool kLKMajor, int kPlanes>
cudaError_t LaunchSplitGemmSm90Instance(cudaStream_t stream, GemmSm90& gemm,
                                        const OperandsSm90& operands);

}  // namespace jgg
