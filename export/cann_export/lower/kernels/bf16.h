// The storage type of bfloat16 in the kernels' interface.
#pragma once

#include <cstdint>

namespace cann {

// The same two bytes as c10::BFloat16.
struct bf16 {
  uint16_t bits;
};

}  // namespace cann
