// Declarations of every FFI handler listed in handlers.inc.
#pragma once

#ifdef JGG_WITH_CUDA
#include "xla/ffi/api/c_api.h"

namespace jgg {
#define JGG_HANDLER(target, symbol) XLA_FFI_Error* symbol(XLA_FFI_CallFrame* call_frame);
#include "handlers.inc"
#undef JGG_HANDLER
}  // namespace jgg
#endif
