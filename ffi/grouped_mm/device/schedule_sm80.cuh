// From segments to tiles of work, on the device.
//
// In the order of segments: every thread block scans the metadata, a window of segments at a time,
// counts the tiles of each segment, and takes every gridDim-th tile. Rows of the result between
// segments are tiles of zeros.
//
// In the order of the result (segments that overlap or come in any order; weights that several
// segments share): a block looks up the segments that reach its tile of the result. If rows differ
// in their segments, it cuts the tile into pieces of rows and does one piece after the other. In
// either order one block writes each element once, as one sum in the order of the segments.
#pragma once

#include <cstdint>

#include "grouped_mm/device/instructions_sm80.cuh"
#include "grouped_mm/device/scan.cuh"
#include "grouped_mm/device/segments.cuh"
#include "grouped_mm/gemm_sm80.h"

namespace jgg::device {

// A piece of work: rows [m_lo, m_hi) and the first n_count columns of a tile of the result.
struct Tile {
  int64_t row0;  // mm: the row of the result that is the tile's row 0; wgrad: its first row
  int64_t n0;    // the tile's first column (of one half, where the activation is gated)
  int m_lo, m_hi, n_count;
  int weight;       // -1 where the tile is zeros
  Segment segment;  // where one segment alone contributes
  int shift;        // rows (mm) or k (wgrad) that the origin precedes the segment by
};

// The schedule's state. It lies in shared memory, so that it costs the main loop no registers.
template <int kThreads, int kWindow_>
struct ScheduleMemory {
  static constexpr int kWindow = kWindow_;  // segments
  static constexpr int kPerThread = kWindow < kThreads ? 1 : kWindow / kThreads;
  struct Entry {
    int first_tile;  // of the segment, and of the gap before it
    int gap_begin;   // mm: the first row of that gap
    int start;       // mm: the first row in the result; wgrad: in x
    int length;
  };
  struct State {
    int next;              // number of the next tile
    int window_begin;      // first segment of the window
    int window_end;        // one past the window's last tile
    int covered;           // one past the last row of the segments before the next window
    uint32_t rows_before;  // kSizes: rows of the groups before the next window
    int done;              // rows of the tile of the result that are done
    bool by_result;
  };
  Entry window[kWindow];
  uint32_t scratch[kThreads / 32];
  State state;
  Tile tile;
};

__device__ inline Segment ReadSegment(const GemmSm80& gemm, int64_t index) {
  return ReadSegment(gemm.metadata, static_cast<int>(gemm.rows_x), static_cast<int>(gemm.rows_y),
                     gemm.groups, index);
}

// kSizes: the metadata are sizes, and the order that of segments; there is no code for others.
// kMmInOrder: likewise, but of any metadata, and there is no code for wgrad.
template <int kM, int kN, int kThreads, bool kAKMajor, bool kBKMajor, int kWindow = 4 * kThreads,
          bool kShares = false, bool kSizes = false, bool kMmInOrder = false>
class Schedule {
 public:
  using Memory = ScheduleMemory<kThreads, kWindow>;

  __device__ Schedule(const GemmSm80& gemm, Memory& memory) : gemm_(gemm), memory_(memory) {
    const bool by_result = !kInOrder && (gemm.order >= GemmSm80::Order::kResult ||
                                         (gemm.order == GemmSm80::Order::kDetect && !InOrder()));
    if (Thread() == 0) {
      memory.state = State{static_cast<int>(blockIdx.x), -1, 0, 0, 0, 0, by_result};
    }
    __syncthreads();
  }

  // Puts this block's next tile into shared memory; false when there is none.
  __device__ bool Next() { return Next(memory_.tile); }

  __device__ bool Next(Tile& to) {
    State state = memory_.state;
    Tile tile;
    const bool by_result = !kInOrder && state.by_result;
    if (!(by_result ? NextOfResult(state, tile) : NextOfSegments(state, tile))) return false;
    __syncthreads();  // everybody has read the state
    if (Thread() == 0) {
      memory_.state = state;
      to = tile;
    }
    __syncthreads();
    return true;
  }

  // Whether no tile has more than one segment.
  __device__ bool OneSegment() const {
    return kInOrder || !memory_.state.by_result || gemm_.order == GemmSm80::Order::kMatrices;
  }

  // The next segment that contributes to the tile, after number `index`; false when there is none.
  __device__ bool NextSegment(int& index, Segment& segment) {
    return NextSegment(memory_.tile, index, segment);
  }

  __device__ bool NextSegment(const Tile& tile, int& index, Segment& segment) {
    if (tile.weight < 0) return false;
    if (OneSegment()) {
      segment = tile.segment;
      return ++index == 0 && segment.length > 0;
    }
    const int64_t row = tile.row0 + tile.m_lo;
    index = FindFirst<kThreads>(
        index + 1, Count(),
        [&](int i) {
          const Segment s = ReadSegment(gemm_, i);
          return IsMm() ? s.y_start <= row && row < int64_t{s.y_start} + s.length
                        : s.weight == tile.weight && s.length > 0;
        },
        reinterpret_cast<int*>(memory_.scratch));
    if (index >= Count()) return false;
    segment = ReadSegment(gemm_, index);
    return true;
  }

 private:
  using Entry = typename Memory::Entry;
  using State = typename Memory::State;
  static constexpr int kBand = 16;  // rows of tiles

  static constexpr bool kInOrder = kSizes || kMmInOrder;

  // Where a pipeline has no register for what follows from it, it is read anew.
  __device__ static unsigned Thread() { return kInOrder ? ThreadAnew() : threadIdx.x; }

  __device__ bool IsMm() const { return kMmInOrder || gemm_.product == GemmSm80::Product::kMm; }

  __device__ int Count() const { return static_cast<int>(gemm_.metadata.count); }

  // The columns of the result, and of one tile of it. A gated tile has gates and values in halves.
  __device__ bool Gated() const { return IsGated(gemm_.epilogue.activation); }
  __device__ int Columns() const { return static_cast<int>(gemm_.n >> Gated()); }
  __device__ int RunBits() const { return kMmInOrder ? 0 : gemm_.run_bits; }
  __device__ int TileBits() const { return Log2(kN) + RunBits() - Gated(); }
  __device__ int TileColumns() const { return 1 << TileBits(); }
  __device__ int TilesN() const { return (Columns() + TileColumns() - 1) >> TileBits(); }

  // Tiles of one matrix of the result, by rows.
  __device__ int TilesM() const {
    return static_cast<int>(((IsMm() ? gemm_.rows_y : gemm_.m) + kM - 1) / kM);
  }

  // Rows (or k) by which a tile's origin precedes its segment, which keeps copies aligned.
  __device__ int Shift(const Segment& segment) const {
    if (IsMm()) return kAKMajor ? 0 : segment.x_start & (gemm_.a_width - 1);
    if (kAKMajor) return segment.x_start & (gemm_.a_width - 1);
    return kBKMajor ? segment.y_start & (gemm_.b_width - 1) : 0;
  }

  // ---- in the order of segments ----

  __device__ bool NextOfSegments(State& state, Tile& tile) {
    while (state.next >= state.window_end) {
      if (!LoadWindow(state)) return false;
    }
    // The last entry that does not begin after this tile: 32 candidates, then those around it.
    constexpr int kStride = Memory::kWindow / 32;
    static_assert(kStride <= 32);
    const int lane = Thread() % 32;
    const unsigned coarse =
        __ballot_sync(0xffffffffu, memory_.window[lane * kStride].first_tile <= state.next);
    const int base = (__popc(coarse) - 1) * kStride;
    const unsigned fine = __ballot_sync(
        0xffffffffu,
        lane < kStride && memory_.window[base + lane % kStride].first_tile <= state.next);
    const int at = base + __popc(fine) - 1;
    const Entry entry = memory_.window[at];
    const int index = state.window_begin + at;
    int number = state.next - entry.first_tile;
    state.next += gridDim.x;

    if (!IsMm()) {
      MakeSegmentTile(tile, index, entry);
      SetWgradTile(tile, number);
      return true;
    }
    const int gap = entry.start - entry.gap_begin;
    const int gap_tiles = gap > 0 ? (gap + kM - 1) / kM * TilesN() : 0;
    if (number < gap_tiles) {
      tile.row0 = entry.gap_begin + static_cast<int64_t>(number / TilesN()) * kM;
      tile.m_lo = 0;
      tile.m_hi = static_cast<int>(min(int64_t{kM}, entry.start - tile.row0));
      tile.weight = -1;
      SetColumns(tile, number % TilesN());
      return true;
    }
    number -= gap_tiles;
    MakeSegmentTile(tile, index, entry);
    int row_tile, column_tile;
    const int row_tiles = (entry.length + tile.shift + kM - 1) / kM;
    InBands(number, row_tiles, row_tile, column_tile);
    const int step = RowsOfTile(entry.length, row_tiles), first = row_tile * step - tile.shift;
    tile.row0 = int64_t{entry.start} + first;
    tile.m_lo = max(-first, 0);
    tile.m_hi = min(step, entry.length - first);
    SetColumns(tile, column_tile);
    return true;
  }

  // Two or three tiles of a segment have 96 rows each, if that is enough, where a tile's time
  // depends on its rows: a last one of few rows takes nearly as long as one of many.
  __device__ static int RowsOfTile(int length, int row_tiles) {
    constexpr int kFewer = kM / 4 * 3;
    return kShares && row_tiles > 1 && length <= min(row_tiles, 3) * kFewer ? kFewer : kM;
  }

  __device__ void MakeSegmentTile(Tile& tile, int index, const Entry& entry) const {
    if (kSizes || gemm_.metadata.kind == MetadataKind::kSizes) {
      // wgrad: matrices after the last group, which have no group.
      const int64_t weight = index < Count() ? index - Offset() : index - Count();
      tile.segment = Segment{entry.start, entry.start, entry.length, static_cast<int>(weight)};
    } else {
      tile.segment = ReadSegment(gemm_, index);
    }
    tile.weight = tile.segment.weight;
    tile.shift = Shift(tile.segment);
  }

  __device__ void SetColumns(Tile& tile, int n_tile) const {
    tile.n0 = static_cast<int64_t>(n_tile) << TileBits();
    tile.n_count = static_cast<int>(min(int64_t{TileColumns()}, Columns() - tile.n0));
  }

  __device__ void SetWgradTile(Tile& tile, int number) const {
    int row_tile, column_tile;
    InBands(number, TilesM(), row_tile, column_tile);
    tile.row0 = static_cast<int64_t>(row_tile) * kM;
    tile.m_lo = 0;
    tile.m_hi = static_cast<int>(min(int64_t{kM}, gemm_.m - tile.row0));
    SetColumns(tile, column_tile);
  }

  // Tiles come in bands of rows: down a band, then on to its next columns. So tiles that run at one
  // time share columns of B, and a band's rows of A stay in L2.
  __device__ void InBands(int number, int row_tiles, int& row_tile, int& column_tile) const {
    int band = 0;
    if (row_tiles > kBand) {
      const int per_band = kBand * TilesN();
      band = number / per_band;
      number -= band * per_band;
    }
    const int rows = min(kBand, row_tiles - band * kBand);
    column_tile = number / rows;
    row_tile = band * kBand + number - column_tile * rows;
  }

  __device__ int64_t Offset() const {
    return gemm_.metadata.offset == nullptr ? 0 : *gemm_.metadata.offset;
  }

  // Number the tiles of the next window of segments; false when there are no more segments. mm: one
  // more, empty segment has the rows after the last one. wgrad: one more entry for each matrix
  // stands for the matrices that have no group.
  __device__ bool LoadWindow(State& state) {
    const bool partial = gemm_.metadata.offset != nullptr;
    const int total = Count() + (IsMm() ? 1 : partial ? static_cast<int>(gemm_.groups) : 0);
    state.window_begin = state.window_begin < 0 ? 0 : state.window_begin + Memory::kWindow;
    if (state.window_begin >= total) return false;
    __syncthreads();  // the window before may still be read
    // Where a window has fewer entries than the block threads, some threads have none.
    const bool mine = kWindow >= kThreads || Thread() < kWindow;
    const int entry = static_cast<int>(Thread()) * Memory::kPerThread;
    const int begin = mine ? state.window_begin + entry : INT32_MAX / 2;
    const uint32_t rows = static_cast<uint32_t>(gemm_.rows_x);
    int starts[Memory::kPerThread], lengths[Memory::kPerThread], shifts[Memory::kPerThread];

    if (kSizes || gemm_.metadata.kind == MetadataKind::kSizes) {
      auto add = [&](uint32_t a, uint32_t b) { return min(a + b, rows); };
      uint32_t sizes[Memory::kPerThread], sum = 0;
#pragma unroll
      for (int i = 0; i < Memory::kPerThread; ++i) {
        const int size = begin + i < Count() ? gemm_.metadata.data[begin + i] : 0;
        sizes[i] = min(static_cast<uint32_t>(max(size, 0)), rows);
        sum = add(sum, sizes[i]);
      }
      uint32_t all;
      uint32_t row =
          add(state.rows_before, ExclusiveScan<kThreads>(sum, 0u, add, memory_.scratch, &all));
      state.rows_before = add(state.rows_before, all);
      const int64_t offset = Offset();
#pragma unroll
      for (int i = 0; i < Memory::kPerThread; ++i) {
        const uint32_t end = add(row, sizes[i]);
        const int64_t weight = begin + i - offset;
        const bool here = begin + i < Count() && weight >= 0 && weight < gemm_.groups;
        starts[i] = row;
        lengths[i] = here ? static_cast<int>(end - row) : 0;
        Segment segment{starts[i], starts[i], lengths[i], 0};
        shifts[i] = Shift(segment);
        row = end;
      }
    } else {
#pragma unroll
      for (int i = 0; i < Memory::kPerThread; ++i) {
        Segment segment{0, 0, 0, 0};
        if (begin + i < Count()) segment = ReadSegment(gemm_, begin + i);
        starts[i] = IsMm() ? segment.y_start : segment.x_start;
        lengths[i] = segment.length;
        shifts[i] = Shift(segment);
      }
    }

    // The gap before each segment begins behind all segments before it.
    int gaps[Memory::kPerThread];
    if (IsMm()) {
      auto later = [](int a, int b) { return max(a, b); };
      int end = 0, all;
#pragma unroll
      for (int i = 0; i < Memory::kPerThread; ++i) {
        if (lengths[i] > 0) end = max(end, starts[i] + lengths[i]);
      }
      int before = max(
          state.covered,
          ExclusiveScan<kThreads>(end, 0, later, reinterpret_cast<int*>(memory_.scratch), &all));
      state.covered = max(state.covered, all);
#pragma unroll
      for (int i = 0; i < Memory::kPerThread; ++i) {
        if (begin + i == Count()) starts[i] = static_cast<int>(gemm_.rows_y);
        gaps[i] = before;
        if (lengths[i] > 0) before = max(before, starts[i] + lengths[i]);
      }
    }

    int tiles[Memory::kPerThread], sum = 0;
    const bool clears = gemm_.metadata.clears_rest && !gemm_.epilogue.accumulate;
#pragma unroll
    for (int i = 0; i < Memory::kPerThread; ++i) {
      tiles[i] = 0;
      if (begin + i < total) {
        if (!IsMm()) {
          tiles[i] = HasMatrix(begin + i) ? TilesM() * TilesN() : 0;
        } else {
          if (lengths[i] > 0) tiles[i] = (lengths[i] + shifts[i] + kM - 1) / kM;
          const bool gap = lengths[i] > 0 || begin + i == Count();
          if (!gap || !clears || gaps[i] > starts[i]) gaps[i] = starts[i];
          tiles[i] = (tiles[i] + (starts[i] - gaps[i] + kM - 1) / kM) * TilesN();
        }
      }
      sum += tiles[i];
    }
    int all;
    int first = state.window_end + ExclusiveScan<kThreads>(
                                       sum, 0, [](int a, int b) { return a + b; },
                                       reinterpret_cast<int*>(memory_.scratch), &all);
#pragma unroll
    for (int i = 0; i < Memory::kPerThread; ++i) {
      if (mine) {
        memory_.window[entry + i] = Entry{first, IsMm() ? gaps[i] : 0, starts[i], lengths[i]};
      }
      first += tiles[i];
    }
    state.window_end += all;
    __syncthreads();
    return true;
  }

  // wgrad: whether entry `index` stands for a matrix of the result.
  __device__ bool HasMatrix(int index) const {
    const int64_t offset = Offset();
    if (index >= Count()) {  // matrix index - Count(), should it have no group
      const int64_t group = index - Count() + offset;
      return group < 0 || group >= Count();
    }
    return index >= offset && index - offset < gemm_.groups;
  }

  // ---- in the order of the result ----

  // mm: whether all segments' rows in the result are ascending and disjoint.
  __device__ bool InOrder() {
    int covered = 0;
    bool ok = true;
    for (int base = 0; base < Count(); base += kThreads) {
      Segment segment{0, 0, 0, 0};
      const int index = base + static_cast<int>(threadIdx.x);
      if (index < Count()) segment = ReadSegment(gemm_, index);
      int all;
      const int before = ExclusiveScan<kThreads>(
          segment.length > 0 ? segment.y_start + segment.length : 0, 0,
          [](int a, int b) { return max(a, b); }, reinterpret_cast<int*>(memory_.scratch), &all);
      ok = ok && (segment.length == 0 || segment.y_start >= max(covered, before));
      covered = max(covered, all);
    }
    return __syncthreads_and(ok);
  }

  // The matrix, of up to 32, before which `rank` others come in order of length.
  __device__ int Longest(int rank) const {
    constexpr unsigned kAll = 0xffffffffu;
    const int lane = threadIdx.x % 32, matrices = static_cast<int>(gemm_.groups);
    const int length = lane < matrices ? ReadSegment(gemm_, lane).length : -1;
    int before = 0;
#pragma unroll 4
    for (int i = 0; i < matrices; ++i) {
      const int other = __shfl_sync(kAll, length, i);
      before += i < lane ? other >= length : other > length;
    }
    return __ffs(__ballot_sync(kAll, lane < matrices && before == rank)) - 1;
  }

  __device__ bool NextOfResult(State& state, Tile& tile) {
    const int64_t tiles = static_cast<int64_t>(TilesM()) * TilesN() * (IsMm() ? 1 : gemm_.groups);
    if (state.next >= tiles) return false;
    const int per_matrix = TilesM() * TilesN();
    if (!IsMm()) {
      tile.weight = state.next / per_matrix;
      if (gemm_.longest_first) tile.weight = Longest(tile.weight);
      tile.shift = 0;
      if (gemm_.order == GemmSm80::Order::kMatrices) {
        tile.segment = ReadSegment(gemm_, tile.weight);
        tile.shift = Shift(tile.segment);
      }
      SetWgradTile(tile, state.next % per_matrix);
      state.next += gridDim.x;
      return true;
    }
    // Counts the rows from `row_` on that lie in the same segments as row `row_`.
    const int64_t row0 = static_cast<int64_t>(state.next / TilesN()) * kM;
    const int64_t row = row0 + state.done;
    const int64_t end = min(row0 + kM, gemm_.rows_y);
    int64_t stop = end;
    for (int i = threadIdx.x; i < Count(); i += kThreads) {
      const Segment s = ReadSegment(gemm_, i);
      if (s.length == 0) continue;
      const int64_t s_end = int64_t{s.y_start} + s.length;
      if (s.y_start > row) stop = min(stop, int64_t{s.y_start});
      if (s_end > row) stop = min(stop, s_end);
    }
    int rows = static_cast<int>(stop - row);
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
      rows = min(rows, __shfl_xor_sync(0xffffffffu, rows, distance));
    }
    if (threadIdx.x % 32 == 0) memory_.scratch[threadIdx.x / 32] = rows;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < kThreads / 32; ++w) rows = min(rows, static_cast<int>(memory_.scratch[w]));
    __syncthreads();
    tile.row0 = row;
    tile.m_lo = 0;
    tile.m_hi = rows;
    tile.weight = 0;
    tile.shift = 0;
    SetColumns(tile, state.next % TilesN());
    state.done += rows;
    if (row0 + state.done >= end) {
      state.done = 0;
      state.next += gridDim.x;
    }
    return true;
  }

  const GemmSm80& gemm_;
  Memory& memory_;
};

}  // namespace jgg::device
