// The pages of a result.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace jgg::cpu {

// A large result is fresh memory: the first write to each of its pages is a fault. Linux gives
// pages of 2 MiB to those who ask, and they make 512 times fewer faults. The handler writes all of
// the result, so it wastes no page.
inline void AskForHugePages([[maybe_unused]] const void* data, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  const uintptr_t address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kPage - 1) / kPage * kPage,
                  end = (address + bytes) / kPage * kPage;
  // This is advice: a Linux kernel that does not take it changes nothing.
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace jgg::cpu
