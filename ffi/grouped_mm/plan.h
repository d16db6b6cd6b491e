// The plan of a product of arrays on a Hopper GPU: which kernel runs, with which tile. It follows
// from static shapes, so Python makes it when it lowers a call (rules.cc). The call carries it as
// attributes, and the handler checks that there is such a kernel. A launch decides how results are
// stored and how clusters share out the tiles.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "common/processors.h"
#include "grouped_mm/rules.h"
#include "grouped_mm/tiles_sm90.h"

namespace jgg::rules {

// How a kernel finds the rows that it multiplies.
enum class RowsBy {
  kOrder,       // they lie in order
  kList,        // rows of x and of the result come by list: the kernel of few rows
  kOperandList  // rows of one operand come by list: the kernel of many rows
};

// Their names as attributes, in the order of RowsBy.
constexpr std::string_view kRowsBy[] = {"in order", "by list", "operand by list"};

struct PlanSm90 {
  RowsBy rows = RowsBy::kOrder;
  int tile = 0;        // rows of a tile
  bool pairs = false;  // of planes: blocks come in pairs that share L
};

// Facts of an mm that its plan needs, beside the shape of its operands.
struct MmRows {
  int64_t rows, segments;  // of the result
  bool y_by_list = false;
  bool bias = false;
  bool activation = false;  // one that is not gated
  bool rounds = false;      // the activation is of rounded sums
  bool float32_out = false;

  int64_t Typical() const { return RowsPerSegment(rows, segments); }
};

// Why the kernel for many rows does not take those of x by list. It has pairs of blocks.
inline Reason OperandByListProblem(const MmShape& mm, const MmRows& of) {
  if (of.y_by_list) return "rows of the result come by list";
  if (of.bias || of.activation || mm.more_options || !mm.same_dtype) {
    return "options beside rows of an operand by list";
  }
  if (mm.planes > 1) return "rows by list of split operands";
  if (mm.gated && !mm.preactivation) return "a gated activation of sums that are not rounded";
  if (mm.n < 128 || (!mm.gated && mm.n == 128)) return "N is too small";
  return NeedsMultiple("N", mm.gated ? 16 : 8, mm.n);
}

// Warps beside those that multiply make a gated activation in tiles of 256 rows, of rounded sums
// that have no bias, where the result's lines are whole 16 bytes.
inline bool GatesApart(const MmShape& mm, const MmRows& of) {
  return of.rounds && !of.bias && mm.n % 16 == 0 && of.Typical() > 96;
}

// The rows of a tile: 32 or 64 where there are few, so that many stages of weights are under way;
// 256 where there are many; 288, shared out evenly, where segments have about 256, so that no small
// rest is left over, or many more and sums are long, which takes 4-9% less then (of short ones up
// to 10% more). Not for float32 results, which only tiles of 256 store by TMA. 128 between, and
// where columns are few. Products of adapters are bound by memory, and take 256: 24% less where K
// is the rank, 5% less where N is.
inline int MmTileSm90(const MmShape& mm, const MmRows& of) {
  const int64_t rows = of.Typical();
  if (mm.gated) return rows <= 16 ? 32 : GatesApart(mm, of) ? 256 : 128;
  if (rows <= 16) return 32;
  if (rows <= 40) return 64;
  if (rows <= 96 || (mm.n <= 128 && (mm.n > 32 || rows <= 192))) return 128;
  const bool higher =
      mm.k > 64 && mm.n > 32 && rows > 240 && (rows <= 288 || (rows > 448 && mm.k >= 5120));
  return higher && !of.float32_out ? 288 : 256;
}

// ... of few rows by list, of which there are fewer tiles to choose from.
inline int ByListTileSm90(const MmShape& mm, const MmRows& of) {
  const int64_t rows = of.Typical();
  if (mm.gated) return rows <= 32 ? 32 : 128;
  if (rows <= 16) return 32;
  return rows <= 96 || mm.n <= 128 ? 128 : 256;
}

// The plan of split operands. Tiles have 128 rows. Four tiles for each multiprocessor of an H200
// are enough for pairs of blocks, which share L. Tiles have 64 rows where those of 128 would be
// fewer than two thirds of the multiprocessors.
inline PlanSm90 PlanOfPlanesSm90(int64_t rows, int64_t n, int64_t matrices) {
  const int64_t tiles = (rows + 127) / 128 * ((n + 127) / 128) * matrices;
  if (tiles < 2 * kH200Processors / 3) return {RowsBy::kOrder, 64, false};
  return {RowsBy::kOrder, 128, tiles >= 4 * kH200Processors && n > 128};
}

inline PlanSm90 PlanMmSm90(const MmShape& mm, const MmRows& of) {
  if (mm.by_list) {
    const bool many = of.rows / std::max<int64_t>(of.segments, 1) > 96;  // rounded down
    if (many && !OperandByListProblem(mm, of)) return {RowsBy::kOperandList, 128};
    return {RowsBy::kList, ByListTileSm90(mm, of)};
  }
  if (mm.planes > 1) return PlanOfPlanesSm90(of.Typical(), mm.n, of.segments);
  return {RowsBy::kOrder, MmTileSm90(mm, of)};
}

// Too few tiles of 256 x 128 are made smaller.
inline int WgradTileSm90(const WgradShape& wgrad, int64_t groups) {
  const int64_t rows = wgrad.a, tiles = (rows + 255) / 256 * ((wgrad.b + 127) / 128) * groups;
  if (wgrad.transpose_x && rows <= 16) return 32;
  if (rows <= 40 || tiles < kH200Processors) return 64;
  return tiles < 4 * kH200Processors || rows <= 96 || wgrad.b <= 128 ? 128 : 256;
}

inline PlanSm90 PlanWgradSm90(const WgradShape& wgrad, int64_t groups) {
  if (wgrad.x_by_list || wgrad.y_by_list) return {RowsBy::kOperandList, 256};
  if (wgrad.planes > 1) return PlanOfPlanesSm90(wgrad.a, wgrad.b, groups);
  return {RowsBy::kOrder, WgradTileSm90(wgrad, groups)};
}

inline std::string NoSuchTile(const PlanSm90& plan) {
  return "no kernel follows the plan: rows '" + std::string(kRowsBy[static_cast<int>(plan.rows)]) +
         "', tile " + std::to_string(plan.tile) + (plan.pairs ? ", in pairs" : "");
}

inline bool HasTileOfPlanes(const PlanSm90& plan) {
  return plan.tile == 128 || (plan.tile == 64 && !plan.pairs);
}

// Why no kernel follows a plan.
inline Reason PlanMmProblem(const PlanSm90& plan, const MmShape& mm, const MmRows& of) {
  if (mm.by_list != (plan.rows != RowsBy::kOrder))
    return "the plan and the operands differ in lists";
  bool has = plan.tile == 128;
  switch (plan.rows) {
    case RowsBy::kOrder:
      has = mm.planes > 1 ? HasTileOfPlanes(plan)
                          : HasTileSm90(false, mm.gated, true, plan.tile) ||
                                (plan.tile == 256 && of.rounds && !of.bias);
      break;
    case RowsBy::kList: has |= plan.tile == 32 || (plan.tile == 256 && !mm.gated); break;
    case RowsBy::kOperandList:
      if (auto reason = OperandByListProblem(mm, of)) return reason;
  }
  return has ? Reason{} : NoSuchTile(plan);
}

inline Reason PlanWgradProblem(const PlanSm90& plan, const WgradShape& wgrad) {
  const bool by_list = wgrad.x_by_list || wgrad.y_by_list;
  if (by_list != (plan.rows == RowsBy::kOperandList)) {
    return "the plan and the operands differ in lists";
  }
  const bool has = by_list            ? plan.tile == 256
                   : wgrad.planes > 1 ? HasTileOfPlanes(plan)
                                      : HasTileSm90(true, false, wgrad.transpose_x, plan.tile);
  return has ? Reason{} : NoSuchTile(plan);
}

}  // namespace jgg::rules
