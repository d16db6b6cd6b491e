// A program in XLA's place: it calls a handler with arrays, flags and a pool of threads, and may
// let allocations fail. For the one file of a program: it replaces operator new.
#pragma once

#include <atomic>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/frame.h"
#include "cpu/gemm.h"
#include "xla/ffi/api/c_api.h"

// ---- allocations that fail -------------------------------------------------------------------

namespace {

// How many allocations of the code under test succeed before all fail; negative: all succeed.
std::atomic<int64_t> allocations_left{-1};
std::atomic<int64_t> allocations_failed{0};
thread_local bool is_harness = false;  // which allocates on the same threads

bool Fails() {
  if (is_harness || allocations_left.load() < 0) return false;
  if (allocations_left.fetch_sub(1) > 0) return false;
  allocations_left.store(0);
  allocations_failed.fetch_add(1);
  return true;
}

}  // namespace

void* operator new(size_t size) {
  void* memory = Fails() ? nullptr : std::malloc(size == 0 ? 1 : size);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}
void* operator new[](size_t size) { return operator new(size); }
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, size_t) noexcept { std::free(memory); }

// ---- XLA -------------------------------------------------------------------------------------

struct XLA_FFI_Error {
  XLA_FFI_Error_Code code;
  std::string message;
};

namespace {

struct Harness {
  Harness() : before(is_harness) { is_harness = true; }
  ~Harness() { is_harness = before; }
  bool before;
};

// The pool's threads; it may say that it has none.
class Pool {
 public:
  explicit Pool(int threads) {
    for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { Run(); });
  }
  ~Pool() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
    }
    any_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }
  int64_t num_threads() const { return static_cast<int64_t>(threads_.size()); }
  void Schedule(std::function<void()> task) {
    Harness harness;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      tasks_.push_back(std::move(task));
    }
    any_.notify_one();
  }

 private:
  void Run() {
    for (;;) {
      std::unique_ptr<std::function<void()>> task;
      {
        Harness harness;
        std::unique_lock<std::mutex> lock(mutex_);
        any_.wait(lock, [this] { return stop_ || !tasks_.empty(); });
        if (tasks_.empty()) return;
        task.reset(new std::function<void()>(std::move(tasks_.front())));
        tasks_.pop_front();
      }
      (*task)();
    }
  }

  std::mutex mutex_;
  std::condition_variable any_;
  std::deque<std::function<void()>> tasks_;
  std::vector<std::thread> threads_;
  bool stop_ = false;
};

Pool* pool = nullptr;  // of the call

XLA_FFI_Error* CreateError(XLA_FFI_Error_Create_Args* args) {
  Harness harness;
  return new XLA_FFI_Error{args->errc, args->message};
}

void DestroyError(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }

XLA_FFI_Error* Schedule(XLA_FFI_ThreadPool_Schedule_Args* args) {
  Harness harness;
  pool->Schedule([task = args->task, data = args->data] { task(data); });
  return nullptr;
}

XLA_FFI_Error* NumThreads(XLA_FFI_ThreadPool_NumThreads_Args* args) {
  if (pool->num_threads() == 0) {
    Harness harness;
    return new XLA_FFI_Error{XLA_FFI_Error_Code_UNIMPLEMENTED, "no pool"};
  }
  *args->num_threads = pool->num_threads();
  return nullptr;
}

XLA_FFI_Api MakeApi() {
  XLA_FFI_Api api{};
  api.struct_size = XLA_FFI_Api_STRUCT_SIZE;
  api.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                     XLA_FFI_API_MINOR};
  api.XLA_FFI_Error_Create = CreateError;
  api.XLA_FFI_Error_Destroy = DestroyError;
  api.XLA_FFI_ThreadPool_Schedule = Schedule;
  api.XLA_FFI_ThreadPool_NumThreads = NumThreads;
  return api;
}

const XLA_FFI_Api api = MakeApi();

struct Result {
  bool ok;
  XLA_FFI_Error_Code code;
  std::string message;
};

Result Take(XLA_FFI_Error* error) {
  if (error == nullptr) return {true, XLA_FFI_Error_Code_OK, ""};
  Result result{false, error->code, error->message};
  delete error;
  return result;
}

// An array whose memory ends where its elements do.
struct Array {
  XLA_FFI_DataType dtype;
  std::vector<int64_t> shape;
  std::unique_ptr<char[]> data;
  int64_t count;

  Array(XLA_FFI_DataType type, std::vector<int64_t> of)
      : dtype(type), shape(std::move(of)), count(1) {
    for (int64_t size : shape) count *= size;
    data.reset(new char[count * Bytes()]);
  }
  int Bytes() const {
    switch (dtype) {
      case XLA_FFI_DataType_F32:
      case XLA_FFI_DataType_S32:
      case XLA_FFI_DataType_U32: return 4;
      case XLA_FFI_DataType_U8:
      case XLA_FFI_DataType_F8E4M3FN: return 1;
      default: return 2;
    }
  }
  double Get(int64_t at) const {
    if (dtype == XLA_FFI_DataType_F32) return reinterpret_cast<const float*>(data.get())[at];
    const uint16_t bits = reinterpret_cast<const uint16_t*>(data.get())[at];
    if (dtype == XLA_FFI_DataType_BF16) {
      const uint32_t wide = static_cast<uint32_t>(bits) << 16;
      float value;
      std::memcpy(&value, &wide, sizeof value);
      return value;
    }
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const double value =
        exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
    return bits & 0x8000 ? -value : value;
  }
  void Set(int64_t at, float value) {
    if (dtype == XLA_FFI_DataType_F32) {
      reinterpret_cast<float*>(data.get())[at] = value;
    } else {
      const auto type = dtype == XLA_FFI_DataType_BF16 ? jgg::DType::kBF16 : jgg::DType::kF16;
      jgg::cpu::Round(&value, 1, type, reinterpret_cast<uint16_t*>(data.get()) + at);
    }
  }
};

XLA_FFI_Buffer BufferOf(Array& array) {
  return {XLA_FFI_Buffer_STRUCT_SIZE,
          nullptr,
          array.dtype,
          array.data.get(),
          static_cast<int64_t>(array.shape.size()),
          array.shape.data()};
}

// An attribute: a string has a text, anything else a number.
struct Flag {
  Flag(bool value) : type(XLA_FFI_DataType_PRED), number(value) {}
  Flag(int32_t value) : type(XLA_FFI_DataType_S32), number(value) {}
  Flag(const char* value) : type(XLA_FFI_DataType_INVALID), number(0), text(value) {}

  XLA_FFI_DataType type;
  int32_t number;
  std::string text;
};

// One dictionary, sorted by name.
struct Flags {
  std::string name;
  std::vector<std::pair<std::string, Flag>> values;
};

// As XLA hands them over.
struct Dictionary {
  explicit Dictionary(const Flags& of) : flags(of) {
    for (auto& [key, value] : flags.values) {
      scalars.push_back({value.type, &value.number});
      texts.push_back({value.text.data(), value.text.size()});
      keys.push_back({key.data(), key.size()});
    }
    for (size_t i = 0; i < scalars.size(); ++i) {
      const bool is_text = scalars[i].dtype == XLA_FFI_DataType_INVALID;
      values.push_back(is_text ? static_cast<void*>(&texts[i]) : &scalars[i]);
      types.push_back(is_text ? XLA_FFI_AttrType_STRING : XLA_FFI_AttrType_SCALAR);
      key_pointers.push_back(&keys[i]);
    }
    name = {flags.name.data(), flags.name.size()};
    attrs = {
        XLA_FFI_Attrs_STRUCT_SIZE, nullptr,      static_cast<int64_t>(values.size()), types.data(),
        key_pointers.data(),       values.data()};
  }

  Flags flags;
  std::vector<XLA_FFI_Scalar> scalars;
  std::vector<XLA_FFI_ByteSpan> keys, texts;
  std::vector<void*> values;
  std::vector<XLA_FFI_ByteSpan*> key_pointers;
  std::vector<XLA_FFI_AttrType> types;
  XLA_FFI_ByteSpan name;
  XLA_FFI_Attrs attrs;
};

// Dictionaries are sorted by name.
Result Call(XLA_FFI_Handler* handler, const std::vector<Array*>& operands,
            const std::vector<Array*>& results, const std::vector<Flags>& flags) {
  std::vector<XLA_FFI_Buffer> buffers, result_buffers;
  for (Array* operand : operands) buffers.push_back(BufferOf(*operand));
  for (Array* result : results) result_buffers.push_back(BufferOf(*result));
  std::vector<void*> args, rets;
  for (XLA_FFI_Buffer& buffer : buffers) args.push_back(&buffer);
  for (XLA_FFI_Buffer& buffer : result_buffers) rets.push_back(&buffer);
  std::vector<XLA_FFI_ArgType> types(args.size(), XLA_FFI_ArgType_BUFFER);
  std::vector<XLA_FFI_RetType> ret_types(rets.size(), XLA_FFI_RetType_BUFFER);

  std::vector<std::unique_ptr<Dictionary>> dictionaries;
  std::vector<void*> attrs;
  std::vector<XLA_FFI_ByteSpan*> attr_names;
  for (const Flags& some : flags) {
    dictionaries.push_back(std::make_unique<Dictionary>(some));
    attrs.push_back(&dictionaries.back()->attrs);
    attr_names.push_back(&dictionaries.back()->name);
  }
  std::vector<XLA_FFI_AttrType> attr_types(attrs.size(), XLA_FFI_AttrType_DICTIONARY);

  XLA_FFI_CallFrame frame{};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = &api;
  frame.stage = XLA_FFI_ExecutionStage_EXECUTE;
  frame.args = {XLA_FFI_Args_STRUCT_SIZE, nullptr, static_cast<int64_t>(args.size()), types.data(),
                args.data()};
  frame.rets = {XLA_FFI_Rets_STRUCT_SIZE, nullptr, static_cast<int64_t>(rets.size()),
                ret_types.data(), rets.data()};
  frame.attrs = {XLA_FFI_Attrs_STRUCT_SIZE, nullptr,           static_cast<int64_t>(attrs.size()),
                 attr_types.data(),         attr_names.data(), attrs.data()};
  is_harness = false;
  XLA_FFI_Error* error = jgg::CallInFrame("jgg", "jgg: out of memory", handler, &frame);
  is_harness = true;
  return Take(error);
}

}  // namespace
