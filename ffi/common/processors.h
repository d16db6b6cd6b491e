// The GPUs that the kernels' rules have in mind.
#pragma once

namespace jgg {

// Multiprocessors of an H200. Rules that choose a kernel or its plan compare numbers of tiles with
// it: they depend on static shapes alone. Launches ask the device.
constexpr int kH200Processors = 132;

// Bytes of shared memory that a block may have on every GPU since compute capability 8.0. Kernels
// for all of them take no more, or have a rule that says so.
constexpr int kLeastSharedMemory = 99 << 10;

}  // namespace jgg
