// Hopper's instructions: mbarriers, bulk tensor copies, warpgroup products.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <utility>

#include "cute/arch/mma_sm90_gmma.hpp"

namespace jgg::device {

__device__ inline uint32_t SharedAddress(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// ---- mbarriers ----

__device__ inline void Init(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(SharedAddress(barrier)),
               "r"(arrivals));
}

// A hint lets the hardware suspend the thread for up to 10 ms at a time.
__device__ inline void Wait(uint64_t* barrier, uint32_t parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1, %2;\n"
      "@!done bra again%=;\n"
      "}" ::"r"(SharedAddress(barrier)),
      "r"(parity), "r"(10000000)
      : "memory");
}

// Whether that phase is over. All lanes of a warp get lane 0's answer.
__device__ inline bool Over(uint64_t* barrier, uint32_t parity) {
  uint32_t over;
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n"
      "}"
      : "=r"(over)
      : "r"(SharedAddress(barrier)), "r"(parity)
      : "memory");
  return __shfl_sync(0xffffffffu, over, 0) != 0;
}

__device__ inline void Arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(SharedAddress(barrier)) : "memory");
}

// Arrives at the barrier in the same place of another block of the cluster. The thread has only
// read before, so this needs no `.release.cluster`. That would fence all memory, and take half of
// the time.
__device__ inline void ArriveAt(uint64_t* barrier, int block) {
  asm volatile(
      "{\n"
      ".reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n"
      "}" ::"r"(SharedAddress(barrier)),
      "r"(block)
      : "memory");
}

__device__ inline void ArriveExpecting(uint64_t* barrier, int bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
}

// Writes 16 bytes to the same place of another block of the cluster. The barrier of that block
// counts them.
__device__ inline void SendTo(int block, const void* place, uint64_t* barrier, float4 values) {
  asm volatile(
      "{\n"
      ".reg .b32 to, barrier;\n"
      "mapa.shared::cluster.u32 to, %0, %2;\n"
      "mapa.shared::cluster.u32 barrier, %1, %2;\n"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to], {%3, %4, %5, %6}, "
      "[barrier];\n"
      "}" ::"r"(SharedAddress(place)),
      "r"(SharedAddress(barrier)), "r"(block), "f"(values.x), "f"(values.y), "f"(values.z),
      "f"(values.w)
      : "memory");
}

// ---- kernels one after the other ----

// The next kernel of the stream, if it was launched with LaunchEarly (common/launch_early.h), may
// begin once all blocks have said so, or have ended.
__device__ inline void AllowNextKernel() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until the kernel before has ended, and all that it wrote can be read. Without such a launch
// there is nothing to wait for. All threads of a kernel have to, so that it ends after the other.
__device__ inline void WaitForPreviousKernel() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

// ---- tensor copies ----

__device__ inline void Prefetch(const CUtensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A line of global memory.
__device__ inline void PrefetchLine(const void* line) {
  asm volatile("prefetch.global.L1 [%0];" ::"l"(line) : "memory");
}

__device__ inline void PrefetchToL2(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line) : "memory");
}

// Copies one box into this block's shared memory, or (kMulticast) into the same place of both
// blocks of a cluster.
template <bool kMulticast = false>
__device__ inline void CopyBox(const CUtensorMap* map, uint64_t* barrier, void* to, int x, int y,
                               int z) {
  if constexpr (kMulticast) {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%3, %4, %5}], [%2], %6;" ::"r"(SharedAddress(to)),
        "l"(map), "r"(SharedAddress(barrier)), "r"(x), "r"(y), "r"(z), "h"(uint16_t{3})
        : "memory");
  } else {
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%3, %4, %5}], [%2];" ::"r"(SharedAddress(to)),
        "l"(map), "r"(SharedAddress(barrier)), "r"(x), "r"(y), "r"(z)
        : "memory");
  }
}

// Plain bytes, a multiple of 16.
__device__ inline void CopyBytes(const void* from, uint64_t* barrier, void* to, int bytes) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(SharedAddress(to)),
      "l"(from), "r"(bytes), "r"(SharedAddress(barrier))
      : "memory");
}

// Copies 16 bytes past the L1 cache, or writes zeros, where 0 bytes are to be read.
__device__ inline void CopyPiece(const void* from, uint32_t to, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}
__device__ inline void CopyPiece(const void* from, void* to, int bytes) {
  CopyPiece(from, SharedAddress(to), bytes);
}

// Arrives when this thread's words and pieces are there.
__device__ inline void ArriveCopied(uint64_t* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(SharedAddress(barrier))
               : "memory");
}

// Waits until this thread's words and pieces are there.
__device__ inline void WaitCopied() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// One thread stores one box from shared memory, without what is outside the tensor. `policy`: of
// L2, for the lines written. The thread waits until TMA has read the box before anybody writes to
// it again.
__device__ inline void StoreBox(const CUtensorMap* map, const void* from, int x, int y, int z,
                                uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group.L2::cache_hint [%0, {%2, %3, %4}], "
      "[%1], %5;" ::"l"(map),
      "r"(SharedAddress(from)), "r"(x), "r"(y), "r"(z), "l"(policy)
      : "memory");
}

// The same, but adds float32 to what is there. Subnormal values there, and subnormal sums, count as
// zero.
__device__ inline void AddBox(const CUtensorMap* map, const void* from, int x, int y, int z) {
  asm volatile(
      "cp.reduce.async.bulk.tensor.3d.global.shared::cta.add.bulk_group [%0, {%2, %3, %4}], "
      "[%1];" ::"l"(map),
      "r"(SharedAddress(from)), "r"(x), "r"(y), "r"(z)
      : "memory");
}

// Ends a group of stores, which may be empty.
__device__ inline void CommitStores() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Waits until all but the last kPending groups have been read.
template <int kPending>
__device__ inline void WaitStored() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(kPending) : "memory");
}

// Ordinary stores have written to shared memory, and tensor cores or copies read it next.
__device__ inline void FenceAsyncProxy() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- matrices of a warp ----

// Four 8 x 8 matrices of 16-bit values, in a word of each lane for each of them. In shared memory
// they are lines of 16 bytes, and lane l names a line of matrix l / 8. A lane's two values lie
// beside each other in a line, or (kTurned) in neighbouring ones.
#define JGG_MATRICES(turned) ".sync.aligned.x4" turned ".m8n8.shared.b16 "
template <bool kTurned>
__device__ inline void StoreMatrices(char* line, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  if constexpr (kTurned) {
    asm volatile(
        "stmatrix" JGG_MATRICES(".trans") "[%0], {%1, %2, %3, %4};" ::"r"(SharedAddress(line)),
        "r"(a), "r"(b), "r"(c), "r"(d));
  } else {
    asm volatile("stmatrix" JGG_MATRICES("") "[%0], {%1, %2, %3, %4};" ::"r"(SharedAddress(line)),
                 "r"(a), "r"(b), "r"(c), "r"(d));
  }
}

__device__ inline void LoadTurnedMatrices(const char* line, uint32_t (&to)[4]) {
  asm volatile("ldmatrix" JGG_MATRICES(".trans") "{%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(SharedAddress(line)));
}
#undef JGG_MATRICES

// ---- warpgroup products ----

__device__ inline void WarpgroupArrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void WarpgroupCommit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int kPending>
__device__ inline void WarpgroupWait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// A tile in shared memory with 128-byte lines, swizzled, in pieces of 8 lines: `chunk` bytes from
// 64 elements of an MN-major tile to the next. This is the lower half of its descriptor, of which
// 1 is 16 bytes further on; the upper half is the same for all.
__device__ inline uint32_t TileDescriptor(uint32_t address, int chunk) {
  return static_cast<uint32_t>(chunk >> 4) << 16 | ((address & 0x3ffff) >> 4);
}

__device__ inline uint64_t WholeDescriptor(uint32_t lower) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kPiece = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kPiece | lower;
}

template <typename Instruction, size_t... kIndex>
__device__ void Multiply(uint32_t a, uint32_t b, float* sums, bool add,
                         std::index_sequence<kIndex...>) {
  Instruction::fma(WholeDescriptor(a), WholeDescriptor(b), sums[kIndex]...,
                   add ? cute::SM90::GMMA::ScaleOut::One : cute::SM90::GMMA::ScaleOut::Zero);
}

// ---- clusters, registers, named barriers ----

__device__ inline int BlockInCluster() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

__device__ inline void ClusterSync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

template <int kRegisters>
__device__ inline void GiveRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ inline void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// All threads of some warps; barrier 0 is __syncthreads.
__device__ inline void SyncSome(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace jgg::device
