// A team of threads that runs one function together: barriers, and loops whose items are claimed one chunk at a time.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace dragoman {

inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Team {
 public:
  explicit Team(int size) : size_(size) {
    for (int i = 1; i < size; ++i) threads_.emplace_back([this, i] { serve(i); });
  }
  ~Team() {
    stopping_ = true;
    start_.fetch_add(1, std::memory_order_release);
    start_.notify_all();
    for (auto& thread : threads_) thread.join();
  }
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  int size() const { return size_; }

  // Runs body(thread number) on every thread, the caller's (0) included, with room for `num_loops` shared loops.
  void run(int num_loops, std::function<void(int)> body) {
    if (static_cast<int>(loops_.size()) < num_loops) loops_ = std::vector<Loop>(num_loops);
    for (auto& loop : loops_) loop.next.store(0, std::memory_order_relaxed);
    body_ = std::move(body);
    start_.fetch_add(1, std::memory_order_release);
    start_.notify_all();
    body_(0);
    barrier();
  }

  void barrier() {
    if (size_ == 1) return;
    const uint32_t phase = phase_.load(std::memory_order_acquire);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
      arrived_.store(0, std::memory_order_relaxed);
      phase_.fetch_add(1, std::memory_order_release);
      phase_.notify_all();
      return;
    }
    await(phase_, phase);
  }

  // Calls item(i) for every i below `count` once over the team, then waits for all of them. `loop` numbers the
  // loops of a run; every thread passes the same sequence.
  template <class Item>
  void share(int loop, int count, int chunk, Item&& item) {
    std::atomic<int>& next = loops_[loop].next;
    for (;;) {
      const int first = next.fetch_add(chunk, std::memory_order_relaxed);
      if (first >= count) break;
      const int last = std::min(first + chunk, count);
      for (int i = first; i < last; ++i) item(i);
    }
    barrier();
  }

 private:
  struct alignas(64) Loop {
    std::atomic<int> next{0};
  };
  // About 20 us: longer than a phase's imbalance, shorter than a time slice lost to another process.
  static constexpr int kSpins = 600;

  static void await(std::atomic<uint32_t>& value, uint32_t old) {
    for (int i = 0; i < kSpins; ++i) {
      if (value.load(std::memory_order_acquire) != old) return;
      relax();
    }
    value.wait(old, std::memory_order_acquire);
  }

  void serve(int thread) {
    for (uint32_t seen = 0;;) {
      await(start_, seen);
      ++seen;
      if (stopping_) return;
      body_(thread);
      barrier();
    }
  }

  const int size_;
  std::vector<std::thread> threads_;
  std::vector<Loop> loops_;
  std::function<void(int)> body_;
  alignas(64) std::atomic<uint32_t> start_{0};
  alignas(64) std::atomic<uint32_t> phase_{0};
  alignas(64) std::atomic<int> arrived_{0};
  std::atomic<bool> stopping_{false};
};

}  // namespace dragoman
