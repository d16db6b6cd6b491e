// ffi/quantized/device/scaled_x_lines.cuh on the host, for test_scaled_x_lines.py: a warp after the
// other.
#include "cuda_on_host.h"
#include "warp_on_host.h"
//
#include "quantized/device/scaled_x_lines.cuh"

using namespace jgg;

struct Problem {
  const float* x;       // (8, n)
  const char* codes;    // (n, k)
  const float* scales;  // (n, k in groups, 1 or 2): beside biases
  float* out;           // (8, k), to which sums are added
  int32_t rows, n, k, group_size;
};

// Boxes of 32 n as a copy of whole lines puts them, swizzled. NaN where there is no row.
static std::vector<float> Boxes(const Problem& p, int slice) {
  std::vector<float> boxes(2 * 8 * 32, NAN);
  for (int row = 0; row < p.rows; ++row) {
    for (int i = 0; i < 64; ++i) {
      const int piece = (i % 32 / 4) ^ row, n = 64 * slice + i;
      boxes[(i / 32 * 8 + row) * 32 + piece * 4 + i % 4] = n < p.n ? p.x[row * p.n + n] : 0;
    }
  }
  return boxes;
}

// 128 k of 64 lines as TMA brings them: swizzled if codes have 4 or 8 bits, and zeros where there
// are none.
template <int kBits>
static std::vector<char> CodesOf(const Problem& p, int slice, int column) {
  using Tile = device::LineTile<kBits>;
  const int line_bytes = p.k * kBits / 8;
  std::vector<char> stage(Tile::kBytes);
  for (int line = 0; line < 64 && 64 * slice + line < p.n; ++line) {
    for (int i = 0; i < Tile::kLineBytes; ++i) {
      const int from = column * kBits / 8 + i;
      const int swizzle = kBits == 4 ? line / 2 % 4 : kBits == 8 ? line % 8 : 0;
      if (from >= line_bytes) break;
      stage[line * Tile::kLineBytes + (i ^ (swizzle * 16))] =
          p.codes[int64_t{64 * slice + line} * line_bytes + from];
    }
  }
  return stage;
}

// By groups of 128 k, of which each has those of 64 lines; zeros where there are none.
static std::vector<float> ScalesOf(const Problem& p, int slice, int column, int arrays) {
  const int groups = std::max(128 / p.group_size, 1), all = p.k / p.group_size;
  std::vector<float> scales(groups * 64 * arrays);
  for (int g = 0; g < groups; ++g) {
    for (int line = 0; line < 64; ++line) {
      const int n = 64 * slice + line, of = column / p.group_size + g;
      if (n >= p.n || of >= all) continue;
      std::copy_n(p.scales + (int64_t{n} * all + of) * arrays, arrays,
                  &scales[(g * 64 + line) * arrays]);
    }
  }
  return scales;
}

template <Mode kMode, int kBits, int kGroups, bool kFew>
static void RunHalf(const Problem& p, int column, int group) {
  constexpr int kArrays = kMode == Mode::kFp8 ? 1 : 2;
  using Product = device::ScaledXLinesProduct<kMode, kBits, kGroups, kFew>;
  using Lines = device::HalfLines<device::LineCodes<kMode, kBits>>;
  const int slices = (p.n + 63) / 64;
  std::vector<std::vector<float>> boxes, scales;
  std::vector<std::vector<char>> codes;
  for (int slice = 0; slice < slices; ++slice) {
    boxes.push_back(Boxes(p, slice));
    codes.push_back(CodesOf<kBits>(p, slice, column));
    scales.push_back(ScalesOf(p, slice, column, kArrays));
  }
  const int first = std::max(128 / p.group_size, 1) * group / 2 * 64 * kArrays;
  std::vector<float> parts(4 * 32 * 16);  // of warps
  Run(1, 128, [&] {
    Product product;
    for (int slice = 0; slice < slices; ++slice) {
      product.Multiply(reinterpret_cast<const char*>(boxes[slice].data()), codes[slice].data(),
                       reinterpret_cast<const char*>(scales[slice].data() + first), group);
    }
    const auto& sums = product.Finish();
    for (int i = 0; i < 16; ++i) parts[threadIdx.x * 16 + i] = sums[i / 4][i % 4];
  });
  // As warps add them up: warp w has columns 16 * w and on.
  Run(1, 128, [&] {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    float sums[4] = {};
    for (int w = 0; w < 4; ++w) {
      for (int j = 0; j < 4; ++j) sums[j] += parts[((w * 32 + lane) * 4 + warp) * 4 + j];
    }
    Product::AddPlanes(sums);
    for (int j = 0; j < 4; ++j) {
      const int row = lane % 4 * 2 + j % 2;
      const int at =
          column + Lines::ColumnOf(group, 16 * warp + lane / 4) + j / 2 * Lines::kSecondColumn;
      if (row < p.rows && at < p.k) p.out[row * p.k + at] = sums[j];
    }
  });
}

template <Mode kMode, int kBits>
static void RunTiles(const Problem& p) {
  for (int column = 0; column < p.k; column += 128) {
    for (int group = 0; group < 2; ++group) {
      if constexpr (kMode != Mode::kFp8) {
        if (p.group_size == 32 && p.rows <= 2) RunHalf<kMode, kBits, 2, true>(p, column, group);
        if (p.group_size == 32 && p.rows > 2) RunHalf<kMode, kBits, 2, false>(p, column, group);
      }
      if (p.group_size > 32 && p.rows <= 2) RunHalf<kMode, kBits, 1, true>(p, column, group);
      if (p.group_size > 32 && p.rows > 2) RunHalf<kMode, kBits, 1, false>(p, column, group);
    }
  }
}

extern "C" int scaled_x_lines(const Problem* problem, int mode, int bits) {
  return Formats::Dispatch(static_cast<Mode>(mode), bits, [&](auto format) {
    using Format = decltype(format);
    if constexpr (Format::kScale == ScaleType::kScaleAndBias ||
                  Format::kScale == ScaleType::kFloat32) {
      return RunTiles<Format::kMode, Format::kBits>(*problem), 0;
    } else {
      return 1;
    }
  });
}
