// The kernel of FP8 products by mma.sync (ffi/fp8/device/gemm_sm89.cuh) on the host, for
// test_fp8_sm89_kernel.py.
#include "warp_on_host.h"

inline bool __syncthreads_and(bool value) { return !__syncthreads_or(!value); }
inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return bits;
}
inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

struct float2 {
  float x, y;
};
inline float2 make_float2(float x, float y) { return {x, y}; }

namespace jgg::device {

// ---- grouped_mm/device/instructions_sm80.cuh

inline unsigned char* Block() {
  alignas(128) static unsigned char memory[99 << 10];
  return memory;
}

inline uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(shared) - Block());
}

// Groups of copies that have not arrived: where they go, and from where, or null for zeros.
inline thread_local OfThread<std::vector<std::vector<PendingPiece>>> groups;

inline void CopyAsync(uint32_t to, const void* from, bool wanted, bool zeros) {
  if (!wanted) return;
  if (groups->empty()) groups->emplace_back();
  if (to % 16 != 0 || reinterpret_cast<uintptr_t>(from) % 16 != 0 ||
      (!zeros && !Readable(from, 16))) {
    std::fprintf(stderr, "a piece that is not aligned, or is outside of every operand\n");
    std::abort();
  }
  std::memset(Block() + to, 0x55, 16);
  groups->back().push_back({from, Block() + to, zeros ? 0 : 16});
}

inline void EndCopies() {
  if (groups->empty()) groups->emplace_back();
  groups->emplace_back();
}

template <int kPending>
void WaitForCopies() {
  while (groups->size() > kPending + 1) {
    for (const auto& piece : groups->front()) {
      std::memset(piece.to, 0, 16);
      if (piece.bytes > 0) std::memcpy(piece.to, piece.from, 16);
    }
    groups->erase(groups->begin());
  }
}

inline void Advance(const char*& pointer, int64_t bytes) { pointer += bytes; }

inline uint32_t ExclusiveOr(uint32_t a, uint32_t b) { return a ^ b; }

template <bool kTransposed>
void LoadMatrices(uint32_t from, uint32_t (&values)[4]) {
  static_assert(!kTransposed);
  LoadMatrices(reinterpret_cast<const char*>(Block() + from), values);
}

inline int ThreadAnew() { return static_cast<int>(threadIdx.x); }

// ---- fp8/device/instructions_sm89.cuh

inline float ValueOfCode(uint32_t code, bool e5m2) {
  const int mantissa = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7;
  const int exponent = static_cast<int>((code & 127) >> mantissa);
  const float fraction = static_cast<float>(code & ((1u << mantissa) - 1)) / (1 << mantissa);
  float value =
      exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1.0f + fraction, exponent - bias);
  if (!e5m2 && (code & 127) == 127) value = NAN;
  if (e5m2 && exponent == 31) value = fraction == 0 ? INFINITY : NAN;
  return code & 128 ? -value : value;
}

// The sums are in double precision, rounded once.
template <bool kE5M2, bool kFirst>
void MultiplyCodes(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const auto both = [](uint32_t low, uint32_t high) { return uint64_t{high} << 32 | low; };
  const auto upper = AllLanes(both(a[0], a[2])), lower = AllLanes(both(a[1], a[3]));
  const auto columns = AllLanes(both(b0, b1));
  static const auto tables = [] {
    std::array<std::array<float, 256>, 2> of;
    for (uint32_t code = 0; code < 256; ++code) {
      for (int e5m2 = 0; e5m2 < 2; ++e5m2) of[e5m2][code] = ValueOfCode(code, e5m2 != 0);
    }
    return of;
  }();
  const int lane = threadIdx.x % 32;
  for (int i = 0; i < 4; ++i) {
    const auto& rows = i < 2 ? upper : lower;
    const int row = lane / 4, column = lane % 4 * 2 + i % 2;
    double sum = kFirst ? 0.0 : sums[i];
    for (int q = 0; q < 4; ++q) {
      const uint64_t x = rows[4 * row + q], w = columns[4 * column + q];
      for (int byte = 0; byte < 8; ++byte) {
        sum += double{tables[kE5M2][x >> 8 * byte & 255]} * tables[0][w >> 8 * byte & 255];
      }
    }
    sums[i] = static_cast<float>(sum);
  }
}

}  // namespace jgg::device

#include "fp8/device/gemm_sm89.cuh"

using namespace jgg;

namespace {

template <bool kWgrad, bool kE5M2>
void Run(const Fp8GemmSm89& fp8, unsigned blocks) {
  using Config = device::Fp8Sm89Config<kWgrad, kE5M2>;
  static_assert(sizeof(typename Config::SharedMemory) <= 99 << 10);
  const auto arguments = device::MakePipelinedFp8<Config>(fp8);
  RunBlocks({blocks, 1}, Config::kThreads, [&] {
    device::groups->clear();
    device::Fp8GemmSm89Block<Config>(
        arguments, *reinterpret_cast<typename Config::SharedMemory*>(device::Block()));
  });
}

}  // namespace

struct Problem {
  const void *a, *b;
  const float *a_scales, *b_scales;
  void* out;
  const int32_t *sizes, *offset;
  int64_t rows, n, k, count, weights;
  int32_t wgrad, e5m2, accumulate, dtype, blocks;
};

// mm: x (rows, k), w (weights, n, k). wgrad: dy (n, rows), x (k, rows), and sizes in pairs.
extern "C" void fp8_gemm_sm89(const Problem* problem) {
  const Problem& p = *problem;
  Fp8GemmSm89 fp8{};
  GemmSm80& gemm = fp8.gemm;
  gemm.metadata.kind = MetadataKind::kSizes;
  gemm.metadata.data = p.sizes;
  gemm.metadata.offset = p.offset;
  gemm.metadata.count = p.count;
  gemm.out = p.out;
  gemm.out_dtype = static_cast<DType>(p.dtype);
  gemm.out_width = gemm.out_dtype == DType::kF32 ? 4 : 8;
  gemm.groups = p.weights;
  gemm.epilogue.accumulate = p.accumulate != 0;
  fp8.e5m2 = p.e5m2 != 0;
  fp8.a_scales = p.a_scales;
  fp8.b_scales = p.b_scales;
  const size_t blocks = ((p.wgrad ? p.rows : p.k) + 127) / 128;
  size_t a, b, a_scales, b_scales;
  if (p.wgrad) {
    gemm.m = p.n, gemm.n = p.k;
    CompleteWgradSm89(fp8, p.a, p.b, p.rows);
    a = p.n * p.rows, b = p.k * p.rows, a_scales = p.n * blocks, b_scales = p.k * blocks;
  } else {
    gemm.rows_x = p.rows, gemm.n = p.n;
    CompleteMmSm89(fp8, p.a, p.b, p.k);
    a = p.rows * p.k, b = p.weights * p.n * p.k, a_scales = p.rows * blocks;
    b_scales = p.weights * ((p.n + 127) / 128) * blocks;
  }
  readable.assign({{static_cast<const char*>(p.a), a},
                   {static_cast<const char*>(p.b), b},
                   {reinterpret_cast<const char*>(p.a_scales), 4 * a_scales},
                   {reinterpret_cast<const char*>(p.b_scales), 4 * b_scales}});
  const auto grid = static_cast<unsigned>(p.blocks);
  if (p.wgrad) {
    p.e5m2 ? Run<true, true>(fp8, grid) : Run<true, false>(fp8, grid);
  } else {
    p.e5m2 ? Run<false, true>(fp8, grid) : Run<false, false>(fp8, grid);
  }
}
