// The kernels of nvfp4_quantize on the host, for test_nvfp4_quantize_kernels.py.
#include "cuda_on_host.h"
//
#include "nvfp4/device/quantize_columns.cuh"

using namespace jgg;
using namespace jgg::nvfp4::device;
using jgg::nvfp4::CeilDiv;

namespace {

struct Operands {
  const void* x;
  const int32_t* sizes;  // or null
  const uint32_t* seed;  // or null
  void *weight, *scales;
  float* global_scale;
  int64_t matrices, rows, columns, blocks, groups, bytes;
  int32_t dtype, along_rows, scale_2d, hadamard;
};

template <DType kOf, bool kStochastic>
struct Kernels {
  using Kernel = void (*)(QuantizeParams);
  Kernel kernel;
  int64_t blocks;
  int threads = kQuantizeThreads;

  static Kernels Amax(const Operands& o, const QuantizeParams& p) {
    if (!o.hadamard) return {AmaxKernel<kOf>, 2};
    if (o.along_rows) return {ColumnsAmaxKernel<kOf>, ColumnsBlocks<kOf>(p), kColumnsThreads};
    return {RowsKernel<kOf, true, false, true>, RowsBlocks(p)};
  }

  static Kernels Encode(const Operands& o, const QuantizeParams& p) {
    if (!o.along_rows && o.scale_2d) {
      return {SquaresKernel<kOf, kStochastic>, CeilDiv(o.rows, kBlock) * CeilDiv(o.blocks, 32),
              kSquareThreads};
    }
    if (!o.along_rows) {
      return {o.hadamard ? RowsKernel<kOf, true, kStochastic, false>
                         : RowsKernel<kOf, false, kStochastic, false>,
              RowsBlocks(p)};
    }
    const int64_t blocks = ColumnsBlocks<kOf>(p);
    if (o.scale_2d) {
      return {ColumnsKernel<kOf, Blocks::kSquare, kStochastic>, blocks, kColumnsThreads};
    }
    return {o.hadamard ? ColumnsKernel<kOf, Blocks::kHadamard, kStochastic>
                       : ColumnsKernel<kOf, Blocks::kOwn, kStochastic>,
            blocks, kColumnsThreads};
  }

  void Run(const QuantizeParams& p) const {
    // Fewer blocks along y than matrices, so that each of them has several.
    const auto y = static_cast<unsigned>(CeilDiv(p.matrices, 2));
    RunBlocks({static_cast<unsigned>(blocks), y}, threads, [&] { kernel(p); });
  }
};

template <DType kOf, bool kStochastic>
void Quantize(const Operands& o) {
  std::vector<int32_t> starts(o.groups + 1), tiles(o.groups + 1);
  std::vector<uint32_t> amax(o.matrices);
  std::vector<MatrixScales> matrix_scales(o.matrices);
  readable = {{static_cast<const char*>(o.x), o.bytes}};
  if (o.seed) readable.emplace_back(reinterpret_cast<const char*>(o.seed), 8);
  QuantizeParams p{};
  p.x = static_cast<const uint8_t*>(o.x);
  p.matrices = o.matrices;
  p.rows = o.rows;
  p.columns = o.columns;
  p.blocks = o.blocks;
  p.starts = starts.data();
  p.tiles = tiles.data();
  p.groups = o.sizes ? static_cast<int32_t>(o.groups) : 0;
  p.seed = o.seed;
  p.amax = amax.data();
  p.matrix_scales = matrix_scales.data();
  p.weight = static_cast<uint8_t*>(o.weight);
  p.scales = static_cast<uint8_t*>(o.scales);
  if (o.sizes) {
    RunBlocks({1, 1}, kScanThreads, [&] {
      StartsKernel(o.sizes, p.groups, static_cast<int32_t>(o.rows), starts.data(), tiles.data(),
                   amax.data());
    });
  }
  Kernels<kOf, kStochastic>::Amax(o, p).Run(p);
  RunBlocks({1, 1}, kQuantizeThreads, [&] {
    MatrixScalesKernel(amax.data(), o.matrices, matrix_scales.data(), o.global_scale);
  });
  Kernels<kOf, kStochastic>::Encode(o, p).Run(p);
}

template <DType kOf>
void Dispatch(const Operands& o) {
  o.seed ? Quantize<kOf, true>(o) : Quantize<kOf, false>(o);
}

}  // namespace

// Two element types stand for all three.
extern "C" void quantize_kernels(const Operands* o) {
  static_cast<DType>(o->dtype) == DType::kF32 ? Dispatch<DType::kF32>(*o)
                                              : Dispatch<DType::kBF16>(*o);
}
