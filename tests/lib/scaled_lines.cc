// ffi/quantized/device/scaled_lines.cuh on the host, a warp after the other, and lines of codes as
// pairs of float16: for test_scaled_lines.py.
#include "cuda_on_host.h"
#include "warp_on_host.h"
//
#include "quantized/device/formats.cuh"
#include "quantized/device/scaled_lines.cuh"

using namespace jgg;

// As QuantizedGemmSm90 has them.
struct Weight {
  const void *scales, *biases;
  int scale_line, elements, scale_shift;
  PackedCodesSm90 packed;
};

struct Problem {
  const uint16_t* x;                    // (rows, K in whole 128), in the kernel's order, or null
  const float* floats;                  // (rows / 4, K): four rows of each
  const float* x_sums;                  // (K / 128, rows, 4)
  const char *codes, *scales, *biases;  // (n, ...)
  float* out;                           // (rows, n)
  int32_t rows, n, k, group_size, half_scales, float_scales;
};

// 128 k of the columns' codes from `first` on, as TMA brings them: swizzled if codes have 4 or 8
// bits, and zeros where there are none.
template <int kBits>
static std::vector<char> StageOf(const Problem& p, int first, int block) {
  using Tile = device::LineTile<kBits>;
  const int line_bytes = p.k * kBits / 8;
  std::vector<char> stage(Tile::kBytes);
  for (int line = 0; line < 64 && first + line < p.n; ++line) {
    for (int i = 0; i < Tile::kLineBytes; ++i) {
      const int from = block * Tile::kLineBytes + i;
      const int swizzle = kBits == 4 ? line / 2 % 4 : kBits == 8 ? line % 8 : 0;
      if (from >= line_bytes) break;
      stage[line * Tile::kLineBytes + (i ^ (swizzle * 16))] =
          p.codes[int64_t{first + line} * line_bytes + from];
    }
  }
  return stage;
}

template <int kBits, int kShare, int kCount, device::PackedFloats kFloats>
static void RunTile(const Problem& p, const Weight& weight, int column) {
  using Product = device::ScaledLinesProduct<Weight, kBits, kShare, kCount, kFloats, 2>;
  const int blocks = (p.k + 127) / 128;
  std::vector<std::vector<char>> stages, rows;
  std::vector<std::vector<float>> sums;
  for (int block = 0; block < blocks; ++block) {
    stages.push_back(StageOf<kBits>(p, column, block));
    // NaN where a tile has no row.
    rows.emplace_back(2 * Product::kSliceBytes, static_cast<char>(0xff));
    sums.emplace_back(4 * Product::kRows, NAN);
    for (int row = 0; row < (p.floats ? p.rows / 4 : 0); ++row) {
      using Planes = device::OrderedPlanes<kBits>;
      for (int piece = 0; piece < 16; ++piece) {
        float eight[8];
        for (int i = 0; i < 8; ++i) {
          const int k = block * 128 + Planes::First(piece) + i / 4 * Planes::kSecondFour + i % 4;
          eight[i] = k < p.k ? p.floats[int64_t{row} * p.k + k] : 0;
        }
        uint32_t planes[3][4];
        Planes::Make(eight, planes);
        for (int i = 0; i < 3; ++i) {
          std::memcpy(rows[block].data() + Planes::PlaceOf(piece, 4 * row + i), planes[i], 16);
        }
      }
    }
    for (int row = 0; row < p.rows; ++row) {
      for (int i = 0; i < (p.floats ? 0 : 256); i += 16) {
        const int at = i / 128 * Product::kSliceBytes + row * 128 + ((i % 128) ^ (row % 8 * 16));
        std::memcpy(rows[block].data() + at,
                    p.x + int64_t{row} * 128 * blocks + block * 128 + i / 2, 16);
      }
      std::copy_n(p.x_sums + (int64_t{block} * p.rows + row) * 4, 4, sums[block].data() + 4 * row);
    }
  }
  Run(1, 128, [&] {
    Product product(weight, p.n, 0, column, 0);
    for (int block = 0; block < blocks; ++block) {
      product.Multiply(rows[block].data(), sums[block].data(), stages[block].data(), block % 2);
    }
    float out[4];
    product.Finish(out);
    if (p.floats) device::AddPlanesOfRows(out);
    const int lane = threadIdx.x % 32;
    for (int j = 0; j < 4; ++j) {
      const int row = lane % 4 * 2 + j % 2;
      const int at = column + threadIdx.x / 32 * 16 + lane / 4 + j / 2 * 8;
      if (row < (p.floats ? p.rows / 4 : p.rows) && at < p.n)
        p.out[int64_t{row} * p.n + at] = out[j];
    }
  });
}

template <int kBits, device::PackedFloats kFloats>
static void RunTiles(const Problem& p, const Weight& weight) {
  for (int column = 0; column < p.n; column += 64) {
    if (p.group_size == 32) {
      if (p.rows <= 4) RunTile<kBits, 1, 2, kFloats>(p, weight, column);
      if (p.rows > 4) RunTile<kBits, 1, 4, kFloats>(p, weight, column);
    } else {
      if (p.rows <= 4) RunTile<kBits, 2, 1, kFloats>(p, weight, column);
      if (p.rows > 4) RunTile<kBits, 2, 2, kFloats>(p, weight, column);
    }
  }
}

extern "C" int scaled_lines(const Problem* problem, int bits) {
  const Problem& p = *problem;
  const int scale_bytes = p.float_scales ? 4 : 2, line = p.k / p.group_size * scale_bytes;
  Weight weight{p.scales, p.biases, line, p.k, 0, {}};
  while (1 << weight.scale_shift < p.group_size) ++weight.scale_shift;
  weight.packed.half_scales = p.half_scales != 0;
  readable.assign({{p.scales, size_t(line) * p.n}, {p.biases, size_t(line) * p.n}});
  return Formats::Dispatch(Mode::kAffine, bits, [&](auto format) {
    constexpr int kBits = decltype(format)::kBits;
    using device::PackedFloats;
    if constexpr (decltype(format)::kMode == Mode::kAffine) {
      if (p.float_scales) return RunTiles<kBits, PackedFloats::k32Bits>(p, weight), 0;
      return RunTiles<kBits, PackedFloats::k16Bits>(p, weight), 0;
    } else {
      return 1;
    }
  });
}

// Units of 32 codes of a line as float16, times what sums are multiplied by, the shorter way where
// scales are small. A unit has a scale, or two.
template <Mode kMode, int kBits, bool kSmall = false>
static void DecodeHalves(const uint32_t* codes, const uint8_t* scales, long units, uint16_t* out) {
  using Codes = device::LineCodes<kMode, kBits>;
  using device::ScaleRange;
  constexpr ScaleRange kRange = kSmall ? ScaleRange::kSmall : ScaleRange::kAny;
  constexpr int kWords = kBits / 2, kApart = 16 / kBits, kScales = Codes::kBlockScales;
  for (long unit = 0; unit < units; ++unit) {
    typename Codes::Loaded loaded = {};
    std::memcpy(loaded, scales + unit * kScales, kScales);
    if (kSmall && (Codes::NotSmallHalves(loaded) & Codes::kNotSmall) != 0) continue;
    const uint32_t both = Codes::template HalfWord<kRange>(loaded);
    for (int half = 0; half < 2; ++half) {
      uint32_t words[kWords];
      std::memcpy(words, codes + unit * kBits + half * kWords, sizeof(words));
      const uint32_t word = Codes::template OfHalf<true>(both, half, words);
      for (int p = 0; p < 8; ++p) {
        const uint32_t pair = Codes::template HalfPairOf<kRange>(words, p, word);
        uint16_t* to = out + unit * 32 + half * 16 + p / kApart * 2 * kApart + p % kApart;
        to[0] = static_cast<uint16_t>(pair), to[kApart] = static_cast<uint16_t>(pair >> 16);
      }
    }
  }
}

extern "C" float halves_of_lines(int mode, const uint32_t* codes, const uint8_t* scales, long units,
                                 uint16_t* out, uint16_t* small) {
  switch (static_cast<Mode>(mode)) {
    case Mode::kMxfp4:
      DecodeHalves<Mode::kMxfp4, 4>(codes, scales, units, out);
      DecodeHalves<Mode::kMxfp4, 4, true>(codes, scales, units, small);
      return 1;
    case Mode::kMxfp8: DecodeHalves<Mode::kMxfp8, 8>(codes, scales, units, out); return 1;
    case Mode::kNvfp4: DecodeHalves<Mode::kNvfp4, 4>(codes, scales, units, out); break;
    default: return 0;
  }
  return device::LineCodes<Mode::kNvfp4, 4>::kHalfUnit;
}
