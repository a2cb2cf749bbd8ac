// Stamps of the device's clock on a stream, for late_rank.py: when a delay ends, and when all before a stamp has ended.
#include <cuda_runtime.h>
#include <stdint.h>

static __device__ uint64_t clock_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// By cycles, not by the clock that stamps: a wait until that clock's tick would make every stamp fall onto one.
static __global__ void delay_kernel(uint32_t cycles, uint64_t *ended_ns) {
  const int64_t started = clock64();
  while (clock64() - started < cycles) {}
  *ended_ns = clock_ns();
}

static __global__ void stamp_kernel(uint64_t *at_ns) { *at_ns = clock_ns(); }

extern "C" int late_delay(uint32_t cycles, uint64_t *ended_ns, void *stream) {
  delay_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(cycles, ended_ns);
  return cudaGetLastError();
}

extern "C" int late_stamp(uint64_t *at_ns, void *stream) {
  stamp_kernel<<<1, 1, 0, static_cast<cudaStream_t>(stream)>>>(at_ns);
  return cudaGetLastError();
}
