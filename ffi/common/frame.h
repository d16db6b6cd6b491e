// The frame that every handler is called in: no exception crosses the boundary to XLA, whose frames
// have no code to unwind.
#pragma once

#include <exception>
#include <new>
#include <string>

#include "xla/ffi/api/c_api.h"

namespace jgg {

inline XLA_FFI_Error* CreateError(const XLA_FFI_Api* api, XLA_FFI_Error_Code code,
                                  const char* message) {
  XLA_FFI_Error_Create_Args args;
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.extension_start = nullptr;
  args.message = message;
  args.errc = code;
  return api->XLA_FFI_Error_Create(&args);
}

// handler(frame), whose exceptions become errors. `out_of_memory` is complete: nothing has to be
// allocated for it here.
template <typename Handler>
XLA_FFI_Error* CallInFrame(const char* target, const char* out_of_memory, Handler handler,
                           XLA_FFI_CallFrame* frame) noexcept {
  try {
    try {
      return handler(frame);
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::exception& error) {
      const std::string message = std::string(target) + ": " + error.what();
      return CreateError(frame->api, XLA_FFI_Error_Code_INTERNAL, message.c_str());
    }
  } catch (const std::bad_alloc&) {
    return CreateError(frame->api, XLA_FFI_Error_Code_RESOURCE_EXHAUSTED, out_of_memory);
  } catch (...) {
    return CreateError(frame->api, XLA_FFI_Error_Code_INTERNAL, target);
  }
}

}  // namespace jgg
