// Everything before the products on Blackwell: shapes and addresses of each, and the rows and
// matrices of the result that no product writes. It runs on any architecture.
#include <algorithm>

#include "grouped_mm/device/groups_sm100.cuh"
#include "grouped_mm/groups_sm100.cuh"

namespace jgg::sm100 {

__global__ void __launch_bounds__(device::kGroupThreads)
    GroupsKernel(Product product, Metadata metadata, int64_t problems, Bases bases, Groups groups) {
  device::FindGroups(
      product, metadata, problems, groups.gaps, groups.gap_count,
      [&](int64_t p, const GroupProblem& problem) { groups.Store(product, bases, p, problem); });
}

// mm: zeros in the rows of no segment.
__global__ void ZeroGapsKernel(Product product, Groups groups, uint8_t* out) {
  const int64_t line = product.n * product.out_bytes / 16, step = int64_t{gridDim.x} * blockDim.x;
  const int64_t first = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (int gap = 0; gap < *groups.gap_count; ++gap) {
    const auto [begin, end] = groups.gaps[gap];
    for (int64_t i = begin * line + first; i < end * line; i += step) {
      reinterpret_cast<uint4*>(out)[i] = uint4{};
    }
  }
}

// wgrad: zeros in the matrices of empty segments. A block has one matrix, and every gridDim.x-th
// piece of it.
__global__ void ZeroMatricesKernel(Product product, Groups groups, uint8_t* out) {
  const int64_t size = product.m * product.n * product.out_bytes / 16;
  for (int64_t g = blockIdx.y; g < product.weights; g += gridDim.y) {
    if (cute::get<2>(groups.shapes[g]) != 0) continue;
    for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < size;
         i += int64_t{gridDim.x} * blockDim.x) {
      reinterpret_cast<uint4*>(out)[g * size + i] = uint4{};
    }
  }
}

}  // namespace jgg::sm100

namespace jgg {

cudaError_t ZeroRestSm100(cudaStream_t stream, const GemmSm100& gemm, const sm100::Workspace& at,
                          uint8_t* base) {
  const sm100::Product& product = gemm.product;
  const sm100::Groups groups(at, base);
  auto* out = static_cast<uint8_t*>(gemm.out);
  // Usually these kernels have little to fill, so a grid has no more blocks than run at a time.
  constexpr int kBlocks = sm100::kMostMultiprocessors;
  if (product.wgrad) {
    const int matrices = static_cast<int>(std::min<int64_t>(product.weights, 64));
    const dim3 grid(std::max(1, kBlocks / matrices), matrices);
    sm100::ZeroMatricesKernel<<<grid, 256, 0, stream>>>(product, groups, out);
  } else if (gemm.metadata.clears_rest) {
    sm100::ZeroGapsKernel<<<kBlocks, 256, 0, stream>>>(product, groups, out);
  }
  return cudaGetLastError();
}

cudaError_t PrepareSm100(cudaStream_t stream, const GemmSm100& gemm, const sm100::Workspace& at,
                         uint8_t* base) {
  const sm100::Groups groups(at, base);
  sm100::GroupsKernel<<<1, device::kGroupThreads, 0, stream>>>(
      gemm.product, gemm.metadata, gemm.Problems(), sm100::Bases(gemm), groups);
  if (cudaError_t error = cudaGetLastError()) return error;
  return ZeroRestSm100(stream, gemm, at, base);
}

}  // namespace jgg
