// Host side of the quantized sm80 kernel: tile shapes, choice between them, launch.
#pragma once

#include "common/arch.h"
#include "grouped_mm/gemm_sm80.cuh"
#include "quantized/device/gemm_sm80.cuh"
#include "quantized/gemm_sm80.h"

namespace jgg {

// The numbers that the kernel needs for W and this tile.
template <typename Config>
PackedSlice MakePackedSlice(const QuantizedGemmSm80& gemm) {
  using Copy = typename Config::CopyB;
  const QuantizedWeight& w = gemm.w;
  const int64_t bits = w.coding.bits;
  PackedSlice slice{};
  slice.line_bytes = w.elements / 8 * bits;
  slice.next = Config::kBKMajor ? Config::kK / 8 * bits : Config::kK * slice.line_bytes;
  slice.scale_bytes = w.coding.ScaleBytes();
  slice.scale_line = w.elements / w.group_size * slice.scale_bytes;
  if (w.biases != nullptr) {
    slice.biases = static_cast<const char*>(w.biases) - static_cast<const char*>(w.scales);
  }
  slice.group_bits = device::Log2(w.group_size);
  const int group = std::min(w.group_size, int{Copy::kUnit});  // within what a thread decodes
  slice.share_bits = device::Log2(std::max(group / 32, 1));
  // A thread's scales are that many bytes, and begin at a multiple of the lowest bit of `begin`.
  const int scales = Copy::kUnit / group * slice.scale_bytes;
  int64_t begin = reinterpret_cast<intptr_t>(w.scales) | reinterpret_cast<intptr_t>(w.biases) |
                  slice.scale_line | scales;
  const int64_t line = Copy::kCont / 8 * bits;  // bytes, of a slice
  bool wide = reinterpret_cast<uintptr_t>(w.packed) % 16 == 0 && slice.line_bytes % 16 == 0 &&
              line % 16 == 0;
  slice.half = Config::kN;
  if (IsGated(gemm.gemm.epilogue.activation)) {
    slice.half = Config::kN / 2;
    slice.between = gemm.gemm.n / 2 - slice.half;
    if (Config::kBKMajor) {
      slice.upper = slice.between * slice.line_bytes;
    } else {
      const int64_t bytes = slice.between / 8 * bits;
      slice.misaligned = static_cast<int>(bytes & 3);
      slice.upper = bytes - slice.misaligned;
      slice.split = slice.between % group != 0 || slice.misaligned != 0;
      begin |= slice.between / w.group_size * slice.scale_bytes;
      wide = wide && bytes % 16 == 0 && line / 2 % 16 == 0;
    }
  }
  slice.shape = SliceShape::Of(Copy::kLines, Copy::kCont, Config::kThreads, w.coding.bits,
                               wide ? 16 : 4, slice.misaligned != 0);
  slice.step_bytes = slice.shape.step * slice.line_bytes;
  const int aligned = begin % 4 == 0 ? 4 : begin % 2 == 0 ? 2 : 1;
  slice.scale_words = (4 - aligned + scales + 3) / 4;
  slice.bytes = Copy::kLines * slice.shape.pitch +
                4 * (slice.scale_words << (w.biases != nullptr)) * Copy::kUnits;
  return slice;
}

template <typename Config>
cudaError_t LaunchQuantizedConfig(cudaStream_t stream, QuantizedGemmSm80 gemm) {
  gemm.slice = MakePackedSlice<Config>(gemm);
  const int slices = Config::kRing + Config::kStages * gemm.slice.bytes +
                     (SumsApart(gemm) ? 4 * Config::Ops::kSums : 0);
  static KnownBlocks known{};
  return LaunchTiles<Config>(stream, device::QuantizedGemmSm80Kernel<Config>, gemm, gemm.gemm,
                             std::max<int>(slices, sizeof(typename Config::SharedMemory)), known);
}

// Low: few rows, tiles as low as an instruction. Large: reuses most, both in the products and of
// what it has decoded. Medium: where large tiles would be half empty, or too few.
template <typename Element, bool kB>
struct QuantizedConfigsSm80 {
  using Operands = device::QuantizedTraitsSm80<Element, kB>;
  // Slices are as long along the lines of W as there is room for. So everything but the decoding
  // happens less often, and copies read whole sectors.
  struct LongTraits : Operands {
    static constexpr int kM = 16, kN = 128, kK = 128, kStages = 2, kBlocksPerSm = 3;
    static constexpr int kWarpsM = 1, kWarpsN = 2, kWarpsK = 2;
  };
  template <int kStages_, typename Format_>
  struct AlignedLongTraits : LongTraits {
    using Format = Format_;
    static constexpr int kStages = kStages_;
    static constexpr bool kAligned = true;
  };
  struct ShortTraits : Operands {
    static constexpr int kM = 16, kN = 128, kK = 64, kStages = 4, kBlocksPerSm = 3;
    static constexpr int kWarpsM = 1, kWarpsN = 4, kWarpsK = 1;
  };
  struct MediumTraits : Operands {
    static constexpr int kM = 64, kN = 128, kK = 64, kStages = 3, kBlocksPerSm = 2;
    static constexpr int kWarpsM = 2, kWarpsN = 2, kWarpsK = 1;
  };
  struct LargeTraits : Operands {
    static constexpr int kM = 128, kN = 128, kK = 64, kStages = 2, kBlocksPerSm = 2;
    static constexpr int kWarpsM = 2, kWarpsN = 2, kWarpsK = 1;
    static constexpr bool kAligned = true;
  };
  template <typename T>
  using Config =
      device::QuantizedGemmConfig<T, device::TensorOps<Element, true, kB, T::kM, T::kN, T::kK,
                                                       T::kWarpsM, T::kWarpsN, T::kWarpsK>>;
  template <int kStages, typename Format>
  using Long = Config<AlignedLongTraits<kStages, Format>>;
  using Low = Config<cute::conditional_t<kB, LongTraits, ShortTraits>>;
  using Medium = Config<MediumTraits>;
  using Large = Config<LargeTraits>;
};

template <bool kB>
struct QuantizedConfigsSm80<cutlass::tfloat32_t, kB> {
  using Operands = device::QuantizedTraitsSm80<cutlass::tfloat32_t, kB>;
  struct LowTraits : Operands {
    static constexpr int kM = 16, kN = kB ? 64 : 128, kK = kB ? 64 : 32;
    static constexpr int kStages = 4, kBlocksPerSm = 3;
    static constexpr int kWarpsM = 1, kWarpsN = kB ? 2 : 4, kWarpsK = kB ? 2 : 1;
  };
  struct MediumTraits : Operands {
    static constexpr int kM = 64, kN = 64, kK = 32, kStages = 4, kBlocksPerSm = 2;
    static constexpr int kWarpsM = 2, kWarpsN = 2, kWarpsK = 1;
  };
  struct LargeTraits : Operands {
    static constexpr int kM = 128, kN = 64, kK = 32, kStages = 4, kBlocksPerSm = 2;
    static constexpr int kWarpsM = 2, kWarpsN = 2, kWarpsK = 1;
  };
  template <typename T>
  using Config =
      device::QuantizedGemmConfig<T, device::TensorOps<cutlass::tfloat32_t, true, kB, T::kM, T::kN,
                                                       T::kK, T::kWarpsM, T::kWarpsN, T::kWarpsK>>;
  using Low = Config<LowTraits>;
  using Medium = Config<MediumTraits>;
  using Large = Config<LargeTraits>;
};

template <bool kB>
struct QuantizedConfigsSm80<float, kB> {
  using Operands = device::QuantizedTraitsSm80<float, kB>;
  struct LowTraits : Operands {
    static constexpr int kM = 16, kN = 128, kK = 32, kStages = 4, kBlocksPerSm = 3;
    static constexpr int kThreadsM = 4, kThreadsN = 32;
  };
  struct MediumTraits : Operands {
    static constexpr int kM = 64, kN = 64, kK = 32, kStages = 3, kBlocksPerSm = 3;
    static constexpr int kThreadsM = 16, kThreadsN = 8;
  };
  struct LargeTraits : Operands {
    static constexpr int kM = 128, kN = 64, kK = 32, kStages = 3, kBlocksPerSm = 2;
    static constexpr int kThreadsM = 16, kThreadsN = 8;
  };
  template <typename T>
  using Config = device::QuantizedGemmConfig<
      T, device::FloatOps<true, kB, T::kM, T::kN, T::kK, T::kThreadsM, T::kThreadsN>>;
  using Low = Config<LowTraits>;
  using Medium = Config<MediumTraits>;
  using Large = Config<LargeTraits>;
};

// Low tiles of long slices. If codes are short, decoding sets the pace, not memory: then a kernel
// for this coding alone runs them.
template <typename Configs, DType kScales>
cudaError_t LaunchLongSlices(cudaStream_t stream, const QuantizedGemmSm80& gemm) {
  const Coding& coding = gemm.w.coding;
  return LinearFormats::Dispatch(coding.mode, coding.bits, [&](auto format) {
    constexpr Mode kMode = decltype(format)::kMode;
    constexpr int kBits = decltype(format)::kBits;
    if constexpr (kBits <= 4) {
      if (!coding.HasFloatScales() || coding.scale_dtype == kScales) {
        // Slices of few bits leave room for a third stage, and need it to keep memory busy.
        constexpr int kStages = kBits <= 3 ? 3 : 2;
        using Format = device::OneCoding<kMode, kBits, kScales>;
        using Config = typename Configs::template Long<kStages, Format>;
        return LaunchQuantizedConfig<Config>(stream, gemm);
      }
    }
    return LaunchQuantizedConfig<typename Configs::Low>(stream, gemm);
  });
}

template <typename Element, bool kBKMajor>
cudaError_t LaunchQuantizedGemmSm80Instance(cudaStream_t stream, const QuantizedGemmSm80& gemm) {
  using Configs = QuantizedConfigsSm80<Element, kBKMajor>;
  const int64_t medium_below = 4 * Processors();  // tiles of 128 x 128
  const int64_t rows = AverageRows(gemm);
  const bool aligned = gemm.gemm.a_width * sizeof(Element) == 16;
  if (HasLowTiles(gemm)) {
    if constexpr (kBKMajor && std::is_same_v<Element, cutlass::bfloat16_t>) {
      if (HasFewRowsSm80(gemm)) return LaunchFewRowsSm80(stream, gemm);
    } else if constexpr (kBKMajor && std::is_same_v<Element, cutlass::half_t>) {
      const bool wide = MakePackedSlice<typename Configs::Low>(gemm).shape.width == 16;
      if (wide && aligned) {
        return LaunchLongSlices<Configs, device::kDTypeOf<Element>>(stream, gemm);
      }
    }
    return LaunchQuantizedConfig<typename Configs::Low>(stream, gemm);
  }
  if (rows <= 64 || Tiles(gemm.gemm, 128, 128) < medium_below || !aligned) {
    return LaunchQuantizedConfig<typename Configs::Medium>(stream, gemm);
  }
  return LaunchQuantizedConfig<typename Configs::Large>(stream, gemm);
}

}  // namespace jgg
