#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#include <random>
#include <algorithm>
#include <cuda_bf16.h>
__device__ unsigned trace_buf[264][2][4096];
#include "quantized/gemm_sm90.cuh"
using namespace jgg;
#define CK(x) do { cudaError_t e_ = (x); if (e_) { printf("%s: %s\n", #x, cudaGetErrorString(e_)); exit(1);} } while (0)
__global__ void fillw(unsigned* p, size_t n, unsigned seed, unsigned mask) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    unsigned h = (unsigned)i * 2654435761u ^ seed; h ^= h >> 15; h *= 2246822519u; h ^= h >> 13; h *= 3266489917u; h ^= h >> 16;
    p[i] = h & mask;
  }
}
__global__ void flush(float* p, size_t n) { for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) p[i] = p[i] * 0.5f + 1; }
#ifndef WARPS
#define WARPS true
#endif
using W = device::PackedWeights<Mode::kNvfp4, 4>;
#ifndef QCONFIG
#define QCONFIG device::QuantizedGemmSm90Config<W, 32, 1, 8, 1, W::kBlocksPerSm, WARPS>
#endif
using Config = QCONFIG;
int main(int argc, char** argv) {
  int G = 128, R = 512, K = 2048, N = 1536; if (argc > 4) { G = atoi(argv[1]); R = atoi(argv[2]); K = atoi(argv[3]); N = atoi(argv[4]); }
  std::mt19937 rng(1); std::vector<int> sizes(G, 0); for (int i = 0; i < R; ++i) sizes[rng() % G]++;
  int active = 0; for (int s : sizes) active += s > 0;
  size_t codes_bytes = (size_t)G * N * K / 2, scale_bytes = codes_bytes / 8;
  unsigned *codes, *scales; __nv_bfloat16 *x, *out; int* meta; float* fl; size_t fn = 64 << 20;
  CK(cudaMalloc(&codes, codes_bytes)); CK(cudaMalloc(&scales, scale_bytes)); CK(cudaMalloc(&x, (size_t)R * K * 2)); CK(cudaMalloc(&out, (size_t)R * N * 2)); CK(cudaMalloc(&meta, 4 * G)); CK(cudaMalloc(&fl, fn * 4));
  CK(cudaMemset(fl, 0, fn * 4));
  fillw<<<1024, 256>>>(codes, codes_bytes / 4, 1, ~0u); fillw<<<1024, 256>>>(scales, scale_bytes / 4, 2, 0x3f3f3f3fu); fillw<<<1024, 256>>>((unsigned*)x, (size_t)R * K / 2, 3, 0x3fff3fffu);
  CK(cudaMemcpy(meta, sizes.data(), 4 * G, cudaMemcpyHostToDevice));
  auto launch = [&] {
    QuantizedGemmSm90 q{}; GemmSm90& gemm = q.gemm;
    gemm.metadata.kind = MetadataKind::kSizes; gemm.metadata.data = meta; gemm.metadata.count = G;
    gemm.out = out; gemm.out_dtype = DType::kBF16; gemm.out_width = 8; gemm.out_line = N; gemm.rows_x = gemm.rows_y = R; gemm.n = N; gemm.k = K; gemm.groups = G;
    q.codes = codes; q.scales = scales; q.column_tiles = N / 64; q.k_tiles = K / 64; q.scale_words = 1;
    OperandsSm90 operands{}; operands.dtype = DType::kBF16; operands.planes = 1; operands.l_k_major = true; operands.l = {x, DType::kBF16, K, R, 1, K, K};
    CK((LaunchQuantizedConfigSm90<Config>(0, q, operands)));
  };
  launch(); CK(cudaDeviceSynchronize());
  cudaEvent_t a, b; cudaEventCreate(&a); cudaEventCreate(&b); std::vector<float> times;
  for (int i = 0; i < 21; ++i) { flush<<<1024, 256>>>(fl, fn); cudaEventRecord(a); launch(); cudaEventRecord(b); CK(cudaDeviceSynchronize()); float ms; cudaEventElapsedTime(&ms, a, b); times.push_back(ms * 1e3f); }
  std::sort(times.begin(), times.end());
  double bytes = (double)active * N * K * 9 / 16;
  printf("G%d R%d K%d N%d active %d stages %d: median %.1f us min %.1f, %.2f TB/s of weights\n", G, R, K, N, active, Config::kStages, times[10], times[0], bytes / times[10] / 1e6);
#ifdef TRACE
  static unsigned buf[264][2][4096]; CK(cudaMemcpyFromSymbol(buf, trace_buf, sizeof buf));
  double sum[8] = {}; int count = 0;
  for (int c = 0; c < 264; ++c) for (int w = 0; w < 2; ++w) for (int t = 1; t < 5; ++t) {
    const unsigned *e = buf[c][w] + 8 * t, *n = e + 8; if (!n[3]) continue; ++count;
    sum[0] += n[0] - e[0]; sum[1] += e[1] - e[0]; sum[2] += e[4]; sum[3] += e[2] - e[1]; sum[4] += e[3] - e[2]; sum[5] += n[0] - e[3]; sum[6] += e[5]; }
  const char* names[] = {"period", "setup", "waits for stages", "products with them", "epilogue", "next work", "of them the first wait"};
  if (count) { printf("  "); for (int i = 0; i < 7; ++i) printf(" %s %.0f", names[i], sum[i] / count); printf(" (%d tiles)\n", count); }
#endif
}
