// For programs that test kernels on a GPU: device memory with a host's values.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <utility>
#include <vector>

inline void Require(bool ok, const char* what) {
  if (ok) return;
  std::printf("%s\n", what);
  std::exit(1);
}

inline void Require(cudaError_t error) { Require(error == cudaSuccess, cudaGetErrorString(error)); }

template <typename T>
struct Array {
  std::vector<T> host;
  T* device;

  explicit Array(std::vector<T> values) : host(std::move(values)) {
    Require(cudaMalloc(&device, (host.size() + 1) * sizeof(T)));
    Require(cudaMemcpy(device, host.data(), host.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  ~Array() { cudaFree(device); }

  std::vector<T> Read() const {
    std::vector<T> values(host.size());
    Require(cudaMemcpy(values.data(), device, host.size() * sizeof(T), cudaMemcpyDeviceToHost));
    return values;
  }
};
