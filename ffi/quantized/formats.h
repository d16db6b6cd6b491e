// The formats of quantized weights: one list, which handlers, instances of kernels, decoders and
// CMakeLists.txt read. What a format is says its file in formats/.
#pragma once

#include <array>
#include <string_view>
#include <type_traits>

#include "common/sample.h"
#include "quantized/format.h"
#include "quantized/formats/affine.h"
#include "quantized/formats/fp8.h"
#include "quantized/formats/mxfp4.h"
#include "quantized/formats/mxfp8.h"
#include "quantized/formats/nvfp4.h"

namespace jgg {

// JGG_SAMPLE leaves out kernels for formats that are marked so: see common/sample.h.
inline constexpr bool kUnlessSample = false;

template <Mode kMode_, int kBits_, bool kInSample = true>
struct FormatOf : FormatTraits<kMode_, kBits_> {
  static constexpr Mode kMode = kMode_;
  static constexpr int kBits = kBits_;
  static constexpr bool kHasKernels = kInSample || !kSample;
};

template <typename... Formats>
struct FormatList;

template <typename First, typename... Rest>
struct FormatList<First, Rest...> {
  // function(FormatOf) of the one with this mode and bits, or the last one: BindCoding has checked
  // that the list has it.
  template <typename Function>
  static auto Dispatch(Mode mode, int bits, Function&& function) {
    if constexpr (sizeof...(Rest) > 0) {
      if (mode != First::kMode || bits != First::kBits) {
        return FormatList<Rest...>::Dispatch(mode, bits, function);
      }
    }
    return function(First{});
  }
};

// Those formats of a list that have a fact.
template <template <typename> typename Has, typename List, typename Found = FormatList<>>
struct Filter;
template <template <typename> typename Has, typename Found>
struct Filter<Has, FormatList<>, Found> {
  using Type = Found;
};
template <template <typename> typename Has, typename First, typename... Rest, typename... Found>
struct Filter<Has, FormatList<First, Rest...>, FormatList<Found...>>
    : Filter<Has, FormatList<Rest...>,
             std::conditional_t<Has<First>::value, FormatList<Found..., First>,
                                FormatList<Found...>>> {};

// In the order of Mode, one a line: CMakeLists.txt compiles an instance of the Hopper kernels for
// each of them.
using Formats = FormatList<                     //
    FormatOf<Mode::kAffine, 2, kUnlessSample>,  //
    FormatOf<Mode::kAffine, 3>,                 //
    FormatOf<Mode::kAffine, 4, kUnlessSample>,  //
    FormatOf<Mode::kAffine, 5, kUnlessSample>,  //
    FormatOf<Mode::kAffine, 6, kUnlessSample>,  //
    FormatOf<Mode::kAffine, 8, kUnlessSample>,  //
    FormatOf<Mode::kMxfp4, 4, kUnlessSample>,   //
    FormatOf<Mode::kMxfp8, 8>,                  //
    FormatOf<Mode::kNvfp4, 4>,                  //
    FormatOf<Mode::kFp8, 8>>;

template <typename Format>
using IsLinear = std::bool_constant<Format::kIsLinear>;
using LinearFormats = Filter<IsLinear, Formats>::Type;

template <typename Format>
using IsPrepacked = std::bool_constant<Format::kIsPrepacked>;
using PrepackedFormats = Filter<IsPrepacked, Formats>::Type;

// The same facts for handlers, which know a format when they run.
struct FormatFacts {
  Mode mode;
  int bits;
  std::string_view name;
  ScaleType scale;
  bool takes_global_scale, is_linear, is_prepacked, is_ordered, packed_by_warps;
  int linear_blocks_per_sm, least_group_sm90;
  bool (*takes_group_size)(int);
  PackedScales (*packed_scales_of)(int);
};

template <typename Format>
constexpr bool TakesGroupSize(int size) {
  bool takes = false;
  for (int known : Format::kGroupSizes) takes |= known == size;
  return takes;
}

template <typename... Each>
constexpr std::array<FormatFacts, sizeof...(Each)> FactsOf(FormatList<Each...>) {
  return {{{Each::kMode, Each::kBits, Each::kName, Each::kScale, Each::kTakesGlobalScale,
            Each::kIsLinear, Each::kIsPrepacked, Each::kIsOrdered, Each::kPackedByWarps,
            Each::kLinearBlocksPerSm, Each::kLeastGroupSm90, &TakesGroupSize<Each>,
            &Each::PackedScalesOf}...}};
}

inline constexpr auto kFormats = FactsOf(Formats{});

// Those of a format that the list has.
constexpr const FormatFacts& FactsOf(Mode mode, int bits) {
  size_t i = 0;
  while (kFormats[i].mode != mode || kFormats[i].bits != bits) ++i;
  return kFormats[i];
}

// Facts that all widths of a mode's codes share.
constexpr const FormatFacts& FactsOf(Mode mode) {
  size_t i = 0;
  while (kFormats[i].mode != mode) ++i;
  return kFormats[i];
}

}  // namespace jgg
