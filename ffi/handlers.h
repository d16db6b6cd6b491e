// Declarations of every FFI handler listed in handlers.inc.
#pragma once

#include "xla/ffi/api/c_api.h"

namespace jgg {
#define JGG_HANDLER(platform, target, symbol) XLA_FFI_Error* symbol(XLA_FFI_CallFrame* call_frame);
#define JGG_CUDA_HANDLER JGG_HANDLER
#include "handlers.inc"
#undef JGG_CUDA_HANDLER
#undef JGG_HANDLER
}  // namespace jgg
