// From run-time types to one of the instances of gemm_sm90_instance.cu and its kin.
#include "grouped_mm/gemm_sm90.h"

#include "common/alignment.h"
#include "common/dispatch.h"
#include "common/sample.h"
#include "cutlass/numeric_types.h"
#include "grouped_mm/by_list_sm90.h"

namespace jgg {

// CheckMm, or the handler of wgrad, has seen to it that axes fit an int.
static GemmSm90 MakeCommon(const ProductSm90& product) {
  const bool gated = IsGated(product.epilogue.activation);
  GemmSm90 gemm{};
  gemm.metadata = product.metadata;
  gemm.epilogue = product.epilogue;
  gemm.out = product.out;
  gemm.out_dtype = product.out_dtype;
  gemm.out_width =
      WholeAlignedElements(product.out_dtype, product.out, {gated ? product.n / 2 : product.n});
  gemm.out_line = product.out_line;
  gemm.rows_x = static_cast<int>(product.rows_x);
  gemm.rows_y = static_cast<int>(product.rows_y);
  gemm.n = static_cast<int>(product.n);
  gemm.groups = static_cast<int>(product.groups);
  return gemm;
}

GemmSm90 MakeGemmSm90(const MmSm90& mm) {
  GemmSm90 gemm = MakeCommon(mm.product);
  gemm.k = static_cast<int>(mm.k);
  return gemm;
}

GemmSm90 MakeGemmSm90(const WgradSm90& wgrad) {
  GemmSm90 gemm = MakeCommon(wgrad.product);
  gemm.wgrad = true;
  gemm.m = static_cast<int>(wgrad.m);
  gemm.out_group = wgrad.out_group;
  gemm.order.matrices = wgrad.matrices;
  gemm.matrix_scale = wgrad.matrix_scale;
  return gemm;
}

cudaError_t LaunchGemmSm90(cudaStream_t stream, GemmSm90& gemm, const OperandsSm90& operands) {
#ifdef JGG_SM90
  gemm.l_k_major = operands.l_k_major;
  gemm.r_k_major = operands.r_k_major;
  gemm.l_plane = static_cast<int>(operands.l.inner / operands.planes);
  gemm.r_plane = static_cast<int>(operands.r.inner / operands.planes);
  return DispatchBool(operands.l_k_major, [&](auto l) {
    constexpr bool kL = decltype(l)::value;
    if (operands.planes == 3) {
      return LaunchSplitGemmSm90Instance<kL, 3>(stream, gemm, operands);
    }
    if (operands.planes == 1 && operands.dtype == DType::kBF16) {
      return LaunchGemmSm90Instance<cutlass::bfloat16_t, kL>(stream, gemm, operands);
    }
    if constexpr (kSample) {
      return cudaErrorNoKernelImageForDevice;
    } else if (operands.planes == 2) {
      return LaunchSplitGemmSm90Instance<kL, 2>(stream, gemm, operands);
    } else {
      return LaunchGemmSm90Instance<cutlass::half_t, kL>(stream, gemm, operands);
    }
  });
#else
  return cudaErrorNoKernelImageForDevice;
#endif
}

cudaError_t LaunchRowsByListSm90(cudaStream_t stream, RowsByListSm90& by_list,
                                 const OperandsSm90& operands) {
#ifdef JGG_SM90
  return DispatchBool(operands.r_k_major, [&](auto r) {
    constexpr bool kR = decltype(r)::value;
    if (operands.dtype == DType::kBF16) {
      return LaunchRowsByListSm90Instance<cutlass::bfloat16_t, kR>(stream, by_list, operands);
    }
    if constexpr (kSample) {
      return cudaErrorNoKernelImageForDevice;
    } else {
      return LaunchRowsByListSm90Instance<cutlass::half_t, kR>(stream, by_list, operands);
    }
  });
#else
  return cudaErrorNoKernelImageForDevice;
#endif
}

#ifdef JGG_SM90
// Calls launch(element), an element of the operands' type.
template <typename Launch>
static cudaError_t LaunchOfElement(GemmSm90& gemm, const OperandsSm90& operands, Launch launch) {
  gemm.l_k_major = operands.l_k_major;
  gemm.r_k_major = operands.r_k_major;
  if (operands.dtype == DType::kBF16) return launch(cutlass::bfloat16_t{});
  if constexpr (kSample) {
    return cudaErrorNoKernelImageForDevice;
  } else {
    return launch(cutlass::half_t{});
  }
}
#endif

cudaError_t LaunchOperandByListSm90(cudaStream_t stream, OperandByListSm90& by_list,
                                    const OperandsSm90& operands, bool transposed) {
#ifdef JGG_SM90
  return LaunchOfElement(by_list.gemm, operands, [&](auto element) {
    return LaunchOperandByListSm90Instance<decltype(element)>(stream, by_list, operands,
                                                              transposed);
  });
#else
  return cudaErrorNoKernelImageForDevice;
#endif
}

cudaError_t LaunchBackwardByListSm90(cudaStream_t stream, BackwardByListSm90& by_list,
                                     const OperandsSm90& operands) {
#ifdef JGG_SM90
  return LaunchOfElement(by_list.gemm, operands, [&](auto element) {
    return LaunchBackwardByListSm90Instance<decltype(element)>(stream, by_list, operands);
  });
#else
  return cudaErrorNoKernelImageForDevice;
#endif
}

}  // namespace jgg
