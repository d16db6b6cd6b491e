// The list of ffi/quantized/formats.h, for test_format_list.py.
#include <string>

#include "quantized/rules.h"

using namespace jgg;

// A line for each format: mode, its number, bits, whether there are biases, global scales, and a
// linear layout, and group sizes.
extern "C" const char* formats() {
  static const std::string text = [] {
    std::string lines;
    for (const FormatFacts& f : kFormats) {
      lines += f.name;
      for (const int number :
           {static_cast<int>(f.mode), f.bits, f.scale == ScaleType::kScaleAndBias ? 1 : 0,
            f.takes_global_scale ? 1 : 0, f.is_linear ? 1 : 0}) {
        lines += " " + std::to_string(number);
      }
      for (int size = 1; size <= 1024; ++size) {
        if (f.takes_group_size(size)) lines += " " + std::to_string(size);
      }
      lines += "\n";
    }
    return lines;
  }();
  return text.c_str();
}
