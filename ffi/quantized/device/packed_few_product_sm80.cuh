// A warp's products of few rows with weights in layout "sm90": packed_few_rows_sm80.cuh.
#pragma once

#include <cstdint>

#include "grouped_mm/device/schedule_sm80.cuh"
#include "quantized/device/async_sm80.cuh"
#include "quantized/device/packed_tiles_sm90.cuh"
#include "quantized/gemm_sm80.h"

namespace jgg::device {

// The kernel's argument.
struct PackedFewRowsSm80 {
  QuantizedGemmSm80 gemm;  // of w, the global scale alone
  PackedCodesSm90 packed;
  const void* scales;
};

// A warp's operands of one segment, by tiles of 64 k of 64 columns.
template <typename Config>
class PackedFewRows {
  using Weights = typename Config::Weights;
  using Codes = typename Weights::Codes;
  static constexpr int kBits = Weights::kTileCodes / 512;
  static_assert(kBits == 4);

 public:
  // Scales of 16 columns.
  struct Scales {
    uint32_t words[Codes::kMostScaleWords][2];
  };

  __device__ PackedFewRows(const PackedFewRowsSm80& of, const Tile& tile, const Segment& segment,
                           char* slots)
      : of_(of), slots_(PlaceOf(slots)), rows_(tile.m_hi), lane_(ThreadAnew() % 32) {
    const PackedCodesSm90& packed = of.packed;
    const GemmSm80& gemm = of.gemm.gemm;
    const int lane = lane_, each = Weights::TileScales(packed);
    const int64_t row = segment.x_start + (tile.row0 - segment.y_start) + lane / 8;
    from_row_ = static_cast<const char*>(gemm.a) + row * gemm.a_line * 2 + lane % 8 * 16;
    // A gated tile has 32 gates, and the 32 columns that they let through.
    const bool gated = IsGated(gemm.epilogue.activation);
    const int64_t behind = gated ? gemm.n / 32 : 2;  // atoms of 16 columns
    const auto first_tile = [&](int64_t atom) {
      return (segment.weight * int64_t{packed.column_tiles} + atom / 4) * packed.k_tiles;
    };
    const int64_t atom = tile.n0 / 16;
#pragma unroll
    for (int h = 0; h < kPointers; ++h) {
      const int64_t at = atom + h * behind;
      codes_[h] = static_cast<const char*>(packed.codes) + first_tile(at) * Weights::kTileCodes +
                  (at % 4 * 32 + lane) * (Weights::kTileCodes / 128);
    }
    apart_ = gated ? gemm.n / 128 * packed.k_tiles * Weights::kTileCodes : Weights::kTileCodes / 2;
    // A lane's piece of scales: of all columns' first words, or second ones.
    constexpr int kPieces = Weights::kTileScales / 16;
    const int piece = lane % kPieces, h = piece / (kPieces / 2), word = lane / kPieces;
    const int64_t at = atom + h * behind;
    from_scale_ = static_cast<const char*>(of.scales) + first_tile(at) * each +
                  at % 4 * (Weights::kTileScales / 4) + piece % (kPieces / 2) * 16 +
                  (each > Weights::kTileScales ? word * Weights::kTileScales : 0);
  }

  // Start copying x and scales of a tile to a slot.
  __device__ void Copy(int tile, int slot) const {
    const int lane = lane_, each = Weights::TileScales(of_.packed);
    const Place to = slots_ + slot * Config::kSlotBytes;
    // K is 2^17 at most (_LONGEST_SUM of dense.py), so distances within a column have 32 bits.
    const auto line = static_cast<uint32_t>(of_.gemm.gemm.a_line * 2);
#pragma unroll
    for (int i = 0; i < Config::kM / 4; ++i) {
      const int row = 4 * i + lane / 8;
      CopyIf(row < rows_, to + row * 128 + (lane % 8 ^ row % 8) * 16,
             from_row_ + (tile * 128u + 4 * i * line));
    }
    // Two tiles may share scales.
    const uint32_t back = tile % 2 == 0 ? 0 : max(Weights::kTileScales - each, 0);
    CopyIf(lane < Config::kScaleBytes / 16, to + Config::kRowBytes + lane * 16,
           from_scale_ + (static_cast<uint32_t>(tile) * each - back));
  }

  // Load the codes of 16 columns, number i of 4.
  __device__ void Load(int tile, int i, uint32_t (&to)[4]) const {
    const char* from = codes_[0];
    if (i >= 2) from = kPointers == 2 ? codes_[kPointers - 1] : codes_[0] + apart_;
    const uint4 codes = LoadOnce(from + (static_cast<uint32_t>(tile) * Weights::kTileCodes +
                                         i % 2 * (Weights::kTileCodes / 4)));
    to[0] = codes.x, to[1] = codes.y, to[2] = codes.z, to[3] = codes.w;
  }

  // 32 k of 8 rows: the B operands of two products.
  __device__ void LoadRows(int slot, int eight, int half, uint32_t (&to)[4]) const {
    const int lane = lane_, row = 8 * eight + lane % 8;
    LoadMatricesAt(
        slots_ + slot * Config::kSlotBytes + row * 128 + ((4 * half + lane / 8) ^ lane % 8) * 16,
        to);
  }

  __device__ Scales LoadScales(int slot, int i) const {
    constexpr int kWords = Weights::kTileScales / 128, kAll = Codes::kMostScaleWords;
    uint32_t words[kAll][kWords];
#pragma unroll
    for (int j = 0; j < kAll; ++j) {
      LoadPlace<kWords>(slots_ + slot * Config::kSlotBytes + Config::kRowBytes +
                            j * Weights::kTileScales + i * (Weights::kTileScales / 4) +
                            lane_ / 4 * (Weights::kTileScales / 32),
                        words[j]);
    }
    Scales scales;
    if constexpr (kAll == 2) {
#pragma unroll
      for (int j = 0; j < kAll; ++j) {
        scales.words[j][0] = words[j][0], scales.words[j][1] = words[j][1];
      }
    } else {
      Weights::template LoadScalesOf<true, ScaleRange::kAny>(
          reinterpret_cast<const char*>(words[0]), Weights::kTileScales, scales.words);
    }
    return scales;
  }

  __device__ static void Decode(const uint32_t (&codes)[4], const Scales& scales, int step,
                                uint32_t* a) {
    if constexpr (Weights::kHalf) {
      Codes::template DecodeHalf<true, ScaleRange::kAny>(codes, step, scales.words, a);
    } else {
      Codes::template Decode<true, ScaleRange::kAny>(codes, step, scales.words, a);
    }
  }

 private:
  const PackedFewRowsSm80& of_;
  const Place slots_;
  const int rows_, lane_;
  // Codes of columns 0 to 31, and of the others, which are as far away for all lanes. Where scales
  // take more registers, there is none for a second pointer.
  static constexpr int kPointers = Codes::kMostScaleWords == 2 ? 1 : 2;
  const char *codes_[kPointers], *from_row_, *from_scale_;
  int64_t apart_;
};

// Add the products of one segment to this warp's sums.
template <typename Config>
__device__ void AddPackedSegment(const PackedFewRowsSm80& of, const Tile& tile,
                                 const Segment& segment, typename Config::SharedMemory& shared,
                                 float (&sums)[4][Config::kEights][4]) {
  using Operands = PackedFewRows<Config>;
  constexpr int kEights = Config::kEights;
  const int warp = ThreadAnew() / 32, tiles = of.packed.k_tiles;
  const Operands operands(of, tile, segment, shared.slots[warp][0]);
  uint32_t next[4][4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (warp < tiles) operands.Load(warp, i, next[i]);
  }
  const auto copy = [&](int at, int slot) {
    if (at < tiles) operands.Copy(at, slot);
    EndCopies();
  };
#pragma unroll
  for (int slot = 0; slot < Config::kSlots - 1; ++slot) copy(warp + Config::kWarps * slot, slot);
  int slot = 0;
#pragma unroll 1
  for (int at = warp; at < tiles; at += Config::kWarps) {
    WaitForCopies<Config::kSlots - 2>();
    __syncwarp();  // all lanes have read the slot that is filled next
    copy(at + Config::kWarps * (Config::kSlots - 1), slot == 0 ? Config::kSlots - 1 : slot - 1);
    uint32_t x[kEights][2][4];
#pragma unroll
    for (int e = 0; e < kEights; ++e) {
#pragma unroll
      for (int half = 0; half < 2; ++half) operands.LoadRows(slot, e, half, x[e][half]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      uint32_t codes[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) codes[j] = next[i][j];
      if (at + Config::kWarps < tiles) operands.Load(at + Config::kWarps, i, next[i]);
      const auto scales = operands.LoadScales(slot, i);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
        uint32_t a[4];
        Operands::Decode(codes, scales, step, a);
#pragma unroll
        for (int e = 0; e < kEights; ++e) {
          const uint32_t (&b)[4] = x[e][step / 2];
          MultiplyAtoms<Config::Weights::kX>(a, b[step % 2 * 2], b[step % 2 * 2 + 1], sums[i][e]);
        }
      }
    }
    slot = slot + 1 == Config::kSlots ? 0 : slot + 1;
  }
  WaitForCopies<0>();
  __syncthreads();  // nobody reads the slots any more
}

}  // namespace jgg::device
