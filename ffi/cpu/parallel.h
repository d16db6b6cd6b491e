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

// Tells a processor that this thread waits for another one.
inline void Pause() {
#if defined(__SSE2__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Calls body(index) for every index below count, in any order, on the caller's thread and on idle
// pool threads. The caller works too, and waits only for indices that a thread has begun. So it
// finishes even if every pool thread is busy, or if it is a pool thread itself.
//
// A thread takes a part of the indices that are left, in a row: what follows in memory is often
// there already. Parts become smaller, so that threads end together.
//
// A body may throw, on any thread: no exception leaves a pool thread. The loop then leaves out the
// indices that no thread has begun, and the caller throws the first exception once no thread is in
// a body.
template <typename Pool, typename Body>
void ParallelFor(Pool& pool, int64_t count, const Body& body) {
  struct Shared {
    std::atomic<int64_t> next{0}, finished{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error;
    std::mutex mutex;
    std::condition_variable all_finished;

    // The next indices [begin, end), at most a `share`-th of those below count that are left.
    bool Take(int64_t count, int64_t share, int64_t* begin, int64_t* end) {
      *begin = next.load(std::memory_order_relaxed);
      do {
        if (*begin >= count) return false;
        *end = *begin + std::max<int64_t>(1, (count - *begin) / share);
      } while (!next.compare_exchange_weak(*begin, *end));
      return true;
    }
  };
  constexpr int64_t kParts = 4;     // of a thread's indices, at first
  constexpr int kMostPauses = 500;  // tens of microseconds: as long as it takes to wake a thread
  if (count <= 0) return;
  const auto shared = std::make_shared<Shared>();
  const int64_t threads = std::clamp<int64_t>(pool.num_threads(), 1, count);
  // Threads that come late find no index left, and must not touch `body`, which is gone by then.
  const auto work = [shared, count, threads, &body]() noexcept {
    int64_t mine = 0;
    std::exception_ptr error;
    for (int64_t i, end; shared->Take(count, kParts * threads, &i, &end);) {
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
    if (shared->finished.fetch_add(mine) + mine == count) shared->all_finished.notify_all();
  };
  try {
    for (int64_t i = 1; i < threads; ++i) pool.Schedule([work] { work(); });
  } catch (...) {  // without memory for so many helpers there are fewer
  }
  work();
  // Others end soon as a rule. Who sleeps is woken late.
  for (int i = 0; i < kMostPauses && shared->finished.load() != count; ++i) Pause();
  std::unique_lock<std::mutex> lock(shared->mutex);
  shared->all_finished.wait(lock, [&] { return shared->finished.load() == count; });
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
