// From XLA's buffers to QuantizedArray, for the handlers of quantize and dequantize.
#pragma once

#include "quantized/qmm_bind.h"
#include "quantized/quantize.h"

namespace jgg {

// The leaves of a Quantized that stands for an array (R, K), rows of which may share global scales.
struct QuantizedBuffers {
  xla::ffi::AnyBuffer weight, scales;
  std::optional<xla::ffi::AnyBuffer> biases, global_scale;
};

inline xla::ffi::Error BindQuantizedArray(const char* op, const QuantizedAttrs& attrs,
                                          const QuantizedBuffers& buffers, int64_t rows, int64_t k,
                                          QuantizedArray* q) {
  QuantizedWeight w{};
  JGG_RETURN_IF_ERROR(BindCoding(op, attrs, "linear", &w));
  q->coding = w.coding;
  q->group_size = w.group_size;
  q->elements = rows * k;
  if (k % w.group_size != 0) {
    return InvalidArgument(op, "K=", k, " is not a multiple of group_size=", w.group_size);
  }
  const auto& [weight, scales, biases, global_scale] = buffers;
  JGG_RETURN_IF_ERROR(
      CheckShape(op, "weight", "(R, K*bits/32)", weight, {rows, k * w.coding.bits / 32}));
  if (weight.element_type() != xla::ffi::U32) {
    return InvalidArgument(op, "weight has XLA dtype ", static_cast<int>(weight.element_type()),
                           ", expected uint32");
  }
  JGG_RETURN_IF_ERROR(
      CheckShape(op, "scales", "(R, K/group_size)", scales, {rows, k / w.group_size}));
  if (w.coding.HasFloatScales()) {
    JGG_RETURN_IF_ERROR(CheckFloat(op, "scales", scales.element_type()));
    q->coding.scale_dtype = *ToDType(scales.element_type());
  } else if (scales.element_type() != xla::ffi::U8) {
    return InvalidArgument(op, "scales has XLA dtype ", static_cast<int>(scales.element_type()),
                           ", expected uint8");
  }
  q->weight = weight.untyped_data();
  q->scales = scales.untyped_data();
  if (biases) {
    JGG_RETURN_IF_ERROR(
        CheckShape(op, "biases", "(R, K/group_size)", *biases, {rows, k / w.group_size}));
    if (biases->element_type() != scales.element_type()) {
      return InvalidArgument(op, "biases and scales must have one dtype");
    }
    q->biases = biases->untyped_data();
  }
  if (global_scale) {
    JGG_RETURN_IF_ERROR(CheckShape(op, "global_scale", "(L,)", *global_scale, {-1}));
    q->global_scales = global_scale->dimensions()[0];
    if (global_scale->element_type() != xla::ffi::F32) {
      return InvalidArgument(op, "global_scale has XLA dtype ",
                             static_cast<int>(global_scale->element_type()), ", expected float32");
    }
    if (q->global_scales == 0 || rows % q->global_scales != 0) {
      return InvalidArgument(op, "global_scale has shape ", ShapeText(*global_scale),
                             ", which does not divide the ", rows, " rows");
    }
    q->global_scale = static_cast<const float*>(global_scale->untyped_data());
  }
  return xla::ffi::Error::Success();
}

// The operands and results of quantize. `across`: w may have three axes (B, K, N).
inline xla::ffi::Error BindQuantize(const char* op, const QuantizedAttrs& attrs,
                                    xla::ffi::AnyBuffer w, xla::ffi::RemainingArgs rest,
                                    xla::ffi::Result<xla::ffi::AnyBuffer> weight,
                                    xla::ffi::Result<xla::ffi::AnyBuffer> scales,
                                    xla::ffi::RemainingRets more, QuantizeArgs* args,
                                    bool across = false) {
  JGG_RETURN_IF_ERROR(CheckFloat(op, "w", w.element_type()));
  if (across && w.dimensions().size() == 3) {
    args->matrices = w.dimensions()[0];
    args->k = w.dimensions()[1];
    args->n = w.dimensions()[2];
  } else {
    JGG_RETURN_IF_ERROR(CheckShape(op, "w", "(R, K)", w, {-1, -1}));
  }
  args->w = w.untyped_data();
  args->dtype = *ToDType(w.element_type());
  QuantizedBuffers buffers{*weight, *scales, {}, {}};
  Operands operands(op, rest);
  if (attrs.global_scale) {
    const auto scale = operands.Take("global_scale");
    if (!scale) return scale.error();
    buffers.global_scale = *scale;
  }
  JGG_RETURN_IF_ERROR(operands.End());
  if (more.size() != attrs.biases) {
    return InvalidArgument(op, "has ", 2 + more.size(), " results, expected ", 2 + attrs.biases);
  }
  if (attrs.biases) {
    auto biases = more.get<xla::ffi::AnyBuffer>(0);
    if (!biases) return biases.error();
    buffers.biases = **biases;
  }
  const bool exchanged = w.dimensions().size() == 3;
  const int64_t rows = exchanged ? args->matrices * args->n : w.dimensions()[0];
  const int64_t k = exchanged ? args->k : w.dimensions()[1];
  JGG_RETURN_IF_ERROR(BindQuantizedArray(op, attrs, buffers, rows, k, &args->q));
  if (args->q.coding.HasFloatScales() && args->q.coding.scale_dtype != args->dtype) {
    return InvalidArgument(op, "scales and w must have one dtype");
  }
  return xla::ffi::Error::Success();
}

// The operands of dequantize.
inline xla::ffi::Error BindDequantize(const char* op, const QuantizedAttrs& attrs,
                                      xla::ffi::AnyBuffer weight, xla::ffi::AnyBuffer scales,
                                      xla::ffi::RemainingArgs rest, int64_t rows, int64_t k,
                                      QuantizedArray* q) {
  QuantizedBuffers buffers{weight, scales, {}, {}};
  Operands operands(op, rest);
  if (attrs.biases) {
    const auto buffer = operands.Take("biases");
    if (!buffer) return buffer.error();
    buffers.biases = *buffer;
  }
  if (attrs.global_scale) {
    const auto buffer = operands.Take("global_scale");
    if (!buffer) return buffer.error();
    buffers.global_scale = *buffer;
  }
  JGG_RETURN_IF_ERROR(operands.End());
  return BindQuantizedArray(op, attrs, buffers, rows, k, q);
}

}  // namespace jgg
