// The GPU that the kernels' rules have in mind.
#pragma once

namespace jgg {

// Multiprocessors of an H200. Rules compare numbers of tiles with it, and ask no device: which
// kernel runs depends on static shapes alone.
constexpr int kH200Processors = 132;

}  // namespace jgg
