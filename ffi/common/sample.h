// JGG_SAMPLE (CMakeLists.txt): a build in which kernels that differ by dtype or bits alone are not
// all there. Those that are missing say that they have no image.
#pragma once

namespace jgg {

#ifdef JGG_SAMPLE
constexpr bool kSample = true;
#else
constexpr bool kSample = false;
#endif

}  // namespace jgg
