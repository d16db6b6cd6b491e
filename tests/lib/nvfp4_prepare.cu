// The kernels that run before NVFP4 products on Blackwell, on any GPU, against the same steps on
// the host; test_nvfp4_layout.py compares those with brute force, and builds and runs this. For a
// machine without nvcc, whose JGG_NVFP4_PREPARE then names it, from the root of the repository:
//
//   nvcc -std=c++17 -arch=sm_90 -cudart static --expt-relaxed-constexpr \
//     -isystem CUTLASS/include -I ffi tests/lib/nvfp4_prepare.cu -o prepare
#include <cstdio>
#include <cstdlib>
#include <random>

#include "../../ffi/nvfp4/prepare_sm100.cu"
#include "nvfp4_layout.cc"
#include "device_array.h"

struct Case {
  Product product;
  std::vector<int32_t> sizes;
  bool accumulate;
};

template <typename Random>
static Case MakeCase(Random& random) {
  const auto pick = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  Case c{};
  Product& p = c.product;
  p.ragged_k = pick(0, 1);
  p.groups = pick(0, 3) ? pick(1, 40) : pick(200, 1500);
  p.tokens = pick(1, 3000);
  p.m = pick(1, 300);
  p.n = 8 * pick(1, 40);
  p.k = p.ragged_k ? (p.tokens + 63 * std::min(p.groups, p.tokens)) / 64 * 64 : 32 * pick(1, 40);
  p.out_size = p.ragged_k || pick(0, 1) ? 4 : 2;
  c.accumulate = p.ragged_k && pick(0, 1);
  // Sums below and above the tokens; groups without any.
  const int most = std::max(1, pick(1, 3) * p.tokens / p.groups);
  for (int g = 0; g < p.groups; ++g) c.sizes.push_back(pick(0, 2) ? pick(0, most) : pick(-5, 0));
  if (pick(0, 9) == 0) c.sizes[pick(0, p.groups - 1)] = INT32_MAX;
  return c;
}

static std::vector<float> Out(const Case& c, const std::vector<int32_t>& starts,
                              const std::vector<int32_t>& tiles, const std::vector<float>& beta,
                              std::vector<float> out) {
  const Product& p = c.product;
  const int64_t size = int64_t{p.m} * p.n;
  for (int g = 0; p.ragged_k && g < p.groups; ++g) {
    if (tiles[g + 1] != tiles[g]) continue;
    for (int64_t i = 0; i < size; ++i) {
      float& value = out[g * size + i];
      value = c.accumulate && beta[g] != 0 ? beta[g] * value : 0;
    }
  }
  if (!p.ragged_k) {
    auto* bytes = reinterpret_cast<uint8_t*>(out.data());
    const int64_t line = int64_t{p.n} * p.out_size;
    std::fill(bytes + starts[p.groups] * line, bytes + p.tokens * line, 0);
  }
  return out;
}

template <typename Random>
static void Try(Random& random) {
  const Case c = MakeCase(random);
  const Product& p = c.product;
  const int32_t fields[] = {p.ragged_k, p.groups, p.tokens, p.m, p.n, p.k, p.out_size};
  const Workspace at(p);
  const auto bytes = [&](int64_t size) {
    std::vector<uint8_t> values(size);
    for (uint8_t& value : values) value = static_cast<uint8_t>(random());
    return values;
  };
  const int64_t columns = p.k / kScaleElements;
  Array<uint8_t> scales_a(bytes((p.ragged_k ? p.m : p.tokens) * columns));
  Array<uint8_t> scales_b(bytes((p.ragged_k ? 1 : p.groups) * p.n * columns));
  Array<int32_t> sizes(c.sizes);
  std::vector<float> numbers(p.ragged_k ? int64_t{p.groups} * p.m * p.n
                                        : int64_t{p.tokens} * p.n * p.out_size / 4);
  for (float& number : numbers) number = static_cast<float>(random() % 1000) - 500;
  Array<float> out(numbers);
  std::vector<float> factors(p.groups);
  for (float& factor : factors) factor = static_cast<float>(random() % 4) / 2;
  Array<float> beta(factors);
  Array<uint8_t> workspace(std::vector<uint8_t>(at.bytes, 0xEE));

  GemmSm100 gemm{};
  gemm.product = p;
  gemm.sizes = sizes.device;
  gemm.a = {out.device, scales_a.device};  // codes are not read
  gemm.b = {out.device, scales_b.device};
  gemm.out = out.device;
  if (c.accumulate) gemm.beta = beta.device;
  Require(PrepareGroups(nullptr, gemm, at, workspace.device));
  Require(cudaDeviceSynchronize());
  std::vector<uint8_t> got = workspace.Read();
  const jgg::nvfp4::Groups arrays(at, got.data());

  std::vector<int32_t> starts(p.groups + 1), tiles(p.groups + 1);
  std::vector<int64_t> problems(8 * p.groups);
  groups(fields, c.sizes.data(), starts.data(), tiles.data(), problems.data());
  Require(std::equal(starts.begin(), starts.end(), arrays.starts), "starts");
  Require(std::equal(tiles.begin(), tiles.end(), arrays.tiles), "tiles");
  const auto* codes = reinterpret_cast<const uint8_t*>(out.device);
  for (int g = 0; g < p.groups; ++g) {
    const int64_t* want = &problems[8 * g];
    const int m = want[0], n = want[1], k = want[2];
    Require(arrays.shapes[g] == cute::make_shape(m, n, k), "shapes");
    Require(arrays.a[g] == codes + want[3] && arrays.b[g] == codes + want[4], "codes");
    Require(arrays.scales_a[g] == workspace.device + at.swizzled_a + want[5], "scales of A");
    Require(arrays.scales_b[g] == workspace.device + at.swizzled_b + want[6], "scales of B");
    Require(arrays.out[g] == codes + want[7], "out");
    Require(arrays.stride_a[g] == p.k && arrays.stride_b[g] == p.k, "strides");
    Require(arrays.stride_out[g] == p.n, "strides of out");
    for (int i = 0; m > 0 && i < 20; ++i) {
      const int s = random() % (k / kScaleElements);
      const auto offset = [&](int row) {
        return (row / kTileRows * CeilDiv(k, kTileK) + s / kTileScales) * kTileBytes +
               ByteInTile(row, s);
      };
      const int row_a = random() % m, row_b = random() % n;
      Require(arrays.layout_a[g](row_a, s * kScaleElements, 0) == offset(row_a), "layout of A");
      Require(arrays.layout_b[g](row_b, s * kScaleElements, 0) == offset(row_b), "layout of B");
    }
  }
  for (int b : {0, 1}) {
    std::vector<uint8_t> want(p.scale_bytes(b), 0xEE);
    swizzle(fields, b, starts.data(), tiles.data(), (b ? scales_b : scales_a).host.data(),
            want.data());
    const int64_t offset = b ? at.swizzled_b : at.swizzled_a;
    Require(std::equal(want.begin(), want.end(), got.begin() + offset), "swizzled scales");
  }
  Require(out.Read() == Out(c, starts, tiles, factors, numbers), "filled rows and matrices");
}

int main() {
  std::mt19937 random(1);
  constexpr int kCases = 300;
  for (int i = 0; i < kCases; ++i) Try(random);
  std::printf("%d cases\n", kCases);
}
