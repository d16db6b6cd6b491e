// A parallel loop on XLA's thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>

#include "cpu/gemm.h"
#include "xla/ffi/api/ffi.h"

namespace jgg::cpu {

// body(index) for every index below count, in any order, on the caller and on idle pool threads.
// The caller works too and waits only for indices that somebody has begun, so that it finishes
// even where every pool thread is busy, or is itself.
template <typename Body>
void ParallelFor(xla::ffi::ThreadPool& pool, int64_t count, Body body) {
  struct Shared {
    std::atomic<int64_t> next{0};
    int64_t finished = 0;
    std::mutex mutex;
    std::condition_variable all_finished;
  };
  auto shared = std::make_shared<Shared>();
  // Threads that come late find no index left, and must not touch `body`, which is gone by then.
  auto work = [shared, count, &body] {
    int64_t mine = 0;
    for (int64_t i; (i = shared->next.fetch_add(1)) < count; ++mine) body(i);
    if (mine == 0) return;
    std::lock_guard<std::mutex> lock(shared->mutex);
    shared->finished += mine;
    if (shared->finished == count) shared->all_finished.notify_all();
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  for (int64_t i = 0; i < helpers; ++i) pool.Schedule([work] { work(); });
  work();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->all_finished.wait(lock, [&] { return shared->finished == count; });
}

// This thread's scratch for Gemm, kept for its next call.
inline float* ThreadScratch() {
  constexpr size_t kAlignment = 64;
  thread_local std::unique_ptr<char[]> memory(
      new char[kScratchFloats * sizeof(float) + kAlignment]);
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory.get());
  return reinterpret_cast<float*>((address + kAlignment - 1) / kAlignment * kAlignment);
}

}  // namespace jgg::cpu
