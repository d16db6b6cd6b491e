// Both programs of ceilings use this: timing, and the products that a command line names.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <optional>
#include <vector>

#include "cutlass/cutlass.h"

inline void Check(cudaError_t error) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
  std::exit(1);
}

// The median of so many runs, after some that warm up. None where a product needs more shared
// memory than there is.
template <typename Gemm>
std::optional<float> Milliseconds(const typename Gemm::Arguments& arguments, int first, int runs) {
  Gemm gemm;
  cudaEvent_t begin, end;
  Check(cudaEventCreate(&begin));
  Check(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < first + runs; ++i) {
    Check(cudaEventRecord(begin));
    if (gemm(arguments) != cutlass::Status::kSuccess) return std::nullopt;
    Check(cudaEventRecord(end));
    Check(cudaEventSynchronize(end));
    float ms;
    Check(cudaEventElapsedTime(&ms, begin, end));
    if (i >= first) times.push_back(ms);
  }
  std::nth_element(times.begin(), times.begin() + runs / 2, times.end());
  return times[runs / 2];
}

// run(M, N, K) for each product of the command line, or for 8192^3.
template <typename Run>
void RunProducts(int argc, char** argv, Run run) {
  if (argc < 4) run(8192, 8192, 8192);
  for (int i = 1; i + 3 <= argc; i += 3) {
    run(std::atoi(argv[i]), std::atoi(argv[i + 1]), std::atoi(argv[i + 2]));
  }
}
