// Waiting for a flag in shared memory: poll, then yield, then sleep in the kernel until the owner wakes us.
//
// raise_flag (owner) and sleep_below (waiter) are a pair: the owner stores, then looks for sleepers; the waiter counts
// itself, then looks at the flag. Both in sequentially consistent order, so one of them sees the other.
#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <climits>

#include "segment.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace wbk {

inline int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return int64_t{t.tv_sec} * 1000000000 + t.tv_nsec;
}

inline void pause_briefly() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb");
#endif
}

inline uint32_t* futex_word(std::atomic<uint64_t>& value) {
  uint32_t* halves = reinterpret_cast<uint32_t*>(&value);
  return halves + (__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? 0 : 1);
}

inline void wake_sleepers(Flag& flag) {
  if (flag.sleepers.load(std::memory_order_seq_cst) != 0)
    syscall(SYS_futex, futex_word(flag.value), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

// Releases everything this rank wrote or finished reading; acquired by has_reached.
inline void raise_flag(Flag& flag, uint64_t value) {
  flag.value.store(value, std::memory_order_seq_cst);
  wake_sleepers(flag);
}

inline bool has_reached(const Flag& flag, uint64_t target) {
  return flag.value.load(std::memory_order_acquire) >= target;
}

// Sleep until the flag moves, at most for_ns. True if a signal arrived, which the caller's program wants to handle.
inline bool sleep_below(Flag& flag, uint64_t target, int64_t for_ns) {
  flag.sleepers.fetch_add(1, std::memory_order_seq_cst);
  const uint64_t seen = flag.value.load(std::memory_order_seq_cst);
  bool interrupted = false;
  if (seen < target) {
    const timespec limit = {for_ns / 1000000000, for_ns % 1000000000};
    const long result = syscall(SYS_futex, futex_word(flag.value), FUTEX_WAIT, static_cast<uint32_t>(seen), &limit,
                                nullptr, 0);
    interrupted = result != 0 && errno == EINTR;
  }
  flag.sleepers.fetch_sub(1, std::memory_order_seq_cst);
  return interrupted;
}

}  // namespace wbk
