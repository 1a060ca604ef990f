// Per-thread scratch memory of the kernels: grows, is reused by later calls of the same thread, and is never shared, so
// that the kernels are re-entrant.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <new>

namespace {

class Scratch {
 public:
  Scratch() = default;
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() { std::free(data_); }

  // At least `count` values of T, aligned to 64 bytes, with undefined content.
  template <class T>
  T* get(int64_t count) {
    const int64_t bytes = (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    if (bytes > size_) {
      std::free(data_);
      size_ = 0;
      data_ = std::aligned_alloc(64, static_cast<size_t>(bytes));
      if (!data_) throw std::bad_alloc();
      size_ = bytes;
    }
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  int64_t size_ = 0;
};

}  // namespace
