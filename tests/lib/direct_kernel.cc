// The kernel of few rows in all (ffi/quantized/device/direct_sm90.cuh) on the host, for
// test_direct_kernel.py. Results are the float32 sums: what an epilogue makes of them is another
// file's.
#include "cuda_on_host.h"
#include "warp_on_host.h"
//
#include "quantized/device/direct_sm90.cuh"

using namespace jgg;

namespace {

// Stores sums: both of a gated product, side by side.
struct Plain {
  static void Store(const device::DirectGemmSm90& gemm, int, int row, int column, float value,
                    float other, bool gated) {
    float* out = static_cast<float*>(gemm.out) + int64_t{row} * gemm.n + column;
    out[0] = value;
    if (gated) out[gemm.n / 2] = other;
  }
  static void StoreZero(const device::DirectGemmSm90& gemm, int row, int column, bool gated) {
    Store(gemm, 0, row, column, 0.0f, 0.0f, gated);
  }
};

template <Mode kMode, int kBits>
void Run(const device::DirectGemmSm90& gemm, bool gated, int eights, bool pairs) {
  using Tiles = device::PackedTiles<kMode, kBits>;
  const bool alone = gemm.metadata.HasEntryOfEach(1);
  const int of_block = 8 * eights;
  const auto rows =
      static_cast<unsigned>(alone ? (gemm.rows + of_block - 1) / of_block : gemm.rows);
  const auto columns = static_cast<unsigned>(gated || pairs ? gemm.n / 2 : gemm.n);
  RunBlocks({columns / 16, rows}, 32 * device::kDirectWarps, [&] {
    using namespace device;
    if (eights == 2) {
      if (gated) return DirectGemmSm90Kernel<Tiles, true, Plain, 2>(gemm);
      if (pairs) return DirectGemmSm90Kernel<Tiles, false, Plain, 2, true>(gemm);
      return DirectGemmSm90Kernel<Tiles, false, Plain, 2>(gemm);
    }
    if (gated) return DirectGemmSm90Kernel<Tiles, true, Plain>(gemm);
    DirectGemmSm90Kernel<Tiles, false, Plain>(gemm);
  });
}

}  // namespace

struct Problem {
  const int32_t *sizes, *offset;
  const void *x, *codes, *scales;
  const float* global_scale;  // of each group, or null
  float* out;
  int32_t count, groups, rows, n, k, tile_scales, clears_rest, gated, eights, pairs;
};

// A tile of mode "fp8" as (64, 64) bfloat16: what each thread of a warpgroup decodes goes where
// WGMMA has its A operand's registers.
extern "C" void decode_fp8_tile(const char* codes, const uint32_t* scales, uint16_t* out) {
  using Codes = device::PackedCodes<Mode::kFp8, 8>;
  for (int thread = 0; thread < 128; ++thread) {
    const int pair = thread / 32 * 8 + thread % 32 / 4, row = pair / 8 * 16 + pair % 8;
    uint32_t words[8], a[4];
    device::LoadCodes(codes, thread, words);
    const uint32_t both[1][2] = {{scales[2 * pair], scales[2 * pair + 1]}};
    for (int step = 0; step < 4; ++step) {
      Codes::Decode<true, device::ScaleRange::kAny>(words, step, both, a);
      for (int i = 0; i < 4; ++i) {
        const int k = 16 * step + 8 * (i / 2) + 2 * (thread % 4);
        std::memcpy(out + 64 * (row + 8 * (i % 2)) + k, a + i, 4);
      }
    }
  }
}

extern "C" int direct_kernel(const Problem* problem, int mode, int bits) {
  const Problem& p = *problem;
  device::DirectGemmSm90 gemm{};
  gemm.metadata.kind = MetadataKind::kSizes;
  gemm.metadata.data = p.sizes;
  gemm.metadata.offset = p.offset;
  gemm.metadata.count = p.count;
  gemm.metadata.clears_rest = p.clears_rest != 0;
  gemm.x = static_cast<const char*>(p.x);
  gemm.out = p.out;
  gemm.rows = p.rows;
  gemm.n = p.n;
  gemm.groups = p.groups;
  gemm.scales = p.scales;
  gemm.global_scale = {p.global_scale, 1, 0};
  gemm.packed = {p.codes, p.n / 64, p.k / 64, p.tile_scales};
  readable.assign({{gemm.x, size_t(2) * p.rows * p.k}});
  const bool gated = p.gated != 0, pairs = p.pairs != 0;
  return Formats::Dispatch(static_cast<Mode>(mode), bits, [&](auto format) {
    using Format = decltype(format);
    return Run<Format::kMode, Format::kBits>(gemm, gated, p.eights, pairs), 0;
  });
}
