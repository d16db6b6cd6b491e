// ffi/grouped_mm/layout_sm100.h and device/groups_sm100.cuh on the host, for
// tests/grouped/test_groups_sm100.py.
#include "cuda_on_host.h"

#include "grouped_mm/device/groups_sm100.cuh"
#include "grouped_mm/layout_sm100.h"

using namespace jgg;

// The members of Product, in order.
static sm100::Product ToProduct(const int64_t* p) {
  return sm100::Product{p[0] != 0,
                        p[1],
                        p[2],
                        p[3],
                        p[4],
                        p[5],
                        p[6],
                        p[7] != 0,
                        static_cast<int>(p[8]),
                        static_cast<int>(p[9])};
}

static Metadata ToMetadata(int kind, const int32_t* data, const int32_t* offset, int64_t count,
                           bool swapped) {
  Metadata metadata{};
  metadata.kind = static_cast<MetadataKind>(kind);
  metadata.data = data;
  metadata.offset = offset;
  metadata.count = count;
  metadata.swapped = swapped;
  return metadata;
}

extern "C" int64_t most_problems(const int64_t* p, int kind, int64_t count) {
  return sm100::MostProblems(ToProduct(p), static_cast<MetadataKind>(kind), count);
}

// problems (P, 8): the members of GroupProblem; gaps (count + 1, 2). Returns how many gaps there
// are.
extern "C" int groups(const int64_t* p, int kind, const int32_t* data, const int32_t* offset,
                      int64_t count, int swapped, int64_t* problems, int32_t* gaps) {
  const sm100::Product product = ToProduct(p);
  const Metadata metadata = ToMetadata(kind, data, offset, count, swapped != 0);
  const int64_t most = sm100::MostProblems(product, metadata.kind, count);
  int gap_count = -1;
  RunBlocks({1, 1}, device::kGroupThreads, [&] {
    device::FindGroups(product, metadata, most, reinterpret_cast<sm100::Gap*>(gaps), &gap_count,
                       [&](int64_t at, const sm100::GroupProblem& problem) {
                         const int64_t members[] = {problem.m,       problem.n,     problem.k,
                                                    problem.a,       problem.b,     problem.out,
                                                    problem.x_start, problem.matrix};
                         std::memcpy(problems + 8 * at, members, sizeof(members));
                       });
  });
  return gap_count;
}

extern "C" void lines(const int64_t* p, int64_t* of) {
  of[0] = ToProduct(p).a_line();
  of[1] = ToProduct(p).b_line();
}

// Where the parts of the workspace begin; its size.
extern "C" int64_t workspace(int64_t problems, int64_t count, int64_t* offsets) {
  const sm100::Workspace at(problems, count);
  const int64_t members[] = {at.shapes,   at.a,          at.b,    at.out,       at.stride_a,
                             at.stride_b, at.stride_out, at.gaps, at.gap_count, at.tensor_maps};
  std::memcpy(offsets, members, sizeof(members));
  return at.bytes;
}

// Of FP8, what follows the parts of `workspace`.
extern "C" int64_t scaled_workspace(int64_t problems, int64_t count, int64_t* offsets) {
  const sm100::ScaledWorkspace at(problems, count);
  const int64_t members[] = {at.scales_a, at.scales_b, at.layout_a, at.layout_b};
  std::memcpy(offsets, members, sizeof(members));
  return at.bytes;
}

extern "C" int64_t workspace_bytes(int64_t weights, int64_t count, int scaled) {
  return sm100::WorkspaceBytes(weights, count, scaled != 0);
}

// How far into a workspace its first aligned byte is.
extern "C" int64_t base(int64_t address) {
  auto* at = reinterpret_cast<void*>(address);
  return sm100::Arena::Base(at) - static_cast<uint8_t*>(at);
}
