// The kernels that run before products on Blackwell, FP8's too, on any GPU. A simple kernel in
// CUTLASS's place multiplies what they wrote, and the result is compared with the host's;
// test_groups_sm100.py builds and runs this. For a machine without nvcc, whose JGG_PREPARE_SM100
// then names it, from the root of the repository:
//
//   nvcc -std=c++17 -arch=sm_90 -cudart static --expt-relaxed-constexpr \
//     -isystem CUTLASS/include -I ffi tests/lib/prepare_sm100.cu -o prepare
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <vector>

#include "../../ffi/fp8/prepare_sm100.cu"
#include "../../ffi/grouped_mm/prepare_sm100.cu"
#include "device_array.h"

using namespace jgg;

// Elements are integers of 16 bits, so sums do not depend on their order.
using Element = uint16_t;

// A block for each product.
__global__ void MultiplyKernel(sm100::Product product, sm100::Groups groups) {
  const auto [m, n, k] = groups.shapes[blockIdx.x];
  const auto* a = reinterpret_cast<const Element*>(groups.a[blockIdx.x]);
  const auto* b = reinterpret_cast<const Element*>(groups.b[blockIdx.x]);
  auto* out = reinterpret_cast<Element*>(groups.out[blockIdx.x]);
  const int64_t line_a = groups.stride_a[blockIdx.x], line_b = groups.stride_b[blockIdx.x];
  for (int64_t i = threadIdx.x; i < int64_t{m} * n; i += blockDim.x) {
    const int64_t row = i / n, column = i % n;
    Element sum = 0;
    for (int64_t j = 0; j < k; ++j) {
      const Element left = product.wgrad ? a[j * line_a + row] : a[row * line_a + j];
      sum += left * (product.k_major ? b[column * line_b + j] : b[j * line_b + column]);
    }
    out[row * groups.stride_out[blockIdx.x] + column] = sum;
  }
}

struct Case {
  sm100::Product product{};
  Metadata metadata;
  std::vector<int32_t> data;
  int32_t offset = 0;
  bool has_offset = false;
};

template <typename Random>
static Case MakeCase(Random& random) {
  const auto pick = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  Case c;
  sm100::Product& p = c.product;
  p.wgrad = pick(0, 1);
  p.rows_x = pick(1, 900);
  p.rows_y = p.rows_x + (pick(0, 1) ? pick(0, 50) : 0);
  p.weights = pick(0, 3) ? pick(1, 12) : pick(200, 700);
  p.m = 8 * pick(1, 3);
  p.n = 8 * pick(1, 3);
  p.k = 8 * pick(1, 3);
  p.k_major = !p.wgrad && pick(0, 1);
  p.in_bytes = p.out_bytes = sizeof(Element);
  const int kind = pick(0, 2);
  c.metadata.kind = static_cast<MetadataKind>(kind == 1 && !p.wgrad ? 0 : kind);
  switch (c.metadata.kind) {
    case MetadataKind::kSizes: {
      c.has_offset = pick(0, 2) == 0;
      c.offset = pick(-3, 9);
      c.metadata.count = c.has_offset ? pick(1, 700) : p.weights;
      const int most = std::max<int>(1, pick(1, 3) * p.rows_x / c.metadata.count);
      for (int g = 0; g < c.metadata.count; ++g) {
        c.data.push_back(pick(0, 2) ? pick(0, most) : pick(-5, 0));
      }
      if (pick(0, 9) == 0) c.data[pick(0, c.metadata.count - 1)] = INT32_MAX;
      break;
    }
    case MetadataKind::kSpans:
      c.metadata.count = p.weights;
      for (int g = 0; g < p.weights; ++g) {
        c.data.push_back(pick(-5, p.rows_x + 5));
        c.data.push_back(pick(-5, p.rows_x + 5));
      }
      break;
    case MetadataKind::kSegments: {
      c.metadata.count = p.wgrad ? p.weights : pick(1, 600);
      int row = 0;
      for (int s = 0; s < c.metadata.count; ++s) {
        row += pick(0, 4) ? 0 : pick(0, 9);
        const int rows = pick(0, 3) ? pick(0, 5) : 0;
        const bool fits = row + rows <= p.rows_y && rows <= p.rows_x;
        const int length = fits ? rows : 0;
        const int weight = p.wgrad ? s : pick(0, p.weights - 1);
        c.data.insert(c.data.end(),
                      {pick(0, p.rows_x - length), std::min<int>(row, p.rows_y), length, weight});
        row += length;
      }
      break;
    }
  }
  c.metadata.clears_rest = pick(0, 4) > 0;
  return c;
}

// The segments, by the definition of each form.
static std::vector<Segment> Segments(const Case& c) {
  const sm100::Product& p = c.product;
  std::vector<Segment> found;
  int64_t row = 0;
  const auto cut = [&](int64_t at) { return std::min(std::max<int64_t>(at, 0), p.rows_x); };
  for (int i = 0; i < c.metadata.count; ++i) {
    if (c.metadata.kind == MetadataKind::kSizes) {
      const int64_t start = cut(row);
      row += std::max(c.data[i], 0);
      const int64_t weight = i - (c.has_offset ? c.offset : 0);
      if (weight < 0 || weight >= p.weights) continue;
      const int at = static_cast<int>(start);
      found.push_back({at, at, static_cast<int>(cut(row) - start), static_cast<int>(weight)});
    } else if (c.metadata.kind == MetadataKind::kSpans) {
      const int start = static_cast<int>(cut(c.data[2 * i]));
      const int end = static_cast<int>(cut(c.data[2 * i + 1]));
      found.push_back({start, start, std::max(end - start, 0), i});
    } else {
      const int32_t* s = &c.data[4 * i];
      found.push_back({s[0], s[1], s[2], s[3]});
    }
  }
  return found;
}

static std::vector<Element> Product(const Case& c, const std::vector<Element>& a,
                                    const std::vector<Element>& b, std::vector<Element> out) {
  const sm100::Product& p = c.product;
  if (p.wgrad || c.metadata.clears_rest) std::fill(out.begin(), out.end(), 0);
  for (const Segment& s : Segments(c)) {
    for (int i = 0; i < s.length; ++i) {
      const Element* x = &a[(s.x_start + i) * p.a_line()];
      if (p.wgrad) {
        for (int64_t row = 0; row < p.m; ++row) {
          for (int64_t column = 0; column < p.n; ++column) {
            out[(s.weight * p.m + row) * p.n + column] +=
                x[row] * b[(s.y_start + i) * p.n + column];
          }
        }
        continue;
      }
      for (int64_t column = 0; column < p.n; ++column) {
        Element sum = 0;
        for (int64_t k = 0; k < p.k; ++k) {
          const int64_t at = p.k_major ? column * p.k + k : k * p.n + column;
          sum += x[k] * b[s.weight * p.k * p.n + at];
        }
        out[(s.y_start + i) * p.n + column] = sum;
      }
    }
  }
  return out;
}

template <typename Random>
static void Try(Random& random) {
  Case c = MakeCase(random);
  const sm100::Product& p = c.product;
  const auto values = [&](int64_t count) {
    std::vector<Element> numbers(count);
    for (Element& number : numbers) number = static_cast<Element>(random());
    return numbers;
  };
  Array<int32_t> data(c.data), offset({c.offset});
  c.metadata.data = data.device;
  c.metadata.offset = c.has_offset ? offset.device : nullptr;
  Array<Element> a(values(p.rows_x * p.a_line()));
  Array<Element> b(values(p.wgrad ? p.rows_y * p.n : p.weights * p.k * p.n));
  Array<Element> out(values(p.wgrad ? p.weights * p.m * p.n : p.rows_y * p.n));
  GemmSm100 gemm{};
  gemm.product = p;
  gemm.metadata = c.metadata;
  gemm.a = a.device;
  gemm.b = b.device;
  gemm.out = out.device;
  const sm100::Workspace at(gemm.Problems(), c.metadata.count);
  Require(at.bytes <= sm100::WorkspaceBytes(p.weights, c.metadata.count), "the workspace's size");
  Array<uint8_t> workspace(std::vector<uint8_t>(at.bytes, 0xEE));
  uint8_t* base = sm100::Arena::Base(workspace.device);
  Require(PrepareSm100(nullptr, gemm, at, base));
  const sm100::Groups groups(at, base);
  MultiplyKernel<<<static_cast<unsigned>(gemm.Problems()), 128>>>(p, groups);
  Require(cudaDeviceSynchronize());
  Require(out.Read() == Product(c, a.host, b.host, out.host), "the product");
  // What CUTLASS writes lies behind.
  const std::vector<uint8_t> bytes = workspace.Read();
  const int64_t skipped = base - workspace.device;
  for (int64_t i = at.tensor_maps + skipped; i < at.bytes; ++i) {
    Require(bytes[i] == 0xEE, "bytes behind the arrays");
  }
}

// ---- FP8 -------------------------------------------------------------------------------------

// Codes are bytes, and scales small integers, so that sums do not depend on their order.
template <bool kWgrad>
__global__ void MultiplyScaledKernel(sm100::ScaledGroups of) {
  const sm100::Groups& groups = of.groups;
  const int p = blockIdx.x;
  const auto [m, n, k] = groups.shapes[p];
  const auto layout_a = of.layout_a[p];
  const auto layout_b = of.template LayoutB<kWgrad>()[p];
  auto* out = reinterpret_cast<float*>(groups.out[p]);
  for (int64_t i = threadIdx.x; i < int64_t{m} * n; i += blockDim.x) {
    const int row = static_cast<int>(i / n), column = static_cast<int>(i % n);
    float sum = 0;
    for (int j = 0; j < k; ++j) {
      const float scale =
          of.scales_a[p][layout_a(row, j, 0)] * of.scales_b[p][layout_b(column, j, 0)];
      sum += groups.a[p][row * groups.stride_a[p] + j] *
             groups.b[p][column * groups.stride_b[p] + j] * scale;
    }
    out[row * groups.stride_out[p] + column] = sum;
  }
}

template <typename Random>
static void TryScaled(Random& random) {
  const auto pick = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  Fp8GemmSm100 fp8{};
  GemmSm100& gemm = fp8.gemm;
  sm100::Product& p = gemm.product;
  p.wgrad = pick(0, 1);
  p.k_major = true;
  p.weights = pick(1, 9);
  p.rows_x = p.rows_y = p.wgrad ? 128 * pick(1, 5) : pick(1, 300);
  p.m = pick(1, 20);
  p.n = 8 * pick(1, 20);
  p.k = p.wgrad ? 0 : 16 * pick(1, 20);
  p.in_bytes = 1;
  p.out_bytes = 4;
  fp8.accumulate = p.wgrad && pick(0, 1);
  std::vector<int32_t> sizes;
  for (int g = 0; g < p.weights; ++g) {
    sizes.push_back(p.wgrad ? 128 * pick(0, 2) : pick(-3, 2 * p.rows_x / p.weights));
  }
  const auto numbers = [&](int64_t count, int most, auto zero) {
    std::vector<decltype(zero)> values(count);
    for (auto& value : values) value = static_cast<decltype(zero)>(pick(0, most));
    return values;
  };
  const int64_t line = ((p.wgrad ? p.rows_x : p.k) + 127) / 128, columns = (p.n + 127) / 128;
  const int64_t lines_a = p.wgrad ? p.m : p.rows_x;
  const int64_t along = p.wgrad ? p.rows_x : p.k;
  Array<int32_t> data(sizes);
  Array<uint8_t> a(numbers(lines_a * along, 3, uint8_t{}));
  Array<uint8_t> b(numbers((p.wgrad ? p.n : p.weights * p.n) * along, 3, uint8_t{}));
  Array<float> a_scales(numbers(lines_a * line, 4, 0.0f));
  Array<float> b_scales(numbers((p.wgrad ? p.n : p.weights * columns) * line, 4, 0.0f));
  Array<float> out(numbers(p.wgrad ? p.weights * p.m * p.n : p.rows_y * p.n, 99, 0.0f));
  gemm.metadata.kind = MetadataKind::kSizes;
  gemm.metadata.data = data.device;
  gemm.metadata.count = p.weights;
  gemm.a = a.device;
  gemm.b = b.device;
  gemm.out = out.device;
  fp8.a_scales = a_scales.device;
  fp8.b_scales = b_scales.device;
  const sm100::ScaledWorkspace at(gemm.Problems(), gemm.metadata.count);
  Require(at.bytes <= sm100::WorkspaceBytes(p.weights, p.weights, true), "the workspace's size");
  Array<uint8_t> workspace(std::vector<uint8_t>(at.bytes, 0xEE));
  uint8_t* base = sm100::Arena::Base(workspace.device);
  Require(PrepareFp8Sm100(nullptr, fp8, at, base));
  const auto kernel = p.wgrad ? MultiplyScaledKernel<true> : MultiplyScaledKernel<false>;
  kernel<<<static_cast<unsigned>(p.weights), 128>>>(sm100::ScaledGroups(at, base));
  Require(cudaDeviceSynchronize());

  std::vector<float> want = out.host;
  int64_t row = 0;
  for (int g = 0; g < p.weights; ++g) {
    const int64_t start = std::min(row, p.rows_x);
    row += std::max(sizes[g], 0);
    const int64_t end = std::min(row, p.rows_x);
    for (int64_t i = 0; i < (p.wgrad ? p.m : end - start); ++i) {
      for (int64_t j = 0; j < p.n; ++j) {
        const int64_t line_a = p.wgrad ? i : start + i, line_b = p.wgrad ? j : g * p.n + j;
        const int64_t scales_b = p.wgrad ? j : g * columns + j / 128;
        float sum = 0;
        for (int64_t k = p.wgrad ? start : 0; k < (p.wgrad ? end : p.k); ++k) {
          sum += a.host[line_a * along + k] * b.host[line_b * along + k] *
                 a_scales.host[line_a * line + k / 128] * b_scales.host[scales_b * line + k / 128];
        }
        float& result = want[((p.wgrad ? g * p.m : start) + i) * p.n + j];
        if (!p.wgrad || end > start || !fp8.accumulate) result = sum;
      }
    }
  }
  if (!p.wgrad) std::fill(want.begin() + std::min(row, p.rows_x) * p.n, want.end(), 0.0f);
  Require(out.Read() == want, "the scaled product");
}

int main() {
  std::mt19937 random(1);
  constexpr int kCases = 300;
  for (int i = 0; i < kCases; ++i) Try(random);
  for (int i = 0; i < kCases; ++i) TryScaled(random);
  std::printf("%d cases of either kind\n", kCases);
}
