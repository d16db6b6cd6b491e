// The CPU handlers called as XLA calls them, without XLA: random calls, forged tables, allocations
// and bodies that fail. A program, for the sanitizers: test_cpu_handlers.py.
//
// cpu_handlers SEED CASES: says what is wrong, and returns how much.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cpu/gemm.h"
#include "cpu/parallel.h"
#include "cpu_cases.h"
#include "cpu_quantize_cases.h"
#include "cpu_quantized_cases.h"

namespace {

void TryCase(int number) {
  const bool forged = number % 3 == 0;
  const int64_t kind = Below(3);
  Case c = kind == 0 ? MmCase(forged) : kind == 1 ? WgradCase(forged) : QmmCase(forged);
  const char* const names[] = {"mm", "wgrad", "qmm"};
  constexpr int kLevels[] = {0, 3, 4};  // of instructions, if the processor has them
  const int level = kLevels[Below(3)];
  jgg::cpu::AtMostLevel(level);
  const std::string what = names[kind] + std::string(" case ") + std::to_string(number) +
                           ", level " + std::to_string(level) + ": ";
  std::vector<char> before;
  for (const int threads : {0, 1, 4}) {  // the same bytes with any number
    Pool some(threads);
    pool = &some;
    const Result result = c.Run();
    if (!c.legal) {
      const bool says = result.message.find(" is rows [") != std::string::npos;
      if (result.ok || result.code != XLA_FFI_Error_Code_INVALID_ARGUMENT || !says) {
        Problem(what + "a forged table was taken: " + result.message);
      }
      continue;
    }
    if (!result.ok) Problem(what + result.message);
    if (result.ok && !c.IsRight()) Problem(what + "wrong values");
    const std::vector<char> bytes(c.out->data.get(),
                                  c.out->data.get() + c.out->count * c.out->Bytes());
    if (threads == 0) before = bytes;
    if (bytes != before) Problem(what + "threads make a difference");
  }
  // One allocation after the other fails, and all that follow it.
  for (int64_t fails = 0; number % 7 == 0 && fails < 1000; ++fails) {
    Pool some(3);
    pool = &some;
    allocations_failed = 0;
    allocations_left = fails;
    const Result result = c.Run();
    allocations_left = -1;
    if (result.ok && c.legal && !c.IsRight()) Problem(what + "wrong values without memory");
    if (!result.ok && result.code != XLA_FFI_Error_Code_RESOURCE_EXHAUSTED && c.legal) {
      Problem(what + "without memory: " + result.message);
    }
    if (allocations_failed == 0) break;
  }
  jgg::cpu::AtMostLevel(4);
}

// ---- a loop whose body fails -----------------------------------------------------------------

void TryThrowing(int threads, int64_t count, int64_t bad) {
  Pool some(threads);
  const std::string what =
      "ParallelFor of " + std::to_string(count) + ", " + std::to_string(threads) + " threads: ";
  std::atomic<int64_t> inside{0}, done{0};
  const auto caller = std::this_thread::get_id();
  std::string said;
  {
    // Memory of this scope: a body that is not waited for would use it later.
    const auto begun = std::make_unique<std::atomic<int64_t>>(0);
    try {
      jgg::cpu::ParallelFor(some, count, [&](int64_t i) {
        ++inside;
        ++*begun;
        if (std::this_thread::get_id() != caller)
          std::this_thread::sleep_for(std::chrono::microseconds(200));
        --inside;
        if (i == bad) throw std::runtime_error("body " + std::to_string(i));
        ++done;
      });
    } catch (const std::runtime_error& error) {
      said = error.what();
    }
    if (inside != 0) Problem(what + "a body still runs");
  }
  const std::string want = bad < 0 ? "" : "body " + std::to_string(bad);
  if (said != want) Problem(what + "'" + said + "' is not '" + want + "'");
  if (bad < 0 && done != count) Problem(what + "not all indices");
}

void TryFrame() {
  XLA_FFI_CallFrame frame{};
  frame.api = &api;
  const auto call = [&](auto handler) {
    return Take(jgg::CallInFrame("jgg_op", "jgg_op: out of memory", handler, &frame));
  };
  using Frame = XLA_FFI_CallFrame*;
  using Error = XLA_FFI_Error*;
  const Result good = call([](Frame) -> Error { return nullptr; });
  if (!good.ok) Problem("a handler that succeeds");
  const Result memory = call([](Frame) -> Error { throw std::bad_alloc(); });
  if (memory.code != XLA_FFI_Error_Code_RESOURCE_EXHAUSTED ||
      memory.message != "jgg_op: out of memory") {
    Problem("bad_alloc: " + memory.message);
  }
  const Result other = call([](Frame) -> Error { throw std::out_of_range("far"); });
  if (other.code != XLA_FFI_Error_Code_INTERNAL || other.message != "jgg_op: far") {
    Problem("an exception: " + other.message);
  }
  const Result number = call([](Frame) -> Error { throw 3; });
  if (number.code != XLA_FFI_Error_Code_INTERNAL) Problem("a number: " + number.message);
}

// ---- one GEMM --------------------------------------------------------------------------------

std::vector<jgg::cpu::Gemm> Gemms() {
  std::vector<jgg::cpu::Gemm> all = {jgg::cpu::GemmBaseline, jgg::cpu::BestGemm()};
#ifdef JGG_X86_LEVELS
  if (jgg::cpu::BestGemm() == jgg::cpu::GemmV4) all.push_back(jgg::cpu::GemmV3);
#endif
  return all;
}

// The sum of count products of `each` numbers of k: one is 2^30, all others
// are 1/4, of which a float32 sum of blocks loses whole blocks.
void TryLongSum(jgg::cpu::Gemm gemm, int64_t count, int64_t each, jgg::DType dtype) {
  const int bytes = jgg::Size(dtype);
  std::vector<char> a(count * each * bytes);
  for (int64_t i = 0; i < count * each; ++i) {
    const float value = i == 0 ? 0x1p15f : 0.5f;
    if (dtype == jgg::DType::kF32) {
      std::memcpy(a.data() + i * bytes, &value, bytes);
    } else {
      jgg::cpu::Round(&value, 1, dtype, reinterpret_cast<uint16_t*>(a.data()) + i);
    }
  }
  const auto at = [&](int64_t i) {
    // The second of two rows of C.
    const jgg::cpu::Matrix matrix{a.data() + i * each * bytes, each, 1, dtype};
    const jgg::cpu::Matrix column{a.data() + i * each * bytes, 1, each, dtype};
    return jgg::cpu::Product{1, 1, each, matrix, column};
  };
  using At = decltype(at);
  const auto call = [](const void* context, int64_t i) {
    return (*static_cast<const At*>(context))(i);
  };
  float out[2] = {-1, -1};
  gemm(2, 1, {count, call, &at}, {out, 1, 1, jgg::DType::kF32}, jgg::cpu::ThreadScratch());
  const double want = 0x1p30 + static_cast<double>(count * each - 1) / 4;
  if (out[0] != 0 || !(std::abs(out[1] - want) <= 0x1p-16 * want)) {
    Problem("a sum of " + std::to_string(count) + " times " + std::to_string(each) + ": " +
            std::to_string(out[1]) + " is not " + std::to_string(want));
  }
}

// How many bytes of scratch a product of 1 x 1 matrices writes, and one of none.
void TrySmall(jgg::cpu::Gemm gemm) {
  jgg::cpu::Scratch* scratch = jgg::cpu::ThreadScratch();
  char* const bytes = reinterpret_cast<char*>(scratch);
  float one = 1, out = -1;
  const jgg::cpu::Matrix matrix{&one, 1, 1, jgg::DType::kF32};
  const jgg::cpu::Product product{0, 1, 1, matrix, matrix};
  const auto call = [](const void* context, int64_t) {
    return *static_cast<const jgg::cpu::Product*>(context);
  };
  for (const int64_t count : {0, 1}) {
    std::memset(bytes, 0x5a, sizeof *scratch);
    gemm(1, 1, {count, call, &product}, {&out, 1, 1, jgg::DType::kF32}, scratch);
    const auto written =
        std::count_if(bytes, bytes + sizeof *scratch, [](char byte) { return byte != 0x5a; });
    if (out != static_cast<float>(count) || written > count * 4096) {
      Problem("a small product writes " + std::to_string(written) + " bytes of scratch");
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  is_harness = true;
  if (argc != 3) return 100;
  random_bits.seed(std::strtoull(argv[1], nullptr, 10));
  TryFrame();
  for (const int threads : {0, 1, 2, 4}) {
    for (const int64_t count : {1, 2, 50}) {
      for (const int64_t bad : {int64_t{-1}, int64_t{0}, count / 2, count - 1}) {
        TryThrowing(threads, count, bad);
      }
    }
  }
  for (const jgg::cpu::Gemm gemm : Gemms()) {
    TrySmall(gemm);
    for (const auto dtype : {jgg::DType::kF32, jgg::DType::kBF16, jgg::DType::kF16}) {
      TryLongSum(gemm, 1, 1 << 18, dtype);
      TryLongSum(gemm, 1 << 16, 3, dtype);
    }
  }
  const int cases = std::atoi(argv[2]);
  for (int number = 0; number < cases; ++number) {
    TryCase(number);
    const std::string of = "quantize case " + std::to_string(number) + ": ";
    TryEncode(of);
    TryQuantize(of);
  }
  std::printf("%d cases, %d problems\n", cases, problems);
  return problems == 0 ? 0 : 1;
}
