// The products, by CUTLASS: one grouped kernel.
#pragma once

#include "common/grouped_sm100.cuh"
#include "grouped_mm/gemm_sm100.h"

namespace jgg {

// One multiprocessor makes a tile of 128 x 256: two of them fill its tensor memory, so the next is
// multiplied while one is stored. A cluster has one block, because groups have any number of tiles.
template <typename Element, typename Out, bool kAKMajor, bool kBKMajor>
struct GemmSm100Types {
  using RowMajor = cutlass::layout::RowMajor;
  using ColumnMajor = cutlass::layout::ColumnMajor;
  using LayoutA = std::conditional_t<kAKMajor, RowMajor, ColumnMajor>;
  using LayoutB = std::conditional_t<kBKMajor, ColumnMajor, RowMajor>;
  using Tile = cute::Shape<cute::_128, cute::_256, cute::_64>;
  using Cluster = cute::Shape<cute::_1, cute::_1, cute::_1>;
  static constexpr int kAlignment = 16 / sizeof(Element);

  using Epilogue = sm100::RowsEpilogue<Tile, Cluster, void, Out>;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm100, cutlass::arch::OpClassTensorOp,  //
      Element, LayoutA*, kAlignment,                         //
      Element, LayoutB*, kAlignment, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      cutlass::gemm::KernelPtrArrayTmaWarpSpecialized1SmSm100>::CollectiveOp;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<
      cutlass::gemm::kernel::GemmUniversal<sm100::Problem, Mainloop, Epilogue>>;
};

template <typename Element, typename Out, bool kAKMajor, bool kBKMajor>
cudaError_t MultiplySm100(cudaStream_t stream, const GemmSm100& gemm, const sm100::Workspace& at,
                          uint8_t* base) {
  using Types = GemmSm100Types<Element, Out, kAKMajor, kBKMajor>;
  static_assert(sizeof(typename Types::Mainloop::InternalStrideA) == sm100::kStrideBytes);
  static_assert(sizeof(typename Types::Mainloop::InternalStrideB) == sm100::kStrideBytes);
  static_assert(sizeof(typename Types::Epilogue::InternalStrideD) == sm100::kStrideBytes);
  typename Types::Gemm::Arguments arguments{};
  arguments.problem_shape.num_groups = static_cast<int>(gemm.Problems());
  arguments.problem_shape.host_problem_shapes = nullptr;
  sm100::Put(&arguments.problem_shape.problem_shapes, base, at.shapes);
  sm100::Put(&arguments.mainloop.ptr_A, base, at.a);
  sm100::Put(&arguments.mainloop.dA, base, at.stride_a);
  sm100::Put(&arguments.mainloop.ptr_B, base, at.b);
  sm100::Put(&arguments.mainloop.dB, base, at.stride_b);
  sm100::Put(&arguments.epilogue.ptr_D, base, at.out);
  sm100::Put(&arguments.epilogue.dD, base, at.stride_out);
  arguments.epilogue.thread.alpha = 1;
  arguments.epilogue.thread.beta = 0;
  return sm100::RunGrouped<typename Types::Gemm>(stream, arguments, base + at.tensor_maps);
}

}  // namespace jgg
