// Page-aligned memory that starts as zeros and takes physical pages only when touched.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <new>
#include <utility>

namespace dragoman {

template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(size_t count) : bytes_((count ? count : 1) * sizeof(T)) {
    void* p = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) throw std::bad_alloc();
    data_ = static_cast<T*>(p);
  }
  Buffer(Buffer&& other) noexcept : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~Buffer() {
    if (data_) munmap(data_, bytes_);
  }

  T* get() const { return data_; }
  T& operator[](size_t i) const { return data_[i]; }
  explicit operator bool() const { return data_ != nullptr; }

  // Weights are read front to back each step; large pages spare the TLB.
  void prefer_large_pages() {
#ifdef MADV_HUGEPAGE
    madvise(data_, bytes_, MADV_HUGEPAGE);
#endif
  }

 private:
  T* data_ = nullptr;
  size_t bytes_ = 0;
};

}  // namespace dragoman
