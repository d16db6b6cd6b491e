// From XLA's buffers to Metadata, for the handlers of mm and wgrad.
#pragma once

#include <string_view>

#include "common/buffer.h"
#include "common/check.h"
#include "grouped_mm/attributes.h"
#include "grouped_mm/segments.h"

namespace jgg {

// Whether a segment of the canonical form contributes anything.
inline bool HasRows(const Segment& segment, int64_t groups) {
  return segment.length > 0 && segment.weight >= 0 && segment.weight < groups;
}

// The canonical form, on the host. Every segment that contributes is checked: a table that was not
// made by the package may hold anything.
inline xla::ffi::Error BindTable(const char* op, xla::ffi::BufferR2<xla::ffi::S32> segments,
                                 int64_t rows_x, int64_t rows_y, int64_t groups,
                                 Metadata* metadata) {
  JGG_RETURN_IF_ERROR(CheckShape(op, "segments", "(S, 4)", segments, {-1, 4}));
  *metadata = Metadata{};
  metadata->data = segments.typed_data();
  metadata->count = segments.dimensions()[0];
  JGG_RETURN_IF_ERROR(CheckSmall(op, {metadata->count}, 0));
  for (int64_t i = 0; i < metadata->count; ++i) {
    const Segment& s = metadata->table()[i];
    if (!HasRows(s, groups)) continue;
    const auto outside = [&](int64_t start, int64_t rows) {
      return start < 0 || start + s.length > rows;
    };
    const bool of_x = outside(s.x_start, rows_x);
    if (!of_x && !outside(s.y_start, rows_y)) continue;
    const int64_t start = of_x ? s.x_start : s.y_start;
    return InvalidArgument(op, "segment ", i, " is rows [", start, ", ", start + s.length, ") of ",
                           of_x ? "x" : "y", ", which has ", of_x ? rows_x : rows_y);
  }
  return xla::ffi::Error::Success();
}

// Any form, by name: "sizes" (G',), "spans" (S, 2) or "segments" (S, 4), all int32.
inline xla::ffi::Error BindMetadata(const char* op, const MetadataAttrs& attrs,
                                    xla::ffi::AnyBuffer buffer, Metadata* metadata) {
  const std::string_view kind = attrs.kind;
  *metadata = Metadata{};
  if (buffer.element_type() != xla::ffi::S32) {
    return InvalidArgument(op, "metadata has XLA dtype ", static_cast<int>(buffer.element_type()),
                           ", expected int32");
  }
  if (kind == "sizes") {
    metadata->kind = MetadataKind::kSizes;
    JGG_RETURN_IF_ERROR(CheckShape(op, "sizes", "(G,)", buffer, {-1}));
  } else if (kind == "spans") {
    metadata->kind = MetadataKind::kSpans;
    JGG_RETURN_IF_ERROR(CheckShape(op, "spans", "(S, 2)", buffer, {-1, 2}));
  } else if (kind == "segments") {
    metadata->kind = MetadataKind::kSegments;
    JGG_RETURN_IF_ERROR(CheckShape(op, "segments", "(S, 4)", buffer, {-1, 4}));
  } else {
    return InvalidArgument(op, "metadata kind '", kind, "' is not one of sizes, spans, segments");
  }
  metadata->data = static_cast<const int32_t*>(buffer.untyped_data());
  metadata->count = buffer.dimensions()[0];
  metadata->swapped = attrs.swapped;
  return xla::ffi::Error::Success();
}

// Check an mm: axes fit an int32, and metadata can name no row or weight that is not there.
// Kernels look at segments themselves: ReadSegment.
inline xla::ffi::Error CheckMm(const char* op, const Metadata& metadata, int64_t rows_x,
                               int64_t rows_y, int64_t groups, int64_t n, int64_t k) {
  JGG_RETURN_IF_ERROR(CheckSmall(op, {rows_x, rows_y, groups, n, k, metadata.count}, 0));
  if (metadata.kind == MetadataKind::kSegments) return xla::ffi::Error::Success();
  if (rows_x > rows_y) {
    return InvalidArgument(op, "groups are of ", rows_x, " rows, the result has ", rows_y);
  }
  if (metadata.kind == MetadataKind::kSpans && metadata.count > groups) {
    return InvalidArgument(op, "there are ", metadata.count, " spans, but ", groups, " matrices");
  }
  return xla::ffi::Error::Success();
}

// The optional operands at the end of a call, in order.
class Operands {
 public:
  Operands(const char* op, xla::ffi::RemainingArgs rest) : op_(op), rest_(rest) {}

  // The next operand.
  xla::ffi::ErrorOr<xla::ffi::AnyBuffer> Take(const char* name) {
    if (next_ >= rest_.size()) {
      return xla::ffi::Unexpected(InvalidArgument(op_, name, " is missing"));
    }
    return rest_.get<xla::ffi::AnyBuffer>(next_++);
  }

  xla::ffi::Error End() const {
    if (next_ == rest_.size()) return xla::ffi::Error::Success();
    return InvalidArgument(op_, "has ", rest_.size() - next_, " operands too many");
  }

 private:
  const char* op_;
  xla::ffi::RemainingArgs rest_;
  size_t next_ = 0;
};

// The next operand as the group that weight 0 is: an int32 scalar, which belongs to sizes.
inline xla::ffi::Error BindGroupOffset(const char* op, Operands* operands, Metadata* metadata) {
  const auto offset = operands->Take("group_offset");
  if (!offset) return offset.error();
  JGG_RETURN_IF_ERROR(CheckShape(op, "group_offset", "()", *offset, {}));
  if (metadata->kind != MetadataKind::kSizes || offset->element_type() != xla::ffi::S32) {
    return InvalidArgument(op, "group_offset must be int32 and belong to sizes");
  }
  metadata->offset = static_cast<const int32_t*>(offset->untyped_data());
  return xla::ffi::Error::Success();
}

}  // namespace jgg
