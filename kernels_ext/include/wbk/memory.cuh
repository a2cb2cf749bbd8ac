// Device memory helpers, named by their memory order. Each one is a single instruction.
#pragma once
#include <stdint.h>

namespace wbk {

struct alignas(16) Vector { // 16 bytes as two 64-bit words, the widest unit PTX promises to keep whole
  uint64_t lo, hi;
};

__device__ __forceinline__ Vector load_relaxed_sys(const Vector *p) {
  Vector v;
  asm volatile("ld.relaxed.sys.global.v2.b64 {%0,%1}, [%2];" : "=l"(v.lo), "=l"(v.hi) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void store_relaxed_sys(Vector *p, Vector v) {
  asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1,%2};" ::"l"(p), "l"(v.lo), "l"(v.hi) : "memory");
}

// Keeps an address in registers from here on, so that it is not computed again on the critical path.
template <class P> __device__ __forceinline__ P *pinned(P *p) {
  asm volatile("" : "+l"(p));
  return p;
}

// Nothing is made of a vector before this place: one that is unpacked early is waited for early, and takes more registers.
__device__ __forceinline__ void packed_until_here(Vector &v) { asm volatile("" : "+l"(v.lo), "+l"(v.hi)); }

// Read once, by one thread: keep it out of L1. Plain order: what it reads is complete before the grid-dependency wait returns.
__device__ __forceinline__ Vector load_once(const Vector *p) {
  Vector v;
  asm volatile("ld.global.L1::no_allocate.v2.b64 {%0,%1}, [%2];" : "=l"(v.lo), "=l"(v.hi) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ Vector load_plain(const Vector *p) {
  Vector v;
  asm volatile("ld.global.v2.b64 {%0,%1}, [%2];" : "=l"(v.lo), "=l"(v.hi) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void store_plain(Vector *p, Vector v) {
  asm volatile("st.global.v2.b64 [%0], {%1,%2};" ::"l"(p), "l"(v.lo), "l"(v.hi) : "memory");
}

__device__ __forceinline__ uint32_t load_relaxed_gpu(const uint32_t *p) {
  uint32_t v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ uint2 load_relaxed_gpu_pair(const uint32_t *p) { // two words that are neighbours
  uint2 v;
  asm volatile("ld.relaxed.gpu.global.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ void add_relaxed_gpu(uint32_t *p, uint32_t v) {
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ uint64_t clock_ns() {
  uint64_t t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}

// Programmatic dependent launch: the next grid may start; the previous grid is complete and its memory visible.
__device__ __forceinline__ void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
__device__ __forceinline__ void wait_previous_grid() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Clusters and their distributed shared memory.
__device__ __forceinline__ uint32_t block_of_cluster() {
  uint32_t r;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ uint32_t blocks_of_cluster() {
  uint32_t r;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ uint32_t shared_address(const void *p) { return uint32_t(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ uint32_t address_in_block(uint32_t shared, uint32_t block) {
  uint32_t r;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(shared), "r"(block));
  return r;
}
__device__ __forceinline__ void cluster_arrive_relaxed() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait_acquire() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void barrier_init(uint64_t *bar, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(bar)), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_expect_bytes(uint64_t *bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(bar)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint64_t *bar, uint32_t parity) {
  asm volatile("{\n .reg .pred done;\n again:\n"
               " mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
               " @!done bra again;\n}" ::"r"(shared_address(bar)),
               "r"(parity)
               : "memory");
}
// One word into another block's shared memory; its barrier counts the bytes on arrival.
__device__ __forceinline__ void store_async(uint32_t address, uint32_t value, uint32_t barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(address), "r"(value),
               "r"(barrier)
               : "memory");
}

} // namespace wbk
