// A cluster's blocks, and what they write to each other. On the host tests/lib/router_kernel.cc has
// this.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
namespace jgg::device {

// The dynamic shared memory of a block.
__device__ inline char* BlockMemory() {
  extern __shared__ __align__(16) char memory[];
  return memory;
}

__device__ inline int BlockThreads() { return static_cast<int>(blockDim.x); }

__device__ inline int ClusterBlocks() {
  uint32_t blocks;
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
  return static_cast<int>(blocks);
}

__device__ inline int BlockOfCluster() {
  uint32_t block;
  asm("mov.u32 %0, %%cluster_ctaid.x;" : "=r"(block));
  return static_cast<int>(block);
}

// All threads of the cluster arrive, then wait. What one wrote before it arrived (without
// kReleases: only that it runs) the others see.
template <bool kReleases>
__device__ inline void ArriveAtCluster() {
  if constexpr (kReleases) {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  } else {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  }
}
__device__ inline void WaitForCluster() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Writes a number to the same place in another block's shared memory.
__device__ inline void WriteTo(int block, float* place, float value) {
  asm volatile(
      "{\n"
      ".reg .b32 to;\n"
      "mapa.shared::cluster.u32 to, %0, %1;\n"
      "st.shared::cluster.f32 [to], %2;\n"
      "}" ::"r"(static_cast<uint32_t>(__cvta_generic_to_shared(place))),
      "r"(block), "f"(value)
      : "memory");
}

}  // namespace jgg::device
#endif
