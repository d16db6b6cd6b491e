// Weights in layout "linear" for x (T, N) @ W (N, K), K quantized: see transposed_sm90.cuh. A slice
// has the codes of 64 lines (n) and 128 k, by TMA. Threads copy the scales of lines by themselves,
// since nothing aligns these.
//
// Where rows are few, a thread has lines as in linear_weights_sm90.cuh: 32 neighbouring k of two
// lines, half of which are of each warpgroup's columns. So these are no neighbours, and each lane
// stores its columns by itself. Where rows are many a thread decodes 32 k of one line, and writes
// them to shared memory in their order.
#pragma once

#include <cstdint>
#include <type_traits>

#include "quantized/device/linear_weights_sm90.cuh"
#include "quantized/device/staged_scales_sm90.cuh"

namespace jgg::device {

// Where a thread's scales of 32 k are, of one line of each slice after another.
template <typename Codes>
class ScalesOfLines {
 public:
  using Loaded = typename Codes::Loaded;

  // From line `line` of a tile of work on, at `k`.
  __device__ ScalesOfLines(const QuantizedGemmSm90& quantized, const Work& work, int line, int k)
      : quantized_(quantized), line_(line) {
    const bool exists = work.weight >= 0 && k < quantized.gemm.n;
    lines_ = exists ? quantized.elements : 0;
    scales_ = static_cast<const char*>(quantized.scales);
    if constexpr (Codes::kInBlocks) {
      scales_ += static_cast<int64_t>(work.weight) * quantized.scale_lines * quantized.scale_line +
                 k / quantized.columns_each * Codes::kScaleSize;
    } else {
      const int64_t first = static_cast<int64_t>(work.weight) * quantized.elements + line;
      scales_ += first * quantized.scale_line + (k >> quantized.scale_shift) * Codes::kScaleSize;
    }
  }

  // Loads those of the line `further` behind this slice's. A line that is not there has codes 0 and
  // scales 0, so that nothing comes of it.
  __device__ void Load(int further, Loaded& to) const {
#pragma unroll
    for (int i = 0; i < kArrays; ++i) {
      to[i] = 0;
      if (line_ + further >= lines_) continue;
      const char* from = At(further, i);
      if constexpr (Codes::kBlockScales == 4) {
        to[i] = __ldg(reinterpret_cast<const uint32_t*>(from));
      } else if constexpr (Codes::kBlockScales == 2) {
        to[i] = __ldg(reinterpret_cast<const uint16_t*>(from));
      } else {
        to[i] = __ldg(reinterpret_cast<const uint8_t*>(from));
      }
    }
  }

  // Begins to copy the words that they lie in to shared memory, `apart` bytes from each other. The
  // last word may end behind an array, but not behind its allocation, which has whole words.
  __device__ void Copy(uint32_t to, int apart) const {
#pragma unroll
    for (int i = 0; i < kArrays; ++i) {
      const auto word = reinterpret_cast<uintptr_t>(At(0, i)) & ~uintptr_t{3};
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to + i * apart), "l"(word),
                   "r"(line_ < lines_ ? 4 : 0)
                   : "memory");
    }
  }

  // A scale of such a word. Slices are 64 lines, whole words, apart, and the arrays begin with
  // whole words: so this is the same of all slices.
  __device__ uint32_t OfWord(uint32_t word) const {
    constexpr uint32_t kMask = Codes::kBlockScales == 4   ? ~0u
                               : Codes::kBlockScales == 2 ? 0xffff
                                                          : 0xff;
    return word >> (reinterpret_cast<uintptr_t>(scales_) % 4 * 8) & kMask;
  }

  __device__ void Next() {
    line_ += 64;
    if constexpr (!Codes::kInBlocks) scales_ += 64 * quantized_.scale_line;
  }

 private:
  static constexpr int kArrays = Codes::kHasBiases ? 2 : 1;

  __device__ const char* At(int further, int array) const {
    const char* from = scales_;
    if constexpr (Codes::kInBlocks) {
      const int line = static_cast<unsigned>(line_ + further) / quantized_.rows_each;
      from += static_cast<int64_t>(line) * quantized_.scale_line;
    } else {
      from += further * quantized_.scale_line;
    }
    if (array == 0) return from;
    return from + (static_cast<const char*>(quantized_.biases) -
                   static_cast<const char*>(quantized_.scales));
  }

  const QuantizedGemmSm90& quantized_;
  const char* scales_;  // of the slice's line; in blocks, of the matrix
  int line_, lines_;
};

template <Mode kMode, int kBits, DType kX_ = DType::kBF16>
struct TransposedLines {
  using Codes = LineCodes<kMode, kBits>;
  using Tile = LineTile<kBits>;
  static constexpr DType kX = kX_;
  static constexpr bool kScaled = false;
  static constexpr bool kHalf = kX == DType::kF16;
  static constexpr float kFactor = kHalf ? Codes::kHalfUnit : Codes::kUnit;
  static constexpr int kCodeBytes = Tile::kBytes;  // of a slice
  static constexpr int kCodesAligned = 1024;       // bytes, for swizzled boxes
  static constexpr int kCopiers = 1;               // threads, beside that of x
  // Few rows: whether scales come with a stage. Beside wider codes they would take one of three.
  using Staged = StagedScales<Codes>;
  static constexpr bool kStagesScales = Codes::kInBlocks || (Codes::kHasBiases && kBits <= 4);
  template <bool kFew>
  static constexpr int kScaleBytes = kFew && kStagesScales ? Staged::kBytes : 0;  // of a slice
  static constexpr bool kHasEpilogue = false;   // few rows: columns are no neighbours
  static constexpr bool kAsksForSmall = false;  // transposed_packed_sm90.cuh
  static constexpr bool kTakesAdapters = false;
  // Many rows: scales go through shared memory, so many slices ahead. Those of blocks, one for 128
  // lines and more, are in the L1 cache.
  static constexpr bool kCopiesScales = !Codes::kInBlocks;
  static constexpr int kAheadOfMany = 4;
  struct NoPlaces {};
  template <bool kFew>
  using Places =
      std::conditional_t<kFew || !kCopiesScales, NoPlaces,
                         uint32_t[kAheadOfMany][Codes::kHasBiases ? 2 : 1][32 * kMultiplyWarps]>;

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

  __device__ static uint32_t Word(const typename Codes::Loaded& loaded) {
    return kHalf ? Codes::template HalfWord<ScaleRange::kAny>(loaded)
                 : Codes::template Word<ScaleRange::kAny>(loaded);
  }

  // What the product takes of a pair of codes.
  __device__ static uint32_t Value(const uint32_t* codes, int p, uint32_t scale) {
    if constexpr (kHalf) {
      return Codes::template HalfPairOf<ScaleRange::kAny>(codes, p, scale);
    } else {
      return Codes::template PairOf<ScaleRange::kAny>(codes, p, scale);
    }
  }

  // Few rows: as TransposedPacked::Reader, of stages of kSlices. Scales that do not come with a
  // stage it loads some slices ahead. Those of many slices, and biases, would take registers.
  template <int kSlices, int kEights>
  class LineReader {
    static constexpr int kHalfWords = (kBits + 1) / 2;
    static constexpr int kAhead = !Codes::kHasBiases ? kSlices : kEights == 1 ? 2 : 1;
    static_assert(kSlices % kAhead == 0);

   public:
    __device__ LineReader(const QuantizedGemmSm90& quantized, const Work& work, int /*group*/)
        : ahead_(quantized, work, Row(), work.out_column + threadIdx.x % 4 * 32) {
      if constexpr (!kStagesScales) {
#pragma unroll
        for (int s = 0; s < kAhead; ++s) LoadScales(s);
      }
    }

    struct Words {
      uint32_t codes[2][kHalfWords], scales[2];

      __device__ uint32_t OfEachLoad() const {
        uint32_t each = kStagesScales ? scales[0] | scales[1] : 0;
#pragma unroll
        for (int i = 0; i < (Tile::kBySlices ? 1 : kHalfWords); ++i)
          each |= codes[0][i] | codes[1][i];
        return each;
      }
    };

    // Loads a warpgroup's half of slice `s` of a stage.
    template <ScaleRange>
    __device__ Words Load(const char* codes, const char* scales, int group, int s) {
      Words words;
      uint32_t now[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        now[r] = kStagesScales ? Staged::Word(scales, Row() + 8 * r, threadIdx.x % 4)
                               : Word(next_[s % kAhead][r]);
      }
      if constexpr (!kStagesScales) LoadScales(s % kAhead);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int piece = threadIdx.x % 4;
        if constexpr (Tile::kBySlices) {
          LoadWords<kBits / 2>(Tile::Half(codes, Row(), 8 * r, piece, group), words.codes[r]);
        } else {
          LoadHalf(codes, Row() + 8 * r, piece, group, words.codes[r]);
        }
        words.scales[r] = Codes::template OfHalf<kHalf>(now[r], group, words.codes[r]);
      }
      return words;
    }

    // 16 of the columns, from step `first` of four on.
    template <ScaleRange>
    __device__ void Read(const Words& words, int /*group*/, int first, uint32_t* a) const {
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // pair of codes, and line
        a[i] = Value(words.codes[i % 2], 2 * first + i / 2, words.scales[i % 2]);
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

    __device__ void LoadScales(int s) {
      ahead_.Load(0, next_[s][0]);
      ahead_.Load(8, next_[s][1]);
      ahead_.Next();
    }

    ScalesOfLines<Codes> ahead_;
    typename Codes::Loaded next_[kAhead][2];
  };

  // Codes of 2 bits: of each of four lines a thread has eight neighbours, which are half a word.
  // Neighbouring lines are halves of one word, so what is decoded has n along a pair, as products
  // take it, and nothing is turned.
  class PairReader {
   public:
    __device__ PairReader(const QuantizedGemmSm90&, const Work&, int /*group*/) {}

    struct Words {
      uint32_t codes[2], scales[2], biases[2];  // of two lines, and the two 8 further on

      __device__ uint32_t OfEachLoad() const { return codes[0] | codes[1] | scales[0] | scales[1]; }
    };

    template <ScaleRange>
    __device__ Words Load(const char* codes, const char* scales, int group, int /*s*/) const {
      const int lane = threadIdx.x % 32, eight = lane / 4;
      Words words;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int line = threadIdx.x % 128 / 32 * 16 + lane % 4 * 2 + 8 * r;
        uint32_t half[2], scale[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const char* from = codes + (line + i) * Tile::kLineBytes + group * 16 + eight * 2;
          half[i] = *reinterpret_cast<const uint16_t*>(from);
          scale[i] = Staged::Word(scales, line + i, 2 * group + eight / 4);
        }
        words.codes[r] = Permute(half[0], half[1], 0x5410);
        words.scales[r] = Permute(scale[0], scale[1], 0x5410);
        words.biases[r] = Permute(scale[0], scale[1], 0x7632);
      }
      return words;
    }

    // Two columns, in the order of the product's operand.
    template <ScaleRange>
    __device__ void Read(const Words& words, int /*group*/, int first, uint32_t* a) const {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint32_t *codes = words.codes + i / 2, p = 2 * first + i % 2;
        const uint32_t numbers = kHalf ? HalfNumbersOf<2>(codes, p) : NumbersOf<2>(codes, p);
        a[i] = MultiplyAdd2<kX>(numbers, words.scales[i / 2], words.biases[i / 2]);
      }
    }
  };

  static constexpr bool kPairsLines = kBits == 2;
  static_assert(!kPairsLines || kStagesScales);
  static constexpr bool kTurns = !kPairsLines;  // few rows
  template <int kSlices, int kEights>
  using Reader = std::conditional_t<kPairsLines, PairReader, LineReader<kSlices, kEights>>;

  // Few rows: the first of this lane's two columns, that beside column `column` of a warpgroup's,
  // and how far behind it the second one is.
  static constexpr int kApart = Codes::kApart, kSecondColumn = kApart == 1 ? 2 : 1;
  __device__ static int ColumnOf(int group, int column) {
    if (kPairsLines) return 64 * group + column % 16 * 8 + column / 16 * 2;
    const int p = 8 * group + column / 16 * 2, e = column % 16;
    return e / 2 * 32 + p / kApart * 2 * kApart + e % 2 * kApart + p % kApart;
  }

  // Many rows: decodes a slice's line of 64 k.
  class Writer {
   public:
    __device__ Writer(const QuantizedGemmSm90& quantized, const Work& work, int group,
                      Places<false>& places)
        : line_(threadIdx.x % 128 / 2),
          piece_(2 * group + threadIdx.x % 2),
          place_(SharedAddress(&places) + (threadIdx.x - 128) * 4),
          ahead_(quantized, work, line_, work.out_column + 32 * piece_) {
      if constexpr (kCopiesScales) {
        asm volatile("cp.async.wait_all;" ::: "memory");  // of the tile before
#pragma unroll
        for (int i = 0; i < kAheadOfMany; ++i) CopyScales(i);
      } else {
        LoadScales();
      }
    }

    struct Words {
      uint32_t pairs[16];
    };

    __device__ Words Load(const char* codes, const char* /*scales*/, int /*group*/) {
      const uint32_t now = Scales();
      Words words;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t some[Tile::kWords];
        if constexpr (Tile::kBySlices) {
          LoadWords<kBits / 2>(Tile::Half(codes, line_, 0, piece_, half), some);
        } else {
          Tile::Load(codes, line_, piece_, some);
        }
        const uint32_t scale = Codes::template OfHalf<kHalf>(now, half, some);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int p = Tile::kBySlices ? i : 8 * half + i;
          words.pairs[8 * half + i] = Value(some, p, scale);
        }
      }
      return words;
    }

    // To the place of 64 lines, which are swizzled.
    __device__ void Write(const Words& words, char* to) const {
      to += line_ * 128;
#pragma unroll
      for (int chunk = 0; chunk < 4; ++chunk) {
        uint32_t eight[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int code = 8 * chunk + 2 * i, of = code % (2 * kApart);
          const int p = code / (2 * kApart) * kApart + of % kApart;
          const uint32_t halves = of < kApart ? 0x5410 : 0x7632;
          eight[i] = kApart == 1 ? words.pairs[p]
                                 : Permute(words.pairs[p], words.pairs[(p + 1) % 16], halves);
        }
        const int at = (threadIdx.x % 2 * 4 + chunk) ^ line_ % 8;
        *reinterpret_cast<uint4*>(to + at * 16) =
            make_uint4(eight[0], eight[1], eight[2], eight[3]);
      }
    }

   private:
    static constexpr int kArrayBytes = 4 * 32 * kMultiplyWarps;
    static constexpr int kPlace = kArrayBytes * (Codes::kHasBiases ? 2 : 1);

    // Those of the next slice.
    __device__ uint32_t Scales() {
      if constexpr (!kCopiesScales) {
        const uint32_t now = Word(next_);
        LoadScales();
        return now;
      }
      asm volatile("cp.async.wait_group %0;" ::"n"(kAheadOfMany - 1) : "memory");
      typename Codes::Loaded loaded;
#pragma unroll
      for (int i = 0; i < (Codes::kHasBiases ? 2 : 1); ++i) {
        uint32_t word;
        const uint32_t from = place_ + slice_ * kPlace + i * kArrayBytes;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(from) : "memory");
        loaded[i] = ahead_.OfWord(word);
      }
      CopyScales(slice_);
      slice_ = (slice_ + 1) % kAheadOfMany;
      return Word(loaded);
    }

    __device__ void CopyScales(int place) {
      ahead_.Copy(place_ + place * kPlace, kArrayBytes);
      asm volatile("cp.async.commit_group;" ::: "memory");
      ahead_.Next();
    }

    __device__ void LoadScales() {
      ahead_.Load(0, next_);
      ahead_.Next();
    }

    const int line_, piece_;
    const uint32_t place_;
    int slice_ = 0;
    ScalesOfLines<Codes> ahead_;
    typename Codes::Loaded next_;
  };
};

}  // namespace jgg::device
