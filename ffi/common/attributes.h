// Attributes of a call, as a dictionary of named values that a handler takes as one struct.
//
//   JGG_ATTRIBUTES(MmAttrs,
//                  (bool, transpose_x),
//                  (int32_t, tile));
//
// makes struct jgg::MmAttrs { bool transpose_x; int32_t tile; }, and its decoding from a dictionary
// with exactly these names: each is written once. It is for the global namespace. A handler has it
// as .Attr<MmAttrs>("mm"), among others, or as .Attrs<MmAttrs>(), all that there are. XLA keeps the
// names sorted and finds one by bisection.
#pragma once

#include <cstdint>
#include <string_view>

#include "xla/ffi/api/ffi.h"

// One attribute as a member of the struct, and as what is decoded.
#define JGG_ATTRIBUTE_MEMBER(type, name) type name;
#define JGG_ATTRIBUTE_DECODED(type, name) ::xla::ffi::StructMember<type>(#name)

#define JGG_MEMBERS_1(a) JGG_ATTRIBUTE_MEMBER a
#define JGG_MEMBERS_2(a, ...) JGG_ATTRIBUTE_MEMBER a JGG_MEMBERS_1(__VA_ARGS__)
#define JGG_MEMBERS_3(a, ...) JGG_ATTRIBUTE_MEMBER a JGG_MEMBERS_2(__VA_ARGS__)
#define JGG_MEMBERS_4(a, ...) JGG_ATTRIBUTE_MEMBER a JGG_MEMBERS_3(__VA_ARGS__)
#define JGG_MEMBERS_5(a, ...) JGG_ATTRIBUTE_MEMBER a JGG_MEMBERS_4(__VA_ARGS__)
#define JGG_MEMBERS_6(a, ...) JGG_ATTRIBUTE_MEMBER a JGG_MEMBERS_5(__VA_ARGS__)
#define JGG_DECODED_1(a) JGG_ATTRIBUTE_DECODED a
#define JGG_DECODED_2(a, ...) JGG_ATTRIBUTE_DECODED a, JGG_DECODED_1(__VA_ARGS__)
#define JGG_DECODED_3(a, ...) JGG_ATTRIBUTE_DECODED a, JGG_DECODED_2(__VA_ARGS__)
#define JGG_DECODED_4(a, ...) JGG_ATTRIBUTE_DECODED a, JGG_DECODED_3(__VA_ARGS__)
#define JGG_DECODED_5(a, ...) JGG_ATTRIBUTE_DECODED a, JGG_DECODED_4(__VA_ARGS__)
#define JGG_DECODED_6(a, ...) JGG_ATTRIBUTE_DECODED a, JGG_DECODED_5(__VA_ARGS__)

// JGG_COUNTED(JGG_MEMBERS, ...) is JGG_MEMBERS_<number of arguments>.
#define JGG_COUNTED_AS(prefix, _1, _2, _3, _4, _5, _6, count, ...) prefix##_##count
#define JGG_COUNTED(prefix, ...) JGG_COUNTED_AS(prefix, __VA_ARGS__, 6, 5, 4, 3, 2, 1, 0)

#define JGG_ATTRIBUTES(Name, ...)                      \
  namespace jgg {                                      \
  struct Name {                                        \
    JGG_COUNTED(JGG_MEMBERS, __VA_ARGS__)(__VA_ARGS__) \
  };                                                   \
  }                                                    \
  XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(::jgg::Name,   \
                                        JGG_COUNTED(JGG_DECODED, __VA_ARGS__)(__VA_ARGS__))
