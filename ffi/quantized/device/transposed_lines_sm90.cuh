// Weights in layout "linear" for x (T, N) @ W (N, K), K quantized: see transposed_sm90.cuh. A slice
// has the codes of 64 lines (n) and 128 k, by TMA. Threads copy the scales of their lines by
// themselves, since nothing aligns these.
//
// Where rows are few, a thread has lines as in linear_weights_sm90.cuh: 32 neighbouring k of two
// lines, half of which are of each warpgroup's columns. So these are no neighbours, and each lane
// stores its columns by itself. Where rows are many a thread decodes 32 k of one line, and writes
// them to shared memory in their order.
#pragma once

#include <cstdint>
#include <type_traits>

#include "quantized/device/linear_weights_sm90.cuh"

namespace jgg::device {

// A thread's scales of 32 k, of kLines lines of each slice, which lie 8 apart. They are copied to
// its own places in shared memory kDepth slices ahead, by the words that they lie in.
template <typename Codes, int kLines, int kDepth>
class CopiedScales {
 public:
  using Loaded = typename Codes::Loaded;
  static constexpr int kWords = kLines * (Codes::kHasBiases ? 2 : 1);
  using Places = uint32_t[kDepth][kWords][32 * kMultiplyWarps];

  // From line `line` of a tile of work on, at `k`.
  __device__ CopiedScales(const QuantizedGemmSm90& quantized, const Work& work, int line, int k,
                          Places& places)
      : quantized_(quantized), line_(line) {
    to_ = SharedAddress(&places[0][0][threadIdx.x - 128]);
    const bool exists = work.weight >= 0 && k < quantized.gemm.n;
    lines_ = exists ? quantized.elements : 0;
    int64_t at;
    if constexpr (Codes::kInBlocks) {
      at = static_cast<int64_t>(work.weight) * quantized.scale_lines * quantized.scale_line +
           k / quantized.columns_each * Codes::kScaleSize;
    } else {
      const int64_t first = static_cast<int64_t>(work.weight) * quantized.elements + line;
      at = first * quantized.scale_line + (k >> quantized.scale_shift) * Codes::kScaleSize;
    }
    // Lines of a slice are whole words apart from the first, so this is where all scales lie in
    // their words. The arrays begin with whole words.
    shift_ = static_cast<int>(at) % 4 * 8;
    scales_ = static_cast<const char*>(quantized.scales) + at / 4 * 4;
    asm volatile("cp.async.wait_all;" ::: "memory");  // of the tile before
#pragma unroll
    for (int i = 0; i < kDepth; ++i) Ask(i);
  }

  // The scales of a slice, which have the place that the slice kDepth further on will have.
  __device__ void Take(int place, Loaded (&to)[kLines]) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kDepth - 1) : "memory");
    constexpr uint32_t kMask = Codes::kBlockScales == 4   ? ~0u
                               : Codes::kBlockScales == 2 ? 0xffff
                                                          : 0xff;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      uint32_t word;
      asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(Place(place, i)) : "memory");
      to[i % kLines][i / kLines] = word >> shift_ & kMask;
    }
    Ask(place);
  }

 private:
  __device__ uint32_t Place(int place, int i) const {
    return to_ + (place * kWords + i) * sizeof(uint32_t[32 * kMultiplyWarps]);
  }

  // Lines that are not there have codes 0 and scales 0, so that nothing comes of them.
  __device__ void Ask(int place) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const int line = line_ + i % kLines * 8;
      const char* from = scales_;
      if constexpr (Codes::kInBlocks) {
        from += static_cast<int64_t>(static_cast<unsigned>(line) / quantized_.rows_each) *
                quantized_.scale_line;
      } else {
        from += i % kLines * 8 * quantized_.scale_line;
      }
      if (i >= kLines) {
        from += static_cast<const char*>(quantized_.biases) -
                static_cast<const char*>(quantized_.scales);
      }
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(Place(place, i)), "l"(from),
                   "r"(line < lines_ ? 4 : 0)
                   : "memory");
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
    line_ += 64;
    if constexpr (!Codes::kInBlocks) scales_ += 64 * quantized_.scale_line;
  }

  const QuantizedGemmSm90& quantized_;
  const char* scales_;  // of the line that is asked for next; in blocks, of the matrix
  int line_, lines_, shift_;
  uint32_t to_;
};

template <Mode kMode, int kBits>
struct TransposedLines {
  using Codes = LineCodes<kMode, kBits>;
  using Tile = LineTile<kBits>;
  static constexpr DType kX = DType::kBF16;
  static constexpr bool kScaled = false;
  static constexpr float kFactor = Codes::kUnit;
  static constexpr int kCodeBytes = Tile::kBytes, kScaleBytes = 0;  // of a slice
  static constexpr int kCodesAligned = 1024;                        // bytes, for swizzled boxes
  static constexpr int kCopiers = 1;                                // threads, beside that of x
  // Scales of few rows, in stages of so many slices, or of many rows.
  template <int kSlices>
  using FewScales = CopiedScales<Codes, 2, kSlices>;
  using ManyScales = CopiedScales<Codes, 1, 4>;
  template <bool kFew, int kSlices>
  using Places = typename std::conditional_t<kFew, FewScales<kSlices>, ManyScales>::Places;
  static constexpr bool kHasEpilogue = false;  // few rows: columns are no neighbours

  // The codes of a tile of work, for the threads that copy them.
  struct Columns {
    const QuantizedGemmSm90& quantized;
    const int k, weight;
    int line = 0;

    __device__ Columns(const QuantizedGemmSm90& q, const Work& work)
        : quantized(q), k(work.out_column * kBits / 16), weight(work.weight) {}

    __device__ int Bytes() const { return kCodeBytes; }

    __device__ void Copy(uint64_t* full, char* codes, char* /*scales*/) const {
      CopyBox<false>(&quantized.codes_map, full, codes, k, line, weight);
    }

    __device__ void Next() { line += 64; }
  };

  // Many rows: thread 0 of one that copies.
  template <typename Config, int>
  __device__ static void CopyThread(const QuantizedGemmSm90& quantized,
                                    typename Config::SharedMemory& memory) {
    Place<Config::kStages> at;
    ForEachWork<Config, false>(memory, [&](const Work& work) {
      Columns columns(quantized, work);
#pragma unroll 1
      for (int slice = 0; slice < work.slices; ++slice) {
        uint64_t* full = &memory.full[at.index];
        Wait(&memory.empty[at.index], at.parity ^ 1);
        ArriveExpecting(full, kCodeBytes);
        columns.Copy(full, memory.codes[at.index][0], nullptr);
        columns.Next();
        at.Next();
      }
    });
  }

  // Few rows: as TransposedPacked::Reader, of stages of kSlices.
  template <int kSlices>
  class Reader {
    static constexpr int kHalfWords = (kBits + 1) / 2;

   public:
    __device__ Reader(const QuantizedGemmSm90& quantized, const Work& work, int /*group*/,
                      Places<true, kSlices>& places)
        : scales_(quantized, work, Row(), work.out_column + threadIdx.x % 4 * 32, places) {}

    struct Words {
      uint32_t codes[2][kHalfWords], scales[2];

      __device__ uint32_t OfEachLoad() const {
        uint32_t each = 0;
#pragma unroll
        for (int i = 0; i < (Tile::kBySlices ? 1 : kHalfWords); ++i)
          each |= codes[0][i] | codes[1][i];
        return each;
      }
    };

    // Of slice `s` of a stage, a warpgroup's half of the codes.
    __device__ Words Load(const char* codes, const char* /*scales*/, int group, int s) {
      Words words;
      typename Codes::Loaded now[2];
      scales_.Take(s, now);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int piece = threadIdx.x % 4;
        if constexpr (Tile::kBySlices) {
          LoadWords<kBits / 2>(Tile::Half(codes, Row(), 8 * r, piece, group), words.codes[r]);
        } else {
          LoadHalf(codes, Row() + 8 * r, piece, group, words.codes[r]);
        }
        const uint32_t scale = Codes::template Word<ScaleRange::kAny>(now[r]);
        words.scales[r] = Codes::OfHalf(scale, group, words.codes[r]);
      }
      return words;
    }

    // 16 of the columns, from step `first` of four on.
    __device__ void Read(const Words& words, int /*group*/, int first, uint32_t* a) const {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // pair of codes, and line
        a[i] = Codes::template PairOf<ScaleRange::kAny>(words.codes[i % 2], 2 * first + i / 2,
                                                        words.scales[i % 2]);
      }
    }

   private:
    __device__ static int Row() { return threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4; }

    // Pairs 8 * group and on, so that they are where pairs from 0 on are: shifts are constants.
    __device__ static void LoadHalf(const char* codes, int line, int piece, int group,
                                    uint32_t (&half)[kHalfWords]) {
      uint32_t words[kBits];
      Tile::Load(codes, line, piece, words);
#pragma unroll
      for (int i = 0; i < kHalfWords; ++i) {
        const uint32_t second = words[kBits / 2 + i];
        half[i] = group == 0 ? words[i]
                  : kBits % 2 == 0
                      ? second
                      : Permute(second, words[min(kBits / 2 + i + 1, kBits - 1)], 0x6341);
      }
    }

    FewScales<kSlices> scales_;
  };

  // Few rows: the first of this lane's two columns, that beside column `column` of a warpgroup's.
  __device__ static int ColumnOf(int group, int column) {
    constexpr int kApart = 16 % kBits ? 16 : 16 / kBits;  // codes of a pair
    const int p = 8 * group + column / 16 * 2, e = column % 16;
    return e / 2 * 32 + p / kApart * 2 * kApart + e % 2 * kApart + p % kApart;
  }

  // Many rows: decodes a slice's line of 64 k.
  class Writer {
   public:
    __device__ Writer(const QuantizedGemmSm90& quantized, const Work& work, int group,
                      Places<false, 1>& places)
        : line_(threadIdx.x % 128 / 2),
          piece_(2 * group + threadIdx.x % 2),
          scales_(quantized, work, line_, work.out_column + 32 * piece_, places) {}

    struct Words {
      uint32_t pairs[16];
    };

    __device__ Words Load(const char* codes, const char* /*scales*/, int /*group*/) {
      typename Codes::Loaded loaded[1];
      scales_.Take(slice_++ % 4, loaded);
      const uint32_t now = Codes::template Word<ScaleRange::kAny>(loaded[0]);
      Words words;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t some[Tile::kWords];
        if constexpr (Tile::kBySlices) {
          LoadWords<kBits / 2>(Tile::Half(codes, line_, 0, piece_, half), some);
        } else {
          Tile::Load(codes, line_, piece_, some);
        }
        const uint32_t scale = Codes::OfHalf(now, half, some);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int p = Tile::kBySlices ? i : 8 * half + i;
          words.pairs[8 * half + i] = Codes::template PairOf<ScaleRange::kAny>(some, p, scale);
        }
      }
      return words;
    }

    // To the place of 64 lines, which are swizzled.
    __device__ void Write(const Words& words, char* to) const {
      constexpr int kApart = 16 % kBits ? 16 : 16 / kBits;
      to += line_ * 128;
#pragma unroll
      for (int chunk = 0; chunk < 4; ++chunk) {
        uint32_t eight[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int code = 8 * chunk + 2 * i, of = code % (2 * kApart);
          const int p = code / (2 * kApart) * kApart + of % kApart;
          const uint32_t halves = of < kApart ? 0x5410 : 0x7632;
          eight[i] = Permute(words.pairs[p], words.pairs[p + 1], halves);
        }
        const int at = (threadIdx.x % 2 * 4 + chunk) ^ line_ % 8;
        *reinterpret_cast<uint4*>(to + at * 16) =
            make_uint4(eight[0], eight[1], eight[2], eight[3]);
      }
    }

   private:
    const int line_, piece_;
    int slice_ = 0;
    ManyScales scales_;
  };
};

}  // namespace jgg::device
