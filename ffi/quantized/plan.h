// The plan of a product with a quantized weight on a Hopper GPU: see grouped_mm/plan.h.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "common/processors.h"
#include "quantized/formats.h"
#include "quantized/rules.h"

namespace jgg::rules {

// Who multiplies.
enum class QmmWay {
  kTiles,   // tiles of rows, by warpgroups
  kWarps,   // tiles of few rows, by warps
  kDirect,  // no tiles: blocks read weights in layout "sm90" for a few rows
  kScaled   // weights are not rounded. Layout "sm90": tiles of few rows by warps, or of 64; W
            // quantized along N: of few rows of float32 x by warps, or of 128 in three planes.
            // Layout "linear": tiles of few rows by warps, in both cases
};

// Their names as attributes, in the order of QmmWay.
constexpr std::string_view kQmmWays[] = {"tiles", "warps", "direct", "scaled"};

struct QmmPlanSm90 {
  QmmWay way = QmmWay::kTiles;
  int tile = 0;        // rows of a tile, or of a block
  int parts = 1;       // warps: blocks that share out a tile's k
  bool pairs = false;  // direct: a warp has two columns' tiles, so x is read half as often
};

// The product: x (T, K) @ W, N of both halves where the activation is gated.
struct QmmSizes {
  int64_t k, n;
  bool gated = false;
  bool packed = false;      // W is in layout "sm90"
  bool transposed = false;  // W is quantized along N: x (T, K) @ W (K, N)
  bool half = false;        // x is float16, for which there are fewer tiles
  int scaled = 0;           // W is not rounded: it meets so many planes of x
};

struct QmmRows {
  int64_t rows_x, rows, segments;
  bool sizes = true;    // metadata are sizes
  bool offset = false;  // ... of more groups than W has

  // Whether all rows meet one matrix.
  bool OneMatrix() const { return segments == 1 && !offset; }
};

// ---- transposed

// Rows of a tile where warps multiply, and up to how many of a matrix they do. All other rows have
// tiles of kMostQmmRows. Where weights are not rounded, tiles are smaller.
constexpr int kTransposedFewRows = 16, kTransposedWarpsUpToRows = 8;
constexpr int kTransposedScaledFewRows = 8, kTransposedScaledRows = 128;

// ---- without tiles

constexpr int kDirectRows = 8;  // of a block, or twice as many of one matrix
// Every block looks for its row's group, 128 at a time.
constexpr int64_t kMostDirectGroups = 512;
// It reads so many weights at most. With more of them, the kernel of tiles is faster (docs/lab).
constexpr int64_t kMostDirectWeights = 1 << 24;
// Rows of all groups, and of one matrix without an offset.
constexpr int64_t kMostDirectRows = 16, kMostDirectMatrixRows = 96;
// So many blocks keep an H100 busy.
constexpr int64_t kManyDirectBlocks = 256;

constexpr int64_t DirectRowTiles(int64_t rows, int of_block) {
  return (rows + of_block - 1) / of_block;
}

// Whether the kernel without tiles is faster for rows of one matrix: it reads the weights for every
// 16 of them, and a tile takes as long as its k. Fitted to an H100 (docs/lab/prepacked.md).
constexpr bool DirectMatrixPays(int64_t rows, int64_t n, int64_t k) {
  if (rows <= kDirectRows) return true;
  return rows <= kMostDirectMatrixRows &&
         DirectRowTiles(rows, 2 * kDirectRows) * n * k <= (7 + k / 64) << 20;
}

// Few rows in all, and of each group.
inline bool DirectPays(const QmmSizes& qmm, const QmmRows& of) {
  const bool few = of.OneMatrix() ? DirectMatrixPays(of.rows, qmm.n, qmm.k)
                                  : of.rows <= (of.segments == 1 ? kDirectRows : kMostDirectRows);
  return few && of.sizes && of.segments <= kMostDirectGroups && of.rows_x == of.rows &&
         std::min(of.rows, of.segments) * qmm.n * qmm.k <= kMostDirectWeights;
}

inline QmmPlanSm90 PlanDirectSm90(const QmmSizes& qmm, const QmmRows& of) {
  if (!of.OneMatrix() || of.rows <= kDirectRows) return {QmmWay::kDirect, kDirectRows};
  const int64_t blocks = qmm.n / 32 * DirectRowTiles(of.rows, 2 * kDirectRows);
  const bool pairs = !qmm.gated && qmm.n % 128 == 0 && blocks >= kManyDirectBlocks;
  return {QmmWay::kDirect, 2 * kDirectRows, 1, pairs};
}

// ---- tiles

// Whether warps multiply all tiles of 32 rows. In layout "linear" they are faster than WGMMA.
constexpr bool AlwaysWarps(bool packed, int bits, bool packed_by_warps) {
  return packed ? packed_by_warps : bits != 4;
}

// Rows of the largest tile.
constexpr int kMostQmmRows = 192;
// Rows of the smallest tile of prepacked weights that adds an adapter's product, and its rank.
constexpr int kLeastAdapterTile = 128, kMostAdapterRank = 64;

// Whether a kernel of prepacked weights that follows this plan adds an adapter's product.
constexpr bool TakesAdapter(const QmmPlanSm90& plan, bool gated) {
  return plan.way == QmmWay::kTiles && plan.tile >= kLeastAdapterTile && !gated;
}

// Why no kernel takes an adapter of this rank. Its lines are whole 16 bytes.
inline Reason AdapterProblem(int64_t rank) {
  if (rank < 1 || rank > kMostAdapterRank) {
    return "needs a rank of 1 to " + std::to_string(kMostAdapterRank) + ", got " +
           std::to_string(rank);
  }
  return NeedsMultiple("rank", 8, rank);
}
// Blocks of a multiprocessor that registers allow where warps multiply.
constexpr int kPackedBlocksPerSm = 2;

// In how many parts to take a tile's k: two where all blocks would run at a time on an H200 and
// each has enough to do. Handing sums over took about as long as 15 slices.
inline int QmmParts(const QmmSizes& qmm, const QmmRows& of, int blocks_per_sm) {
  const int64_t tiles = std::min(of.segments, of.rows) * ((qmm.n + 127) / 128);
  return 2 * tiles <= kH200Processors * blocks_per_sm && (qmm.k + 63) / 64 >= 64 ? 2 : 1;
}

// Rows of the larger tile of weights that are not rounded, and planes that it takes at most.
constexpr int kScaledTileRows = 64, kMostScaledPlanes = 3;

// ... of lines: rows of 16 bits, or of float32.
constexpr int kScaledLinesTile = 8, kFloatLinesTile = 2;

// Few rows have a row for each plane: their tile has room for them. Otherwise planes are beside
// each other, and meet codes that are read once.
inline QmmPlanSm90 PlanScaledSm90(const QmmSizes& qmm, const QmmRows& of) {
  if (!qmm.packed) {
    if (qmm.scaled > 1) return {QmmWay::kScaled, kFloatLinesTile, QmmParts(qmm, of, 1)};
    return {QmmWay::kScaled, kScaledLinesTile, QmmParts(qmm, of, 1)};
  }
  if (RowsPerSegment(of.rows, of.segments) * qmm.scaled > 24) {
    return {QmmWay::kScaled, kScaledTileRows};
  }
  const QmmRows of_planes{qmm.scaled * of.rows_x, qmm.scaled * of.rows, of.segments};
  return {QmmWay::kScaled, 32, QmmParts(qmm, of_planes, 1)};
}

inline QmmPlanSm90 PlanTransposedSm90(const QmmSizes& qmm, const QmmRows& of) {
  const bool few = RowsPerSegment(of.rows, of.segments) <= kTransposedWarpsUpToRows;
  if (qmm.scaled > 0) {
    const bool tiles_of_few = few || !qmm.packed;
    return {QmmWay::kScaled, tiles_of_few ? kTransposedScaledFewRows : kTransposedScaledRows};
  }
  if (few) return {QmmWay::kWarps, kTransposedFewRows};
  return {QmmWay::kTiles, kMostQmmRows};
}

// Whether a weight of this format may be multiplied without being rounded.
constexpr bool HasScaled(const FormatFacts& format) {
  return format.scale == ScaleType::kScaleAndBias || format.scale == ScaleType::kFloat32;
}

// Whether scales multiply sums of 128 k: these need registers, so tiles are smaller.
constexpr bool ScalesSums(const FormatFacts& format, const QmmSizes& qmm) {
  return !qmm.packed && format.scale == ScaleType::kFloat32;
}

// The tiles of many rows: 64 or 96 of gated products, 64, 128 or more of others.
constexpr bool HasTile(const FormatFacts& format, const QmmSizes& qmm, int tile) {
  const bool sums = ScalesSums(format, qmm);
  if (qmm.gated) return tile == (sums ? 64 : 96);
  if (tile == 128) return !qmm.half || sums;
  return tile == 64 || (tile == kMostQmmRows && !sums);
}

// Rows of a tile: 32 or 64 where there are few, so that many stages of weights are under way. A
// segment that has more than a tile decodes its weights again, so tiles are larger than the
// average. Up to 8 rows warps multiply by themselves.
inline QmmPlanSm90 PlanQmmSm90(const FormatFacts& format, const QmmSizes& qmm, const QmmRows& of) {
  if (qmm.transposed) return PlanTransposedSm90(qmm, of);
  if (qmm.scaled > 0) return PlanScaledSm90(qmm, of);
  if (qmm.packed && !qmm.half && DirectPays(qmm, of)) return PlanDirectSm90(qmm, of);
  const int64_t rows = RowsPerSegment(of.rows, of.segments);
  if (rows > 24) {
    if (qmm.gated) return {QmmWay::kTiles, HasTile(format, qmm, 96) ? 96 : 64};
    const int most = HasTile(format, qmm, kMostQmmRows) ? kMostQmmRows : 128;
    const bool some = rows <= 104 && HasTile(format, qmm, 128);
    return {QmmWay::kTiles, rows <= 52 ? 64 : some ? 128 : most};
  }
  if (rows > 8 && !qmm.half && !AlwaysWarps(qmm.packed, format.bits, format.packed_by_warps)) {
    return {QmmWay::kTiles, 32};
  }
  const int blocks = qmm.packed ? kPackedBlocksPerSm : format.linear_blocks_per_sm;
  return {QmmWay::kWarps, 32, qmm.gated ? 1 : QmmParts(qmm, of, blocks)};
}

inline std::string NoKernelFollows(const QmmPlanSm90& plan) {
  return "no kernel follows the plan: way '" + std::string(kQmmWays[static_cast<int>(plan.way)]) +
         "', tile " + std::to_string(plan.tile) + ", parts " + std::to_string(plan.parts) +
         (plan.pairs ? ", in pairs" : "");
}

inline Reason TransposedPlanProblem(const QmmPlanSm90& plan, const FormatFacts& format,
                                    const QmmSizes& qmm) {
  if (qmm.gated) return "a gated activation of a weight that is quantized along N";
  if (plan.way == QmmWay::kScaled && !HasScaled(format)) return "scales are no floats";
  bool has = false;
  if (plan.way == QmmWay::kWarps) has = plan.tile == kTransposedFewRows;
  if (plan.way == QmmWay::kTiles) has = plan.tile == kMostQmmRows;
  if (plan.way == QmmWay::kScaled) {
    has = !qmm.half &&
          (plan.tile == kTransposedScaledFewRows ? qmm.scaled == 1
           : plan.tile == kTransposedScaledRows  ? qmm.packed && qmm.scaled == kMostScaledPlanes
                                                 : false);
  }
  if (has && plan.parts == 1 && !plan.pairs) return std::nullopt;
  return NoKernelFollows(plan);
}

// Why no kernel follows a plan.
inline Reason PlanQmmProblem(const QmmPlanSm90& plan, const FormatFacts& format,
                             const QmmSizes& qmm, const QmmRows& of) {
  const int tile = plan.tile;
  if (qmm.transposed) return TransposedPlanProblem(plan, format, qmm);
  bool has = false;
  switch (plan.way) {
    case QmmWay::kDirect:
      if (!qmm.packed) return "a plan without tiles needs layout 'sm90'";
      if (qmm.half) return "a plan without tiles needs bfloat16 x";
      if (!of.sizes || of.rows_x != of.rows) return "a plan without tiles needs sizes of groups";
      has = tile == kDirectRows || (tile == 2 * kDirectRows && of.OneMatrix());
      if (plan.pairs) has &= tile == 2 * kDirectRows && !qmm.gated && qmm.n % 128 == 0;
      has &= plan.parts == 1;
      break;
    case QmmWay::kScaled:
      if (!HasScaled(format)) return "scales are no floats";
      has = !qmm.half && !qmm.gated && !plan.pairs;
      if (!qmm.packed) {
        has &= format.scale == ScaleType::kScaleAndBias &&
               (tile == kScaledLinesTile || tile == kFloatLinesTile) && qmm.scaled == 1 &&
               (plan.parts == 1 || plan.parts == 2);
        break;
      }
      has &= tile == 32 ? qmm.scaled == 1 && (plan.parts == 1 || plan.parts == 2)
                        : tile == kScaledTileRows && plan.parts == 1 &&
                              (qmm.scaled == 1 || qmm.scaled == kMostScaledPlanes);
      break;
    case QmmWay::kWarps:
      has = tile == 32 && (plan.parts == 1 || (plan.parts == 2 && !qmm.gated)) && !plan.pairs;
      break;
    case QmmWay::kTiles:
      has = tile == 32 ? !qmm.half && !AlwaysWarps(qmm.packed, format.bits, format.packed_by_warps)
                       : HasTile(format, qmm, tile);
      has &= plan.parts == 1 && !plan.pairs;
  }
  if (has) return std::nullopt;
  return NoKernelFollows(plan);
}

}  // namespace jgg::rules
