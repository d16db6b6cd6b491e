// The products, by CUTLASS: one grouped kernel.
#pragma once

#include "common/grouped_sm100.cuh"
#include "fp8/gemm_sm100.h"
#include "fp8/scales_sm100.cuh"

namespace jgg {

// One multiprocessor makes a tile of 128 x 128, or in wgrad of 128 x 64. Each block of 128 k is
// summed in tensor memory, and other warps add it up, times its scales. Where each column has a
// scale of its own, 128 of them spill.
template <typename Out, bool kWgrad>
struct Fp8GemmSm100Types {
  using RowMajor = cutlass::layout::RowMajor;
  using ColumnMajor = cutlass::layout::ColumnMajor;
  using Element = cutlass::float_e4m3_t;
  using Tile = cute::Shape<cute::_128, cute::Int<kWgrad ? 64 : 128>, cute::_128>;
  using Cluster = cute::Shape<cute::_1, cute::_1, cute::_1>;
  using C = std::conditional_t<kWgrad, Out, void>;  // what wgrad may add to
  static constexpr int kAlignment = 16;

  using Epilogue = sm100::RowsEpilogue<Tile, Cluster, C, Out>;
  using LayoutsA = cute::tuple<RowMajor*, sm100::ScaleLayoutA*>;
  using LayoutsB = cute::tuple<ColumnMajor*, sm100::ScaleLayoutB<kWgrad>*>;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm100, cutlass::arch::OpClassTensorOp,  //
      Element, LayoutsA, kAlignment,                         //
      Element, LayoutsB, kAlignment, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      cutlass::gemm::KernelPtrArrayTmaWarpSpecializedBlockwise1SmSm100>::CollectiveOp;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<
      cutlass::gemm::kernel::GemmUniversal<sm100::Problem, Mainloop, Epilogue>>;
};

template <typename Out, bool kWgrad>
cudaError_t MultiplyFp8Sm100(cudaStream_t stream, const Fp8GemmSm100& fp8,
                             const sm100::ScaledWorkspace& at, uint8_t* base) {
  using Types = Fp8GemmSm100Types<Out, kWgrad>;
  static_assert(sizeof(typename Types::Mainloop::InternalStrideA) == sm100::kStrideBytes);
  static_assert(sizeof(typename Types::Mainloop::InternalStrideB) == sm100::kStrideBytes);
  static_assert(sizeof(typename Types::Epilogue::InternalStrideD) == sm100::kStrideBytes);
  const sm100::Workspace& groups = at.groups;
  typename Types::Gemm::Arguments arguments{};
  arguments.problem_shape.num_groups = static_cast<int>(fp8.gemm.Problems());
  arguments.problem_shape.host_problem_shapes = nullptr;
  sm100::Put(&arguments.problem_shape.problem_shapes, base, groups.shapes);
  sm100::Put(&arguments.mainloop.ptr_A, base, groups.a);
  sm100::Put(&arguments.mainloop.dA, base, groups.stride_a);
  sm100::Put(&arguments.mainloop.ptr_B, base, groups.b);
  sm100::Put(&arguments.mainloop.dB, base, groups.stride_b);
  sm100::Put(&arguments.mainloop.ptr_SFA, base, at.scales_a);
  sm100::Put(&arguments.mainloop.layout_SFA, base, at.layout_a);
  sm100::Put(&arguments.mainloop.ptr_SFB, base, at.scales_b);
  sm100::Put(&arguments.mainloop.layout_SFB, base, at.layout_b);
  sm100::Put(&arguments.epilogue.ptr_D, base, groups.out);
  sm100::Put(&arguments.epilogue.dD, base, groups.stride_out);
  arguments.epilogue.thread.alpha = 1;
  arguments.epilogue.thread.beta = fp8.accumulate ? 1 : 0;
  if constexpr (kWgrad) {
    sm100::Put(&arguments.epilogue.ptr_C, base, groups.out);
    sm100::Put(&arguments.epilogue.dC, base, groups.stride_out);
  }
  return sm100::RunGrouped<typename Types::Gemm>(stream, arguments, base + groups.tensor_maps);
}

}  // namespace jgg
