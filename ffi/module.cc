// The Python module: the handlers by name, and what they were built with.

#include <nanobind/nanobind.h>

#include "common/frame.h"
#include "handlers.h"
#include "rules.h"
#include "xla/ffi/api/c_api.h"
#ifdef JGG_WITH_CUDA
#include "cutlass/version.h"
#endif

namespace nb = nanobind;

namespace {

nb::dict Registrations() {
  nb::dict platforms;
#define JGG_HANDLER(platform, target, symbol)                                               \
  if (!platforms.contains(platform)) platforms[platform] = nb::dict();                      \
  platforms[platform][target] =                                                             \
      nb::capsule(reinterpret_cast<void*>(+[](XLA_FFI_CallFrame* frame) noexcept {          \
        return jgg::CallInFrame(target, target ": out of memory on the host", &jgg::symbol, \
                                frame);                                                     \
      }));
#ifdef JGG_WITH_CUDA
#define JGG_CUDA_HANDLER JGG_HANDLER
#else
#define JGG_CUDA_HANDLER(platform, target, symbol)
#endif
#include "handlers.inc"
#undef JGG_CUDA_HANDLER
#undef JGG_HANDLER
  return platforms;
}

nb::dict BuildInfo() {
  nb::dict info;
  info["ffi_api"] = nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
#ifdef JGG_WITH_CUDA
  info["cuda"] = JGG_CUDA_VERSION;
  info["architectures"] = nb::str(JGG_ARCHS).attr("split")();
  info["cutlass"] = nb::str("{}.{}.{}").format(CUTLASS_MAJOR, CUTLASS_MINOR, CUTLASS_PATCH);
#else
  info["cuda"] = nb::none();
  info["architectures"] = nb::make_tuple();
  info["cutlass"] = nb::none();
#endif
  return info;
}

}  // namespace

NB_MODULE(_ffi, m) {
  m.doc() = "Compiled handlers of jax_groupgemm.";
  m.def("registrations", &Registrations, "XLA FFI handlers by platform and target name.");
  m.def("build_info", &BuildInfo,
        "CUDA toolkit, architectures, CUTLASS and XLA FFI API of this build.");
  jgg::DefineRules(m);
}
