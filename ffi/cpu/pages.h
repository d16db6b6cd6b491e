// The pages of a result.
#pragma once

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace jgg::cpu {

// A large result is fresh memory, and each of its pages a fault when it is written first. Pages of
// 2 MiB, which Linux gives to those who ask, make 512 times fewer. All of the result is written, so
// none of them is in vain.
inline void AskForHugePages([[maybe_unused]] const void* data, [[maybe_unused]] int64_t bytes) {
#if defined(MADV_HUGEPAGE)
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  const uintptr_t address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kPage - 1) / kPage * kPage,
                  end = (address + bytes) / kPage * kPage;
  // It is advice: a kernel that does not take it changes nothing.
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}

}  // namespace jgg::cpu
