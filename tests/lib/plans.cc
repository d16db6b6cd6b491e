// Plans of every shape of a grid, and what their own check says: ffi/*/plan.h.
#include "grouped_mm/plan.h"

#include <string>

#include "grouped_mm/tiles_sm80.h"
#include "quantized/plan.h"

using namespace jgg;
using namespace jgg::rules;

static const int64_t kSizes[] = {1,   8,   9,   16,  17,  24,  25,  40,  41,  52,  53,   96,  97,
                                 104, 105, 128, 129, 240, 256, 288, 289, 449, 512, 4096, 7168};
static int64_t count = 0;
static std::string text;

static void Note(const Reason& reason) {
  ++count;
  if (reason && text.empty()) text = *reason;
}

static void OfMm(int64_t rows, int64_t segments, int64_t k, int64_t n, int bits) {
  const auto bit = [bits](int i) { return (bits >> i & 1) != 0; };
  MmShape mm{k, n};
  mm.gated = bit(0);
  mm.by_list = bit(1);
  mm.planes = bit(2) && !mm.gated && !mm.by_list ? 3 : 1;
  MmRows of{rows, segments};
  of.y_by_list = mm.by_list && bit(3);
  of.bias = bit(4);
  of.rounds = mm.preactivation = mm.gated && bit(5);
  of.activation = !mm.gated && bit(5);
  of.float32_out = bit(6);
  mm.same_dtype = !of.float32_out;
  mm.more_options = of.bias && mm.by_list;
  Note(PlanMmProblem(PlanMmSm90(mm, of), mm, of));
}

static void OfWgrad(int64_t a, int64_t b, int64_t groups, int bits) {
  WgradShape wgrad{4096, 4096, a, b};
  wgrad.x_by_list = bits == 1;
  wgrad.planes = bits == 2 ? 3 : 1;
  wgrad.transpose_x = bits == 3;
  Note(PlanWgradProblem(PlanWgradSm90(wgrad, groups), wgrad));
}

static void OfQmm(int64_t rows, int64_t segments, int64_t k, int64_t n, int bits) {
  for (const FormatFacts& format : kFormats) {
    QmmSizes qmm{64 * k, 64 * n, (bits & 1) != 0, (bits & 2) != 0};
    qmm.transposed = !qmm.gated && (bits & 8) != 0;
    qmm.half = (bits & 16) != 0;
    const QmmRows of{rows + (bits == 7), rows, segments, (bits & 4) != 0, bits == 6};
    Note(PlanQmmProblem(PlanQmmSm90(format, qmm, of), format, qmm, of));
    if (!HasScaled(format) || qmm.gated || qmm.half) continue;
    const bool lines = format.scale == ScaleType::kScaleAndBias && !qmm.transposed;
    if (!qmm.packed && !lines) continue;
    // Few rows come as they are, or as rows for each plane.
    for (int planes : {1, kMostScaledPlanes}) {
      qmm.scaled = planes;
      const QmmPlanSm90 plan = PlanQmmSm90(format, qmm, of);
      const bool few = plan.tile <= 32;
      qmm.scaled = few ? 1 : qmm.transposed ? kMostScaledPlanes : planes;
      Note(PlanQmmProblem(plan, format, qmm, of));
    }
  }
}

// How many plans were made.
extern "C" int64_t plans() {
  count = 0;
  for (int64_t rows : kSizes) {
    for (int64_t n : kSizes) {
      for (int64_t segments : {1, 2, 8, 600}) {
        for (int bits = 0; bits < 128; ++bits) OfMm(rows * segments, segments, 5120, n, bits);
        for (int bits = 0; bits < 4; ++bits) OfWgrad(rows, n, segments, bits);
        for (int bits = 0; bits < 32; ++bits) OfQmm(rows * segments, segments, 70, n, bits);
      }
    }
  }
  return count;
}

// The first reason why there is no kernel as a plan says, or "".
extern "C" const char* problem() { return text.c_str(); }

static std::string last;

// What the check says of a plan of an mm (64 rows to a segment) that somebody else made.
extern "C" const char* of_mm(int rows, int tile, bool pairs, bool gated, bool by_list, int planes) {
  MmShape mm{512, 512};
  mm.gated = gated;
  mm.by_list = by_list;
  mm.planes = planes;
  const MmRows of{512, 8};
  last = PlanMmProblem({static_cast<RowsBy>(rows), tile, pairs}, mm, of).value_or("");
  return last.c_str();
}

// ... and of a product with a weight of affine codes of 4 bits.
extern "C" const char* of_qmm(int way, int tile, int parts, bool pairs, bool gated, bool packed,
                              bool transposed, int64_t segments) {
  const FormatFacts& format = FactsOf(Mode::kAffine, 4);
  const QmmRows of{12, 12, segments};
  last = PlanQmmProblem({static_cast<QmmWay>(way), tile, parts, pairs}, format,
                        {512, 512, gated, packed, transposed}, of)
             .value_or("");
  return last.c_str();
}

// ... of codes in blocks as they are stored.
extern "C" const char* of_blocks(int tile, bool gated, bool transposed, bool half) {
  const QmmSizes qmm{512, 512, gated, false, transposed, half};
  last = PlanQmmProblem({QmmWay::kTiles, tile}, FactsOf(Mode::kFp8, 8), qmm, {512, 512, 4})
             .value_or("");
  return last.c_str();
}

// ... that is not rounded, with x in so many planes.
extern "C" const char* of_scaled(int mode, int tile, int planes, bool transposed, bool half,
                                 bool packed) {
  const FormatFacts& format = FactsOf(static_cast<Mode>(mode), mode == 0 ? 4 : 8);
  QmmSizes qmm{512, 512, false, packed, transposed, half};
  qmm.scaled = planes;
  last = PlanQmmProblem({QmmWay::kScaled, tile}, format, qmm, {12, 12, 4}).value_or("");
  return last.c_str();
}

// The tile of the generic kernel on a GPU of so many multiprocessors with so much shared memory:
// the number of a TileSm80.
extern "C" int tile_sm80(bool mm, int64_t rows, int64_t n, int64_t k, int64_t matrices,
                         int64_t segments, int processors, int shared_memory) {
  const ProblemSm80 problem{mm, rows, n, k, matrices, segments};
  return static_cast<int>(ChooseTileSm80(problem, {processors, shared_memory}));
}
