// The kernel of gemm_sm80.cuh for large tiles of 16-bit elements whose copies are of 16 bytes. Its
// warps never wait for shared memory: while one multiplies values of 16 k, it loads those of the
// next 16 k into other registers. Its blocks never wait for a tile's first slices: they begin those
// before they store the tile before.
//
// A warp multiplies 64 x 64 and stores its results alone, by way of 2 KB of shared memory of its
// own. A gated activation reads gates and values in turns, 8 columns each, so that both meet there.
#pragma once

#include <cstdint>

#include "grouped_mm/device/compute_sm80.cuh"
#include "grouped_mm/device/instructions_sm80.cuh"
#include "grouped_mm/device/schedule_sm80.cuh"
#include "grouped_mm/device/warp_results_sm80.cuh"

namespace jgg::device {

// Bytes by which a thread's place in an operand moves from one piece to the next, and from a
// slice's last piece to the next slice's first. They are the same for every tile, so they lie in
// constant memory.
struct Strides {
  int64_t piece, slice;
};

// The slices of one tile of an operand on their way to shared memory, in kPieces pieces of 16 bytes
// for each thread. A line is a run of elements that are contiguous in global memory.
template <typename Element, bool kKMajor, int kMn, int kK, int kThreads>
class PipelinedCopy {
 public:
  using Tile = MatrixTile<Element, kKMajor, kMn, kK>;
  static constexpr int kSize = sizeof(Element);
  static constexpr int kPiece = 8;  // elements of 16 bytes
  static constexpr int kPerLine = (kKMajor ? kK : kMn) / kPiece;
  static constexpr int kLines = kThreads / kPerLine;  // from one piece of a thread to the next
  static constexpr int kPieces = (kKMajor ? kMn : kK) / kLines;
  static constexpr int kBytes = kMn * kK * kSize;
  static_assert(kThreads % kPerLine == 0 && kLines % Tile::kPeriod == 0 &&
                kLines * kPieces == (kKMajor ? kMn : kK));

  // In turns: 8 mn, 8 of those `apart` elements on, and so forth.
  static Strides StridesOf(int64_t line, bool turns) {
    const int64_t piece = (kLines >> (kKMajor && turns)) * line * kSize;
    return {piece, kKMajor ? kK * kSize - (kPieces - 1) * piece : piece};
  }

  // Begin a tile. `origin` is its element (0, 0), `line` the elements between lines. Only mn below
  // `count` are wanted.
  __device__ void Begin(const Element* origin, int64_t line, int count, bool turns, int64_t apart) {
    const int thread = ThreadAnew(), in_line = thread % kPerLine * kPiece;
    const int mn = kKMajor ? thread / kPerLine : in_line;
    const int first = turns ? mn / 16 * 8 + mn % 8 : mn;
    k_ = kKMajor ? in_line : thread / kPerLine;
    from_ = reinterpret_cast<const char*>(origin + (turns && (mn & 8) ? apart : 0) +
                                          (kKMajor ? first * line + k_ : first + k_ * line));
    to_ = typename Tile::Layout{}(mn, k_) * kSize;
    wanted_ = 0;
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      if (first + (kKMajor ? i * (kLines >> turns) : 0) < count) wanted_ |= 1u << i;
    }
  }

  // Start copying piece i, one after the other, of a slice that has `left` k, or none, and zeros
  // after those. Rows and columns that the tile does not have keep what is there.
  __device__ void Piece(uint32_t slice, int i, int left, const Strides& strides) {
    typename Tile::Plain plain;
    const int more = (kKMajor ? plain(i * kLines, 0) : plain(0, i * kLines)) * kSize;
    const bool wanted = left > 0 && (wanted_ & (1u << i)) != 0;
    const bool zeros = left - k_ <= (kKMajor ? 0 : i * kLines);
    CopyAsync(slice + to_ + more, from_, wanted, zeros);
    Advance(from_, i == kPieces - 1 ? strides.slice : strides.piece);
  }

 private:
  const char* from_;
  uint32_t wanted_;  // which pieces
  int k_;            // of the first, in a slice
  int to_;           // bytes from the beginning of a slice
};

// A warp's share of one operand: 4 blocks of 16 m (or n), each kApart after the one before.
template <typename Element, bool kIsA, bool kKMajor, int kMn, int kK, int kApart>
class WarpOperand {
  using Tile = MatrixTile<Element, kKMajor, kMn, kK>;

 public:
  // `mn`: where the first block begins.
  __device__ explicit WarpOperand(int mn) {
    // Lanes 8 v to 8 v + 7 name the lines of the v-th 8 x 8 matrix of a 16 x 16 block. Their order
    // is (mn, k) = (0, 0) (8, 0) (0, 8) (8, 8) for A, and (0, 0) (0, 8) (8, 0) (8, 8) for B.
    const int lane = threadIdx.x % 32, v = lane / 8;
    const int high_mn = 8 * (kIsA ? v % 2 : v / 2), high_k = 8 * (kIsA ? v / 2 : v % 2);
    typename Tile::Layout layout;
    const int first =
        kKMajor ? layout(mn + high_mn + lane % 8, high_k) : layout(mn + high_mn, high_k + lane % 8);
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      at_[i] =
          Tile::Move(first, kKMajor ? 0 : kApart * i, kKMajor ? 16 * i : 0) * int{sizeof(Element)};
    }
  }

  // Block i, and the k from 16 step on.
  __device__ void Load(uint32_t slice, int i, int step, uint32_t (&values)[4]) const {
    typename Tile::Plain plain;
    const int more = (kKMajor ? plain(kApart * i, 0) : plain(0, 16 * step)) * int{sizeof(Element)};
    const uint32_t from = slice + at_[kKMajor ? step : i] + more;
    LoadMatrices<!kKMajor>(from, values);
  }

  // For K-major operands of two steps: where block 0 of the first step begins, by what that place
  // differs from the second step's, and how far block i is from it.
  __device__ int First() const {
    constexpr typename Tile::Layout kAt{};
    static_assert(!kKMajor || (kAt(6, 24) == (kAt(6, 8) ^ 16) && kAt(kApart, 0) == kApart * kK));
    return at_[0];
  }
  static constexpr int kOtherStep = 16 * int{sizeof(Element)};
  __device__ static constexpr int BlockBytes(int i) {
    return kApart * i * kK * int{sizeof(Element)};
  }

 private:
  static constexpr int kPlaces = kKMajor ? kK / 16 : 4;
  int at_[kPlaces];  // bytes from the beginning of a slice
};

template <typename Element>
__device__ void MultiplyAdd(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<Element, cutlass::bfloat16_t>) {
    cute::SM80_16x8x16_F32BF16BF16F32_TN::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0,
                                              b1, c[0], c[1], c[2], c[3]);
  } else {
    cute::SM80_16x8x16_F32F16F16F32_TN::fma(c[0], c[1], c[2], c[3], a[0], a[1], a[2], a[3], b0, b1,
                                            c[0], c[1], c[2], c[3]);
  }
}

template <typename Element_, bool kAKMajor_, bool kBKMajor_, int kM_, int kN_, int kStages_,
          int kBlocksPerSm_, int kWindow, bool kSizes = false>
struct PipelinedConfig {
  using Element = Element_;
  static constexpr bool kAKMajor = kAKMajor_, kBKMajor = kBKMajor_;
  static constexpr bool kMm = kAKMajor;                          // or wgrad, whose lines are rows
  static constexpr bool kHasOptions = kMm, kAddsExisting = kMm;  // of its results
  static constexpr bool kKeepsEmpty = false;  // what is there, where it adds sums of no rows
  static constexpr bool kTurned = false;      // sums: warp_results_sm80.cuh
  static_assert(kMm || !kBKMajor);
  static constexpr int kM = kM_, kN = kN_, kK = 32;
  static constexpr int kStages = kStages_, kBlocksPerSm = kBlocksPerSm_;
  static constexpr int kWarpsM = kM / kWarpTile, kWarpsN = kN / kWarpTile;
  static constexpr int kThreads = 32 * kWarpsM * kWarpsN;
  using CopyA = PipelinedCopy<Element, kAKMajor, kM, kK, kThreads>;
  using CopyB = PipelinedCopy<Element, kBKMajor, kN, kK, kThreads>;
  // Warps take 16 rows in turns, so that each has its share of a low tile.
  static constexpr int kRowsApart = 16 * kWarpsM;
  using OperandA = WarpOperand<Element, true, kAKMajor, kM, kK, kRowsApart>;
  using OperandB = WarpOperand<Element, false, kBKMajor, kN, kK, 16>;
  using Work = Schedule<kM, kN, kThreads, kAKMajor, kBKMajor, kWindow, kMm, kSizes>;
  static constexpr int kStageBytes = CopyA::kBytes + CopyB::kBytes;

  // While a tile's results are stored, the copies of the next one fill all slices but the last.
  struct SharedMemory {
    alignas(128) unsigned char ring[kStages][kStageBytes];
    typename Work::Memory schedule;
    Tile tiles[2];

    __device__ unsigned char* Results() { return ring[kStages - 1]; }
  };
  static_assert(kWarpsM * kWarpsN * kResultBytes <= kStageBytes);
};

// The kernel's argument.
struct PipelinedSm80 {
  GemmSm80 gemm;
  Strides a, b;
};

template <typename Config>
PipelinedSm80 MakePipelined(const GemmSm80& gemm) {
  return {gemm, Config::CopyA::StridesOf(gemm.a_line, false),
          Config::CopyB::StridesOf(gemm.b_line, IsGated(gemm.epilogue.activation))};
}

// The main loop: a ring of slices that copies fill, and this warp's sums.
template <typename Config>
class Pipeline {
  using Element = typename Config::Element;
  static constexpr int kStages = Config::kStages, kK = Config::kK;
  static constexpr int kPieces = Config::CopyA::kPieces + Config::CopyB::kPieces;

 public:
  __device__ Pipeline(const PipelinedSm80& arguments, const void* ring)
      : arguments_(arguments),
        ring_(SharedAddress(ring)),
        a_(threadIdx.x / 32 / Config::kWarpsN * 16),
        b_(threadIdx.x / 32 % Config::kWarpsN * kWarpTile) {}

  // Begin copying the operands of a tile, from its column `column` on, for one of its segments.
  __device__ void Begin(const Tile& tile, int column, const Segment& segment) {
    constexpr bool kB = Config::kBKMajor;
    const GemmSm80& gemm = arguments_.gemm;
    const Element* a = static_cast<const Element*>(gemm.a);
    const Element* b = static_cast<const Element*>(gemm.b);
    const int64_t n0 = tile.n0 + column;
    const int columns = tile.n_count - column;
    if (Config::kMm) {
      const int64_t row = segment.x_start + (tile.row0 - segment.y_start);
      left_ = static_cast<int>(gemm.k);
      copy_a_.Begin(a + row * gemm.a_line, gemm.a_line, tile.m_hi, false, 0);
      copy_b_.Begin(b + segment.weight * gemm.b_group + n0 * (kB ? gemm.b_line : 1), gemm.b_line,
                    columns, IsGated(gemm.epilogue.activation),
                    gemm.n / 2 * (kB ? gemm.b_line : 1));
    } else {
      left_ = segment.length;
      copy_a_.Begin(a + tile.row0 + segment.x_start * gemm.a_line, gemm.a_line, tile.m_hi, false,
                    0);
      copy_b_.Begin(b + n0 + segment.y_start * gemm.b_line, gemm.b_line, columns, false, 0);
    }
    write_ = ring_;
#pragma unroll 1
    for (int slice = 0; slice < kStages - 1; ++slice) {
      if (left_ > 0) {
#pragma unroll
        for (int i = 0; i < kPieces; ++i) CopyPiece(i);
      }
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

  __device__ const WarpSums& Sums() const { return sums_; }

 private:
  struct Fragments {
    uint32_t a[4][4], b[4][4];
  };

  // ... 16 kAtoms rows of this warp.
  template <int kAtoms>
  __device__ void AddRows() {
    uint32_t read = ring_;
    Fragments first, second;  // of the two halves of a slice
    Meet();
#pragma unroll
    for (int i = 0; i < 4; ++i) Load<kAtoms>(read, i, 0, first);
    FirstHalf<kAtoms>(read, first, second);
    // `left_` is of the slice that is copied next. The loop begins where warps have met, because
    // the compiler would move products from behind that to before it, and have none left to hide
    // the loads.
#pragma unroll 1
    while (left_ > (1 - kStages) * kK) {
      read = Next(read);
#pragma unroll
      for (int part = 0; part < 8; ++part) {
        if (part < 4) Load<kAtoms>(read, part, 0, first);
        Multiply<kAtoms>(part, second);
      }
      FirstHalf<kAtoms>(read, first, second);
    }
    if (left_ <= 16 - kStages * kK) return;  // the second half has nothing
#pragma unroll
    for (int part = 0; part < 8; ++part) Multiply<kAtoms>(part, second);
  }

  // Add the first half of a slice, while the second is loaded and another slice is copied. All
  // loads come before the copies, which would delay them: both go one way.
  template <int kAtoms>
  __device__ void FirstHalf(uint32_t read, const Fragments& first, Fragments& second) {
#pragma unroll
    for (int part = 0; part < 8; ++part) {
      if (part < 4) Load<kAtoms>(read, part, 1, second);
      if (part >= 4) {
#pragma unroll
        for (int i = (part - 4) * kPieces / 4; i < (part - 3) * kPieces / 4; ++i) CopyPiece(i);
      }
      Multiply<kAtoms>(part, first);
    }
    EndSlice();
    Meet();
  }

  // A quarter of the fragments, in an order in which products need them.
  template <int kAtoms>
  __device__ void Load(uint32_t slice, int quarter, int half, Fragments& to) const {
    const uint32_t slice_b = slice + Config::CopyA::kBytes;
    if (quarter == 0) {
      a_.Load(slice, 0, half, to.a[0]);
      b_.Load(slice_b, 0, half, to.b[0]);
      b_.Load(slice_b, 1, half, to.b[1]);
    } else if (quarter == 1) {
      b_.Load(slice_b, 2, half, to.b[2]);
      b_.Load(slice_b, 3, half, to.b[3]);
    } else if (quarter == 2) {
      if (kAtoms > 1) a_.Load(slice, 1, half, to.a[1]);
    } else {
      if (kAtoms > 2) a_.Load(slice, 2, half, to.a[2]);
      if (kAtoms > 3) a_.Load(slice, 3, half, to.a[3]);
    }
  }

  // An eighth of the products: 16 rows and 4 of 8 atoms of columns, which come and go in turns.
  template <int kAtoms>
  __device__ void Multiply(int part, const Fragments& of) {
    const int i = part / 2;
    if (i >= kAtoms) return;
#pragma unroll
    for (int jj = part % 2 * 4; jj < part % 2 * 4 + 4; ++jj) {
      const int j = i % 2 == 0 ? jj : 7 - jj;
      MultiplyAdd<Element>(sums_[i][j], of.a[i], of.b[j / 2][j % 2 * 2],
                           of.b[j / 2][j % 2 * 2 + 1]);
    }
  }

  // The slice that is read next has arrived, and nobody reads the one that is filled next.
  __device__ static void Meet() {
    WaitForCopies<kStages - 2>();
    __syncthreads();
  }

  __device__ uint32_t Next(uint32_t slice) const {
    slice += Config::kStageBytes;
    return slice == ring_ + kStages * Config::kStageBytes ? ring_ : slice;
  }

  __device__ void CopyPiece(int i) {
    constexpr int kPiecesA = Config::CopyA::kPieces;
    if (i < kPiecesA) {
      copy_a_.Piece(write_, i, left_, arguments_.a);
    } else {
      copy_b_.Piece(write_ + Config::CopyA::kBytes, i - kPiecesA, left_, arguments_.b);
    }
  }

  __device__ void EndSlice() {
    EndCopies();
    left_ -= kK;
    write_ = Next(write_);
  }

  const PipelinedSm80& arguments_;
  const uint32_t ring_;
  typename Config::OperandA a_;
  typename Config::OperandB b_;
  typename Config::CopyA copy_a_;
  typename Config::CopyB copy_b_;
  int left_;
  uint32_t write_;
  WarpSums sums_;
};

#ifdef __CUDACC__
template <typename Config>
__global__ void __launch_bounds__(Config::kThreads, Config::kBlocksPerSm)
    PipelinedSm80Kernel(const __grid_constant__ PipelinedSm80 arguments) {
  extern __shared__ __align__(128) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Config::SharedMemory*>(memory);
  const GemmSm80& gemm = arguments.gemm;
  typename Config::Work work(gemm, shared.schedule);
  Pipeline<Config> pipeline(arguments, shared.ring);
  Segment segment;
  // The segment whose copies have begun, if any; which columns of this tile come next, if there is
  // one. Negative: none.
  int index = -1, column = -1;
  bool at = true, have_next = false;
  auto next_segment = [&](const Tile& tile) {
    if (work.NextSegment(tile, index, segment)) {
      pipeline.Begin(tile, column, segment);
    } else {
      index = -1;
    }
  };
  // A round adds up and stores kN columns of this tile, and in between begins the copies of the
  // round after it. The first one does that alone.
#pragma unroll 1
  do {
    const Tile& tile = shared.tiles[at];
    const int first = column;
    if (column <= 0) have_next = work.Next(shared.tiles[!at]);
    if (first >= 0) {
      pipeline.Clear();
      while (index >= 0) {
        pipeline.Add(tile.m_hi);
        if (work.OneSegment()) break;
        __syncthreads();
        next_segment(tile);
      }
      column += Config::kN >> (Config::kHasOptions && IsGated(gemm.epilogue.activation));
    }
    if (first < 0 || column >= tile.n_count) {
      at = !at;
      column = have_next ? 0 : -1;
    }
    index = -1;
    if (column >= 0) next_segment(shared.tiles[at]);
    if (first >= 0) {
      WarpResults<Config>::Store(gemm, tile, first, pipeline.Sums(), shared.Results());
    }
  } while (column >= 0);
}
#endif

}  // namespace jgg::device
