// Python asks these functions before it lowers a call. They give the rules that handlers have, by
// name, the plans of calls, and the names of kernels' activations.
//
// A function whose name ends in "_problem" returns why a kernel cannot take a call, in one
// sentence, or None where it can. Only a handler can tell what depends on a device or on addresses.

#include "rules.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <initializer_list>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "common/processors.h"
#include "fp8/rules.h"
#include "grouped_mm/layout_sm100.h"
#include "grouped_mm/mm.h"
#include "grouped_mm/plan.h"
#include "moe/rules.h"
#include "nvfp4/rules.h"
#include "quantized/plan.h"

namespace nb = nanobind;

namespace jgg {
namespace {

using namespace nb::literals;
using rules::Reason;

std::vector<int> TilesSm90(bool wgrad, bool gated, bool transpose_x) {
  std::vector<int> tiles;
  for (int tile : rules::kTilesSm90) {
    if (rules::HasTileSm90(wgrad, gated, !wgrad || transpose_x, tile)) tiles.push_back(tile);
  }
  return tiles;
}

Reason MmSm90Problem(int64_t k, int64_t n, int element_bytes, int planes, bool transpose_x,
                     bool transpose_w, bool transpose_out, bool in_order, bool gated, bool by_list,
                     bool preactivation, bool more_options, bool same_dtype) {
  rules::MmShape mm{k, n};
  mm.element_bytes = element_bytes;
  mm.planes = planes;
  mm.transpose_x = transpose_x;
  mm.transpose_w = transpose_w;
  mm.transpose_out = transpose_out;
  mm.in_order = in_order;
  mm.gated = gated;
  mm.by_list = by_list;
  mm.preactivation = preactivation;
  mm.more_options = more_options;
  mm.same_dtype = same_dtype;
  return rules::MmSm90Problem(mm);
}

Reason MmSm100Problem(int64_t k, int64_t n, bool transpose_x, bool transpose_out, bool in_order) {
  rules::MmShape mm{k, n};
  mm.transpose_x = transpose_x;
  mm.transpose_out = transpose_out;
  mm.in_order = in_order;
  return rules::MmSm100Problem(mm);
}

// As attributes of a call.
using Plan = std::tuple<std::string, int, bool>;

Plan ToPlan(const rules::PlanSm90& plan) {
  return {std::string(rules::kRowsBy[static_cast<int>(plan.rows)]), plan.tile, plan.pairs};
}

Plan PlanMmSm90(int64_t rows, int64_t segments, int64_t k, int64_t n, int planes, bool gated,
                bool by_list, bool y_by_list, bool preactivation, bool more_options,
                bool same_dtype, bool bias, bool activation, bool rounds, bool float32_out) {
  rules::MmShape mm{k, n};
  mm.planes = planes;
  mm.gated = gated;
  mm.by_list = by_list;
  mm.preactivation = preactivation;
  mm.more_options = more_options;
  mm.same_dtype = same_dtype;
  const rules::MmRows of{rows, segments, y_by_list, bias, activation, rounds, float32_out};
  return ToPlan(rules::PlanMmSm90(mm, of));
}

Plan PlanWgradSm90(int64_t rows, int64_t groups, int64_t a, int64_t b, int planes, bool transpose_x,
                   bool by_list) {
  rules::WgradShape wgrad{rows, rows, a, b};
  wgrad.planes = planes;
  wgrad.transpose_x = transpose_x;
  wgrad.x_by_list = by_list;
  return ToPlan(rules::PlanWgradSm90(wgrad, groups));
}

const FormatFacts& FindFormat(const std::string& mode, int bits) {
  for (const FormatFacts& format : kFormats) {
    if (format.name == mode && format.bits == bits) return format;
  }
  throw nb::value_error(rules::UnknownMode(mode).c_str());
}

std::tuple<std::string, int, int, bool> PlanQmmSm90(const std::string& mode, int bits, bool packed,
                                                    int64_t rows_x, int64_t rows, int64_t segments,
                                                    int64_t k, int64_t n, bool gated,
                                                    bool transposed, bool half, int scaled,
                                                    bool sizes, bool offset) {
  const FormatFacts& format = FindFormat(mode, bits);
  const rules::QmmPlanSm90 plan =
      rules::PlanQmmSm90(format, {k, n, gated, packed, transposed, half, scaled},
                         {rows_x, rows, segments, sizes, offset});
  return {std::string(rules::kQmmWays[static_cast<int>(plan.way)]), plan.tile, plan.parts,
          plan.pairs};
}

Reason WgradSm90Problem(int64_t rows_x, int64_t rows_y, int64_t a, int64_t b, int element_bytes,
                        bool transpose_x, bool transpose_y, bool own_weight, bool segments,
                        bool x_by_list, bool y_by_list, bool more_options, bool same_dtype) {
  rules::WgradShape wgrad{rows_x, rows_y, a, b};
  wgrad.element_bytes = element_bytes;
  wgrad.transpose_x = transpose_x;
  wgrad.transpose_y = transpose_y;
  wgrad.own_weight = own_weight;
  wgrad.segments = segments;
  wgrad.x_by_list = x_by_list;
  wgrad.y_by_list = y_by_list;
  wgrad.more_options = more_options;
  wgrad.same_dtype = same_dtype;
  return rules::WgradSm90Problem(wgrad);
}

Reason WgradSm100Problem(int64_t a, int64_t b, bool transpose_x, bool transpose_y,
                         bool own_weight) {
  rules::WgradShape wgrad{0, 0, a, b};
  wgrad.transpose_x = transpose_x;
  wgrad.transpose_y = transpose_y;
  wgrad.own_weight = own_weight;
  return rules::WgradSm100Problem(wgrad);
}

Reason QmmSm90Problem(int64_t line, int bits, bool bfloat16_x, bool bfloat16_scales, bool half,
                      bool scaled, bool transpose_w, bool in_order, bool has_options) {
  rules::QmmShape qmm{line, bits};
  qmm.bfloat16_x = bfloat16_x;
  qmm.bfloat16_scales = bfloat16_scales;
  qmm.half = half;
  qmm.scaled = scaled;
  qmm.transpose_w = transpose_w;
  qmm.in_order = in_order;
  qmm.has_options = has_options;
  return rules::QmmSm90Problem(qmm);
}

bool TakesAdapter(const std::string& way, int tile, int64_t rank) {
  const auto known = rules::FindName<rules::QmmWay>(rules::kQmmWays, way);
  return known && rules::TakesAdapter({*known, tile}, false) && !rules::AdapterProblem(rank);
}

Reason GroupsSm90Problem(const std::string& mode, int group_size) {
  const FormatFacts* format = rules::FindMode(mode);
  return format == nullptr ? std::nullopt : rules::GroupsSm90Problem(*format, group_size);
}

Reason PackedSm80Problem(const std::string& mode, int bits, int group_size, int64_t n, bool gated) {
  return rules::QmmPackedSm80Problem(FindFormat(mode, bits), group_size, n, gated);
}

// The axes of a Product are int32.
void CheckAxes(std::initializer_list<int64_t> axes) {
  for (int64_t axis : axes) {
    if (axis < 0 || axis > INT32_MAX) {
      throw nb::value_error("an axis is negative, or longer than 2^31 - 1");
    }
  }
}

int64_t Sm100Workspace(int64_t weights, int64_t count, bool scaled) {
  CheckAxes({weights, count});
  return sm100::WorkspaceBytes(weights, count, scaled);
}

Reason Nvfp4MmSm100Problem(int64_t k, int64_t n, int out_bytes) {
  CheckAxes({k, n});
  return nvfp4::ShapeProblem(nvfp4::GroupedMm(1, 1, n, k, out_bytes));
}

Reason Nvfp4WgradSm100Problem(int64_t k) {
  CheckAxes({k});
  return nvfp4::ShapeProblem(nvfp4::GroupedWgrad(1, nvfp4::kTileK, 1, 1, k));
}

int64_t Nvfp4MmWorkspace(int64_t tokens, int64_t groups, int64_t n, int64_t k) {
  CheckAxes({tokens, groups, n, k});
  return nvfp4::Workspace(nvfp4::GroupedMm(tokens, groups, n, k, Size(DType::kF32))).bytes;
}

int64_t Nvfp4WgradWorkspace(int64_t padded_tokens, int64_t groups, int64_t n, int64_t k) {
  CheckAxes({padded_tokens, groups, n, k});
  return nvfp4::Workspace(nvfp4::GroupedWgrad(padded_tokens, padded_tokens, groups, n, k)).bytes;
}

std::pair<int64_t, int> PackedScaleShape(const std::string& mode, int group_size, int64_t k_tiles) {
  const FormatFacts* format = rules::FindMode(mode);
  if (format == nullptr) throw nb::value_error(rules::UnknownMode(mode).c_str());
  if (group_size < 1) throw nb::value_error("group_size is not positive");
  const PackedScales scales = format->packed_scales_of(group_size);
  return {64 * k_tiles / scales.k, scales.words};
}

nb::str Named(std::string_view name) { return nb::str(name.data(), name.size()); }

nb::dict Activations() {
  nb::dict gated;
  for (const auto& [name, activation] : kActivations) gated[Named(name)] = IsGated(activation);
  return gated;
}

}  // namespace

void DefineRules(nb::module_& m) {
  m.attr("H200_PROCESSORS") = kH200Processors;
  m.attr("ACTIVATIONS") = Activations();  // by name, whether it is gated
  m.attr("BACKWARD_ACTIVATION") = Named(ActivationOf<kBackwardSm90>::kName);  // of sm90
  m.def("tiles_sm90", &TilesSm90, nb::kw_only(), "wgrad"_a = false, "gated"_a = false,
        "transpose_x"_a = false,
        "Rows of the tiles that the Hopper kernel has for mm, or for wgrad, where transpose_x says "
        "that x is contiguous along the axis that is contracted.");
  m.def("mm_sm90_problem", &MmSm90Problem, nb::kw_only(), "k"_a, "n"_a, "element_bytes"_a = 2,
        "planes"_a = 1, "transpose_x"_a = false, "transpose_w"_a = false, "transpose_out"_a = false,
        "in_order"_a = true, "gated"_a = false, "by_list"_a = false, "preactivation"_a = false,
        "more_options"_a = false, "same_dtype"_a = true,
        "Why the Hopper kernel cannot take an mm: x (T, K) @ w (G, K, N). With planes, k is the "
        "one that has been filled up, and element_bytes 2. more_options says that there is a row "
        "scale or an existing result, or a bias beside rows by list.");
  m.def("plan_mm_sm90", &PlanMmSm90, nb::kw_only(), "rows"_a, "segments"_a, "k"_a, "n"_a,
        "planes"_a = 1, "gated"_a = false, "by_list"_a = false, "y_by_list"_a = false,
        "preactivation"_a = false, "more_options"_a = false, "same_dtype"_a = true,
        "bias"_a = false, "activation"_a = false, "rounds"_a = false, "float32_out"_a = false,
        "The plan of an mm: how rows are found ('in order', 'by list', 'operand by list'), rows of "
        "a tile, and whether blocks come in pairs. rows: of the result, in so many segments. "
        "activation: one that is not gated; rounds: it is of rounded sums.");
  m.def("plan_wgrad_sm90", &PlanWgradSm90, nb::kw_only(), "rows"_a, "groups"_a, "a"_a, "b"_a,
        "planes"_a = 1, "transpose_x"_a = false, "by_list"_a = false,
        "The plan of a wgrad, as plan_mm_sm90 has it. by_list: rows of one operand come by list.");
  m.def("plan_qmm_sm90", &PlanQmmSm90, nb::kw_only(), "mode"_a, "bits"_a, "packed"_a, "rows_x"_a,
        "rows"_a, "segments"_a, "k"_a, "n"_a, "gated"_a = false, "transposed"_a = false,
        "half"_a = false, "scaled"_a = 0, "sizes"_a = true, "offset"_a = false,
        "The plan of a product with a quantized weight: who multiplies ('tiles', 'warps', "
        "'direct', 'scaled'), rows of a tile or block, blocks that share out a tile's k, and "
        "whether warps have pairs of columns' tiles.");
  m.def("fp8_rows_first_sm90", &rules::Fp8RowsFirstSm90, nb::kw_only(), "rows"_a, "segments"_a,
        "Whether an FP8 product with results of 16 bits has rows as the instruction's M.");
  m.def("wgrad_sm90_problem", &WgradSm90Problem, nb::kw_only(), "rows_x"_a, "rows_y"_a, "a"_a,
        "b"_a, "element_bytes"_a = 2, "transpose_x"_a = false, "transpose_y"_a = false,
        "own_weight"_a = true, "segments"_a = false, "x_by_list"_a = false, "y_by_list"_a = false,
        "more_options"_a = false, "same_dtype"_a = true,
        "Why the Hopper kernel cannot take a wgrad: out (G, A, B) of x (T, A) and y (T, B). "
        "segments says that the metadata is a table of segments. With planes, rows of transposed "
        "operands are those that have been filled up, and element_bytes 2.");
  m.def("mm_sm100_problem", &MmSm100Problem, nb::kw_only(), "k"_a, "n"_a, "transpose_x"_a = false,
        "transpose_out"_a = false, "in_order"_a = true,
        "Why the Blackwell kernel cannot take an mm of 16-bit operands.");
  m.def("wgrad_sm100_problem", &WgradSm100Problem, nb::kw_only(), "a"_a, "b"_a,
        "transpose_x"_a = false, "transpose_y"_a = false, "own_weight"_a = true,
        "Why the Blackwell kernel cannot take a wgrad of 16-bit operands.");
  m.def("sm100_workspace", &Sm100Workspace, nb::kw_only(), "weights"_a, "count"_a,
        "scaled"_a = false,
        "Bytes of the workspace of an mm or a wgrad on Blackwell; count: entries of metadata; "
        "scaled: of FP8.");
  m.def("qmm_sm90_problem", &QmmSm90Problem, nb::kw_only(), "line"_a, "bits"_a,
        "bfloat16_x"_a = true, "bfloat16_scales"_a = true, "half"_a = false, "scaled"_a = false,
        "transpose_w"_a = true, "in_order"_a = true, "has_options"_a = false,
        "Why the Hopper kernel cannot take a product with a weight in layout 'linear', whose lines "
        "have so many codes. bfloat16_scales is also true of modes whose scales are bytes. half: "
        "x, scales and biases are float16 instead. scaled: scales multiply sums.");
  m.def("takes_adapter", &TakesAdapter, nb::kw_only(), "way"_a, "tile"_a, "rank"_a,
        "Whether a kernel of prepacked weights with this plan adds a product of this rank.");
  m.def("groups_sm90_problem", &GroupsSm90Problem, nb::kw_only(), "mode"_a, "group_size"_a,
        "Why the Hopper kernels cannot take a weight of a mode in groups of so many codes.");
  m.def(
      "fp8_quantize_problem", &rules::Fp8QuantizeProblem, nb::kw_only(), "rows"_a, "columns"_a,
      "along"_a,
      "Why the kernels cannot take an fp8_quantize of x (rows, columns); along: elements of a line "
      "of the result where blocks lie along rows, else 0.");
  m.def("fp8_cast_problem", &rules::Fp8CastProblem, nb::kw_only(), "columns"_a, "along"_a,
        "Why the kernel cannot take an fp8_cast of x (rows, columns); along as above.");
  m.def("fp8_dequantize_problem", &rules::Fp8DequantizeProblem, nb::kw_only(), "rows"_a,
        "columns"_a, "Why the kernel cannot dequantize codes (rows, columns).");
  m.def("fp8_activation_problem", &rules::Fp8ActivationProblem, nb::kw_only(), "columns"_a,
        "along_rows"_a,
        "Why the kernels cannot quantize a gated activation with so many columns; along_rows says "
        "that blocks lie along rows, too.");
  m.attr("FP8_ACTIVATION_BACKWARD_BYTES") = rules::kFp8ActivationBackwardBytes;
  m.def("activation_backward_problem", &rules::ActivationBackwardProblem, nb::kw_only(),
        "columns"_a,
        "Why the kernel of an activation's backward pass cannot take so many columns.");
  m.def("lora_problem", &rules::LoraProblem, nb::kw_only(), "rank"_a, "k"_a, "n"_a,
        "Why the kernel of products of low rank cannot take factors of these sizes.");
  m.def("qmm_packed_problem", &rules::QmmPackedProblem, nb::kw_only(), "n"_a, "gated"_a,
        "Why the Hopper kernel cannot take a product with a prepacked weight of n columns.");
  m.def("qmm_packed_sm80_problem", &PackedSm80Problem, nb::kw_only(), "mode"_a, "bits"_a,
        "group_size"_a, "n"_a, "gated"_a,
        "Why the generic kernel cannot take a product with a prepacked weight of n columns.");
  m.def("nvfp4_mm_sm100_problem", &Nvfp4MmSm100Problem, nb::kw_only(), "k"_a, "n"_a, "out_bytes"_a,
        "Why the Blackwell kernel cannot take an nvfp4_grouped_mm: out (T, N), of elements of "
        "out_bytes, of x (T, K) and w (G, N, K).");
  m.def("nvfp4_wgrad_sm100_problem", &Nvfp4WgradSm100Problem, nb::kw_only(), "k"_a,
        "Why the Blackwell kernel cannot take an nvfp4_grouped_wgrad: out (G, N, K) float32.");
  m.def("nvfp4_mm_workspace", &Nvfp4MmWorkspace, nb::kw_only(), "tokens"_a, "groups"_a, "n"_a,
        "k"_a, "Bytes of the workspace of an nvfp4_grouped_mm.");
  m.def("nvfp4_wgrad_workspace", &Nvfp4WgradWorkspace, nb::kw_only(), "padded_tokens"_a, "groups"_a,
        "n"_a, "k"_a, "Bytes of the workspace of an nvfp4_grouped_wgrad; k columns of x.");
  m.def("packed_scales", &PackedScaleShape, nb::kw_only(), "mode"_a, "group_size"_a, "k_tiles"_a,
        "The last two axes of the scales of layout 'sm90': tiles along K, and words of a tile, for "
        "a weight of so many tiles of 64 k.");
  m.def("moe_route_problem", &rules::MoeRouteProblem, nb::kw_only(), "pairs"_a, "experts"_a,
        "Why the kernel of route cannot take so many pairs of token and expert.");
  m.def("moe_route_blocks", &rules::MoeRouteBlocks, nb::kw_only(), "pairs"_a,
        "The last axis of the workspace (E, blocks) of route.");
  m.def("moe_rows_problem", &rules::MoeRowsProblem, nb::kw_only(), "pairs"_a, "d"_a,
        "element_bytes"_a,
        "Why the kernels of dispatch and combine cannot take rows of d elements.");
  m.def("moe_top_k_problem", &rules::MoeTopKProblem, nb::kw_only(), "experts"_a, "k"_a, "groups"_a);
  m.def("moe_router_problem", &rules::MoeRouterProblem, nb::kw_only(), "tokens"_a, "d"_a,
        "experts"_a, "k"_a, "groups"_a,
        "Why the kernel of a router cannot take x (tokens, d), and choose k of so many experts.");
  m.def("moe_few_term_rows", &rules::MoeFewTermRows, nb::kw_only(), "pairs"_a, "experts"_a,
        "matrix"_a, "Rows of the workspace of what pairs add, of a few tokens' experts.");
  m.def("moe_few_tokens_problem", &rules::MoeFewTokensProblem, nb::kw_only(), "pairs"_a,
        "choices"_a, "width"_a, "packed"_a,
        "Why the kernels of a few tokens' experts cannot take so many pairs, and so many experts "
        "of a token; whether weights are prepacked.");
  m.def("moe_few_dense_problem", &rules::MoeFewDenseProblem, nb::kw_only(), "pairs"_a, "choices"_a,
        "d"_a, "f"_a, "Likewise with weights of 16 bits.");
  m.def("moe_some_tokens_problem", &rules::MoeSomeTokensProblem, nb::kw_only(), "pairs"_a,
        "choices"_a, "experts"_a, "d"_a, "f"_a,
        "Why the kernels of some tokens' experts cannot take so many pairs, or so long rows.");
}

}  // namespace jgg
