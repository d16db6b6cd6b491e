// The kernels of fp8_quantize: x (M, R, C) to codes and scales, in blocks of 128 along C; R may be
// grouped. quantize_tiles.cuh has blocks along R and of 128 x 128, quantize_block.cuh the
// arithmetic.
#pragma once

#include "fp8/device/quantize_block.cuh"
#include "nvfp4/device/starts.cuh"

namespace jgg::fp8::device {

using jgg::device::Elements;
using nvfp4::CeilDiv;
using nvfp4::device::kScanThreads;

inline constexpr int kBlock = 128;  // rows to which groups are padded, too

struct alignas(8) TileRows {
  int32_t first, count;  // of x
};

struct QuantizeParams {
  const uint8_t* x;
  int64_t matrices, rows, columns;
  int64_t along;          // elements of a line of the result
  int64_t blocks;         // scales of a line of them
  bool power_of_two;      // scales are
  const int32_t* inside;  // rows of groups; null where rows are not grouped
  const TileRows*
      groups;            // for each 128 padded rows, where those are grouped and blocks along them
  const uint32_t* seed;  // two words
  const int32_t* list;   // the line of x that each row is, where rows are named by one
  int64_t x_lines;       // lines of x; a row that names none of them is zeros
  uint32_t slice;        // spans of columns of a slice, where there is a list
  uint8_t* codes;
  float* scales;
};

template <DType kOf>
inline constexpr int kElementBytes = Size(kOf);

// ---- once per call ----

// One thread block makes, of group sizes, each group's first row and first tile of 128 padded rows
// (G + 1,), and the rows of each of `count` tiles.
static __global__ void __launch_bounds__(kScanThreads)
    GroupsKernel(const int32_t* sizes, int32_t groups, int32_t rows, int32_t* starts,
                 int32_t* tiles, TileRows* of_tiles, int32_t count) {
  nvfp4::device::FindStarts({sizes, groups, rows, kBlock, 0}, starts, tiles);
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kScanThreads) {
    TileRows of{0, 0};
    if (i < tiles[groups]) {
      const int g = nvfp4::device::GroupOfTile(tiles, groups, i);
      of.first = starts[g] + kBlock * (i - tiles[g]);
      of.count = min(kBlock, starts[g + 1] - of.first);
    }
    of_tiles[i] = of;
  }
}

// ---- elements ----

// Eight neighbours.
template <DType kOf>
using Eight = Elements<kOf, 8>;

template <DType kOf>
__device__ Eight<kOf> LoadEight(const uint8_t* at, bool inside) {
  Eight<kOf> x{};
  if (!inside) return x;
  JGG_UNROLL
  for (int i = 0; i < Eight<kOf>::kWords / 4; ++i) {
    const uint4 four = __ldg(reinterpret_cast<const uint4*>(at) + i);
    x.words[4 * i] = four.x;
    x.words[4 * i + 1] = four.y;
    x.words[4 * i + 2] = four.z;
    x.words[4 * i + 3] = four.w;
  }
  return x;
}

// Magnitudes: a word holds those of two elements of 16 bits, or of one float32. NaN is larger than
// all others.
template <DType kOf>
struct Magnitudes {
  __device__ static uint32_t Of(uint32_t word) {
    if constexpr (kOf == DType::kF32) return word & ~jgg::device::kSign;
    if constexpr (kOf != DType::kF32) return jgg::device::Magnitudes2<kOf>(word);
  }
  __device__ static uint32_t Larger(uint32_t a, uint32_t b) {
    if constexpr (kOf == DType::kF32) return max(a, b);
    if constexpr (kOf != DType::kF32) return jgg::device::Max2<kOf>(a, b);
  }
  // Every lane gets the largest word of a set of lanes: those whose numbers differ from its own
  // only in the bits from kFirst up to, and without, kEnd.
  template <int kFirst, int kEnd>
  __device__ static uint32_t Share(uint32_t word) {
    JGG_UNROLL
    for (int mask = kFirst; mask < kEnd; mask *= 2) {
      word = Larger(word, __shfl_xor_sync(0xffffffffu, word, mask));
    }
    return word;
  }
  // A word holds two values of 16 bits, of which `which` names one, or a single float32.
  __device__ static float Value(uint32_t word, int which) {
    if constexpr (kOf == DType::kF32) return AsFloat(word);
    if constexpr (kOf != DType::kF32) return jgg::device::Half<kOf>(word, which);
  }
  __device__ static float Largest(uint32_t word) {
    if constexpr (kOf == DType::kF32) return AsFloat(word);
    return jgg::device::Max(Value(word, 0), Value(word, 1));
  }
};

template <DType kOf>
__device__ uint32_t LargestOf(const Eight<kOf>& x) {
  uint32_t largest = Magnitudes<kOf>::Of(x.words[0]);
  JGG_UNROLL
  for (int i = 1; i < Eight<kOf>::kWords; ++i) {
    largest = Magnitudes<kOf>::Larger(largest, Magnitudes<kOf>::Of(x.words[i]));
  }
  return largest;
}

// Where the random numbers of a line begin. Each 16 elements have a block of them.
__device__ inline uint64_t RandomOfLine(const QuantizeParams& p, int64_t line) {
  return line * CeilDiv(p.along, 16);
}

// Codes of eight neighbours of a line of the result, from element `along` on. `lifts` says that
// some lane's scale is small. All lanes have the same.
template <Element kElement, bool kStochastic>
__device__ uint2 EncodeEight(const QuantizeParams& p, float (&values)[8], float scale,
                             float reciprocal, bool lifts, uint64_t random_of_line, int64_t along) {
  uint32_t random[4] = {}, words[2];
  if constexpr (kStochastic) {
    const RandomBits bits(random_of_line + along / 16, along / 8 % 2, __ldg(p.seed),
                          __ldg(p.seed + 1));
    JGG_UNROLL
    for (int i = 0; i < 4; ++i) random[i] = bits.words[i];
  }
  Divisor divisor{scale, reciprocal};
  if (lifts) {
    const float lift = IsSmall(scale) ? kLift : 1.0f;
    divisor.value = Multiply(scale, lift);
    JGG_UNROLL
    for (int i = 0; i < 8; ++i) values[i] = Multiply(values[i], lift);
  }
  JGG_UNROLL
  for (int word = 0; word < 2; ++word) {
    const float four[4] = {values[4 * word], values[4 * word + 1], values[4 * word + 2],
                           values[4 * word + 3]};
    words[word] = Encode4<kElement, kStochastic>(four, divisor, IsDead(scale), random + 2 * word);
  }
  return make_uint2(words[0], words[1]);
}

// Whether quotients are made with a reciprocal of two parts.
template <DType kOf, bool kStochastic>
inline constexpr bool kSplits = kOf != DType::kF32 && !kStochastic;

// The same of elements of 16 bits, rounded to nearest.
template <Element kElement>
__device__ uint2 EncodeSplit8(const float (&values)[8], const SplitReciprocal& by) {
  const float low[4] = {values[0], values[1], values[2], values[3]};
  const float high[4] = {values[4], values[5], values[6], values[7]};
  const uint2 codes = make_uint2(EncodeSplit4<kElement>(low, by), EncodeSplit4<kElement>(high, by));
  return IsDead(by.high) ? make_uint2(0, 0) : codes;
}

// The codes of eight neighbours of x, where they are neighbours of the result, too.
template <Element kElement, bool kStochastic, DType kOf>
__device__ uint2 EncodeRow(const QuantizeParams& p, const Eight<kOf>& x, float scale, int64_t line,
                           int64_t column) {
  float values[8];
  JGG_UNROLL
  for (int i = 0; i < 8; ++i) values[i] = x[i];
  if constexpr (kSplits<kOf, kStochastic>) {
    return EncodeSplit8<kElement>(values, MakeSplitReciprocal(scale));
  }
  return EncodeEight<kElement, kStochastic>(p, values, scale, MakeDivisor(scale).reciprocal,
                                            jgg::device::AnyLane(IsSmall(scale)),
                                            RandomOfLine(p, line), column);
}

// ---- blocks along columns ----

inline constexpr int kRowsThreads = 256;
inline constexpr int kLanes = 8;  // of a block: each has twice eight neighbours, 64 apart

template <DType kOf>
inline constexpr int kRowSteps = kOf == DType::kF32 ? 1 : 2;  // blocks of a lane

template <DType kOf>
inline constexpr int kRowBlocks = kRowSteps<kOf> * kRowsThreads / kLanes;  // of a thread block

template <DType kOf>
int64_t RowsBlocks(const QuantizeParams& p) {
  return CeilDiv(p.matrices * p.rows * p.blocks, kRowBlocks<kOf>);
}

// Where eight elements of a block are. kCut: the last block of each line may be cut.
template <bool kCut>
struct RowPlace {
  int64_t line, column, at;
  bool exists;

  __device__ RowPlace(const QuantizeParams& p, uint32_t block, uint32_t column_of_block) {
    if constexpr (kCut) {
      const auto blocks = static_cast<uint32_t>(p.blocks);
      line = block / blocks;
      column = int64_t{block % blocks} * kBlock + column_of_block;
      exists = column < p.columns;
      at = line * p.columns + column;
    } else {  // lines follow one another without a gap, also in multiples of 16
      line = 0;
      at = column = int64_t{block} * kBlock + column_of_block;
      exists = true;
    }
  }
};

// Elements as they are stored.
template <DType kOf>
struct Stored {
  static constexpr bool kClearsRest = true;  // rows behind the last become zeros
  template <typename Place>
  __device__ static Eight<kOf> Load(const QuantizeParams& p, const Place& place, bool exists) {
    return LoadEight<kOf>(p.x + place.at * kElementBytes<kOf>, exists);
  }
};

// Eight lanes have a block, and a warp's blocks are neighbours. Source: where elements come from.
template <DType kOf, Element kElement, bool kStochastic, bool kCut, typename Source = Stored<kOf>>
__global__ void __launch_bounds__(kRowsThreads)
    RowsKernel(const __grid_constant__ QuantizeParams p) {
  using Magnitude = Magnitudes<kOf>;
  constexpr int kSteps = kRowSteps<kOf>, kAtOnce = 32 / kLanes;
  const int lane = threadIdx.x % 32, part = lane % kLanes;
  const auto count = static_cast<uint32_t>(p.matrices * p.rows * p.blocks);
  const uint32_t inside = p.inside == nullptr ? count : static_cast<uint32_t>(*p.inside * p.blocks);
  if (!Source::kClearsRest && blockIdx.x * kRowBlocks<kOf> >= inside) return;
  const uint32_t first =
      blockIdx.x * kRowBlocks<kOf> + threadIdx.x / 32 * (kSteps * kAtOnce) + lane / kLanes;
  Eight<kOf> x[kSteps][2];
  JGG_UNROLL
  for (int j = 0; j < kSteps; ++j) {
    const uint32_t block = first + kAtOnce * j;
    JGG_UNROLL
    for (int half = 0; half < 2; ++half) {
      const RowPlace<kCut> place(p, block, 64 * half + 8 * part);
      x[j][half] = Source::Load(p, place, block < inside && place.exists);
    }
  }
  float scales[kSteps];
  uint32_t largest[kSteps];
  JGG_UNROLL
  for (int j = 0; j < kSteps; ++j) {
    largest[j] = Magnitude::Larger(LargestOf<kOf>(x[j][0]), LargestOf<kOf>(x[j][1]));
  }
  if constexpr (kOf == DType::kF32) {
    scales[0] = AsFloat(Magnitude::template Share<1, kLanes>(largest[0]));
  } else {  // both steps' in a word
    const uint32_t low = Permute(largest[0], largest[1], 0x5410);
    const uint32_t both = Magnitude::Larger(low, Permute(largest[0], largest[1], 0x7632));
    const uint32_t shared = Magnitude::template Share<1, kLanes>(both);
    JGG_UNROLL
    for (int j = 0; j < kSteps; ++j) scales[j] = Magnitude::Value(shared, j);
  }
  float own = 0.0f;  // that this lane stores
  JGG_UNROLL
  for (int j = 0; j < kSteps; ++j) {
    const uint32_t block = first + kAtOnce * j;
    scales[j] = MakeScale<kElement>(scales[j], p.power_of_two);
    if (part == j) own = scales[j];
    JGG_UNROLL
    for (int half = 0; half < 2; ++half) {
      const RowPlace<kCut> place(p, block, 64 * half + 8 * part);
      const uint2 codes =
          EncodeRow<kElement, kStochastic>(p, x[j][half], scales[j], place.line, place.column);
      if (block < count && place.exists) *reinterpret_cast<uint2*>(p.codes + place.at) = codes;
    }
  }
  const uint32_t block = first + kAtOnce * part;
  if (part < kSteps && block < count) p.scales[block] = own;
}

}  // namespace jgg::fp8::device
