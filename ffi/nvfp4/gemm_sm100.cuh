// The products, by CUTLASS: one grouped kernel, which reads in device memory what each group is.
#pragma once

#include "common/grouped_sm100.cuh"
#include "nvfp4/gemm_sm100.h"

namespace jgg::nvfp4 {

// One multiprocessor makes a tile of 128 x 128, from stages of 256 k. A and B are contiguous along
// k; these instructions multiply nothing else. A cluster has one block, because groups have any
// number of tiles.
template <DType kOut>
struct GemmSm100Types {
  using Out = std::conditional_t<kOut == DType::kF32, float, cutlass::bfloat16_t>;
  using Element = cutlass::nv_float4_t<cutlass::float_e2m1_t>;
  using Tile = cute::Shape<cute::_128, cute::_128, cute::_256>;
  using Cluster = cute::Shape<cute::_1, cute::_1, cute::_1>;
  static constexpr int kAlignment = 32;  // elements of A and B in 16 bytes
  static constexpr int kOutAlignment = 16 / sizeof(Out);

  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm100, cutlass::arch::OpClassBlockScaledTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float,  //
      Out, cutlass::layout::RowMajor*, kOutAlignment,                 //
      Out, cutlass::layout::RowMajor*, kOutAlignment,
      cutlass::epilogue::PtrArrayTmaWarpSpecialized1Sm,
      cutlass::epilogue::fusion::LinearCombination<Out, float, Out, float>>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm100, cutlass::arch::OpClassBlockScaledTensorOp,  //
      Element, cutlass::layout::RowMajor*, kAlignment,                  //
      Element, cutlass::layout::ColumnMajor*, kAlignment, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(
          sizeof(typename Epilogue::SharedStorage))>,
      cutlass::gemm::KernelPtrArrayTmaWarpSpecialized1SmNvf4Sm100>::CollectiveOp;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<
      cutlass::gemm::kernel::GemmUniversal<sm100::Problem, Mainloop, Epilogue>>;
};

template <DType kOut>
cudaError_t MultiplyGroups(cudaStream_t stream, const GemmSm100& gemm, const Workspace& at,
                           uint8_t* base) {
  using Types = GemmSm100Types<kOut>;
  using Gemm = typename Types::Gemm;
  using Mainloop = typename Types::Mainloop;
  using Epilogue = typename Types::Epilogue;
  static_assert(sizeof(typename Mainloop::InternalLayoutSFA) == kScaleLayoutBytes);
  static_assert(sizeof(typename Mainloop::InternalLayoutSFB) == kScaleLayoutBytes);
  static_assert(sizeof(typename Mainloop::InternalStrideA) == kStrideBytes);
  static_assert(sizeof(typename Mainloop::InternalStrideB) == kStrideBytes);
  static_assert(sizeof(typename Epilogue::InternalStrideD) == kStrideBytes);

  const auto put = [&](auto* pointer, int64_t offset) { sm100::Put(pointer, base, offset); };
  typename Gemm::Arguments arguments{};
  arguments.problem_shape.num_groups = gemm.product.groups;
  arguments.problem_shape.host_problem_shapes = nullptr;
  put(&arguments.problem_shape.problem_shapes, at.shapes);
  put(&arguments.mainloop.ptr_A, at.a);
  put(&arguments.mainloop.dA, at.stride_a);
  put(&arguments.mainloop.ptr_B, at.b);
  put(&arguments.mainloop.dB, at.stride_b);
  put(&arguments.mainloop.ptr_SFA, at.scales_a);
  put(&arguments.mainloop.layout_SFA, at.layout_a);
  put(&arguments.mainloop.ptr_SFB, at.scales_b);
  put(&arguments.mainloop.layout_SFB, at.layout_b);
  put(&arguments.epilogue.ptr_D, at.out);
  put(&arguments.epilogue.dD, at.stride_out);

  // One factor per group: pointers with a stride of one group.
  auto& factors = arguments.epilogue.thread;
  factors.alpha_ptr = gemm.alpha;
  factors.dAlpha = {cute::_0{}, cute::_0{}, 1};
  if (gemm.beta != nullptr) {
    factors.beta_ptr = gemm.beta;
    factors.dBeta = {cute::_0{}, cute::_0{}, 1};
    put(&arguments.epilogue.ptr_C, at.out);
    put(&arguments.epilogue.dC, at.stride_out);
  }

  return sm100::RunGrouped<Gemm>(stream, arguments, base + at.tensor_maps);
}

}  // namespace jgg::nvfp4
