// Which functions of the CUDA API do FFI handlers call?
//
// Wrap() makes of a handler one that notes, for its thread, that it is running. CUPTI calls back at
// each call of the runtime and of the driver: those on a thread where a handler is running are the
// handler's. Nothing here takes Python's lock, whoever holds it.

#include <array>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace {

using Handler = void* (*)(void* frame);  // XLA_FFI_Handler

struct Watched {
  std::string name;
  Handler handler;
};

constexpr int kMost = 64;
std::array<Watched, kMost> watched;
int count = 0;
thread_local int running = -1;

std::mutex mutex;
bool recording = false;
std::map<std::pair<int, std::string>, long> calls;  // handler and function; "" is the handler

void Count(const char* function) {
  std::lock_guard<std::mutex> lock(mutex);
  if (recording) ++calls[{running, function}];
}

template <int kIndex>
void* Run(void* frame) {
  const int outer = std::exchange(running, kIndex);
  Count("");
  void* error = watched[kIndex].handler(frame);
  running = outer;
  return error;
}

template <int... kIndices>
constexpr std::array<Handler, kMost> Wrappers(std::integer_sequence<int, kIndices...>) {
  return {Run<kIndices>...};
}

constexpr std::array<Handler, kMost> wrappers = Wrappers(std::make_integer_sequence<int, kMost>());

// What cupti_callbacks.h calls CUpti_CallbackData begins so.
struct CallbackData {
  int site;
  const char* function_name;
};
constexpr int kEnter = 0;                 // CUPTI_API_ENTER
constexpr int kDriver = 1, kRuntime = 2;  // CUPTI_CB_DOMAIN_DRIVER_API, _RUNTIME_API

using Callback = void (*)(void* user, int domain, unsigned id, const void* data);

void OnApiCall(void*, int domain, unsigned, const void* data) {
  if (running < 0 || (domain != kDriver && domain != kRuntime)) return;
  const auto* call = static_cast<const CallbackData*>(data);
  if (call->site == kEnter) Count(call->function_name);
}

}  // namespace

extern "C" {

// One that runs `handler`; null where there are too many.
void* Wrap(const char* name, void* handler) {
  if (count == kMost) return nullptr;
  watched[count] = {name, reinterpret_cast<Handler>(handler)};
  return reinterpret_cast<void*>(wrappers[count++]);
}

// With cuptiSubscribe and cuptiEnableDomain. Returns a CUptiResult, 0 for success.
int Subscribe(int (*subscribe)(void**, Callback, void*), int (*enable)(unsigned, void*, int)) {
  void* subscriber = nullptr;
  if (int error = subscribe(&subscriber, OnApiCall, nullptr)) return error;
  if (int error = enable(1, subscriber, kDriver)) return error;
  return enable(1, subscriber, kRuntime);
}

void Start() {
  std::lock_guard<std::mutex> lock(mutex);
  calls.clear();
  recording = true;
}

// Lines of handler, function and number of calls. Valid until the next one.
const char* Stop() {
  static std::string lines;
  std::lock_guard<std::mutex> lock(mutex);
  recording = false;
  lines.clear();
  for (const auto& [call, times] : calls) {
    lines += watched[call.first].name + "\t" + call.second + "\t" + std::to_string(times) + "\n";
  }
  return lines.c_str();
}

}  // extern "C"
