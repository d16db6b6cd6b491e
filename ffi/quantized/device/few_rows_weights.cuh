// Lines of codes as few_rows_sm80.cuh takes them, of every linear format.
#pragma once

#include "quantized/device/formats.cuh"

namespace jgg::device {

template <Mode kMode, int kBits_, int kCopy_ = 16>
struct FewRowsWeights : LineCodes<kMode, kBits_> {
  static constexpr int kBits = kBits_;
  // Blocks of 32 codes that a thread takes in a step; bytes of a copy; bytes that are placed, and
  // read, together, and how many times a thread reads so many.
  static constexpr int kBlocks = kBits == 8 ? 1 : 2;
  static constexpr int kCopy = kCopy_;
  static constexpr int kPiece = kBits % 2 == 0 ? 16 : 8;
  static constexpr int kPieces = 4 * kBits * kBlocks / kPiece;
  // Bytes of their scales (biases) where groups are as small as they may be.
  static constexpr int kScaleBytes = LineCodes<kMode, kBits>::kBlockScales * kBlocks;
};

}  // namespace jgg::device
