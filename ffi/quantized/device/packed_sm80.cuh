// Products of many rows with weights in layout "sm90" (quantized/gemm_sm90.h) by mma.sync: the
// tiles, schedule and results of grouped_mm/device/pipelined_sm80.cuh.
//
// The layout has a thread's codes in the order of WGMMA's A operand in registers, which is also
// that of mma.sync. So columns of the result are the instruction's M side, and weights go from
// global memory to registers, by way of shared memory, as codes. A warp has 64 x 64 of the result.
// It decodes 16 columns x 16 k to four registers, and multiplies them with all of its rows while it
// decodes the next 16 columns. Rows of x come by ldmatrix, 16 k ahead.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cutlass/numeric_types.h"
#include "grouped_mm/device/schedule_sm80.cuh"
#include "quantized/device/async_sm80.cuh"
#include "quantized/device/packed_tiles_sm90.cuh"
#include "quantized/gemm_sm80.h"

namespace jgg::device {

// Weights are PackedTiles. Slices have 64 k, a tile of the layout.
template <typename Weights_, int kM_, int kN_, int kStages_, int kBlocksPerSm_, int kWindow>
struct PackedConfig {
  using Weights = Weights_;
  using Codes = typename Weights::Codes;
  static constexpr DType kX = Weights::kX;
  using Element = std::conditional_t<kX == DType::kBF16, cutlass::bfloat16_t, cutlass::half_t>;
  // As WarpResults asks.
  static constexpr bool kTurned = true, kHasOptions = true, kAddsExisting = false;
  static constexpr bool kBKMajor = false;  // turns of 32 columns
  static constexpr bool kKeepsEmpty = false;
  static constexpr int kM = kM_, kN = kN_, kK = 64;
  static constexpr int kStages = kStages_, kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kWarpsM = kM / 64, kWarpsN = kN / 64;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  // Warps take 16 rows in turns, so that each has its share of a low tile.
  static constexpr int kRowsApart = 16 * kWarpsM;
  using Work = Schedule<kM, kN, kThreads, true, true, kWindow, true, false, true>;

  // A stage: rows of x of 128 bytes each, tiles of codes, and as many of scales.
  static constexpr int kRowBytes = 128 * kM;
  static constexpr int kCodeBytes = kN / 64 * Weights::kTileCodes;
  static constexpr bool kSharesScales = Codes::kMostScaleWords == 2;  // two tiles may
  static constexpr int kScaleTile = Weights::kTileScales * Codes::kMostScaleWords;
  static constexpr int kStageBytes = kRowBytes + kCodeBytes + kN / 64 * kScaleTile;
  static constexpr int kRowPieces = kRowBytes / 16 / kThreads;  // of a thread
  static constexpr int kCodePieces = kCodeBytes / 16 / kThreads;
  static constexpr int kTilePieces = Weights::kTileCodes / 16;  // of all threads
  static_assert(kThreads % kTilePieces == 0 || kTilePieces % kThreads == 0);
  static_assert(kThreads / 8 % 8 == 0 && kN / 64 * kScaleTile / 16 <= kThreads);

  // While a tile's results are stored, the copies of the next one fill all slices but the last.
  struct SharedMemory {
    alignas(128) unsigned char ring[kStages][kStageBytes];
    typename Work::Memory schedule;
    Tile tiles[2];

    __device__ unsigned char* Results() { return ring[kStages - 1]; }
  };
};

// The kernel's argument. Distances are the same for every tile, so they lie in constant memory.
struct PackedSm80 {
  static constexpr int kMostPieces = 8;
  GemmSm80 gemm;  // A and the result; b is not used
  PackedCodesSm90 packed;
  const void* scales;
  GlobalScale global_scale;
  int64_t row_piece, row_slice;     // from a piece of x to the next, and to the next slice's first
  int64_t code_piece[kMostPieces];  // from each piece of codes to the next, and the next slice's
  int64_t even_scales, odd_scales;  // from a slice's scales to the next one's
  int scale_bytes;                  // of a tile of scales, which two tiles may share
  int second_codes, second_scales;  // bytes from a warp's first 32 columns to the others
};

template <typename Config>
PackedSm80 MakePacked(const GemmSm80& gemm, const PackedCodesSm90& packed, const void* scales,
                      const GlobalScale& global_scale) {
  using Weights = typename Config::Weights;
  PackedSm80 made{};
  made.gemm = gemm;
  made.packed = packed;
  made.scales = scales;
  made.global_scale = global_scale;
  made.row_piece = Config::kThreads / 8 * gemm.a_line * 2;
  made.row_slice = 2 * Config::kK - (Config::kRowPieces - 1) * made.row_piece;
  // Pieces are kThreads apart in a stage. The second half of a gated tile's columns is n / 2 behind
  // the first.
  constexpr int half = Config::kN / 128;
  const auto at = [&](int piece) {
    const int64_t first = int64_t{piece} * Config::kThreads;
    const int64_t tile = first / Config::kTilePieces;
    const bool second = IsGated(gemm.epilogue.activation) && tile >= half;
    return (tile + (second ? gemm.n / 128 - half : 0)) * packed.k_tiles * Weights::kTileCodes +
           first % Config::kTilePieces * 16;
  };
  constexpr int kPieces = Config::kCodePieces;
  static_assert(kPieces <= PackedSm80::kMostPieces);
  for (int i = 0; i < kPieces; ++i) {
    made.code_piece[i] = (i + 1 < kPieces ? at(i + 1) : Weights::kTileCodes) - at(i);
  }
  made.scale_bytes = packed.tile_scales;
  if (Config::Codes::kMostScaleWords == 1) made.scale_bytes = Weights::kTileScales;
  if (made.scale_bytes < Weights::kTileScales) made.scale_bytes = Weights::kTileScales;
  const bool shared = packed.tile_scales < Weights::kTileScales && Config::kSharesScales;
  made.even_scales = shared ? 0 : made.scale_bytes;
  made.odd_scales = made.scale_bytes;
  const bool gated = IsGated(gemm.epilogue.activation);
  made.second_codes = gated ? half * Weights::kTileCodes : Weights::kTileCodes / 2;
  made.second_scales = gated ? half * Config::kScaleTile : Weights::kTileScales / 2;
  return made;
}

// The main loop: a ring of slices that copies fill, and this warp's sums.
template <typename Config>
class PackedPipeline {
  using Weights = typename Config::Weights;
  using Codes = typename Config::Codes;
  static constexpr int kStages = Config::kStages, kK = Config::kK, kThreads = Config::kThreads;
  static constexpr int kBits = Weights::kTileCodes / 512;
  static constexpr int kPieces = Config::kRowPieces + Config::kCodePieces + 1;
  static_assert(kBits == 4);

 public:
  __device__ PackedPipeline(const PackedSm80& arguments, const void* ring)
      : arguments_(arguments), ring_(PlaceOf(ring)) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, v = lane / 8;
    const int row = warp / Config::kWarpsN * 16 + v / 2 * 8 + lane % 8;
    rows_ = row * 128 + (v % 2 ^ lane % 8) * 16;
    // A gated tile has gates in the first half of its columns. A warp has 32 of them, and the 32
    // columns that they let through.
    const int first = FirstAtom();
    codes_ = Config::kRowBytes + first / 4 * Weights::kTileCodes + (first % 4 * 32 + lane) * 16;
    scales_ = Config::kRowBytes + Config::kCodeBytes + first / 4 * Config::kScaleTile +
              (first % 4 * 8 + lane / 4) * (Weights::kTileScales / 32);
  }

  // Begin copying the operands of a tile, for one of its segments.
  __device__ void Begin(const Tile& tile, const Segment& segment) {
    const GemmSm80& gemm = arguments_.gemm;
    const PackedCodesSm90& packed = arguments_.packed;
    const int thread = ThreadAnew();
    const bool gated = IsGated(gemm.epilogue.activation);
    const int half = gated ? Config::kN / 128 : Config::kN / 64;
    const int behind = gated ? static_cast<int>(gemm.n / 128) - half : 0;
    const int columns = (tile.n_count + 63) / 64;  // tiles of the layout, of a half

    const int64_t row = segment.x_start + (tile.row0 - segment.y_start) + thread / 8;
    from_row_ = static_cast<const char*>(gemm.a) + (row * gemm.a_line + thread % 8 * 8) * 2;
    wanted_ = 0;
#pragma unroll
    for (int i = 0; i < Config::kRowPieces; ++i) {
      if (thread / 8 + i * (kThreads / 8) < tile.m_hi) wanted_ |= 1u << i;
    }

    const int64_t first = static_cast<int64_t>(segment.weight) * packed.column_tiles + tile.n0 / 64;
    const int code_tile = thread / Config::kTilePieces;
    from_code_ = static_cast<const char*>(packed.codes) +
                 (first + code_tile) * packed.k_tiles * Weights::kTileCodes +
                 thread % Config::kTilePieces * 16;
#pragma unroll
    for (int i = 0; i < Config::kCodePieces; ++i) {
      const int at = i * kThreads / Config::kTilePieces + code_tile;
      if ((at < half ? at : at - half) < columns) wanted_ |= 1u << (Config::kRowPieces + i);
    }

    const int pieces = arguments_.scale_bytes / 16, scale_tile = thread / pieces;
    const int scales_each = Weights::TileScales(packed);
    const int64_t tiles = (first + scale_tile + (scale_tile < half ? 0 : behind)) * packed.k_tiles;
    from_scale_ =
        static_cast<const char*>(arguments_.scales) + tiles * scales_each + thread % pieces * 16;
    const bool exists = scale_tile < Config::kN / 64 &&
                        (scale_tile < half ? scale_tile : scale_tile - half) < columns;
    if (exists) wanted_ |= 1u << (kPieces - 1);
    to_scale_ = Config::kRowBytes + Config::kCodeBytes + scale_tile * Config::kScaleTile +
                thread % pieces * 16;

    left_ = static_cast<int>(gemm.k);
    write_ = ring_;
#pragma unroll 1
    for (int slice = 0; slice < kStages - 1; ++slice) {
      CopyPieces<0, kPieces>();
      EndSlice();
    }
  }

  __device__ void Clear() {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
#pragma unroll
        for (int v = 0; v < 4; ++v) sums_[i][j][v] = 0.0f;
      }
    }
  }

  // Add the products of the segment whose copies have begun, for the first `rows` rows of the tile.
  __device__ void Add(int rows) {
    if (rows > 3 * Config::kRowsApart) {
      AddRows<4>();
    } else if (rows > 2 * Config::kRowsApart) {
      AddRows<3>();
    } else if (rows > Config::kRowsApart) {
      AddRows<2>();
    } else {
      AddRows<1>();
    }
  }

  // Multiply the sums by what decoding leaves out, and by a global scale.
  __device__ void Scale(const Tile& tile) {
    const GlobalScale& global = arguments_.global_scale;
    if (Weights::kFactor == 1.0f && global.data == nullptr) return;
    if (tile.weight < 0) return;
    const bool gated = IsGated(arguments_.gemm.epilogue.activation);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float factor = Weights::kFactor;
        if (global.data != nullptr) {
          const int column =
              (FirstAtom() + (gated ? i % 2 : i)) * 16 + 8 * h + threadIdx.x % 32 / 4;
          const int64_t n = tile.n0 + column + (gated && i >= 2 ? arguments_.gemm.n / 2 : 0);
          factor *= column < tile.n_count ? global.At(tile.weight, n) : 0.0f;
        }
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          sums_[i][j][2 * h] *= factor;
          sums_[i][j][2 * h + 1] *= factor;
        }
      }
    }
  }

  // [atom of 16 columns][atom of 8 rows][as mma.sync has them].
  __device__ const float (&Sums() const)[4][8][4] { return sums_; }

 private:
  // Where scales may be two words for a row, all comes for 32 k at a time: registers are few.
  static constexpr bool kByHalves = Codes::kMostScaleWords == 2;
  static constexpr int kScaleWords = Weights::kTileScales / 128;  // of two rows
  static_assert(Codes::kMostScaleWords <= 2);
  // A thread's part of 64 k of 16 columns.
  struct Words {
    uint32_t codes[kByHalves ? 2 : 4], scales[1][2];
  };
  // All that is under way: x of 16 k and of the next 16, codes, and values of 16 columns and of the
  // next 16.
  struct Operands {
    uint32_t x[2][4][4];
    Words words[4];
    uint32_t a[2][4];
  };

  // ... 16 kAtoms rows of this warp.
  template <int kAtoms>
  __device__ void AddRows() {
    Place read = ring_;
    Operands of;
    Meet();
#pragma unroll
    for (int i = 0; i < kAtoms; ++i) LoadRows(read, i, 0, of.x[0][i]);
#pragma unroll
    for (int i = 0; i < 4; ++i) LoadWords(read, i, of.words[i]);
    Decode(of, 0, 0);
    // `left_` is of the slice that is copied next. The loop begins where warps have met, because
    // the compiler would move products from behind that to before it, and have none left to hide
    // the loads.
    ThreeSteps<kAtoms>(read, of);
#pragma unroll 1
    while (left_ > (1 - kStages) * kK) {
      read = Next(read);
      Step<kAtoms, 3, true>(read, of);
      ThreeSteps<kAtoms>(read, of);
    }
    Step<kAtoms, 3, false>(read, of);
  }

  // The first 48 k of a slice, of which the first 16 have been loaded. Another slice is copied.
  template <int kAtoms>
  __device__ void ThreeSteps(Place read, Operands& of) {
    Step<kAtoms, 0, true>(read, of);
    Step<kAtoms, 1, true>(read, of);
    Step<kAtoms, 2, true>(read, of);
    EndSlice();
    Meet();
  }

  // Multiply 16 k, while the 16 k after those are loaded, from `next`, and decoded.
  template <int kAtoms, int kStep, bool kMore>
  __device__ void Step(Place next, Operands& of) {
    constexpr int kNext = (kStep + 1) % 4;
    __syncwarp();  // so that the compiler does not load what later steps need, too
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (kMore && i < 2) {
#pragma unroll
        for (int j = 2 * i; j < 2 * i + 2; ++j) {
          if (j < kAtoms) LoadRows(next, j, kNext, of.x[kNext % 2][j]);
        }
      }
      // Nobody needs the words of the slice before any more.
      if (kMore && kStep == 3) LoadWords(next, i, of.words[i]);
      if (kByHalves && kStep == 1) LoadWords(next, i, of.words[i], 1);
      if (i < 3) {
        Decode(of, kStep, i + 1);
      } else if (kMore) {
        Decode(of, kNext, 0);
      }
      constexpr int kEach = (kPieces + 3) / 4;
      if (kStep < 2 && i == 2) CopyPieces<2 * kStep * kEach, kEach>();
      if (kStep < 2 && i == 3) CopyPieces<(2 * kStep + 1) * kEach, kEach>();
#pragma unroll
      for (int jj = 0; jj < 2 * kAtoms; ++jj) {
        const int j = i % 2 == 0 ? jj : 2 * kAtoms - 1 - jj;
        const uint32_t (&x)[4] = of.x[kStep % 2][j / 2];
        MultiplyAtoms<Config::kX>(of.a[i % 2], x[j % 2 * 2], x[j % 2 * 2 + 1], sums_[i][j]);
      }
    }
  }

  __device__ static void Forget(uint32_t& word) {
#ifdef __CUDA_ARCH__
    asm volatile("" : "+r"(word));
#endif
  }

  __device__ void Decode(Operands& of, int step, int i) const {
    Words& words = of.words[i];
    uint32_t codes[4], scales[Codes::kMostScaleWords][2];
#pragma unroll
    for (int j = 0; j < 4; ++j) codes[j] = words.codes[kByHalves ? j % 2 : j];
    // Scales are expanded anew for each step: the next one keeps none of it.
    Forget(words.scales[0][0]);
    Forget(words.scales[0][1]);
#pragma unroll
    for (int j = 0; j < Codes::kMostScaleWords; ++j) {
      scales[j][0] = words.scales[0][0];
      scales[j][1] = words.scales[0][1];
    }
    if constexpr (Weights::kHalf) {
      Codes::template DecodeHalf<false, ScaleRange::kAny>(codes, step, scales, of.a[i % 2]);
    } else {
      Codes::template Decode<false, ScaleRange::kAny>(codes, step, scales, of.a[i % 2]);
    }
  }

  // 16 rows, and the k from 16 step on.
  __device__ void LoadRows(Place slice, int i, int step, uint32_t (&to)[4]) const {
    LoadMatricesAt(Flipped(slice + rows_, 32 * step) + i * Config::kRowsApart * 128, to);
  }

  // The first of a warp's atoms of 16 columns.
  __device__ int FirstAtom() const {
    const int column = ThreadAnew() / 32 % Config::kWarpsN;
    return column * (IsGated(arguments_.gemm.epilogue.activation) ? 2 : 4);
  }

  // Codes and scales of 16 columns of a slice.
  __device__ void LoadWords(Place slice, int i, Words& to, int half = 0) const {
    Place from = slice + codes_;
    if (i >= 2) from += arguments_.second_codes;
    LoadPlace<kByHalves ? 2 : 4>(from + i % 2 * (Weights::kTileCodes / 4) + 8 * half, to.codes);
    LoadScales(slice, i, half, to);
  }

  // ... their scales, of the first or second 32 k where these differ.
  __device__ void LoadScales(Place slice, int i, int half, Words& to) const {
    Place place = slice + scales_;
    if (i >= 2) place += arguments_.second_scales;
    place += i % 2 * (Weights::kTileScales / 4);
    if (kByHalves && half == 1) place += arguments_.scale_bytes - Weights::kTileScales;
    uint32_t words[kScaleWords];
    LoadPlace<kScaleWords>(place, words);
    if constexpr (kByHalves) {
      to.scales[0][0] = words[0], to.scales[0][1] = words[1];
    } else {
      Weights::template LoadScalesOf<false, ScaleRange::kAny>(reinterpret_cast<const char*>(words),
                                                              Weights::kTileScales, to.scales);
    }
  }

  // The slice that is read next has arrived, and nobody reads the one that is filled next.
  __device__ static void Meet() {
    WaitForCopies<kStages - 2>();
    __syncthreads();
  }

  __device__ Place Next(Place slice) const {
    slice += Config::kStageBytes;
    return slice == ring_ + kStages * Config::kStageBytes ? ring_ : slice;
  }

  // Start copying piece kI, one after the other, of the slice that is filled.
  template <int kI>
  __device__ void CopyPieceOf() {
    if constexpr (kI < Config::kRowPieces) {
      const int thread = ThreadAnew();
      const int to = thread / 8 * 128 + (thread % 8 ^ thread / 8 % 8) * 16;
      CopyIf<kI>(wanted_, write_ + (to + kI * (kThreads / 8 * 128)), from_row_);
      Advance(from_row_,
              kI == Config::kRowPieces - 1 ? arguments_.row_slice : arguments_.row_piece);
    } else if constexpr (kI < kPieces - 1) {
      constexpr int kPiece = kI - Config::kRowPieces;
      const int to = Config::kRowBytes + ThreadAnew() * 16 + kPiece * kThreads * 16;
      CopyIf<kI>(wanted_, write_ + to, from_code_);
      Advance(from_code_, arguments_.code_piece[kPiece]);
    } else if constexpr (kI == kPieces - 1) {
      CopyIf<kI>(wanted_, write_ + to_scale_, from_scale_);
      // Two tiles may share scales.
      const bool odd = (static_cast<int>(arguments_.gemm.k) - left_) / kK % 2 != 0;
      Advance(from_scale_, odd ? arguments_.odd_scales : arguments_.even_scales);
    }
  }

  // kCount pieces from kFirst on.
  template <int kFirst, int kCount>
  __device__ void CopyPieces() {
    if constexpr (kCount > 0) {
      CopyPieceOf<kFirst>();
      CopyPieces<kFirst + 1, kCount - 1>();
    }
  }

  __device__ void EndSlice() {
    EndCopies();
    left_ -= kK;
    if (left_ <= 0) wanted_ = 0;
    write_ = Next(write_);
  }

  const PackedSm80& arguments_;
  const Place ring_;
  int rows_;            // bytes of the first piece of x that this lane names, in a slice
  int codes_, scales_;  // ... of what decodes its first 16 columns
  const char *from_row_, *from_code_, *from_scale_;
  int to_scale_;     // bytes from the beginning of a slice
  uint32_t wanted_;  // which pieces
  int left_;
  Place write_;
  float sums_[4][8][4];
};

template <typename Config, typename Results>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    PackedSm80Kernel(const __grid_constant__ PackedSm80 arguments) {
  auto& shared = *reinterpret_cast<typename Config::SharedMemory*>(SharedBytes());
  const GemmSm80& gemm = arguments.gemm;
  typename Config::Work work(gemm, shared.schedule);
  PackedPipeline<Config> pipeline(arguments, shared.ring);
  Segment segment;
  bool at = true, have = false, next = true, some = false;  // some: copies of the tile have begun
  // A round adds up and stores this tile, and in between begins the copies of the one after it. The
  // first one does that alone.
#pragma unroll 1
  do {
    const Tile& tile = shared.tiles[at];
    next = work.Next(shared.tiles[!at]);
    if (have) {
      pipeline.Clear();
      if (some) pipeline.Add(tile.m_hi);
      pipeline.Scale(tile);
    }
    at = !at;
    int index = -1;
    some = next && work.NextSegment(shared.tiles[at], index, segment);
    if (some) pipeline.Begin(shared.tiles[at], segment);
    if (have) Results::Store(gemm, tile, 0, pipeline.Sums(), shared.Results());
    have = next;
  } while (next);
}

}  // namespace jgg::device
