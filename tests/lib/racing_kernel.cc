// A kernel that lacks a barrier, for test_host_kernels.py: what finds others' faults finds this.
#include "cuda_on_host.h"

static void Kernel(const int* from, int* to, bool meet) {
  __shared__ int staged[64];
  staged[threadIdx.x] = from[threadIdx.x];
  if (meet) __syncthreads();
  to[threadIdx.x] = staged[threadIdx.x ^ 32];
}

extern "C" void racing_kernel(const int* from, int* to, int meet) {
  RunBlocks({1, 1}, 64, [&] { Kernel(from, to, meet != 0); });
}
