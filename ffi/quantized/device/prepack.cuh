// prepack: layout "linear" to layout "sm90", tiles of 64 rows x 64 k
// (jax_groupgemm/_quantized/prepack.py).
#pragma once

#include "quantized/device/instructions.cuh"
#include "quantized/device/packed_codes.cuh"
#include "quantized/quantized.h"

namespace jgg::device {

inline constexpr int kPrepackThreads = 128;  // 64 rows x 256 k

struct PrepackParams {
  const uint8_t *weight, *scales, *biases;
  uint8_t *out, *out_scales;  // affine scales may be null: PrepackScalesKernel stores them
  int32_t k_tiles, blocks_along_k;
  int32_t group_bits;  // 2^group_bits tiles share an affine scale
};

// Affine scales and biases, of which a line has `groups`.
struct PrepackScalesParams {
  const uint8_t *scales, *biases;
  uint8_t* out;
  int64_t count;  // of all lines
  int32_t groups;
  bool floats;  // float32; or else of 16 bits
};

// Four words of eight codes, row r, k 0-7; row r + 8, k 0-7; row r, k 8-15; row r + 8, k 8-15, as
// what four threads have of them. Byte j of every word is thread j's: even k in the low nibbles.
template <CodeType kCode>
JGG_HOST_DEVICE void ToThreads(const uint32_t (&from)[4], uint32_t (&threads)[4]) {
  const auto [a, b, c, d] = from;
  // Byte j is a byte of thread j's word, from the lowest on.
  uint32_t planes[4];
  if constexpr (kCode == CodeType::kInteger) {
    constexpr uint32_t kLow = 0x0f0f0f0f, kHigh = 0xf0f0f0f0;
    planes[0] = (a & kLow) | (b << 4 & kHigh);
    planes[1] = (c & kLow) | (d << 4 & kHigh);
    planes[2] = (a >> 4 & kLow) | (b & kHigh);
    planes[3] = (c >> 4 & kLow) | (d & kHigh);
  } else {
    static_assert(kCode == CodeType::kE2M1);
    // As device/packed_format_sm90.cuh takes them; of c the magnitudes are in the other half.
    planes[0] = (a << 6 & 0xc0c0c0c0) | (d << 4 & 0x30303030) | (c & 0x08080808) | (b & 0x07070707);
    planes[1] = (a << 4 & 0x80808080) | (d << 4 & 0x40404040) | (d << 2 & 0x20202020) |
                (c >> 2 & 0x1c1c1c1c) | (b >> 2 & 0x02020202) | (a >> 2 & 0x01010101);
    planes[2] =
        (a << 2 & 0xc0c0c0c0) | (d & 0x30303030) | (c >> 4 & 0x08080808) | (b >> 4 & 0x07070707);
    planes[3] = (a & 0x80808080) | (d & 0x40404040) | (d >> 2 & 0x20202020) |
                (c << 2 & 0x1c1c1c1c) | (b >> 6 & 0x02020202) | (a >> 6 & 0x01010101);
  }
  JGG_UNROLL
  for (int pair = 0; pair < 2; ++pair) {
    const uint32_t selector = pair ? 0x7362 : 0x5140;
    const uint32_t low = Permute(planes[0], planes[1], selector);
    const uint32_t high = Permute(planes[2], planes[3], selector);
    threads[2 * pair] = Permute(low, high, 0x5410);
    threads[2 * pair + 1] = Permute(low, high, 0x7632);
  }
}

// The highest bit of each byte, eight times.
JGG_HOST_DEVICE uint32_t SignBytes(uint32_t word) { return Permute(word, 0, 0xba98); }

// Four e4m3 magnitudes as (exponent + 10) * 8 + mantissa, without subnormals; NaN is 255.
JGG_HOST_DEVICE uint32_t WideE4M3(uint32_t bytes) {
  uint32_t mantissas = bytes & 0x07070707;
  mantissas |= mantissas >> 4;
  const uint32_t selector = Permute(mantissas, 0, 0x4420);
  const uint32_t small = Permute(0x14100800, 0x1e1c1a18, selector);
  const uint32_t normal = SignBytes(bytes + 0x78787878), nan = SignBytes(bytes + 0x01010101);
  return ((bytes + 0x18181818) & normal) | (small & ~normal) | nan;
}

// The scales of a row of a tile, as words.
template <ScaleType kScale, int kWords>
struct RowScales;

template <>
struct RowScales<ScaleType::kE4M3, 1> {
  uint32_t words[1];

  __device__ void Load(const PrepackParams& p, int64_t row, int tile) {
    const uint32_t* at = reinterpret_cast<const uint32_t*>(p.scales) + row * p.k_tiles + tile;
    words[0] = WideE4M3(__ldg(at) & 0x7f7f7f7f);
  }

  // A mask of the codes of a step, 16 k: none where the scale is 0.
  __device__ uint32_t Codes(int step) const {
    const uint32_t not_zero = words[0] | ((words[0] & 0x7f7f7f7f) + 0x7f7f7f7f);
    return Permute(not_zero, 0, 0x8888 + 0x1111 * step);
  }
};

template <>
struct RowScales<ScaleType::kE8M0, 1> {
  uint32_t words[1];

  __device__ void Load(const PrepackParams& p, int64_t row, int tile) {
    const uint16_t* at = reinterpret_cast<const uint16_t*>(p.scales) + row * p.k_tiles + tile;
    words[0] = __ldg(at);
  }

  __device__ uint32_t Codes(int) const { return ~0u; }
};

template <>
struct RowScales<ScaleType::kScaleAndBias, 1> {
  uint32_t words[1];

  __device__ void Load(const PrepackParams& p, int64_t row, int tile) {
    const int64_t group = (row * p.k_tiles + tile) >> p.group_bits;  // lines are whole groups
    const auto load = [&](const uint8_t* from) -> uint32_t {
      return __ldg(reinterpret_cast<const uint16_t*>(from) + group);
    };
    words[0] = load(p.scales) | load(p.biases) << 16;
  }

  __device__ uint32_t Codes(int) const { return ~0u; }
};

template <>
struct RowScales<ScaleType::kScaleAndBias, 2> {
  uint32_t words[2];

  __device__ void Load(const PrepackParams& p, int64_t row, int tile) {
    const auto load = [&](const uint8_t* from) {
      return __ldg(reinterpret_cast<const uint32_t*>(from) + row * p.k_tiles + tile);
    };
    const uint32_t scales = load(p.scales), biases = load(p.biases);
    words[0] = Permute(scales, biases, 0x5410);
    words[1] = Permute(scales, biases, 0x7632);
  }

  __device__ uint32_t Codes(int) const { return ~0u; }
};

// Codes of two rows of a tile, row and row + 8, as what four threads have of them: of each thread,
// 16 bytes.
template <typename Scales, CodeType kCode>
__device__ void Rearrange(const uint4 (&rows)[2][2], const Scales (&scales)[2],
                          uint32_t (&threads)[4][4]) {
  const auto step = [&](int i, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const uint32_t mask = scales[0].Codes(i), mask8 = scales[1].Codes(i);
    uint32_t words[4];
    ToThreads<kCode>({a & mask, b & mask8, c & mask, d & mask8}, words);
    JGG_UNROLL
    for (int j = 0; j < 4; ++j) threads[j][i] = words[j];
  };
  JGG_UNROLL
  for (int half = 0; half < 2; ++half) {
    const uint4 row = rows[0][half], row8 = rows[1][half];
    step(2 * half, row.x, row8.x, row.y, row8.y);
    step(2 * half + 1, row.z, row8.z, row.w, row8.w);
  }
}

// Stores the scales of this lane's two rows of a tile. Tiles that share scales have the first's.
template <ScaleType kScale, int kWords>
__device__ void StoreScales(const PrepackParams& p, int64_t tile,
                            const RowScales<kScale, kWords> (&scales)[2]) {
  if constexpr (kScale == ScaleType::kE8M0) {  // half a word
    auto* to = reinterpret_cast<uint32_t*>(p.out_scales) + tile * 32 + threadIdx.x / 4;
    *to = scales[0].words[0] | scales[1].words[0] << 16;
    return;
  }
  if (tile & ((1 << p.group_bits) - 1)) return;
  tile >>= p.group_bits;
  auto* to = reinterpret_cast<uint2*>(p.out_scales) + tile * 32 * kWords + threadIdx.x / 4;
  JGG_UNROLL
  for (int i = 0; i < kWords; ++i) {
    to[32 * i] = make_uint2(scales[0].words[i], scales[1].words[i]);
  }
}

// Codes of four bits. A lane has two rows of a tile, a warp 16 rows of four tiles; warps store what
// their lanes have put in order in shared memory.
template <Mode kMode, int kScaleWords>
__global__ void __launch_bounds__(kPrepackThreads)
    PrepackKernel(const __grid_constant__ PrepackParams p) {
  using Format = FormatTraits<kMode, 4>;
  using Scales = RowScales<Format::kScale, kScaleWords>;
  __shared__ uint4 stages[kPrepackThreads / 32][128];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pair = lane / 4;
  const int64_t row_tile = blockIdx.x / p.blocks_along_k;
  const int first = 4 * static_cast<int>(blockIdx.x % p.blocks_along_k);  // of the block's tiles
  const int tile = first + lane % 4;
  uint4* stage = stages[warp];
  // Tile by tile, threads in order, but for the last two bits of their numbers: neither what lanes
  // write nor what the warp reads meets a bank twice.
  const auto place = [](int i, int thread) { return 32 * i + (thread ^ i); };

  if (tile < p.k_tiles) {
    const int64_t row = 64 * row_tile + 16 * warp + pair;
    uint4 rows[2][2];
    Scales scales[2];
    JGG_UNROLL
    for (int i = 0; i < 2; ++i) {
      const auto* at =
          reinterpret_cast<const uint4*>(p.weight) + 2 * ((row + 8 * i) * p.k_tiles + tile);
      rows[i][0] = __ldg(at);
      rows[i][1] = __ldg(at + 1);
    }
    const bool has_scales = Format::kScale != ScaleType::kScaleAndBias || p.out_scales != nullptr;
    JGG_UNROLL
    for (int i = 0; i < 2; ++i) {
      if (has_scales) scales[i].Load(p, row + 8 * i, tile);
    }
    uint32_t threads[4][4];
    Rearrange<Scales, Format::kCode>(rows, scales, threads);
    JGG_UNROLL
    for (int j = 0; j < 4; ++j) {
      const uint32_t (&steps)[4] = threads[j];
      stage[place(lane % 4, 4 * pair + j)] = make_uint4(steps[0], steps[1], steps[2], steps[3]);
    }
    if (has_scales) StoreScales(p, row_tile * p.k_tiles + tile, scales);
  }
  __syncwarp();
  auto* out = reinterpret_cast<uint4*>(p.out) + (row_tile * p.k_tiles + first) * 128 + 32 * warp;
  JGG_UNROLL
  for (int i = 0; i < 4; ++i) {
    if (first + i < p.k_tiles) out[128 * i + lane] = stage[place(i, lane)];
  }
}

// Two codes that lie side by side, in the lower bits of the halves of a word.
template <int kBits>
JGG_HOST_DEVICE uint32_t TwoHalves(uint32_t codes) {
  constexpr uint32_t kMask = (1u << kBits) - 1;
  if constexpr (3 * kBits <= 16) {  // a product, since shifts take longer
    constexpr uint32_t kBoth = (1u << (2 * kBits)) - 1;
    return (codes & kBoth) * (1 + (1u << (16 - kBits))) & kMask * 0x10001;
  }
  return (codes & kMask) | (codes << (16 - kBits) & kMask << 16);
}

// The codes of a row of a tile, from a word on: 0, or 1 where codes are so wide that threads begin
// that far apart.
template <int kBits>
JGG_HOST_DEVICE void LoadRow(const uint32_t* row, int first, uint32_t (&words)[2 * kBits]) {
  if constexpr (6 * kBits < 32) {
    JGG_UNROLL
    for (int i = 0; i < 2 * kBits; i += 2) {
      const uint2 two = *reinterpret_cast<const uint2*>(row + i);
      words[i] = two.x;
      words[i + 1] = two.y;
    }
  } else {
    JGG_UNROLL
    for (int i = 0; i < 2 * kBits; ++i) words[i] = row[first + i];
  }
}

// Affine codes of any width. A warp copies 16 rows of four tiles to shared memory; there each lane
// finds its codes of a tile, as a thread of the product will have them, and stores them.
template <int kBits, int kScaleWords>
__global__ void __launch_bounds__(kPrepackThreads)
    PrepackAnyKernel(const __grid_constant__ PrepackParams p) {
  // An odd number of 16 bytes to a row, with room for a word behind the last one.
  constexpr int kRowWords = (8 * kBits + 29) / 32 * 32 + 4, kUnits = 4 * kBits;
  alignas(16) __shared__ uint32_t rows[64][kRowWords];
  const int thread = threadIdx.x, lane = thread % 32, first_row = thread / 32 * 16;
  const int row = first_row + lane / 4;  // and row + 8
  const int64_t row_tile = blockIdx.x / p.blocks_along_k;
  const int first = 4 * static_cast<int>(blockIdx.x % p.blocks_along_k);
  const int tiles = p.k_tiles - first < 4 ? p.k_tiles - first : 4;
  // Eight bytes at a time, of which a tile has kBits to a row.
  const int64_t line = static_cast<int64_t>(p.k_tiles) * kBits;
  const auto* weight =
      reinterpret_cast<const uint2*>(p.weight) + (64 * row_tile + first_row) * line + first * kBits;
  JGG_UNROLL
  for (int i = 0; i < 16 * kUnits / 32; ++i) {
    const int from = (32 * i + lane) / kUnits, column = (32 * i + lane) % kUnits;
    if (column >= tiles * kBits) continue;
    *reinterpret_cast<uint2*>(&rows[first_row + from][2 * column]) =
        __ldg(weight + from * line + column);
  }
  if (lane % 4 < tiles && p.out_scales != nullptr) {
    RowScales<ScaleType::kScaleAndBias, kScaleWords> scales[2];
    const int tile = first + lane % 4;
    JGG_UNROLL
    for (int i = 0; i < 2; ++i) scales[i].Load(p, 64 * row_tile + row + 8 * i, tile);
    StoreScales(p, row_tile * p.k_tiles + tile, scales);
  }
  __syncwarp();
  // A thread has a pair of every 8 codes of a row; the first of its 32 begins at this bit.
  const int ahead = 2 * kBits * (lane % 4), shift = ahead % 32;
  char* out = reinterpret_cast<char*>(p.out) + (row_tile * p.k_tiles + first) * 512 * kBits;
  JGG_NO_UNROLL
  for (int tile = 0; tile < tiles; ++tile) {
    uint32_t pairs[16];
    JGG_UNROLL
    for (int h = 0; h < 2; ++h) {
      uint32_t bits[2 * kBits];
      LoadRow<kBits>(&rows[row + 8 * h][2 * kBits * tile], ahead / 32, bits);
      JGG_UNROLL
      for (int i = 0; i < 2 * kBits - 1; ++i) bits[i] = FunnelRight(bits[i], bits[i + 1], shift);
      bits[2 * kBits - 1] >>= shift;
      JGG_UNROLL
      for (int i = 0; i < 8; ++i) {
        const int at = 8 * kBits * i % 32, word = 8 * kBits * i / 32;
        const uint32_t pair =
            at + 2 * kBits > 32 ? FunnelRight(bits[word], bits[word + 1], at) : bits[word] >> at;
        pairs[2 * i + h] = TwoHalves<kBits>(pair);
      }
    }
    uint32_t words[kBits];
    PackPairs<kBits>(pairs, words);
    StoreCodes<kBits>(out + tile * 512 * kBits, thread, words);
  }
}

// Affine scales that the kernels above do not know: of groups of 16, and float32. A thread has one:
// tile after tile of 64 rows, group after group, the rows in the order of a tile's words.
__global__ void __launch_bounds__(kPrepackThreads)
    PrepackScalesKernel(const __grid_constant__ PrepackScalesParams p) {
  const int64_t to = int64_t{blockIdx.x} * kPrepackThreads + threadIdx.x;
  if (to >= p.count) return;
  const int place = static_cast<int>(to % 64), pair = place / 2;
  const int64_t row = to / 64 / p.groups * 64 + pair / 8 * 16 + pair % 8 + place % 2 * 8;
  const int64_t from = row * p.groups + to / 64 % p.groups;
  if (p.floats) {
    reinterpret_cast<uint2*>(p.out)[to] =
        make_uint2(__ldg(reinterpret_cast<const uint32_t*>(p.scales) + from),
                   __ldg(reinterpret_cast<const uint32_t*>(p.biases) + from));
  } else {
    const uint32_t bias = __ldg(reinterpret_cast<const uint16_t*>(p.biases) + from);
    reinterpret_cast<uint32_t*>(p.out)[to] =
        __ldg(reinterpret_cast<const uint16_t*>(p.scales) + from) | bias << 16;
  }
}

template <Mode kMode, int kBits, int kScaleWords>
constexpr auto PrepackKernelOf() {
  if constexpr (kBits == 4) {
    return &PrepackKernel<kMode, kScaleWords>;
  } else {
    return &PrepackAnyKernel<kBits, kScaleWords>;
  }
}

}  // namespace jgg::device
