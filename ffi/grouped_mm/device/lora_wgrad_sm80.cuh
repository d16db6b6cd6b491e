// Gradients of the factors of products of low rank: ../lora_wgrad.h. What bounds them is memory:
// rows are read once by list, results written once.
//
// The first kernel searches where the rows of each pair begin. In the second one a block has a pair
// and a part of the columns of one product, of which its warps take tiles of 64. Warps meet
// nowhere. A warp copies rows to a ring in shared memory, a step of 16 rows after the other: of its
// tile, then of its next tile. So copies are under way while it stores a result.
//
// The rows are the k of `mma.sync`. Wide and narrow operands have them as lines, so ldmatrix turns
// both. Of the result (rank, length) the narrow operand is the M side, of (length, rank) the wide
// one. Lanes of a quad exchange words, so that each stores 16 bytes.
#pragma once

#include <cstdint>
#include <type_traits>

#include "grouped_mm/lora_wgrad.h"
#include "quantized/device/async_sm80.cuh"
#include "quantized/device/instructions.cuh"

namespace jgg::device {

constexpr int kLoraWgradWarps = 4, kLoraWgradThreads = 32 * kLoraWgradWarps;
constexpr int kLoraWgradColumns = 64, kLoraWgradRows = 16;

constexpr int LoraWgradStages(int rank) { return rank <= 32 ? 4 : 3; }
// Blocks of a multiprocessor, which bound the registers of a thread.
constexpr int LoraWgradBlocks(int rank) { return rank <= 16 ? 5 : rank == 32 ? 3 : 2; }

// Where the rows of each pair begin, and the end.
__global__ void __launch_bounds__(kLoraWgradThreads)
    LoraBeginsKernel(const __grid_constant__ LoraWgrad lora) {
  const int pair = static_cast<int>(blockIdx.x * kLoraWgradThreads + threadIdx.x);
  if (pair > lora.pairs) return;
  int first = 0, last = lora.rows;  // the first row of no lower pair is among them
  while (first < last) {
    const int middle = first + (last - first) / 2;
    if (__ldg(lora.pair_of + middle) < pair) {
      first = middle + 1;
    } else {
      last = middle;
    }
  }
  lora.begins[pair] = first;
}

// Exchanges words in a quad. Each of its four lanes has one word of each of four pieces of 16
// bytes. Lane q gets piece q.
__device__ inline uint4 PieceOfQuad(const uint32_t (&words)[4], int lane) {
  const bool odd = lane & 1, high = lane & 2;
  uint32_t a[4];
#pragma unroll
  for (int m = 0; m < 4; m += 2) {
    const uint32_t other = __shfl_xor_sync(0xffffffffu, odd ? words[m] : words[m + 1], 1);
    a[m] = odd ? other : words[m];
    a[m + 1] = odd ? words[m + 1] : other;
  }
  const uint32_t low = __shfl_xor_sync(0xffffffffu, high ? a[0] : a[2], 2);
  const uint32_t next = __shfl_xor_sync(0xffffffffu, high ? a[1] : a[3], 2);
  return high ? make_uint4(low, next, a[2], a[3]) : make_uint4(a[0], a[1], low, next);
}

// A warp's step of 16 rows in shared memory. Pieces of 16 bytes are swapped, so that those of eight
// rows lie in different banks.
template <int kRank>
struct LoraWgradStep {
  static constexpr int kPieces = kRank / 8;
  alignas(128) char wide[kLoraWgradRows * kLoraWgradColumns * 2];
  alignas(128) char narrow[kLoraWgradRows * kRank * 2];

  __device__ Place Wide(int row, int piece) const {
    return PlaceOf(wide) + row * 128 + (piece ^ row % 8) * 16;
  }
  __device__ Place Narrow(int row, int piece) const {
    return PlaceOf(narrow) + (row * kPieces + (piece ^ row / (8 / kPieces) % kPieces)) * 16;
  }
};

// Product kWhich of a pair: the tiles of a warp.
template <DType kX, int kRank, int kWhich>
struct LoraWgradProduct {
  static constexpr int kStages = LoraWgradStages(kRank), kPieces = kRank / 8;
  static constexpr bool kLong = kWhich == 0;
  // Tiles of 16 of the M side, and of 8 of the N side.
  static constexpr int kM = kLong ? (kRank + 15) / 16 : kLoraWgradColumns / 16;
  static constexpr int kN = kLong ? kLoraWgradColumns / 8 : kRank / 8;
  using Step = LoraWgradStep<kRank>;

  const LoraWgrad& lora;
  Step* const steps;
  const int pair, lane, apart, tiles;
  int begin, end, chunks;
  int load_tile, load_chunk = 0;
  int row = -1;  // that of this lane in the chunk that is loaded, or -1
  float sums[kM][kN][4];

  __device__ LoraWgradProduct(const LoraWgrad& lora, Step* steps, int pair, int first, int apart,
                              int lane)
      : lora(lora),
        steps(steps),
        pair(pair),
        lane(lane),
        apart(apart),
        tiles((lora.length[kWhich] + kLoraWgradColumns - 1) / kLoraWgradColumns),
        begin(lora.begins[pair]),
        end(lora.begins[pair + 1]),
        chunks((end - begin + kLoraWgradRows - 1) / kLoraWgradRows),
        load_tile(first) {}

  __device__ void FindRow() {
    const int place = begin + load_chunk * kLoraWgradRows + lane % kLoraWgradRows;
    row = place < end ? __ldg(lora.row_of + place) : -1;
  }

  // Zeros where there is no row, and behind the last column.
  __device__ void Load(Step& to) {
    if (load_tile < tiles) {
      if (chunks > 1) FindRow();
      const int length = lora.length[kWhich];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int line = 4 * i + lane / 8, column = load_tile * kLoraWgradColumns + lane % 8 * 8;
        const int64_t of = __shfl_sync(0xffffffffu, row, line);
        const bool there = of >= 0 && column < length;
        const char* const from =
            lora.wide[kWhich] + (there ? (of * length + column) * int64_t{2} : 0);
        CopyAsync(to.Wide(line, lane % 8), from, true, !there);
      }
#pragma unroll
      for (int i = 0; i < 16 * kPieces; i += 32) {
        const int line = (i + lane) / kPieces % 16, piece = (i + lane) % kPieces;
        const int64_t of = __shfl_sync(0xffffffffu, row, line);
        const char* const from =
            lora.narrow[kWhich] + (of >= 0 ? (of * kRank + 8 * piece) * int64_t{2} : 0);
        CopyAsync(to.Narrow(line, piece), from, kPieces > 1 || lane < 16, of < 0);
      }
      if (++load_chunk == chunks) load_chunk = 0, load_tile += apart;
    }
    EndCopies();
  }

  __device__ void Multiply(Step& step) {
    // Lane l names line l % 8 of matrix l / 8. Matrices are rows 0 to 7, then 8 to 15, of a piece,
    // and the same of the next piece.
    const int line = lane / 8 % 2 * 8 + lane % 8, second = lane / 16;
    uint32_t narrow[kPieces < 2 ? 2 : kPieces][2] = {};
#pragma unroll
    for (int i = 0; i < kPieces; i += 2) {
      uint32_t words[4];
      LoadMatrices<true>(step.Narrow(line, kPieces == 1 ? 0 : i + second), words);
      narrow[i][0] = words[0], narrow[i][1] = words[1];
      if constexpr (kPieces > 1) narrow[i + 1][0] = words[2], narrow[i + 1][1] = words[3];
    }
#pragma unroll
    for (int i = 0; i < kLoraWgradColumns / 16; ++i) {
      uint32_t wide[4];
      LoadMatrices<true>(step.Wide(line, 2 * i + second), wide);
      if constexpr (kLong) {
#pragma unroll
        for (int m = 0; m < kM; ++m) {
          const uint32_t ranks[4] = {narrow[2 * m][0], narrow[2 * m + 1][0], narrow[2 * m][1],
                                     narrow[2 * m + 1][1]};
          MultiplyAtoms<kX>(ranks, wide[0], wide[1], sums[m][2 * i]);
          MultiplyAtoms<kX>(ranks, wide[2], wide[3], sums[m][2 * i + 1]);
        }
      } else {
        const uint32_t columns[4] = {wide[0], wide[2], wide[1], wide[3]};
#pragma unroll
        for (int n = 0; n < kN; ++n) {
          MultiplyAtoms<kX>(columns, narrow[n][0], narrow[n][1], sums[i][n]);
        }
      }
    }
  }

  __device__ uint32_t Word(int m, int n, int half) const {
    return Round2<kX>(sums[m][n][2 * half], sums[m][n][2 * half + 1]);
  }

  __device__ void Store(int tile) const {
    const int length = lora.length[kWhich];
    int g = lane / 4, q = lane % 4;
#ifdef __CUDA_ARCH__
    asm volatile("" : "+r"(g), "+r"(q));  // places follow from these, not kept while multiplying
#endif
    const int64_t first = tile * kLoraWgradColumns;
    if constexpr (kLong) {
#pragma unroll
      for (int m = 0; m < kM; ++m) {
#pragma unroll
        for (int half = 0; half < (kRank == 8 ? 1 : 2); ++half) {
#pragma unroll
          for (int n = 0; n < kN; n += 4) {
            const uint32_t words[4] = {Word(m, n, half), Word(m, n + 1, half), Word(m, n + 2, half),
                                       Word(m, n + 3, half)};
            const uint4 piece = PieceOfQuad(words, lane);
            const int64_t line = int64_t{pair} * kRank + 16 * m + 8 * half + g;
            const int64_t column = first + 8 * (n + q);
            if (column >= length) continue;
            *reinterpret_cast<uint4*>(lora.out[kWhich] + (line * length + column) * 2) = piece;
          }
        }
      }
    } else {
      // Pieces of a lane's columns: those of the ranks of a column, of columns g and g + 8 of a
      // tile of the M side, of all tiles.
#pragma unroll
      for (int i = 0; i < 2 * kM * kN; i += 4) {
        uint32_t words[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          words[j] = Word((i + j) / (2 * kN), (i + j) % kN, (i + j) / kN % 2);
        }
        const uint4 piece = PieceOfQuad(words, lane);
        const int64_t column = first + (i + q) / kN * 8 + g;
        if (column >= length) continue;
        const int64_t at = (pair * int64_t{length} + column) * kRank + (i + q) % kN * 8;
        *reinterpret_cast<uint4*>(lora.out[kWhich] + at * 2) = piece;
      }
    }
  }

  __device__ void Clear() {
#pragma unroll
    for (int m = 0; m < kM; ++m) {
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[m][n][i] = 0.0f;
      }
    }
  }

  __device__ void Run() {
    const int first = load_tile;
    if (chunks > 0) {
      FindRow();
#pragma unroll
      for (int i = 0; i < kStages - 1; ++i) Load(steps[i]);
    }
    int stage = 0;
#pragma unroll 1
    for (int tile = first; tile < tiles; tile += apart) {
      Clear();
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; ++chunk) {
        WaitForCopies<kStages - 2>();
        __syncwarp();
        // The step before this one, which nobody reads any more, is the next to be loaded.
        Load(steps[stage == 0 ? kStages - 1 : stage - 1]);
        Multiply(steps[stage]);
        stage = stage == kStages - 1 ? 0 : stage + 1;
      }
      Store(tile);
    }
  }
};

template <DType kX, int kRank>
__global__ void __launch_bounds__(kLoraWgradThreads, LoraWgradBlocks(kRank))
    LoraWgradSm80Kernel(const __grid_constant__ LoraWgrad lora) {
  __shared__ LoraWgradStep<kRank> steps[kLoraWgradWarps][LoraWgradStages(kRank)];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int pair = static_cast<int>(blockIdx.x), part = static_cast<int>(blockIdx.y);
  const auto run = [&](auto which, int part) {
    constexpr int kWhich = decltype(which)::value;
    LoraWgradProduct<kX, kRank, kWhich> product(lora, steps[warp], pair,
                                                part * kLoraWgradWarps + warp,
                                                lora.parts[kWhich] * kLoraWgradWarps, lane);
    product.Run();
  };
  if (part < lora.parts[0]) {
    run(std::integral_constant<int, 0>{}, part);
  } else {
    run(std::integral_constant<int, 1>{}, part - lora.parts[0]);
  }
}

}  // namespace jgg::device
