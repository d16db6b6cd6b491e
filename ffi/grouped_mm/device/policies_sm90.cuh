// A Hopper kernel is a loader, products and a store: three policies, which are structs of named
// constants. These are what most kernels have. A kernel's own policies derive from them, and say
// what they have instead. A configuration (GemmSm90Config, Fp8GemmSm90Config,
// QuantizedGemmSm90Config) derives from its three policies, and adds what follows from them.
#pragma once

#include "grouped_mm/mm.h"

namespace jgg::device {

// The operand that comes by list. Warps gather it: TMA copies boxes, and its rows are scattered.
enum class ByList {
  kNothing,
  kRowsOfBoth,  // mm: rows of L and of the result; rows_by_list_sm90.cuh
  kRowsOfL,     // mm: operand_by_list_sm90.cuh
  kLinesOfR,    // wgrad: lines of k; operand_by_list_sm90.cuh
};

// How operands reach shared memory. A kernel's loader also has kStages, slices of k in the ring.
struct LoaderSm90 {
  static constexpr int kCluster = 1;        // thread blocks that share an operand: 1 or 2
  static constexpr bool kStacked = false;   // they share R, one's tile below the other's; else L
  static constexpr bool kSharesK = false;   // blocks may share out a tile's k
  static constexpr bool kBalances = false;  // wgrad: clusters may share out tiles by their work
  static constexpr ByList kByList = ByList::kNothing;
};

// How operands are multiplied. A kernel's products also have kRows, the rows of a tile.
struct ProductsSm90 {
  static constexpr int kBlocks = 1;          // of 128 columns
  static constexpr int kPlanes = 1;          // of each operand; more than one are of float32
  static constexpr bool kRaggedK = false;    // the kernel takes wgrad, too
  static constexpr bool kRowsFirst = false;  // rows are the instruction's M
};

// How the result leaves.
struct StoreSm90 {
  static constexpr bool kStoreWarp = false;   // a warp of its own may store: store_sm90.cuh
  static constexpr bool kWide = false;        // that warp takes float32 results
  static constexpr bool kGates = false;       // two warps gate rounded sums: gates_apart_sm90.cuh
  static constexpr bool kTransposed = false;  // wgrad: the result is (columns, rows)
  // Sums are this activation's cotangent: backward_sm90.cuh.
  static constexpr Activation kBackward = Activation::kNone;
};

}  // namespace jgg::device
