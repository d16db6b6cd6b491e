// mm by the Hopper kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <optional>
#include <string>

#include "grouped_mm/mm.h"

namespace jgg {

// Why this kernel cannot take a call; nothing where it can.
std::optional<std::string> mm_sm90_unsupported(const MmArgs& args, int compute_capability);

// Why there is no kernel as the plan says; nothing where there is.
std::optional<std::string> mm_sm90_plan_problem(const MmArgs& args);

// The plan of a call that comes without one.
rules::PlanSm90 mm_sm90_plan(const MmArgs& args);

cudaError_t mm_sm90(cudaStream_t stream, const MmArgs& args);

// Two products in one kernel, the second of which has the first one's result for x: whether there
// is one that follows their plans, and its launch. `turns`: see up_and_down_sm90.h.
bool mm_sm90_has_up_and_down(const MmArgs& up, const MmArgs& down);
cudaError_t mm_sm90_up_and_down(cudaStream_t stream, const MmArgs& up, const MmArgs& down,
                                int32_t* turns);

// What a mixture's backward pass has beside a product whose sums are the cotangent of
// row_scale * swiglu(h), and makes in place of them: see by_list_sm90.h.
struct DownBackwardArgs {
  const void* h;           // (T, 2N)
  void* dh;                // (T, 2N)
  const float* row_scale;  // (T,)
  float* row_sums;         // (ceil(N / 16), T)
};

// Takes operands as mm_sm90 does, with rows of x by list; out is row_scale * swiglu(h).
cudaError_t mm_backward_sm90(cudaStream_t stream, const MmArgs& args,
                             const DownBackwardArgs& backward);

}  // namespace jgg
