// Brings a quantized operand from global memory to the tile that the products read, in two steps.
// First cp.async copies the codes of a slice, and its scales, to a ring in shared memory. When they
// have landed, threads decode them, and write the rounded values to the tile.
#pragma once

#include <cstdint>

#include "cute/arch/copy_sm80.hpp"
#include "quantized/device/decode.cuh"
#include "quantized/gemm_sm80.h"

namespace jgg::device {

template <typename Element>
inline constexpr DType kDTypeOf = cute::is_same_v<Element, cutlass::bfloat16_t> ? DType::kBF16
                                  : cute::is_same_v<Element, cutlass::half_t>   ? DType::kF16
                                                                                : DType::kF32;

// A kernel for every mode, which looks at the mode while it runs. So it compares modes, here and in
// decode.cuh.
struct AnyCoding {
  static constexpr bool kFixed = false;
  static constexpr int kWay = 0;  // see Decode32
  __device__ static Coding Of(const QuantizedGemmSm80& gemm) { return gemm.w.coding; }
  template <int kLines, int kElements, int kThreads>
  __device__ static SliceShape Shape(const QuantizedGemmSm80& gemm) {
    return gemm.slice.shape;
  }
  __device__ static bool Split(const QuantizedGemmSm80& gemm) { return gemm.slice.split; }
};

// A kernel for a single format, if copies are of 16 bytes and groups begin where they should.
template <Mode kMode, int kBits, DType kScales>
struct OneCoding {
  static constexpr bool kFixed = true;
  static constexpr int kWay = kWayOf<kMode, kBits>;
  __device__ static constexpr Coding Of(const QuantizedGemmSm80&) {
    return Coding{kMode, kBits, kScales};
  }
  template <int kLines, int kElements, int kThreads>
  __device__ static constexpr SliceShape Shape(const QuantizedGemmSm80&) {
    return SliceShape::Of(kLines, kElements, kThreads, kBits, 16, false);
  }
  __device__ static bool Split(const QuantizedGemmSm80&) { return false; }
};

// Slices of kN x kK elements. Codes are packed along lines. A line is a column of the product if W
// is K-major, and otherwise a k. `SharedTile` says how the decoded slice lies in shared memory.
template <typename Element, bool kKMajor, int kN, int kK, int kThreads, typename SharedTile,
          typename Format>
class QuantizedCopy {
 public:
  static constexpr int kLines = kKMajor ? kN : kK;
  static constexpr int kCont = kKMajor ? kK : kN;  // elements of a line in a slice
  // Codes that one thread decodes. Neighbouring threads have neighbouring lines, which lie in
  // different banks.
  static constexpr int kUnit = kLines * kCont / kThreads < 32 ? 32 : kLines * kCont / kThreads;
  static constexpr int kUnits = kLines * kCont / kUnit;
  static_assert(kUnits <= kThreads && kUnit % 32 == 0 && kCont % kUnit == 0);

  // Begin a tile of the columns from n0 on, of which there are `count` (in either half).
  __device__ void Begin(const QuantizedGemmSm80& gemm, int64_t weight, int64_t n0, int count) {
    const PackedSlice& slice = gemm.slice;
    const SliceShape shape = Shape(gemm);
    const int byte = CopyByte(shape);
    const int64_t line0 = weight * gemm.w.lines + (kKMajor ? n0 : 0);
    words_ = static_cast<const char*>(gemm.w.packed) + byte +
             (line0 + CopyLine(shape)) * slice.line_bytes;
    scales_ = static_cast<const char*>(gemm.w.scales) + (line0 + Line()) * slice.scale_line;
    wanted_ = 0;
    if constexpr (kKMajor) {
      for (int i = 0; i < shape.steps; ++i) {
        const int line = CopyLine(shape) + i * shape.step;
        if ((line < slice.half ? line : line - slice.half) < count) wanted_ |= 1u << i;
      }
      const bool upper = Line() >= slice.half;
      if (upper) scales_ += slice.between * slice.scale_line;
      position_ = Line() - (upper ? slice.half : 0) < count ? 0 : 1 << 30;
    } else {
      const int bits = Format::Of(gemm).bits;
      const int64_t first = n0 / 8 * bits + (byte < slice.half / 8 * bits ? 0 : slice.upper);
      words_ += first;
      if (first + byte < slice.line_bytes) wanted_ = ~0u;
      position_ = static_cast<int>(n0 + (Cont() < slice.half ? 0 : slice.between));
    }
  }

  // Start copying the slice from k0 on into a place of the ring. Slices come in order.
  __device__ void Start(const QuantizedGemmSm80& gemm, unsigned char* ring, int k0) {
    StartCodes(gemm, ring, k0);
    if (threadIdx.x < kUnits) StartScales(gemm, ring, k0);
  }

  // Decode a slice that has landed. Zeros where k is past the end.
  __device__ void Decode(const QuantizedGemmSm80& gemm, const unsigned char* ring, Element* tile,
                         int k0) {
    constexpr DType kTo = kDTypeOf<Element>;
    constexpr int kSubs = kUnit / 32;
    if (threadIdx.x >= kUnits) return;
    const Coding coding = Format::Of(gemm);
    const unsigned char* codes = Codes(gemm, ring);
    const int first = First();
    uint32_t left = 0;  // what has to be decoded one by one
    if (Format::Split(gemm) && Cont() >= gemm.slice.half) {
      left = (1 << kSubs) - 1;
    } else {
      const bool halves = AreHalves(gemm);
      Scales scales{};
#pragma unroll(Format::kFixed ? kSubs : 1)
      for (int sub = 0; sub < kSubs; ++sub) {
        const int offset = Move(first, 32 * sub);
        const auto load = [&](auto& words) { Load(codes + 4 * coding.bits * sub, words); };
        // Groups of 16: one after the other, since registers are few.
#pragma unroll 1
        for (int half = 0; half < (halves ? 2 : 1); ++half) {
          if (halves || (sub & ((1 << gemm.slice.share_bits) - 1)) == 0) {
            scales = MakeScales<kTo>(coding, ReadScales(gemm, ring, k0, sub, half));
          }
          const auto store = [&](int i, const Eight<kTo>& eight) {
            if (!halves || i / 2 == half) Store(tile, offset, 8 * i, eight);
          };
          if (!Decode32<kTo, Format::kWay>(scales, load, store)) left |= 1u << sub;
        }
      }
    }
#pragma unroll 1
    for (int sub = 0; left != 0; ++sub, left >>= 1) {
      if (left & 1) DecodeSlowly(gemm, ring, tile, k0, sub);
    }
  }

 private:
  __device__ static SliceShape Shape(const QuantizedGemmSm80& gemm) {
    return Format::template Shape<kLines, kCont, kThreads>(gemm);
  }

  // The part that this thread copies: it begins at this byte of a line, and has every shape.step-th
  // line from its first one on.
  __device__ int CopyByte(const SliceShape& shape) const {
    return (threadIdx.x & ((1 << shape.column_bits) - 1)) * shape.width;
  }
  __device__ int CopyLine(const SliceShape& shape) const {
    return threadIdx.x >> shape.column_bits;
  }

  // The part that this thread decodes: its place in the slice ...
  __device__ int Line() const { return threadIdx.x % kLines; }
  __device__ int Cont() const { return threadIdx.x / kLines * kUnit; }

  // ... in the tile ...
  __device__ int First() const {
    return typename SharedTile::Layout{}(kKMajor ? Line() : Cont(), kKMajor ? Cont() : Line());
  }
  __device__ static int Move(int offset, int more) {
    return SharedTile::Move(offset, kKMajor ? 0 : more, kKMajor ? more : 0);
  }

  // ... in the ring ...
  __device__ const unsigned char* Codes(const QuantizedGemmSm80& gemm,
                                        const unsigned char* ring) const {
    return ring + Line() * Shape(gemm).pitch + Cont() / 8 * Format::Of(gemm).bits;
  }
  __device__ int ScalesAt(const QuantizedGemmSm80& gemm) const {
    const int words = gemm.slice.scale_words << (gemm.w.biases != nullptr);
    return kLines * Shape(gemm).pitch + 4 * words * int(threadIdx.x);
  }

  // ... along its line of W, and whether it is a line of this tile.
  __device__ int Along(int k0) const { return (kKMajor ? k0 : position_) + Cont(); }
  __device__ bool HasLine(const QuantizedGemmSm80& gemm, int k0) const {
    return kKMajor ? position_ == 0 : k0 + Line() < gemm.gemm.k;
  }

  // The scale of the element that comes so many after this thread's first.
  __device__ const char* Scale(const QuantizedGemmSm80& gemm, int k0, int more) const {
    const char* line = kKMajor ? scales_ : scales_ + k0 * gemm.slice.scale_line;
    return line + ((Along(k0) + more) >> gemm.slice.group_bits) * gemm.slice.scale_bytes;
  }

  __device__ void StartCodes(const QuantizedGemmSm80& gemm, unsigned char* ring, int k0) {
    const SliceShape shape = Shape(gemm);
    const int byte = CopyByte(shape), first = CopyLine(shape);
    if (byte >= shape.copies * shape.width || first >= kLines) return;
    const bool inside = !kKMajor || k0 / 8 * Format::Of(gemm).bits + byte < gemm.slice.line_bytes;
    const uint32_t wanted = inside ? wanted_ : 0;
    int line = first;
    const char* from = words_;
    unsigned char* to = ring + first * shape.pitch + byte;
#pragma unroll(Format::kFixed ? 8 : 1)
    for (int i = 0; i < shape.steps; ++i) {
      const char* piece = kKMajor && line >= gemm.slice.half ? from + gemm.slice.upper : from;
      const bool take = kKMajor ? wanted >> i & 1 : wanted && k0 + line < gemm.gemm.k;
      if (shape.width == 16) {
        cute::SM80_CP_ASYNC_CACHEGLOBAL_ZFILL<cute::uint128_t>::copy(
            *reinterpret_cast<const cute::uint128_t*>(piece),
            *reinterpret_cast<cute::uint128_t*>(to), take);
      } else {
        CopyWord(piece, to, take);
      }
      line += shape.step;
      from += gemm.slice.step_bytes;
      to += shape.step * shape.pitch;
    }
    words_ += gemm.slice.next;
  }

  // The words that hold this thread's scales and biases.
  __device__ void StartScales(const QuantizedGemmSm80& gemm, unsigned char* ring, int k0) const {
    const PackedSlice& slice = gemm.slice;
    const int count = min(static_cast<int>(gemm.w.elements) - Along(k0), kUnit);
    const int groups = (count + (1 << slice.group_bits) - 1) >> slice.group_bits;
    const int bytes = HasLine(gemm, k0) && count > 0 ? groups * slice.scale_bytes : 0;
    const char* from = Scale(gemm, k0, 0);
    unsigned char* to = ring + ScalesAt(gemm);
    CopyWords(from, to, bytes, slice.scale_words);
    if (gemm.w.biases != nullptr) {
      CopyWords(from + slice.biases, to + 4 * slice.scale_words, bytes, slice.scale_words);
    }
  }

  __device__ static void CopyWords(const char* from, unsigned char* to, int bytes, int words) {
    const int before = Misaligned(from);
    from -= before;
    for (int i = 0; i < words; ++i) {
      CopyWord(from + 4 * i, to + 4 * i, bytes > 0 && 4 * i < before + bytes);
    }
  }

  __device__ static void CopyWord(const char* from, unsigned char* to, bool take) {
    cute::SM80_CP_ASYNC_CACHEALWAYS_ZFILL<uint32_t>::copy(*reinterpret_cast<const uint32_t*>(from),
                                                          *reinterpret_cast<uint32_t*>(to), take);
  }

  __device__ static int Misaligned(const char* from) {
    return static_cast<int>(reinterpret_cast<uintptr_t>(from)) & 3;
  }

  // Whether affine groups are of 16.
  __device__ static bool AreHalves(const QuantizedGemmSm80& gemm) {
    return Format::Of(gemm).mode == Mode::kAffine && gemm.slice.group_bits == 4;
  }

  // Read the scales of 32 codes, or of a half of them, as MakeScales takes them: zeros past the end
  // of a line, whose codes are zeros too.
  __device__ ScaleBits ReadScales(const QuantizedGemmSm80& gemm, const unsigned char* ring, int k0,
                                  int sub, int half) const {
    const PackedSlice& slice = gemm.slice;
    const Mode mode = Format::Of(gemm).mode;
    const int left = static_cast<int>(gemm.w.elements) - Along(k0) - 32 * sub;
    if (left <= 0) return ScaleBits::Of(0, 0);
    const char* global = Scale(gemm, k0, 0);
    const unsigned char* from = ring + ScalesAt(gemm);
    const unsigned char* bias = from + 4 * slice.scale_words;
    from += Misaligned(global);
    if (mode == Mode::kNvfp4) {
      return ScaleBits::Of(from[2 * sub], left > 16 ? from[2 * sub + 1] : 0);
    }
    int number = sub >> slice.share_bits;
    if (mode != Mode::kAffine) return ScaleBits::Of(from[number], 0);
    bias += Misaligned(global + slice.biases);
    if (AreHalves(gemm)) {
      if (half > 0 && left <= 16) return ScaleBits::Of(0, 0);
      number = 2 * sub + half;
    }
    const auto read = [&](const unsigned char* at, int i) -> uint32_t {
      if (Format::Of(gemm).scale_dtype == DType::kF32) {
        return reinterpret_cast<const uint32_t*>(at)[i];
      }
      return reinterpret_cast<const uint16_t*>(at)[i];
    };
    return ScaleBits::Of(read(from, number), read(bias, number));
  }

  // kWords words, by reads as wide as their place in a line allows.
  template <int kWords>
  __device__ static void Load(const unsigned char* from, uint32_t (&words)[kWords]) {
    using Wide = cute::conditional_t<kWords % 4 == 0, uint4,
                                     cute::conditional_t<kWords % 2 == 0, uint2, uint32_t>>;
    constexpr int kReads = kWords * 4 / sizeof(Wide);
    Wide wide[kReads];
#pragma unroll
    for (int i = 0; i < kReads; ++i) wide[i] = reinterpret_cast<const Wide*>(from)[i];
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = reinterpret_cast<const uint32_t*>(wide)[i];
  }

  // Eight values of 32, from number `first` on; the 32 begin at `offset`.
  __device__ static void Store(Element* tile, int offset, int first,
                               const Eight<kDTypeOf<Element>>& eight) {
    constexpr int kPiece = 16 / sizeof(Element);
    if constexpr (SharedTile::kTransposed) {
      auto* to = reinterpret_cast<uint32_t*>(tile);
#pragma unroll
      for (int i = 0; i < 8; ++i) to[Move(offset, first + i)] = eight.words[i];
    } else {
#pragma unroll
      for (int i = 0; i < 8; i += kPiece) {
        const uint32_t* four = eight.words + i / kPiece * 4;
        *reinterpret_cast<uint4*>(tile + Move(offset, first + i)) =
            make_uint4(four[0], four[1], four[2], four[3]);
      }
    }
  }

  // 32 codes one by one: extreme scales, NaN, groups that begin anywhere.
  __device__ void DecodeSlowly(const QuantizedGemmSm80& gemm, const unsigned char* ring,
                               Element* tile, int k0, int sub) const {
    const Coding coding = Format::Of(gemm);
    const bool split = Format::Split(gemm) && Cont() >= gemm.slice.half;
    const auto* words = reinterpret_cast<const uint32_t*>(Codes(gemm, ring));
    ScaleBits scale = split ? ScaleBits::Of(0, 0) : ReadScales(gemm, ring, k0, sub, 0);
    int bit = 32 * sub * coding.bits + (split ? 8 * gemm.slice.misaligned : 0);
#pragma unroll 1
    for (int i = 32 * sub; i < 32 * sub + 32; ++i, bit += coding.bits) {
      const uint32_t* word = words + bit / 32;
      uint32_t code = word[0] >> bit % 32;
      if (bit % 32 + coding.bits > 32) code |= word[1] << (32 - bit % 32);
      if (split) {
        const bool take = HasLine(gemm, k0) && Along(k0) + i < gemm.w.elements;
        const char* from = Scale(gemm, k0, i);
        scale.first = take ? ReadGlobal(gemm, from) : 0;
        scale.second = take ? ReadGlobal(gemm, from + gemm.slice.biases) : 0;
      } else if (i % 32 == 16) {
        if (coding.mode == Mode::kNvfp4) scale.first = scale.second;
        if (AreHalves(gemm)) scale = ReadScales(gemm, ring, k0, sub, 1);
      }
      const float value =
          DecodeOne(coding, code & ((1 << coding.bits) - 1), scale.first, scale.second);
      Element& to = tile[Move(First(), i)];
      if constexpr (sizeof(Element) == 4) {
        reinterpret_cast<float&>(to) = value;
      } else {
        to = Element(value);
      }
    }
  }

  __device__ static uint32_t ReadGlobal(const QuantizedGemmSm80& gemm, const char* from) {
    switch (gemm.slice.scale_bytes) {
      case 1: return *reinterpret_cast<const uint8_t*>(from);
      case 2: return *reinterpret_cast<const uint16_t*>(from);
      default: return *reinterpret_cast<const uint32_t*>(from);
    }
  }

  const char* words_;   // what this thread copies of its first line of the next slice
  const char* scales_;  // of the line that it decodes; MN-major: of k = 0
  uint32_t wanted_;     // which of its copies belong to this tile; MN-major: all or none
  int position_;        // K-major: 0 where its line is one of the tile; else the tile's column in W
};

}  // namespace jgg::device
