// Products of low rank, one for each row: ../lora.h. What bounds them is memory, so factors go from
// there to registers, and each warp has some steps of them under way.
//
// A block has `span` rows, which are in the order of their pairs. It multiplies *runs*: rows of one
// pair. A run begins where the pair is another than before, and at multiples of 16 if the row 16
// before has the same pair. So it has up to 31 rows, and up to 16 are never two. The block in which
// a run begins has all of it. Nothing is planned: whether a run begins follows from two rows
// before, so the time does not depend on how many pairs there are.
//
// Rows are the M side of `mma.sync`, and lines of a factor its N side. Which k an element of the
// instruction is does not matter, as long as both operands agree. Nor does it matter which line of
// b, as long as the result agrees. Lane 4 * g + q has rows g and g + 8 of a run, and
//   in a step of x and a (32 k) the eight k from 8 * q, of lines 8 * i + g of a;
//   in a step of b (32 lines) rank / 4 columns from q * rank / 4, of lines
//   8 * (g / 2) + 2 * j + g % 2. So its results are the eight from 8 * q, 16 bytes.
// With kTurned factors are stored the other way, as the gradient of x needs them: a as b is
// otherwise, and b as a. Loads are the same, and `movmatrix` turns 8 x 8 elements.
// Warps share out k, meet to add up h, and share out the lines of b. They ask for their first lines
// of b before they meet.
#pragma once

#include <cstdint>
#include <type_traits>

#include "grouped_mm/lora.h"
#include "quantized/device/instructions.cuh"
#include "quantized/device/warp_sm90.cuh"

namespace jgg::device {

constexpr int kLoraWarps = 8, kLoraThreads = 32 * kLoraWarps;
constexpr int kLoraRows = 16, kLoraStep = 32;
constexpr int kLoraMostSpan = 16;

// Words of 4 bytes, of which up to 4 are read at a time; zeros where they are not `there`.
// Neighbours of 16 bytes are other warps': L2 fetches the whole line.
template <int kWords>
__device__ void LoadWords(const char* from, bool there, uint32_t (&to)[kWords]) {
#pragma unroll
  for (int i = 0; i < kWords; ++i) to[i] = 0;
  if (!there) return;
  if constexpr (kWords == 1) {
    to[0] = __ldg(reinterpret_cast<const uint32_t*>(from));
  } else if constexpr (kWords == 2) {
#ifdef __CUDA_ARCH__
    asm volatile("ld.global.nc.L2::128B.v2.u32 {%0, %1}, [%2];"
                 : "=r"(to[0]), "=r"(to[1])
                 : "l"(from));
#else
    const uint2 line = __ldg(reinterpret_cast<const uint2*>(from));
    to[0] = line.x, to[1] = line.y;
#endif
  } else {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
#ifdef __CUDA_ARCH__
      asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(to[i]), "=r"(to[i + 1]), "=r"(to[i + 2]), "=r"(to[i + 3])
                   : "l"(from + 4 * i));
#else
      const uint4 line = __ldg(reinterpret_cast<const uint4*>(from + 4 * i));
      to[i] = line.x, to[i + 1] = line.y, to[i + 2] = line.z, to[i + 3] = line.w;
#endif
    }
  }
}

// Rows of a run that a block multiplies at a time, as a lane has them: its two of 16, or -1.
struct LoraRun {
  int pair;
  int64_t rows[2];
};

// 16 bytes of the result, which may be written later.
__device__ inline void LoadExisting(const char* from, bool there, uint32_t (&to)[4]) {
  const uint4 line = there ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
  to[0] = line.x, to[1] = line.y, to[2] = line.z, to[3] = line.w;
}

// Two shapes of the kernel.
enum class LoraKind {
  kShort,  // a processor has two blocks
  kDeep    // few pairs: it has one, of which more steps are under way
};

// Steps of which a warp has the operands: of x and a, and of b.
constexpr int StepsOfA(int rank, LoraKind kind) {
  if (kind == LoraKind::kDeep) return rank <= 16 ? 8 : rank == 32 ? 5 : 3;
  return rank <= 16 ? 3 : rank == 32 ? 2 : 1;
}
constexpr int StepsOfB(int rank, LoraKind kind) {
  if (kind == LoraKind::kDeep) return rank <= 16 ? 6 : rank == 32 ? 4 : 3;
  return rank == 8 ? 3 : rank == 16 ? 2 : 1;
}

// A warp's step of a factor whose lines are of k, or of n: (rank, length).
template <int kRank>
struct LoraLong {
  static constexpr int kTiles = kRank / 8;
  uint32_t words[kTiles][4];

  __device__ static const char* Begin(const char* factor, int pair, int length, int lane) {
    const int64_t line = static_cast<int64_t>(pair) * kRank + lane / 4;
    return factor + (line * length + lane % 4 * 8) * 2;
  }
  __device__ void Load(const char* begin, int first, int length, int lane) {
    const bool there = first + lane % 4 * 8 < length;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      LoadWords(begin + (int64_t{8} * tile * length + first) * 2, there, words[tile]);
    }
  }
};

// ... of a factor whose lines are of rank: (length, rank).
template <int kRank>
struct LoraShort {
  static constexpr int kWords = kRank / 8;
  uint32_t words[4][kWords];

  __device__ static int FirstLine(int lane) { return lane / 8 * 8 + lane / 4 % 2; }
  __device__ static const char* Begin(const char* factor, int pair, int length, int lane) {
    const int64_t line = static_cast<int64_t>(pair) * length + FirstLine(lane);
    return factor + (line * kRank + lane % 4 * kRank / 4) * 2;
  }
  __device__ void Load(const char* begin, int first, int length, int lane) {
    const bool there = first + FirstLine(lane) < length;
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
      LoadWords(begin + (first + 2 * tile) * int64_t{kRank * 2}, there, words[tile]);
    }
  }
};

// x @ a^T of a run: the sums over the k of this warp. With kTurned a is (k, rank), and no ^T.
template <DType kX, int kRank, bool kTurned, LoraKind kKind>
struct LoraDown {
  static constexpr int kTiles = kRank / 8, kAhead = StepsOfA(kRank, kKind);
  using Factor = std::conditional_t<kTurned, LoraShort<kRank>, LoraLong<kRank>>;

  const char* a;
  const char* x[2];  // null without a row
  int k, steps, warp, lane;
  Factor of_a[kAhead];
  uint32_t of_x[kAhead][2][4];
  float sums[kTiles][4] = {};

  __device__ LoraDown(const Lora& lora, const LoraRun& run, int warp, int lane)
      : a(Factor::Begin(lora.a, run.pair, lora.k, lane)),
        k(lora.k),
        steps((lora.k + kLoraStep - 1) / kLoraStep),
        warp(warp),
        lane(lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t row = run.rows[i];
      x[i] = row < 0 ? nullptr : lora.x + (row * k + lane % 4 * 8) * 2;
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) Load(i, warp + i * kLoraWarps);
  }

  // Zeros behind the last k: NaN there must meet no other number.
  __device__ void Load(int i, int step) {
    const int first = step * kLoraStep;
    of_a[i].Load(a, first, k, lane);
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      const bool there = x[row] != nullptr && first + lane % 4 * 8 < k;
      LoadWords(x[row] + first * int64_t{2}, there, of_x[i][row]);
    }
  }

  __device__ void Multiply(int i) {
    const auto& words = of_a[i].words;
    const auto& x = of_x[i];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int low = 2 * half, high = low + 1;
      const uint32_t rows[4] = {x[0][low], x[1][low], x[0][high], x[1][high]};
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        uint32_t lines[2];
        if constexpr (kTurned) {
          lines[0] = Turned(words[low][tile]), lines[1] = Turned(words[high][tile]);
        } else {
          lines[0] = words[tile][low], lines[1] = words[tile][high];
        }
        MultiplyWarp<kX>(rows, lines[0], lines[1], sums[tile]);
      }
    }
  }

  // The first of two neighbouring columns of h that this lane's sums of a tile are of.
  __device__ static int Column(int tile, int lane) {
    return kTurned ? lane % 4 * (kRank / 4) + 2 * tile : 8 * tile + lane % 4 * 2;
  }

  __device__ void Run() {
#pragma unroll 1
    for (int first = warp; first < steps; first += kLoraWarps * kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int step = first + i * kLoraWarps;
        if (step >= steps) break;
        Multiply(i);
        const int next = step + kLoraWarps * kAhead;
        if (next < steps) Load(i, next);
      }
    }
  }
};

// existing + h @ b^T of a run: the columns of this warp. With kTurned b is (rank, n), and no ^T.
template <DType kX, int kRank, bool kTurned, LoraKind kKind>
struct LoraUp {
  static constexpr int kWords = kRank / 8, kAhead = StepsOfB(kRank, kKind);
  using Factor = std::conditional_t<kTurned, LoraLong<kRank>, LoraShort<kRank>>;

  const char* b;
  const char* existing;
  char* out;
  int64_t row[2];
  int n, steps, warp, lane;
  Factor of_b[kAhead];
  uint32_t of_existing[kAhead][2][4];

  __device__ LoraUp(const Lora& lora, const LoraRun& run, int warp, int lane)
      : b(Factor::Begin(lora.b, run.pair, lora.n, lane)),
        existing(lora.existing),
        out(lora.out),
        row{run.rows[0], run.rows[1]},
        n(lora.n),
        steps((lora.n + kLoraStep - 1) / kLoraStep),
        warp(warp),
        lane(lane) {
#pragma unroll
    for (int i = 0; i < kAhead; ++i) Load(i, warp + i * kLoraWarps);
  }

  __device__ int FirstColumn(int step) const { return step * kLoraStep + lane % 4 * 8; }
  __device__ int64_t Place(int64_t row, int step) const {
    return (row * n + FirstColumn(step)) * 2;
  }

  __device__ void Load(int i, int step) {
    of_b[i].Load(b, step * kLoraStep, n, lane);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const bool there = existing != nullptr && row[r] >= 0 && FirstColumn(step) < n;
      LoadExisting(existing + (there ? Place(row[r], step) : 0), there, of_existing[i][r]);
    }
  }

  // Which word of a row of h is the lane's word of a tile of ranks.
  __device__ static int WordOfH(int word, int lane) {
    return kTurned ? 4 * word + lane % 4 : lane % 4 * kWords + word;
  }

  // Lines of b for the lane's column of a tile, in the order of h.
  __device__ uint32_t Word(int i, int tile, int word) const {
    if constexpr (kTurned) {
      return Turned(of_b[i].words[word][tile]);
    } else {
      return of_b[i].words[tile][word];
    }
  }

  using OfH = uint32_t[2][kWords];  // the lane's words of its rows of h

  __device__ void Store(int i, int step, const OfH& h) {
    float sums[4][4];
#pragma unroll
    for (int tile = 0; tile < 4; ++tile) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sums[tile][2 * r] = Half<kX>(of_existing[i][r][tile], 0);
        sums[tile][2 * r + 1] = Half<kX>(of_existing[i][r][tile], 1);
      }
      if constexpr (kWords == 1) {
        const uint32_t rows[4] = {h[0][0], h[1][0], 0, 0};
        MultiplyWarp<kX>(rows, Word(i, tile, 0), 0, sums[tile]);
      } else {
#pragma unroll
        for (int w = 0; w < kWords; w += 2) {
          const uint32_t rows[4] = {h[0][w], h[1][w], h[0][w + 1], h[1][w + 1]};
          MultiplyWarp<kX>(rows, Word(i, tile, w), Word(i, tile, w + 1), sums[tile]);
        }
      }
    }
    if (FirstColumn(step) >= n) return;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (row[r] < 0) continue;
      *reinterpret_cast<uint4*>(out + Place(row[r], step)) =
          make_uint4(Round2<kX>(sums[0][2 * r], sums[0][2 * r + 1]),
                     Round2<kX>(sums[1][2 * r], sums[1][2 * r + 1]),
                     Round2<kX>(sums[2][2 * r], sums[2][2 * r + 1]),
                     Round2<kX>(sums[3][2 * r], sums[3][2 * r + 1]));
    }
  }

  __device__ void Run(const OfH& h) {
#pragma unroll 1
    for (int first = warp; first < steps; first += kLoraWarps * kAhead) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int step = first + i * kLoraWarps;
        if (step >= steps) break;
        Store(i, step, h);
        const int next = step + kLoraWarps * kAhead;
        if (next < steps) Load(i, next);
      }
    }
  }
};

// Rows of no pair: zeros, or what is there.
__device__ inline void StoreNothing(const Lora& lora, const int64_t* rows, int count) {
  if (lora.h != nullptr) {
    for (int i = threadIdx.x; i < count * lora.rank / 2; i += kLoraThreads) {
      const int64_t row = rows[i / (lora.rank / 2)];
      reinterpret_cast<uint32_t*>(lora.h)[row * (lora.rank / 2) + i % (lora.rank / 2)] = 0;
    }
  }
  if (lora.existing == lora.out) return;
  for (int row = 0; row < count; ++row) {
    for (int i = threadIdx.x; i < lora.n / 8; i += kLoraThreads) {
      const int64_t at = (rows[row] * lora.n + int64_t{8} * i) * 2;
      uint32_t words[4];
      LoadExisting(lora.existing + at, lora.existing != nullptr, words);
      *reinterpret_cast<uint4*>(lora.out + at) = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
}

// A run of a block: rows of one pair, whose products and results are its own.
template <DType kX, int kRank, bool kTurned, LoraKind kKind>
__device__ void MultiplyRun(const Lora& lora, int pair, const int64_t* rows, int count,
                            float (&partial)[kLoraWarps][kLoraRows][kRank],
                            uint32_t (&h)[kLoraRows][kRank / 2 + 4]) {
  using Down = LoraDown<kX, kRank, kTurned, kKind>;
  using Up = LoraUp<kX, kRank, kTurned, kKind>;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4;
  LoraRun run{pair, {}};
#pragma unroll
  for (int i = 0; i < 2; ++i) run.rows[i] = g + 8 * i < count ? rows[g + 8 * i] : -1;
  Down down(lora, run, warp, lane);
  down.Run();
  Up up(lora, run, warp, lane);
#pragma unroll
  for (int tile = 0; tile < kRank / 8; ++tile) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (8 * i >= count) break;
      float* const to = &partial[warp][g + 8 * i][Down::Column(tile, lane)];
      to[0] = down.sums[tile][2 * i];
      to[1] = down.sums[tile][2 * i + 1];
    }
  }
  __syncthreads();
  for (int i = thread; i < count * kRank / 2; i += kLoraThreads) {
    const int of = i / (kRank / 2), column = i % (kRank / 2) * 2;
    const float scale =
        lora.row_scale == nullptr ? lora.scale : lora.scale * lora.row_scale[rows[of]];
    float low = 0.0f, high = 0.0f;
#pragma unroll
    for (int w = 0; w < kLoraWarps; ++w) {
      low += partial[w][of][column];
      high += partial[w][of][column + 1];
    }
    const uint32_t both = Round2<kX>(scale * low, scale * high);
    h[of][column / 2] = both;
    if (lora.h != nullptr) {
      reinterpret_cast<uint32_t*>(lora.h)[(rows[of] * kRank + column) / 2] = both;
    }
  }
  __syncthreads();
  typename Up::OfH of_lane;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int w = 0; w < kRank / 8; ++w) {
      of_lane[i][w] = g + 8 * i < count ? h[g + 8 * i][Up::WordOfH(w, lane)] : 0;
    }
  }
  up.Run(of_lane);
}

template <DType kX, int kRank, bool kTurned, LoraKind kKind>
__global__ void __launch_bounds__(kLoraThreads, kKind == LoraKind::kDeep ? 1 : 2)
    LoraSm80Kernel(const __grid_constant__ Lora lora) {
  constexpr int kAround = kLoraRows + kLoraMostSpan + 2 * kLoraRows;  // rows that a block looks at
  __shared__ int pairs[kAround];
  __shared__ int64_t rows[kAround];
  __shared__ float partial[kLoraWarps][kLoraRows][kRank];
  __shared__ uint32_t h[kLoraRows][kRank / 2 + 4];
  const int first = static_cast<int>(blockIdx.x) * lora.span;
  const int last = min(first + lora.span, lora.rows);
  // From 16 before the first to the last that may be of the last run.
  if (threadIdx.x < kAround) {
    const int row = first - kLoraRows + static_cast<int>(threadIdx.x);
    int pair = -2;
    if (row >= 0 && row < lora.rows) {
      pair = lora.pair_of[row];
      if (pair < 0 || pair >= lora.pairs) pair = -1;
      rows[threadIdx.x] = lora.row_of == nullptr ? row : lora.row_of[row];
    }
    pairs[threadIdx.x] = pair;
  }
  __syncthreads();
  const auto begins = [&](int row) {
    const int* const own = pairs + (row - first) + kLoraRows;
    return own[-1] != own[0] || (row % kLoraRows == 0 && own[-kLoraRows] == own[0]);
  };
#pragma unroll 1
  for (int row = first; row < last; ++row) {
    if (!begins(row)) continue;
    int count = 1;
    while (row + count < lora.rows && !begins(row + count)) ++count;
    const int place = row - first + kLoraRows, pair = pairs[place];
    if (pair < 0) {
      StoreNothing(lora, rows + place, count);
      continue;
    }
#pragma unroll 1
    for (int done = 0; done < count; done += kLoraRows) {
      MultiplyRun<kX, kRank, kTurned, kKind>(lora, pair, rows + place + done,
                                             min(count - done, kLoraRows), partial, h);
    }
  }
}

}  // namespace jgg::device
