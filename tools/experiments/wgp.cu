#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>
#include <random>
#include <algorithm>
#include <cuda_bf16.h>
__device__ unsigned trace_buf[132][3][8192];
#ifndef LINES
#define LINES 1
#endif
#ifndef JX_UNROLL
#define JX_UNROLL false
#endif
#ifdef TRACE
#define TRACE_DECLARE unsigned tr[5]; int tile_number = 0;
#undef TRACE
#define TRACE(i) tr[i] = clock();
#define TRACE_FLUSH if (threadIdx.x % 128 == 0 && tile_number < 512) { unsigned* o = &trace_buf[blockIdx.x][group][tile_number++ * 16]; for (int i = 0; i < 5; ++i) o[i] = tr[i]; o[5] = slices; }
#define TRACE_PARAM , unsigned* tr
#define TRACE_ARG , tr
#define TRACE_IN(i) tr[i] = clock();
#define TRACING
#else
#define TRACE_DECLARE
#define TRACE(i)
#define TRACE_FLUSH
#define TRACE_PARAM
#define TRACE_ARG
#define TRACE_IN(i)
#endif
#include "grouped_mm/gemm_sm90.cuh"
#include "grouped_mm/device/ping_pong_sm90.cuh"
using namespace jgg;
#define CK(x) do { cudaError_t e_ = (x); if (e_) { printf("%s: %s\n", #x, cudaGetErrorString(e_)); exit(1);} } while (0)
__global__ void fill(__nv_bfloat16* p, size_t n, unsigned seed) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    unsigned h = (unsigned)i * 2654435761u ^ seed; h ^= h >> 15; h *= 2246822519u; h ^= h >> 13; h *= 3266489917u; h ^= h >> 16;
    float u = 0; for (int k = 0; k < 4; ++k) u += ((h >> (8 * k)) & 255) / 255.f - 0.5f;
    p[i] = __float2bfloat16(u * 1.7f);
  }
}
__global__ void flush(float* p, size_t n) { for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) p[i] = p[i] * 0.5f + 1; }
#ifndef CLUSTER
#define CLUSTER 2
#endif
#ifndef STAGES
#define STAGES 4
#endif
using Config = device::PingPongSm90Config<cutlass::bfloat16_t, false, false, STAGES, CLUSTER>;
static cudaError_t LaunchPP(GemmSm90& gemm, const OperandsSm90& operands) {
  TensorMapSpec l = operands.l, r = operands.r;
  l.box_lines = 64; r.box_lines = 64;
  if (cudaError_t e = EncodeTensorMap(l, &gemm.l_map)) return e;
  if (cudaError_t e = EncodeTensorMap(r, &gemm.r_map)) return e;
  for (int i = 0; i < 2; ++i) { l.box_lines = r.box_lines = 16 << i; if (cudaError_t e = EncodeTensorMap(l, &gemm.l_rest[i])) return e; if (cudaError_t e = EncodeTensorMap(r, &gemm.r_rest[i])) return e; }
  if (cudaError_t e = EncodeOutSm90<Config>(gemm)) return e;
  gemm.ranks = gemm.matrices && gemm.groups <= kMostRankedMatrices && MostTilesSm90<Config>(gemm) <= 2048;
  return LaunchTilesSm90<Config, device::PingPongSm90Kernel<Config>>(0, gemm, gemm);
}
int main(int argc, char** argv) {
  int G = 128; long R = 32768; int A = 2048, B = 1536; bool equal = argc > 1 && !strcmp(argv[1], "equal");
  bool seg = argc > 1 && !strcmp(argv[1], "seg");
  if (argc > 5) { G = atoi(argv[2]); R = atol(argv[3]); A = atoi(argv[4]); B = atoi(argv[5]); }
  std::mt19937 rng(1);
  std::vector<int> sizes(G, 0);
  if (equal) for (auto& s : sizes) s = R / G;
  else if (seg) { std::vector<int> cuts{0, (int)R}; for (int i = 0; i < G - 1; ++i) cuts.push_back(rng() % R); std::sort(cuts.begin(), cuts.end()); for (int i = 0; i < G; ++i) sizes[i] = cuts[i + 1] - cuts[i]; }
  else for (long i = 0; i < R; ++i) sizes[rng() % G]++;
  std::vector<int> spans(2 * G); int at = 0; for (int i = 0; i < G; ++i) { spans[2 * i] = at; at += sizes[i]; spans[2 * i + 1] = at; }
  __nv_bfloat16 *x, *y, *out; int* meta; float* fl; size_t fn = 64 << 20;
  CK(cudaMalloc(&x, R * A * 2)); CK(cudaMalloc(&y, R * B * 2)); CK(cudaMalloc(&out, (size_t)G * A * B * 2)); CK(cudaMalloc(&meta, 8 * G)); CK(cudaMalloc(&fl, fn * 4));
  CK(cudaMemset(fl, 0, fn * 4));
  fill<<<1024, 256>>>(x, (size_t)R * A, 1); fill<<<1024, 256>>>(y, (size_t)R * B, 77);
  CK(cudaMemset(out, 0xff, (size_t)G * A * B * 2));
  WgradArgs args{}; 
  args.x = x; args.y = y; args.out = out; args.dtype = DType::kBF16; args.out_dtype = DType::kBF16;
  args.rows_x = args.rows_y = R; args.a = A; args.b = B; args.groups = G; args.x_row = A; args.x_a = 1; args.y_row = B; args.y_b = 1;
  args.own_weight = true; args.metadata.count = G;
  if (seg) { args.metadata.kind = MetadataKind::kSpans; CK(cudaMemcpy(meta, spans.data(), 8 * G, cudaMemcpyHostToDevice)); }
  else { args.metadata.kind = MetadataKind::kSizes; CK(cudaMemcpy(meta, sizes.data(), 4 * G, cudaMemcpyHostToDevice)); }
  args.metadata.data = meta;
  auto matrix = [&](const void* data, long columns) { return TensorMapSpec{data, DType::kBF16, columns, R, 1, columns, columns}; };
  OperandsSm90 operands{}; operands.dtype = DType::kBF16; operands.planes = 1; operands.l = matrix(x, A); operands.r = matrix(y, B);
  auto launch = [&] {
    GemmSm90 gemm{}; gemm.wgrad = true; gemm.matrices = seg; gemm.metadata = args.metadata; gemm.out = out; gemm.out_dtype = DType::kBF16;
    gemm.out_width = 8; gemm.out_line = B; gemm.out_group = (int64_t)A * B; gemm.rows_x = gemm.rows_y = R; gemm.m = A; gemm.n = B; gemm.groups = G;
    CK(LaunchPP(gemm, operands));
  };
  launch(); CK(cudaDeviceSynchronize());
  // check
  { std::vector<__nv_bfloat16> hx((size_t)R * A), hy((size_t)R * B); CK(cudaMemcpy(hx.data(), x, hx.size() * 2, cudaMemcpyDeviceToHost)); CK(cudaMemcpy(hy.data(), y, hy.size() * 2, cudaMemcpyDeviceToHost));
    double worst = 0; 
    for (int t = 0; t < 3000; ++t) { int g = rng() % G, a = rng() % A, b = rng() % B; double want = 0; for (int k = spans[2 * g]; k < spans[2 * g + 1]; ++k) want += (double)__bfloat162float(hx[(size_t)k * A + a]) * __bfloat162float(hy[(size_t)k * B + b]);
      __nv_bfloat16 got; CK(cudaMemcpy(&got, out + ((size_t)g * A + a) * B + b, 2, cudaMemcpyDeviceToHost)); double e = fabs(__bfloat162float(got) - want) / (fabs(want) + 1); if (!(e <= worst)) worst = e; }
    printf("%s worst %.4f ", worst < 0.01 ? "right" : "WRONG", worst); }
  cudaEvent_t a, b; cudaEventCreate(&a); cudaEventCreate(&b); std::vector<float> times;
  for (int i = 0; i < 15; ++i) { if (!seg) flush<<<1024, 256>>>(fl, fn); cudaEventRecord(a); launch(); cudaEventRecord(b); CK(cudaDeviceSynchronize()); float ms; cudaEventElapsedTime(&ms, a, b); times.push_back(ms * 1e3f); }
  std::sort(times.begin(), times.end()); printf("%s G%d R%ld %dx%d: median %.1f us min %.1f\n", argc > 1 ? argv[1] : "random", G, R, A, B, times[7], times[0]);
#ifdef TRACING
  static unsigned buf[132][3][8192]; CK(cudaMemcpyFromSymbol(buf, trace_buf, sizeof buf));
  double sum[16] = {}; int count = 0; 
  for (int sm = 0; sm < 132; ++sm) for (int w = 0; w < 2; ++w) for (int t = 3; t < 9; ++t) {
    const unsigned* e = buf[sm][w] + 16 * t; const unsigned* n = e + 16;
    if (!n[4]) continue; ++count;
    sum[0] += (n[0] - e[0]) / 2.; sum[1] += e[1] - e[0]; sum[2] += e[2] - e[1]; sum[3] += e[3] - e[2]; sum[4] += e[4] - e[3]; sum[5] += n[0] - e[4];
  }
  const char* names[] = {"period of a tile", "turn", "products issued", "done", "staged", "next"};
  printf("   "); for (int i = 0; i < 6; ++i) printf(" %s %.0f", names[i], sum[i] / count); printf("\n");
#endif
}
