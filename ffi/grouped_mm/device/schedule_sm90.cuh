// One warp of each thread block (or pair of blocks) makes tiles of work of segments. Before that,
// all threads rank the matrices of a wgrad of few tiles.
//
// The warp scans the metadata, a window of segments at a time, and counts the tiles of each
// segment. It takes every so many-th tile. Rows of the result between segments make tiles of zeros.
// No other kernel prepares anything, and a segment without rows costs its share of the scan only.
#pragma once

#include <cstdint>
#include <type_traits>

#include "grouped_mm/device/primitives_sm90.cuh"
#include "grouped_mm/device/segments.cuh"
#include "grouped_mm/device/tile_order_sm90.cuh"
#include "grouped_mm/device/turns_sm90.cuh"
#include "grouped_mm/gemm_sm90.h"

namespace jgg::device {

constexpr int kSliceSm90 = 64;  // values of k in a stage

// A tile of work.
struct Work {
  int l_row, l_k, r_k;  // where its operands begin; R's row is the result's column
  int weight;           // -1: zeros, whose segments do not exist
  int slices;           // of k
  int first;            // values of k before the segment in the first slice
  int last;             // values of k up to the segment's end in the last one
  int rows, columns;    // of the result, for this block; 0 rows: there is no more work
  int out_row, out_column;
  int64_t out;  // element of the result at the tile's (0, 0)

  // For ZeroAfter.
  __device__ uint32_t OfEachLoad() const {
    return l_row | l_k | r_k | weight | slices | first | last | rows | columns | out_row |
           out_column | static_cast<uint32_t>(out) | static_cast<uint32_t>(out >> 32);
  }

  // qmm: keeps one of `parts` parts of the slices, and l_k says where it begins. Parts are equal
  // and multiples of four, but for the last one.
  __device__ void TakePart(int part, int parts) {
    const int each = ((slices + 3) / 4 + parts - 1) / parts * 4, begin = min(part * each, slices);
    l_k = begin * kSliceSm90;
    slices = min(slices - begin, each);
  }

  // The slice of a turn. The last slice comes first. It may have to be cleared behind its end, and
  // that happens while the tile before is stored.
  __device__ int Slice(int turn) const { return turn == 0 ? slices - 1 : turn - 1; }

  // Whether a slice has values of k from outside the segment, which then are cleared.
  __device__ bool Cut(int slice) const {
    return (slice == 0 && first > 0) || (slice == slices - 1 && last < kSliceSm90);
  }
};

// Columns of the result, and of a tile of it. kBlocks: of 128 columns of w; two may be the halves
// of a gated product. kGateApart in its place: of a gated product 64 gates, and 64 columns that
// they let through. kOfBothHalves: 128 columns, and as many of w's other half.
constexpr int kGateApart = 0, kOfBothHalves = -1;

template <int kBlocks>
__device__ int ResultColumns(const GemmSm90& gemm) {
  if (kBlocks == kGateApart || kBlocks == kOfBothHalves) return gemm.n / 2;
  return kBlocks == 2 && IsGated(gemm.epilogue.activation) ? gemm.n / 2 : gemm.n;
}

template <int kBlocks>
__device__ int TileColumns(const GemmSm90& gemm) {
  if (kBlocks == kGateApart) return 64;
  if (kBlocks == kOfBothHalves) return 128;
  return kBlocks == 2 && IsGated(gemm.epilogue.activation) ? 128 : 128 * kBlocks;
}

// kStacked: the tiles of a pair of blocks are one above the other, and share R in place of L.
template <int kCluster, bool kStacked>
using OrderOfTiles = std::conditional_t<kStacked, StackedOrder, TileOrder<kCluster>>;

template <int kCluster, int kBlocks, bool kStacked = false>
__device__ OrderOfTiles<kCluster, kStacked> OrderTiles(const GemmSm90& gemm) {
  const int columns = TileColumns<kBlocks>(gemm);
  return {(ResultColumns<kBlocks>(gemm) + columns - 1) / columns};
}

// Rows of tiles that are halved where that is possible.
template <int kRows>
constexpr int kHalfRows = kRows % 128 == 0 ? kRows / 2 : kRows;

// wgrad of few tiles: the segments of matrices, and the matrices by their lengths, the longest
// first.
struct RankedMatrices {
  alignas(16) Segment segments[kMostRankedMatrices];
  uint8_t order[kMostRankedMatrices];
  RankedTurns turns;
  // In place of these, of ClusterTurns.
  __device__ int* Orders() { return reinterpret_cast<int*>(segments); }
};
static_assert(2 * ClusterTurns<kMostBalancedClusters>::kMost * sizeof(int) <=
              sizeof(RankedMatrices::segments));

// All threads of a block rank the matrices, and then have to meet. Each warp takes some of the
// matrices, and compares each with all others. Of those each lane has a few.
template <typename Config>
__device__ void RankMatrices(const GemmSm90& gemm, RankedMatrices& ranked) {
  constexpr int kPerLane = kMostRankedMatrices / 32;
  const int lane = threadIdx.x % 32, groups = gemm.groups;
  for (int i = threadIdx.x; i < groups; i += blockDim.x) {
    ranked.segments[i] = ReadSegment(gemm.metadata, gemm.rows_x, gemm.rows_y, groups, i);
  }
  __syncthreads();
  // The warp that schedules looks for lengths that stand out, while the others rank.
  if (threadIdx.x < 32) {
    const auto slices = [&](int i) {
      return (ranked.segments[i].length + kSliceSm90 - 1) / kSliceSm90;
    };
    constexpr int kRows = Config::kRows;
    const auto order = OrderTiles<Config::kCluster, Config::kBlocks>(gemm);
    const RankedTurns turns =
        TakeTurns<kRows>(slices, groups, order.Count(RowShares<kRows>{gemm.m}.Tiles()),
                         order.Count(RowShares<kHalfRows<kRows>>{gemm.m}.Tiles()),
                         Config::kPlanes * (Config::kPlanes + 1) / 2, gridDim.x / Config::kCluster);
    if (lane == 0) ranked.turns = turns;
    __syncwarp();
    return;
  }
  int others[kPerLane];
#pragma unroll
  for (int j = 0; j < kPerLane; ++j) {
    const int i = 32 * j + lane;
    others[j] = i < groups ? ranked.segments[i].length : -1;
  }
  for (int i = threadIdx.x / 32 - 1; i < groups; i += blockDim.x / 32 - 1) {
    const int length = ranked.segments[i].length;
    int rank = 0;
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
      const bool earlier = 32 * j + lane < i;  // and first of those that are as long
      rank += __popc(__ballot_sync(0xffffffffu, others[j] > length - earlier));
    }
    if (lane == 0) ranked.order[rank] = static_cast<uint8_t>(i);
  }
  __syncwarp();
}

// Tiles of work as a cluster of blocks sees them.
template <int kRows, int kBlocks, int kCluster, bool kRaggedK, bool kStacked = false>
class TilesSm90 {
 public:
  __device__ TilesSm90(const GemmSm90& gemm, int block)
      : gemm_(gemm), lane_(threadIdx.x % 32), block_(block) {}

 protected:
  static constexpr unsigned kAll = 0xffffffffu;

  __device__ bool Wgrad() const { return kRaggedK && gemm_.wgrad; }

  __device__ OrderOfTiles<kCluster, kStacked> Order() const {
    return OrderTiles<kCluster, kBlocks, kStacked>(gemm_);
  }

  // wgrad: of a cluster, for a matrix.
  template <int kMost = kRows>
  __device__ int MatrixTiles() const {
    return Order().Count(RowShares<kMost>{gemm_.m}.Tiles());
  }

  // Sets the tile's columns and returns its row of tiles.
  __device__ int SetColumns(Work& work, int number, int row_tiles) const {
    const TilePlace place = Order().At(number, row_tiles, block_, Wgrad() ? 3 : 2);
    const int columns = TileColumns<kBlocks>(gemm_);
    work.out_column = place.column * columns;
    work.columns = place.exists ? min(columns, ResultColumns<kBlocks>(gemm_) - work.out_column) : 0;
    return place.row;
  }

  // mm: a segment's rows are shared out evenly, and to whole pairs of stacked tiles.
  __device__ static int TileRows(int length) {
    const int tiles =
        kStacked ? (length + 2 * kRows - 1) / (2 * kRows) * 2 : (length + kRows - 1) / kRows;
    constexpr int kWhole = kRows < 8 ? kRows : 8;
    return (Divide(length - 1, max(tiles, 1)) + kWhole) / kWhole * kWhole;
  }

  __device__ static int RowTiles(int length) {
    return length == 0 ? 0 : Divide(length - 1, TileRows(length)) + 1;
  }

  __device__ void SetK(Work& work, int k) const {
    work.slices = (k + kSliceSm90 - 1) / kSliceSm90;
    work.last = k - (work.slices - 1) * kSliceSm90;
  }

  // wgrad: tile `number` of a matrix, in tiles of at most kMost rows.
  template <int kMost = kRows>
  __device__ void SetMatrix(Work& work, int number, int weight, const Segment& segment) const {
    SetMatrixTile<kMost>(work, number, weight, segment.x_start, segment.y_start, segment.length);
  }

  template <int kMost = kRows>
  __device__ void SetMatrixTile(Work& work, int number, int weight, int x_start, int y_start,
                                int length) const {
    const RowShares<kMost> shares{gemm_.m};
    const int row_tile = SetColumns(work, number, shares.Tiles());
    // Copies begin at multiples of 16 bytes along k.
    if (length > 0) work.first = (gemm_.l_k_major ? x_start : gemm_.r_k_major ? y_start : 0) % 8;
    SetK(work, length + work.first);
    work.l_row = work.out_row = shares.FirstRow(row_tile);
    work.l_k = x_start - work.first;
    work.r_k = y_start - work.first;
    work.weight = weight;
    work.rows = min(shares.FirstRow(row_tile + 1), gemm_.m) - work.l_row;
    work.out = weight * gemm_.out_group + work.l_row * gemm_.out_line + work.out_column;
    // Nothing is added to this matrix. (A tile without rows would be the last one.)
    if (length == 0 && gemm_.epilogue.accumulate) work.columns = 0;
  }

  const GemmSm90& gemm_;
  const int lane_, block_;
};

// mm: one warp prefetches the sizes, as early as it runs. The first tile waits for sizes. Where
// there are many, windows of them would wait for memory one after the other.
__device__ inline void PrefetchSizes(const GemmSm90& gemm) {
  if (gemm.wgrad || gemm.metadata.kind != MetadataKind::kSizes) return;
  constexpr int kLine = 128 / sizeof(int32_t);
  for (int64_t i = threadIdx.x % 32 * kLine; i < gemm.metadata.count; i += 32 * kLine) {
    PrefetchLine(gemm.metadata.data + i);
  }
}

// kRaggedK: also of wgrad.
template <int kRows, int kBlocks, int kCluster, bool kRaggedK, bool kStacked = false>
class ScheduleSm90 : TilesSm90<kRows, kBlocks, kCluster, kRaggedK, kStacked> {
  using Tiles = TilesSm90<kRows, kBlocks, kCluster, kRaggedK, kStacked>;
  using Tiles::gemm_, Tiles::lane_, Tiles::kAll, Tiles::Wgrad, Tiles::Order, Tiles::MatrixTiles;
  using Tiles::RowTiles;
  using Tiles::SetColumns, Tiles::SetK, Tiles::SetMatrix, Tiles::SetMatrixTile, Tiles::TileRows;

 public:
  // `block` of the cluster. `parts` blocks have the same tiles. `ranked`: what RankMatrices made,
  // if gemm.order.ranks.
  __device__ ScheduleSm90(const GemmSm90& gemm, int block, int parts, const RankedMatrices* ranked)
      : Tiles(gemm, block), ranked_(ranked) {
    next_ = Divide(blockIdx.x / kCluster, parts);
    stride_ = Divide(gridDim.x / kCluster, parts);
    offset_ = gemm.metadata.offset == nullptr ? 0 : *gemm.metadata.offset;
  }

  // The whole warp; every lane gets the same tile. Without rows when there are no more.
  __device__ Work Next() {
    if (kRaggedK && gemm_.order.ranks) return NextRanked();
    Work work{};
    if (Wgrad() && gemm_.order.matrices) {
      const int weight = next_ / MatrixTiles();
      if (weight < gemm_.groups) {
        SetMatrix(work, next_ - weight * MatrixTiles(), weight,
                  ReadSegment(gemm_.metadata, gemm_.rows_x, gemm_.rows_y, gemm_.groups, weight));
      }
      next_ += stride_;
      return work;
    }
    while (next_ >= window_tiles_) {
      if (!LoadWindow()) return work;
    }
    // Finds the last lane that does not begin after this tile, then the last such segment of that
    // lane.
    const unsigned begun = __ballot_sync(kAll, first_ <= next_);
    const int owner = 31 - __clz(begun);
    int number = next_ - first_, which = 0;
    if (lane_ == owner) {
      while (which < kPerLane - 1 && number >= tiles_[which]) number -= tiles_[which++];
    }
    which = __shfl_sync(kAll, which, owner);
    number = __shfl_sync(kAll, number, owner);
    const int start = Take(starts_, which, owner), length = Take(lengths_, which, owner);
    const int gap = Take(gaps_, which, owner);
    const int index = window_ + owner * kPerLane + which;
    next_ += stride_;
    if (Wgrad()) {
      SetMatrixTile(work, number, index < Count() ? index - offset_ : index - Count(), start, start,
                    length);
    } else {
      SetRowsTile(work, number, index, start, length, gap);
    }
    return work;
  }

 protected:
  static constexpr int kPerLane = 4, kWindow = 32 * kPerLane;

  __device__ int Count() const { return static_cast<int>(gemm_.metadata.count); }

  // mm: whether rows of no segment are tiles.
  __device__ bool ClearsRest() const {
    return gemm_.metadata.clears_rest && !gemm_.epilogue.accumulate;
  }

  __device__ int Take(const int (&values)[kPerLane], int which, int owner) const {
    int value = values[0];
#pragma unroll
    for (int i = 1; i < kPerLane; ++i) value = which == i ? values[i] : value;
    return __shfl_sync(kAll, value, owner);
  }

  __device__ void SetRowsTile(Work& work, int number, int index, int start, int length,
                              int gap) const {
    const int gap_tiles = (start - gap + kRows - 1) / kRows;
    const int zeros = Order().Count(gap_tiles);
    if (number < zeros) {
      const int row_tile = SetColumns(work, number, gap_tiles);
      work.weight = -1;
      work.out_row = gap + row_tile * kRows;
      work.rows = min(kRows, start - work.out_row);
    } else {
      Segment segment{start, start, length, index - offset_};
      if (gemm_.metadata.kind != MetadataKind::kSizes) {
        segment = ReadSegment(gemm_.metadata, gemm_.rows_x, gemm_.rows_y, gemm_.groups, index);
      }
      // Where groups have few rows, all warps wait for a tile. So nothing is divided then.
      constexpr int kLow = kStacked ? 0 : kRows;
      const int rows = length <= kLow ? length : TileRows(length);
      const int row_tile = SetColumns(work, number - zeros, length <= kLow ? 1 : RowTiles(length));
      SetK(work, gemm_.k);
      work.weight = segment.weight;
      work.l_row = segment.x_start + row_tile * rows;
      work.out_row = start + row_tile * rows;
      work.rows = min(rows, length - row_tile * rows);
    }
    work.out = work.out_row * gemm_.out_line + work.out_column;
  }

  template <typename T, typename Combine>
  __device__ T ExclusiveScan(T value, T identity, Combine combine, T& total) const {
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const T earlier = __shfl_up_sync(kAll, value, distance);
      if (lane_ >= distance) value = combine(earlier, value);
    }
    total = __shfl_sync(kAll, value, 31);
    const T before = __shfl_up_sync(kAll, value, 1);
    return lane_ == 0 ? identity : before;
  }

  // The next tile of the ranked matrices.
  __device__ Work NextRanked() {
    Work work{};
    const RankedTurns& turns = ranked_->turns;
    int tile = turns.Next(turn_, next_, stride_), before = 0;
    const bool held = tile < turns.held;
    if (!held) tile -= turns.held, before = turns.matrices;
    const bool halved = held && turns.halved;
    const int tiles = halved ? Tiles::template MatrixTiles<kHalfRows<kRows>>() : MatrixTiles();
    const int matrix = Divide(tile, tiles), rank = before + matrix;
    if (rank >= gemm_.groups) return work;
    const int weight = ranked_->order[rank], number = tile - matrix * tiles;
    const Segment& segment = ranked_->segments[weight];
    if (halved) {
      Tiles::template SetMatrix<kHalfRows<kRows>>(work, number, weight, segment);
    } else {
      SetMatrix(work, number, weight, segment);
    }
    return work;
  }

  // wgrad: whether entry `index` stands for a matrix of the result. Entries after the last group
  // stand for the matrices that have none.
  __device__ bool HasMatrix(int index) const {
    const auto count = static_cast<uint32_t>(Count()), at = static_cast<uint32_t>(index);
    if (at >= count) return at - count + static_cast<uint32_t>(offset_) >= count;
    return IsMatrix(index);
  }

  // Whether the group is one of this shard's; any offset will do.
  __device__ bool IsMatrix(int group) const {
    return static_cast<uint32_t>(group) - static_cast<uint32_t>(offset_) <
           static_cast<uint32_t>(gemm_.groups);
  }

  // mm: finds where the gap before each segment begins, the rows of no segment. Sizes of all groups
  // do not need this: they have such rows behind the last group only.
  __device__ void FindGaps(int begin) {
    auto later = [](int a, int b) { return max(a, b); };
    int end = 0, all;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (lengths_[i] > 0) end = max(end, starts_[i] + lengths_[i]);
    }
    int before = max(covered_, ExclusiveScan(end, 0, later, all));
    covered_ = max(covered_, all);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      const bool last = begin + i == Count();
      gaps_[i] = starts_[i];
      if ((lengths_[i] > 0 || last) && ClearsRest()) {
        gaps_[i] = min(before, starts_[i]);
      }
      if (lengths_[i] > 0) before = max(before, starts_[i] + lengths_[i]);
    }
  }

  // Numbers the tiles of the next window of segments. Returns false when there are no more
  // segments. mm: one more, empty segment has the rows after the last one.
  __device__ bool LoadWindow() {
    const bool partial = gemm_.metadata.offset != nullptr;
    const int total = Count() + (!Wgrad() ? 1 : partial ? gemm_.groups : 0);
    window_ = window_ < 0 ? 0 : window_ + kWindow;
    if (window_ >= total) return false;
    const int begin = window_ + lane_ * kPerLane;
    const uint32_t rows = gemm_.rows_x;
    if (gemm_.metadata.kind == MetadataKind::kSizes) {
      auto add = [&](uint32_t a, uint32_t b) { return min(a + b, rows); };
      uint32_t sum = 0, all;
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int size = begin + i < Count() ? gemm_.metadata.data[begin + i] : 0;
        lengths_[i] = min(static_cast<uint32_t>(max(size, 0)), rows);
        sum = add(sum, lengths_[i]);
      }
      if (!Wgrad() && window_ + kWindow <= Count() && !__any_sync(kAll, sum > 0)) return true;
      uint32_t row = add(rows_before_, ExclusiveScan(sum, 0u, add, all));
      rows_before_ = add(rows_before_, all);
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const uint32_t end = add(row, lengths_[i]);
        const bool here = begin + i < Count() && IsMatrix(begin + i);
        starts_[i] = row;
        lengths_[i] = here ? static_cast<int>(end - row) : 0;
        row = end;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        Segment segment{0, 0, 0, 0};
        if (begin + i < Count()) {
          segment =
              ReadSegment(gemm_.metadata, gemm_.rows_x, gemm_.rows_y, gemm_.groups, begin + i);
        }
        starts_[i] = segment.y_start;
        lengths_[i] = segment.length;
      }
    }
    int sum = 0, all;
    if (Wgrad()) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        gaps_[i] = 0;
        tiles_[i] = begin + i < total && HasMatrix(begin + i) ? MatrixTiles() : 0;
        sum += tiles_[i];
      }
    } else {
      bool low = true;  // one row of tiles a segment, or none
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        gaps_[i] = starts_[i];
        if (begin + i == Count()) starts_[i] = gemm_.rows_y;
        if (!ClearsRest()) gaps_[i] = starts_[i];
        low = low && lengths_[i] <= kRows && gaps_[i] == starts_[i];
      }
      const bool contiguous = gemm_.metadata.HasSizeOfEach(gemm_.groups);
      if (contiguous && __all_sync(kAll, low)) {
        const int row = Order().Count(1);
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
          tiles_[i] = lengths_[i] > 0 ? row : 0;
          sum += tiles_[i];
        }
      } else {
        if (!contiguous) FindGaps(begin);
#pragma unroll
        for (int i = 0; i < kPerLane; ++i) {
          tiles_[i] = 0;
          if (begin + i > Count()) continue;
          tiles_[i] = Order().Count((starts_[i] - gaps_[i] + kRows - 1) / kRows) +
                      Order().Count(RowTiles(lengths_[i]));
          sum += tiles_[i];
        }
      }
    }
    first_ = window_tiles_ + ExclusiveScan(sum, 0, [](int a, int b) { return a + b; }, all);
    window_tiles_ += all;
    return true;
  }

  const RankedMatrices* const ranked_;
  int next_, stride_, offset_;
  int turn_ = 0;              // of ranked matrices: rounds until now
  int window_ = -1;           // its first segment
  int window_tiles_ = 0;      // one past its last tile
  int covered_ = 0;           // one past the last row of the segments before the next window
  uint32_t rows_before_ = 0;  // kSizes: rows of the groups before the next window
  // This lane's segments: its first tile, then for each segment its tiles, the first row of the gap
  // before it, its first row and its length.
  int first_ = 0;
  int tiles_[kPerLane], gaps_[kPerLane], starts_[kPerLane], lengths_[kPerLane];
};

}  // namespace jgg::device
