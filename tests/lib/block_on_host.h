// The threads of a block on the host. They are fibres of one thread: each runs until it waits, then
// the next one does. Where a sanitizer watches they are threads of the system, which it can follow.
#pragma once

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)

#include <barrier>
#include <thread>

using Barrier = std::barrier<>;

// A variable that each thread has one of, where it is declared thread_local.
template <typename T>
struct OfThread {
  T value{};
  T& operator*() { return value; }
  T* operator->() { return &value; }
};

// function(0), ..., function(count - 1) at the same time.
template <typename Function>
void RunTogether(unsigned count, Function function) {
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < count; ++i) threads.emplace_back([&, i] { function(i); });
  for (auto& thread : threads) thread.join();
}

#else

#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <cstddef>
#include <functional>

constexpr unsigned kMostFibres = 2048;
constexpr size_t kStackBytes = 256 << 10, kGuardBytes = 4096;

struct Fibre {
  char* stack = nullptr;  // kept for the next run
  ucontext_t start;
  jmp_buf place;
  bool begun, ended;
};
inline Fibre fibres[kMostFibres];
inline unsigned fibre = 0, fibre_count = 0;  // the one that runs
inline ucontext_t before_fibres;
inline std::function<void(unsigned)> fibre_function;
inline size_t waits = 0;  // since a barrier opened, or a fibre ended

template <typename T>
struct OfThread {
  T values[kMostFibres]{};
  T& operator*() { return values[fibre]; }
  T* operator->() { return &values[fibre]; }
};

// Goes on where the next fibre stopped.
inline void StartNext() {
  for (unsigned i = 0; i < fibre_count; ++i) {
    fibre = fibre + 1 < fibre_count ? fibre + 1 : 0;
    Fibre& next = fibres[fibre];
    if (next.ended) continue;
    if (next.begun) _longjmp(next.place, 1);
    next.begun = true;
    setcontext(&next.start);
  }
  setcontext(&before_fibres);
}

// The other fibres run, each until it waits. The caller's variables of a thread are its own.
inline void LetOthersRun() {
  if (++waits > 4 * size_t{fibre_count} + 4) {
    std::fprintf(stderr, "every thread waits\n");
    std::abort();
  }
  if (_setjmp(fibres[fibre].place) == 0) StartNext();
}

inline void RunFibre() {
  fibre_function(fibre);
  fibres[fibre].ended = true;
  waits = 0;
  StartNext();
}

class Barrier {
 public:
  using arrival_token = size_t;

  explicit Barrier(ptrdiff_t count) : expected_(count), missing_(count) {}
  arrival_token arrive() {
    const size_t round = round_;
    if (--missing_ == 0) {
      missing_ = expected_;
      ++round_;
      waits = 0;
    }
    return round;
  }
  void wait(arrival_token round) const {
    while (round_ == round) LetOthersRun();
  }
  void arrive_and_wait() { wait(arrive()); }
  void arrive_and_drop() {
    --expected_;
    arrive();
  }

 private:
  ptrdiff_t expected_, missing_;
  size_t round_ = 0;
};

template <typename Function>
void RunTogether(unsigned count, Function function) {
  if (count > kMostFibres) std::abort();
  fibre_function = function;
  fibre_count = count;
  for (unsigned i = 0; i < count; ++i) {
    Fibre& made = fibres[i];
    if (made.stack == nullptr) {
      void* memory = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) std::abort();
      made.stack = static_cast<char*>(memory);
    }
    made.begun = made.ended = false;
    getcontext(&made.start);
    made.start.uc_stack.ss_sp = made.stack;
    made.start.uc_stack.ss_size = kStackBytes;
    made.start.uc_link = nullptr;
    makecontext(&made.start, RunFibre, 0);
  }
  fibre = count - 1;
  waits = 0;
  volatile bool started = false;
  getcontext(&before_fibres);
  if (!started) {
    started = true;
    StartNext();
  }
}

#endif
