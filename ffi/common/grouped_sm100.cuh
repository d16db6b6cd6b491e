// Launches one of CUTLASS's grouped kernels for Blackwell, which reads in device memory what each
// product is.
#pragma once

#include <algorithm>
#include <type_traits>

#include "common/arch.h"
#include "common/grouped_sm100.h"
#include "cute/tensor.hpp"
#include "cutlass/cutlass.h"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

namespace jgg::sm100 {

using Problem = cutlass::gemm::GroupProblemShape<cute::Shape<int, int, int>>;
static_assert(sizeof(Problem::UnderlyingProblemShape) == kShapeBytes);

// Results by TMA, in rows: Out, or Out plus what C holds. The tile is of one multiprocessor.
template <typename Tile, typename Cluster, typename C, typename Out>
using RowsEpilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
    cutlass::arch::Sm100, cutlass::arch::OpClassTensorOp, Tile, Cluster,
    cutlass::epilogue::collective::EpilogueTileAuto, float, float,  //
    C, cutlass::layout::RowMajor*, 16 / sizeof(Out),                //
    Out, cutlass::layout::RowMajor*, 16 / sizeof(Out),              //
    cutlass::epilogue::PtrArrayTmaWarpSpecialized1Sm,
    cutlass::epilogue::fusion::LinearCombination<Out, float, C, float>>::CollectiveOp;

// Points a member of a kernel's arguments to an array of the workspace.
template <typename Pointer>
void Put(Pointer* pointer, uint8_t* base, int64_t offset) {
  *pointer = reinterpret_cast<Pointer>(base + offset);
}

// `tensor_maps`: kTensorMapBytes of the workspace. The arguments lack the mode and the hardware.
template <typename Gemm>
cudaError_t RunGrouped(cudaStream_t stream, typename Gemm::Arguments& arguments,
                       void* tensor_maps) {
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
  // NOTE: without a count CUTLASS asks for no workspace, but writes one all the same.
  if (cudaError_t error = cudaGetDevice(&arguments.hw_info.device_id)) return error;
  arguments.hw_info.sm_count = std::min(Processors(), kMostMultiprocessors);
  if (arguments.hw_info.sm_count == 0) return cudaErrorInvalidDevice;
  if (static_cast<int64_t>(Gemm::get_workspace_size(arguments)) > kTensorMapBytes) {
    return cudaErrorInvalidValue;
  }
  Gemm kernel;
  if (kernel.can_implement(arguments) != cutlass::Status::kSuccess) return cudaErrorNotSupported;
  if (kernel.initialize(arguments, tensor_maps, stream) != cutlass::Status::kSuccess ||
      kernel.run(stream) != cutlass::Status::kSuccess) {
    const cudaError_t error = cudaGetLastError();
    return error == cudaSuccess ? cudaErrorLaunchFailure : error;
  }
  return cudaSuccess;
}

}  // namespace jgg::sm100
