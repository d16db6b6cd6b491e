// CuTe's layouts of the scales that Blackwell's kernels read, one for each product.
#pragma once

#include "cute/tensor.hpp"
#include "cutlass/detail/blockwise_scale_layout.hpp"
#include "grouped_mm/layout_sm100.h"

namespace jgg::sm100 {

// Blocks of a line follow each other. Of w a scale is for 128 lines, too.
template <bool kWgrad>
using ScaleConfig =
    cutlass::detail::Sm100BlockwiseScaleConfig<1, kWgrad ? 1 : 128, 128, cute::UMMA::Major::K,
                                               cute::UMMA::Major::K>;
using ScaleLayoutA = decltype(ScaleConfig<false>::deduce_layoutSFA());
template <bool kWgrad>
using ScaleLayoutB = decltype(ScaleConfig<kWgrad>::deduce_layoutSFB());
static_assert(sizeof(ScaleLayoutA) == kScaleLayoutBytes);
static_assert(sizeof(ScaleLayoutB<false>) == kScaleLayoutBytes);
static_assert(sizeof(ScaleLayoutB<true>) == kScaleLayoutBytes);

// `lines` of `blocks` scales each; a line begins `step` scales behind the one before it.
template <typename Layout>
__host__ __device__ Layout MakeScaleLayout(int lines, int blocks, int step) {
  const auto of_line = cute::get<0, 0>(Layout{}.shape());
  const auto of_block = cute::get<1, 0>(Layout{}.shape());
  return Layout{
      cute::make_shape(cute::make_shape(of_line, lines), cute::make_shape(of_block, blocks), 1),
      cute::make_stride(cute::make_stride(cute::_0{}, step),
                        cute::make_stride(cute::_0{}, cute::_1{}), 0)};
}

}  // namespace jgg::sm100
