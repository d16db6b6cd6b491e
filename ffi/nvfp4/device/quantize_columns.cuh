// The kernels of nvfp4_quantize in blocks of 16 along R of x (M, R, C), stored transposed: a line
// of the result is a column of x. R may be grouped: each group is padded to 64 rows.
#pragma once

#include "nvfp4/device/quantize.cuh"

namespace jgg::nvfp4::device {

struct TileRows {
  int64_t first;
  int count;  // the others are zeros
};

__device__ inline TileRows RowsOfTile(const QuantizeParams& p, int64_t tile) {
  int64_t first = kTileLines * tile, end = p.rows;
  if (p.groups != 0) {
    if (tile >= p.tiles[p.groups]) return {0, 0};
    const int group = GroupOfTile(p.tiles, p.groups, static_cast<int>(tile));
    first = p.starts[group] + kTileLines * (tile - p.tiles[group]);
    end = p.starts[group + 1];
  }
  return {first, static_cast<int>(max(int64_t{0}, min(int64_t{kTileLines}, end - first)))};
}

// Columns of a lane, neighbours.
template <DType kOf>
inline constexpr int kLaneColumns = kOf == DType::kF32 ? 1 : 2;

template <DType kOf>
__device__ Values ColumnOf(const uint32_t (&words)[kBlock], int which) {
  Values values;
  JGG_UNROLL
  for (int i = 0; i < kBlock; ++i) {
    if constexpr (kOf == DType::kF32) {
      values.words[i] = words[i];
    } else {
      values.words[i] = AsBits(jgg::device::Half<kOf>(words[i], which));
    }
  }
  return values;
}

// The largest magnitude of each of a lane's columns; NaN where there is one.
template <DType kOf>
__device__ void LargestOfColumns(const uint32_t (&words)[kBlock],
                                 float (&largest)[kLaneColumns<kOf>]) {
  if constexpr (kOf == DType::kF32) {
    largest[0] = LargestMagnitude(ColumnOf<kOf>(words, 0));
  } else {
    uint32_t pair = jgg::device::Magnitudes2<kOf>(words[0]);
    JGG_UNROLL
    for (int i = 1; i < kBlock; ++i) {
      pair = jgg::device::Max2<kOf>(pair, jgg::device::Magnitudes2<kOf>(words[i]));
    }
    largest[0] = jgg::device::Half<kOf>(pair, 0);
    largest[1] = jgg::device::Half<kOf>(pair, 1);
  }
}

// The largest magnitude of 16 columns, to all lanes that have them.
template <DType kOf>
__device__ void ShareLargest(float (&largest)[kLaneColumns<kOf>]) {
  constexpr int kLanes = kBlock / kLaneColumns<kOf>;
  float all = largest[0];
  if constexpr (kLaneColumns<kOf> == 2) all = jgg::device::Max(all, largest[1]);
  JGG_UNROLL
  for (int mask = 1; mask < kLanes; mask *= 2) {
    all = jgg::device::Max(all, __shfl_xor_sync(0xffffffffu, all, mask));
  }
  JGG_UNROLL
  for (int j = 0; j < kLaneColumns<kOf>; ++j) largest[j] = all;
}

enum class Blocks { kOwn, kSquare, kHadamard };

inline constexpr int kColumnsThreads = 128;
inline constexpr int kSpans = 2;  // of a warp's columns, one after the other

// Thread blocks of ColumnsKernel on a multiprocessor: as many as spill no registers. Each takes 35
// KB of shared memory, so six fit on Hopper and Blackwell, four in 164 KB and two in 100 KB.
template <DType kOf, bool kStochastic>
inline constexpr int kResident = !kStochastic         ? 6
                                 : kOf == DType::kF16 ? 4
                                                      : 5;

// Thread blocks for a matrix.
template <DType kOf>
int64_t ColumnsBlocks(const QuantizeParams& p) {
  return CeilDiv(CeilDiv(p.blocks, kTileLines / kBlock), kColumnsThreads / 32) *
         CeilDiv(p.columns, kSpans * 32 * kLaneColumns<kOf>);
}

// Where a warp is: its tile of 64 rows, and the thread block's columns.
template <DType kOf>
struct ColumnsPlace {
  static constexpr int kLines = 32 * kLaneColumns<kOf>;  // columns of a warp at a time
  int64_t first_tile, first_column;                      // of the thread block
  int64_t tile, columns, pitch;
  TileRows rows{0, 0};

  // Where thread block `at` is.
  __device__ ColumnsPlace(const QuantizeParams& p, uint32_t at) {
    const auto across = static_cast<uint32_t>(CeilDiv(p.columns, kSpans * kLines));
    first_tile = int64_t{at / across} * (kColumnsThreads / 32);
    first_column = int64_t{at % across} * (kSpans * kLines);
    tile = first_tile + threadIdx.x / 32;
    columns = p.columns;
    pitch = columns * kElementBytes<kOf>;
    if (kTileLines / kBlock * tile < p.blocks) rows = RowsOfTile(p, tile);
  }

  __device__ int spans() const {
    return static_cast<int>(min(int64_t{kSpans}, CeilDiv(columns - first_column, kLines)));
  }
};

// A warp's tile of x, 16 rows of 128 bytes after 16 rows, span after span, through three stages of
// shared memory: one is read, and two are on their way where rows begin at multiples of 4 bytes.
template <DType kOf>
class ColumnsReader {
 public:
  static constexpr int kRowBytes = 128, kStages = 3;
  using Stages = uint4[kStages][kBlock * kRowBytes / 16];

  __device__ ColumnsReader(const QuantizeParams& p, const ColumnsPlace<kOf>& at, int64_t m,
                           Stages& stages)
      : rows_(at.rows.count), spans_(at.spans()), pitch_(at.pitch) {
    const int64_t first = at.first_column * kElementBytes<kOf>;
    left_ = static_cast<int>(min(int64_t{kSpans * kRowBytes}, pitch_ - first));
    from_ = p.x + (m * p.rows + at.rows.first) * pitch_ + first;
    base_ = reinterpret_cast<uint8_t*>(stages);
    Begin();
    Begin();
  }

  // The next 16 rows of this lane's columns, a word of each.
  __device__ void Read(uint32_t (&words)[kBlock]) {
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.wait_group 1;" ::: "memory");
#endif
    __syncwarp();
    const auto* from = reinterpret_cast<const uint32_t*>(base_ + reads_) + threadIdx.x % 32;
    JGG_UNROLL
    for (int i = 0; i < kBlock; ++i) words[i] = from[kRowBytes / 4 * i];
    reads_ = After(reads_);
    Begin();
  }

 private:
  static constexpr int kStage = kBlock * kRowBytes;

  __device__ static int After(int stage) {
    return stage == (kStages - 1) * kStage ? 0 : stage + kStage;
  }

  __device__ void Begin() {
    if (spans_ > 0) {
      if (pitch_ % 16 == 0) {
        CopyPieces();
      } else if (pitch_ % 4 == 0) {
        CopyWords();
      } else {
        CopyElements();
      }
      begins_ = After(begins_);
      from_ += kBlock * pitch_;
      row_ += kBlock;
      if (row_ == kTileLines) {
        row_ = 0;
        from_ += kRowBytes - kTileLines * pitch_;
        left_ -= kRowBytes;
        --spans_;
      }
    }
#ifdef __CUDA_ARCH__
    asm volatile("cp.async.commit_group;" ::: "memory");  // an empty one too
#endif
  }

  // 16 bytes of each lane, eight lanes a row, four rows at a time.
  __device__ void CopyPieces() {
    const int lane = threadIdx.x % 32;
    const int rows = rows_ - row_, row = lane / 8, column = lane % 8 * 16;
    const uint8_t* from = from_ + row * pitch_ + column;
    uint8_t* const to = base_ + begins_ + 16 * lane;
    JGG_UNROLL
    for (int i = 0; i < kBlock / 4; ++i) {
      Copy<uint4>(to + 4 * kRowBytes * i, from, row + 4 * i < rows && column < left_);
      from += 4 * pitch_;
    }
  }

  // If rows begin at multiples of 4 bytes only, each lane copies what it will read.
  __device__ void CopyWords() {
    const int lane = threadIdx.x % 32;
    const uint8_t* from = from_ + 4 * lane;
    uint8_t* const to = base_ + begins_ + 4 * lane;
    JGG_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      Copy<uint32_t>(to + kRowBytes * i, from, row_ + i < rows_ && 4 * lane < left_);
      from += pitch_;
    }
  }

  // 16 bytes or 4, or zeros.
  template <typename T>
  __device__ static void Copy(uint8_t* to, const uint8_t* from, bool some) {
#ifdef __CUDA_ARCH__
    const auto shared = static_cast<uint32_t>(__cvta_generic_to_shared(to));
    const int bytes = some ? sizeof(T) : 0;
    if constexpr (sizeof(T) == 16) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from),
                   "r"(bytes)
                   : "memory");
    } else {
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(from),
                   "r"(bytes)
                   : "memory");
    }
#else  // tests/lib/cuda_on_host.h
    const T piece = some ? __ldg(reinterpret_cast<const T*>(from)) : T{};
    std::memcpy(to, &piece, sizeof(T));
#endif
  }

  // If rows begin at single elements, each lane also waits for the loads.
  __device__ void CopyElements() {
    const int lane = threadIdx.x % 32;
    JGG_NO_UNROLL
    for (int i = 0; i < kBlock; ++i) {
      uint32_t word = 0;
      const uint8_t* from = from_ + i * pitch_ + 4 * lane;
      JGG_UNROLL
      for (int j = 0; j < 4; j += kElementBytes<kOf>) {
        if (row_ + i >= rows_ || 4 * lane + j >= left_) continue;
        if constexpr (kOf == DType::kF32) {
          word = __ldg(reinterpret_cast<const uint32_t*>(from));
        } else {
          word |= uint32_t{__ldg(reinterpret_cast<const uint16_t*>(from + j))} << 8 * j;
        }
      }
      reinterpret_cast<uint32_t*>(base_ + begins_ + kRowBytes * i)[lane] = word;
    }
  }

  int rows_, row_ = 0;  // of the tile: how many there are, and the next
  int spans_, left_;    // the columns left: spans, and bytes
  int64_t pitch_;
  const uint8_t* from_;
  uint8_t* base_;
  int reads_ = 0, begins_ = 0;  // stages
};

// amax of rotated values.
template <DType kOf>
__global__ void __launch_bounds__(kColumnsThreads)
    ColumnsAmaxKernel(const __grid_constant__ QuantizeParams p) {
  __shared__ typename ColumnsReader<kOf>::Stages stages[kColumnsThreads / 32];
  const ColumnsPlace<kOf> at(p, blockIdx.x);
  for (int64_t m = blockIdx.y; m < p.matrices; m += gridDim.y) {
    uint32_t amax = __ldcg(p.amax + m);  // what others have found so far
    if (at.rows.count > 0) {
      ColumnsReader<kOf> reader(p, at, m, stages[threadIdx.x / 32]);
      JGG_NO_UNROLL
      for (int i = 0; i < at.spans() * (kTileLines / kBlock); ++i) {
        uint32_t words[kBlock];
        reader.Read(words);
        JGG_UNROLL
        for (int j = 0; j < kLaneColumns<kOf>; ++j) RaiseToRotated(ColumnOf<kOf>(words, j), &amax);
      }
    }
    JoinAmax(amax, p.amax + m);
  }
}

// The result of a thread block. In each of its columns, the blocks of all warps are neighbours in
// memory. Line 32 * j + lane is column kLaneColumns * lane + j.
template <DType kOf>
struct ColumnsResult {
  using Place = ColumnsPlace<kOf>;
  static constexpr int kPer = kLaneColumns<kOf>, kWarps = kColumnsThreads / 32;
  static constexpr int kPairs = kTileLines / kBlock / 2 * kWarps;  // of blocks, to a line
  uint4 codes[Place::kLines][kPairs + 1];
  uint32_t scales[Place::kLines][kWarps + 1];

  // Writes the codes of block `b` of the warp's tile.
  __device__ void Put(int j, int b, const uint32_t (&words)[2]) {
    auto* blocks = reinterpret_cast<uint2*>(codes[32 * j + threadIdx.x % 32]);
    blocks[threadIdx.x / 32 * (kTileLines / kBlock) + b] = make_uint2(words[0], words[1]);
  }
  __device__ void PutScales(int j, uint32_t bytes) {
    scales[32 * j + threadIdx.x % 32][threadIdx.x / 32] = bytes;
  }

  // `first_line`: where its first column is in the result.
  __device__ void Write(const QuantizeParams& p, const Place& at, int64_t first_line,
                        int span) const {
    const int64_t line = first_line * p.blocks, block = kTileLines / kBlock * at.first_tile;
    const int64_t left = at.columns - at.first_column - span * Place::kLines;
    const int columns = static_cast<int>(min(int64_t{Place::kLines}, left));
    Each<kPairs>(columns, p.weight + 8 * line, 8 * p.blocks, [&](uint8_t* to, int slot, int pair) {
      StoreCodes(codes[slot][pair], block + 2 * pair, p.blocks, to);
    });
    Each<kWarps>(columns, p.scales + line, p.blocks, [&](uint8_t* to, int slot, int four) {
      StoreScales(scales[slot][four], block + 4 * four, p.blocks, to);
    });
  }

 private:
  // Calls f(line, line here, part) for the columns that exist and kParts parts of each.
  template <int kParts, typename F>
  __device__ static void Each(int columns, uint8_t* to, int64_t pitch, F f) {
    constexpr int kStep = kColumnsThreads / kParts;
    static_assert(kStep % kPer == 0 && Place::kLines % kStep == 0);
    const int part = threadIdx.x % kParts, first = threadIdx.x / kParts;
    const int slot = first % kPer * 32 + first / kPer;
    to += first * pitch;
    JGG_UNROLL
    for (int i = 0; i < Place::kLines / kStep; ++i) {
      if (first + i * kStep < columns) f(to, slot + i * (kStep / kPer), part);
      to += kStep * pitch;
    }
  }

  // Two neighbouring blocks of a line, the first of them number `at` of `blocks`.
  __device__ static void StoreCodes(const uint4& codes, int64_t at, int64_t blocks, uint8_t* line) {
    if (blocks % 2 == 0) {
      if (at < blocks) *reinterpret_cast<uint4*>(line + 8 * at) = codes;
      return;
    }
    auto* two = reinterpret_cast<uint2*>(line) + at;
    if (at < blocks) two[0] = make_uint2(codes.x, codes.y);
    if (at + 1 < blocks) two[1] = make_uint2(codes.z, codes.w);
  }

  // The scales of four blocks, one in a byte.
  __device__ static void StoreScales(uint32_t bytes, int64_t at, int64_t blocks, uint8_t* line) {
    if (blocks % 4 == 0) {
      if (at < blocks) *reinterpret_cast<uint32_t*>(line + at) = bytes;
      return;
    }
    JGG_UNROLL
    for (int i = 0; i < 4; ++i) {
      if (at + i < blocks) line[at + i] = bytes >> 8 * i;
    }
  }
};

// A warp per 64 rows; the warps of a block have neighbouring rows.
template <DType kOf, Blocks kBlocks, bool kStochastic>
__global__ void __launch_bounds__(kColumnsThreads, kResident<kOf, kStochastic>)
    ColumnsKernel(const __grid_constant__ QuantizeParams p) {
  constexpr int kPer = kLaneColumns<kOf>;
  __shared__ ColumnsResult<kOf> result;
  __shared__ typename ColumnsReader<kOf>::Stages stages[kColumnsThreads / 32];
  const ColumnsPlace<kOf> at(p, FromLast(blockIdx.x, gridDim.x));
  const int spans = at.spans();
  for (int64_t i = blockIdx.y; i < p.matrices; i += gridDim.y) {
    const int64_t m = FromLast(i, p.matrices);
    const MatrixScales matrix = p.matrix_scales[m];
    ColumnsReader<kOf> reader(p, at, m, stages[threadIdx.x / 32]);
    JGG_NO_UNROLL
    for (int span = 0; span < spans; ++span) {
      const int64_t first_line = m * p.columns + at.first_column + span * ColumnsPlace<kOf>::kLines;
      const int64_t line = first_line + threadIdx.x % 32 * kPer;
      uint32_t scales[kPer] = {};
      JGG_NO_UNROLL
      for (int b = 0; b < kTileLines / kBlock; ++b) {
        uint32_t words[kBlock];
        float largest[kPer];
        reader.Read(words);
        if constexpr (kBlocks != Blocks::kHadamard) LargestOfColumns<kOf>(words, largest);
        if constexpr (kBlocks == Blocks::kSquare) ShareLargest<kOf>(largest);
        JGG_UNROLL
        for (int j = 0; j < kPer; ++j) {
          Values values = ColumnOf<kOf>(words, j);
          if constexpr (kBlocks == Blocks::kHadamard) {
            Rotate(&values);
            largest[j] = LargestMagnitude(values);
          }
          const BlockScale scale = MakeBlockScale(largest[j], matrix);
          const int64_t block = (line + j) * p.blocks + kTileLines / kBlock * at.tile + b;
          uint32_t codes[2];
          EncodeBlock<kStochastic>(p, values, scale, block, codes);
          result.Put(j, b, codes);
          scales[j] = jgg::device::FunnelRight(scales[j], scale.byte, 8);
        }
      }
      JGG_UNROLL
      for (int j = 0; j < kPer; ++j) result.PutScales(j, scales[j]);
      __syncthreads();
      result.Write(p, at, first_line, span);
      __syncthreads();  // before what comes next is put
    }
  }
}

}  // namespace jgg::nvfp4::device
