// The kernels of fp8_quantize, along either axis or both, and of fp8_dequantize on the
// host, for test_fp8_quantize_kernels.py.
#include "cuda_on_host.h"
//
#include "fp8/device/dequantize.cuh"
#include "fp8/device/quantize_lines.cuh"

using namespace jgg;
using namespace jgg::fp8::device;

namespace {

struct Operands {
  const void* x;
  const int32_t* sizes;  // or null
  const uint32_t* seed;  // or null
  void *codes, *scales;
  int64_t matrices, rows, columns, along, groups, bytes;
  int32_t dtype, e5m2, along_rows, square, power_of_two;
  const int32_t* list;
  void *turned, *turned_scales;  // of codes along both axes
};

template <DType kOf, Element kElement, bool kStochastic>
void Run(const Operands& o, const QuantizeParams& p) {
  using Kernel = void (*)(QuantizeParams);
  const auto run = [&](Kernel kernel, int64_t blocks, int64_t matrices, int threads) {
    // Fewer blocks along y than matrices, so that each of them has several.
    const auto y = static_cast<unsigned>(CeilDiv(matrices, 2));
    RunBlocks({static_cast<unsigned>(blocks), y}, threads, [&] { kernel(p); });
  };
  if (o.square) {
    run(o.along_rows ? SquaresKernel<kOf, kElement, kStochastic, true>
                     : SquaresKernel<kOf, kElement, kStochastic, false>,
        SquaresBlocks(p), p.matrices, kSquareThreads);
  } else if (o.along_rows) {
    run(p.list ? ColumnsKernel<kOf, kElement, kStochastic, true>
               : ColumnsKernel<kOf, kElement, kStochastic, false>,
        ColumnsBlocks(p), p.matrices, kSpanThreads);
  } else {
    run(p.columns % kBlock ? RowsKernel<kOf, kElement, kStochastic, true>
                           : RowsKernel<kOf, kElement, kStochastic, false>,
        RowsBlocks<kOf>(p), 1, kRowsThreads);
  }
}

template <DType kOf>
void Quantize(const Operands& o) {
  QuantizeParams p{};
  p.x = static_cast<const uint8_t*>(o.x);
  p.matrices = o.matrices;
  p.rows = o.rows;
  p.columns = o.columns;
  p.along = o.along;
  p.blocks = CeilDiv(o.along, kBlock);
  p.power_of_two = o.power_of_two;
  p.seed = o.seed;
  p.codes = static_cast<uint8_t*>(o.codes);
  p.scales = static_cast<float*>(o.scales);
  readable = {{static_cast<const char*>(o.x), o.bytes}};
  p.list = o.list;
  p.x_lines = o.rows;
  p.slice = 3;  // fewer than all spans of a wide x
  if (o.list) readable.emplace_back(reinterpret_cast<const char*>(o.list), 4 * o.rows);
  if (o.seed) readable.emplace_back(reinterpret_cast<const char*>(o.seed), 8);
  const auto groups = static_cast<int32_t>(o.groups);
  const auto count = static_cast<int32_t>(o.along_rows ? p.blocks : 0);
  std::vector<int32_t> starts(groups + 1), tiles(groups + 1);
  std::vector<TileRows> of_tiles(count);
  if (o.sizes) {
    RunBlocks({1, 1}, kScanThreads, [&] {
      GroupsKernel(o.sizes, groups, static_cast<int32_t>(p.rows), starts.data(), tiles.data(),
                   of_tiles.data(), count);
    });
    p.inside = starts.data() + groups;
    if (o.along_rows) p.groups = of_tiles.data();
  }
  if (o.seed) {
    o.e5m2 ? Run<kOf, Element::kE5M2, true>(o, p) : Run<kOf, Element::kE4M3, true>(o, p);
  } else {
    o.e5m2 ? Run<kOf, Element::kE5M2, false>(o, p) : Run<kOf, Element::kE4M3, false>(o, p);
  }
}

template <DType kOf>
void QuantizeBoth(const Operands& o) {
  BothParams p{};
  p.of.x = static_cast<const uint8_t*>(o.x);
  p.of.matrices = o.matrices;
  p.of.rows = o.rows;
  p.of.columns = o.columns;
  p.of.codes = static_cast<uint8_t*>(o.codes);
  p.of.scales = static_cast<float*>(o.scales);
  p.turned = static_cast<uint8_t*>(o.turned);
  p.turned_scales = static_cast<float*>(o.turned_scales);
  readable = {{static_cast<const char*>(o.x), o.bytes}};
  const auto y = static_cast<unsigned>(CeilDiv(o.matrices, 2));
  RunBlocks({static_cast<unsigned>(SquaresBlocks(p.of)), y}, kSquareThreads,
            [&] { BothKernel<kOf>(p); });
}

void QuantizeLines(const Operands& o) {
  LinesParams p{};
  p.by_rows.x = static_cast<const uint8_t*>(o.x);
  p.by_rows.rows = o.rows;
  p.by_rows.columns = p.by_rows.along = o.columns;
  p.by_rows.codes = static_cast<uint8_t*>(o.codes);
  p.by_rows.scales = static_cast<float*>(o.scales);
  p.by_columns.along = o.along;
  p.by_columns.codes = static_cast<uint8_t*>(o.turned);
  p.by_columns.scales = static_cast<float*>(o.turned_scales);
  for (QuantizeParams* of : {&p.by_rows, &p.by_columns}) of->blocks = CeilDiv(of->along, kBlock);
  const auto groups = static_cast<int32_t>(o.groups);
  const auto count = static_cast<int32_t>(p.by_columns.blocks);
  std::vector<int32_t> starts(groups + 1), tiles(groups + 1);
  std::vector<TileRows> of_tiles(count);
  RunBlocks({1, 1}, kScanThreads, [&] {
    GroupsKernel(o.sizes, groups, static_cast<int32_t>(o.rows), starts.data(), tiles.data(),
                 of_tiles.data(), count);
  });
  p.by_columns.groups = of_tiles.data();
  p.by_columns.inside = starts.data() + groups;
  readable = {{static_cast<const char*>(o.x), o.bytes}};
  RunBlocks({static_cast<unsigned>(LinesBlocks(p)), 1}, kSquareThreads,
            [&] { LinesKernel<DType::kBF16>(p); });
}

// `codes` are x, and values the result.
template <DType kTo, Element kElement, bool kSquare>
void Dequantize(const Operands& o) {
  constexpr int kCodes = kPieceCodes<kTo>;
  DequantizeParams p{};
  p.codes = static_cast<const uint8_t*>(o.x);
  p.scales = static_cast<const float*>(o.scales);
  p.out = static_cast<uint8_t*>(o.codes);
  p.of_line = static_cast<uint32_t>(o.columns / kCodes);
  p.pieces = static_cast<uint32_t>(o.matrices * o.rows * p.of_line);
  p.blocks = static_cast<uint32_t>(CeilDiv(o.columns, kBlock));
  p.rows = static_cast<uint32_t>(o.rows);
  p.tiles = static_cast<uint32_t>(CeilDiv(o.rows, kBlock));
  const int64_t lines = kSquare ? p.tiles : p.rows;
  readable = {{static_cast<const char*>(o.x), o.bytes},
              {static_cast<const char*>(o.scales), 4 * o.matrices * lines * p.blocks}};
  const auto blocks = CeilDiv(p.pieces, kDequantizeThreads * kDequantizeSteps);
  RunBlocks({static_cast<unsigned>(blocks), 1}, kDequantizeThreads,
            [&] { DequantizeKernel<kTo, kElement, kSquare>(p); });
}

template <DType kTo>
void Dequantize(const Operands& o) {
  if (o.e5m2) {
    o.square ? Dequantize<kTo, Element::kE5M2, true>(o) : Dequantize<kTo, Element::kE5M2, false>(o);
  } else {
    o.square ? Dequantize<kTo, Element::kE4M3, true>(o) : Dequantize<kTo, Element::kE4M3, false>(o);
  }
}

}  // namespace

extern "C" void quantize_kernels(const Operands* o) {
  switch (static_cast<DType>(o->dtype)) {
    case DType::kF32: return Quantize<DType::kF32>(*o);
    case DType::kBF16: return Quantize<DType::kBF16>(*o);
    case DType::kF16: return Quantize<DType::kF16>(*o);
  }
}

extern "C" void quantize_both_kernel(const Operands* o) {
  switch (static_cast<DType>(o->dtype)) {
    case DType::kF32: return QuantizeBoth<DType::kF32>(*o);
    case DType::kBF16: return QuantizeBoth<DType::kBF16>(*o);
    case DType::kF16: return QuantizeBoth<DType::kF16>(*o);
  }
}

extern "C" void quantize_lines_kernel(const Operands* o) { QuantizeLines(*o); }

extern "C" void dequantize_kernel(const Operands* o) {
  switch (static_cast<DType>(o->dtype)) {
    case DType::kF32: return Dequantize<DType::kF32>(*o);
    case DType::kBF16: return Dequantize<DType::kBF16>(*o);
    case DType::kF16: return Dequantize<DType::kF16>(*o);
  }
}
