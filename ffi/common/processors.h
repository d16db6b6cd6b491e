// The GPUs that the kernels' rules have in mind.
#pragma once

namespace jgg {

// Multiprocessors of an H200. Rules compare numbers of tiles with it, and ask no device: which
// kernel runs depends on static shapes alone.
constexpr int kH200Processors = 132;

// Bytes of shared memory that a block may have on every GPU since compute capability 8.0. Kernels for
// all of them take no more, or have a rule that says so.
constexpr int kLeastSharedMemory = 99 << 10;

}  // namespace jgg
