// The global scales of a thread's groups, as it goes from one to the next.
#pragma once

#include "quantized/global_scales.h"

namespace jgg::device {

// `Make` gives what the thread wants to know of a scale, and is asked only where the scale changes.
template <typename Make>
class GlobalScales {
 public:
  using Value = decltype(Make{}(0.0f));

  // `inside`: the group exists.
  __device__ GlobalScales(const GlobalScaleSteps& steps, int32_t group, bool inside) {
    const int32_t after = group - steps.first;  // the groups of the first scale
    index_ = after < 0 ? 0 : 1 + after / steps.per_scale;
    left_ = after < 0 ? -after : steps.per_scale - after % steps.per_scale;
    if (inside) value_ = Make{}(steps.data[index_]);
  }

  __device__ Value Get() const { return value_; }

  // The value of the group after this one.
  __device__ Value Next(const GlobalScaleSteps& steps, bool inside) const {
    return left_ > 1 || !inside ? value_ : Make{}(steps.data[index_ + 1]);
  }

  __device__ void Advance(const GlobalScaleSteps& steps, bool inside) {
    const int32_t last = index_;
    index_ += steps.index_step;
    left_ -= steps.rest_step;
    if (left_ <= 0) {
      left_ += steps.per_scale;
      ++index_;
    }
    if (index_ != last && inside) value_ = Make{}(steps.data[index_]);
  }

 private:
  int32_t index_, left_;  // groups of the same scale from here on
  Value value_{};
};

// Where there are none.
template <typename Value>
struct NoGlobalScales {
  __device__ NoGlobalScales(const GlobalScaleSteps&, int32_t, bool) {}
  __device__ Value Get() const { return {}; }
  __device__ Value Next(const GlobalScaleSteps&, bool) const { return {}; }
  __device__ void Advance(const GlobalScaleSteps&, bool) {}
};

}  // namespace jgg::device
