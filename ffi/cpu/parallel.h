// A parallel loop on XLA's thread pool.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <utility>

#include "cpu/gemm.h"

namespace jgg::cpu {

// Calls body(index) for every index below count, in any order, on the caller's thread and on idle
// pool threads. The caller works too, and waits only for indices that a thread has begun. So it
// finishes even if every pool thread is busy, or if it is a pool thread itself.
//
// A body may throw, on any thread: no exception leaves a pool thread. The loop then leaves out the
// indices that no thread has begun, and the caller throws the first exception once no thread is in
// a body.
template <typename Pool, typename Body>
void ParallelFor(Pool& pool, int64_t count, const Body& body) {
  struct Shared {
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    int64_t finished = 0;
    std::exception_ptr error;
    std::mutex mutex;
    std::condition_variable all_finished;
  };
  if (count <= 0) return;
  const auto shared = std::make_shared<Shared>();
  // If there are many indices, a thread takes several at a time.
  const int64_t share = 1 + count / 4096;
  // Threads that come late find no index left, and must not touch `body`, which is gone by then.
  const auto work = [shared, count, share, &body]() noexcept {
    int64_t mine = 0;
    std::exception_ptr error;
    for (int64_t i; (i = shared->next.fetch_add(share)) < count;) {
      const int64_t end = std::min(i + share, count);
      mine += end - i;
      try {
        for (; i < end && !shared->failed.load(std::memory_order_relaxed); ++i) body(i);
      } catch (...) {
        shared->failed.store(true, std::memory_order_relaxed);
        error = std::current_exception();
      }
    }
    if (mine == 0) return;
    const std::lock_guard<std::mutex> lock(shared->mutex);
    if (error && !shared->error) shared->error = std::move(error);
    shared->finished += mine;
    if (shared->finished == count) shared->all_finished.notify_all();
  };
  const int64_t chunks = (count + share - 1) / share;
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), chunks) - 1;
  try {
    for (int64_t i = 0; i < helpers; ++i) pool.Schedule([work] { work(); });
  } catch (...) {  // without memory for so many helpers there are fewer
  }
  work();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->all_finished.wait(lock, [&] { return shared->finished == count; });
  // The caller takes the exception along, because threads that come late still hold `shared`.
  const std::exception_ptr error = std::move(shared->error);
  lock.unlock();
  if (error) std::rethrow_exception(error);
}

// This thread's scratch for Gemm, kept for its next call.
inline Scratch* ThreadScratch() {
  constexpr size_t kAlignment = 64;
  thread_local const std::unique_ptr<char[]> memory(new char[sizeof(Scratch) + kAlignment]);
  const uintptr_t address = reinterpret_cast<uintptr_t>(memory.get());
  return reinterpret_cast<Scratch*>((address + kAlignment - 1) / kAlignment * kAlignment);
}

}  // namespace jgg::cpu
