// The pieces of the push kernels: parameters, the sentinel, pushes, bounded waits, the row sum of a cluster, the count of calls. The
// protocols are described in push.cuh and two_shot.cuh.
#pragma once
#include <cuda_runtime.h>

#include "../include/wbk/cuda_abi.h"
#include "../include/wbk/cuda_layout.h"
#include "../include/wbk/numbers.cuh"

namespace wbk {

// ---- parameters

// How many ranks the parameters have room for, and how many of them one launch plays. With two, every branch over ranks is gone.
template <uint32_t played, uint32_t ranks> struct Room {
  static constexpr uint32_t kPlayed = played, kRanks = ranks;
  static constexpr bool kTwo = ranks == 2;
};
using OneOfTwo = Room<1, 2>;
using BothOfTwo = Room<2, 2>; // virtual ranks
using OneOfMany = Room<1, kMaxRanks>;
using AllOfMany = Room<kMaxRanks, kMaxRanks>; // virtual ranks

template <class Ranks> struct PushArgs {
  WbkRank rank[Ranks::kPlayed];
  Vector *slots[Ranks::kRanks];
  const Vector *weight;
  uint64_t timeout_ns;
  Layout layout;
  uint32_t first_rank, tokens, rows, trigger, round_twice, group, op; // rows (two-shot: groups): most that a lane carries
  float inverse_hidden, eps, weight_bias;
};

struct SumOnly {
  static constexpr bool kNorm = false;
};
struct AddNorm {
  static constexpr bool kNorm = true;
};

// ---- device steps

constexpr uint32_t kHole = 0xffffffffu;   // low half of a word that has not come
constexpr uint32_t kLeave = 0xffffffffu;  // a part of a row sum that says "this warp gives up"; fp32 arithmetic never makes it
constexpr uint32_t kMaxParts = 128;       // warps of a cluster
constexpr uint32_t kFastPolls = 512;      // polls before the first look at the clock
constexpr uint32_t kLatePolls = 64;       // polls between looks at the clock, after that
constexpr uint32_t kWindow = 4;           // ranks whose vectors a thread holds at one time

static __device__ __forceinline__ Vector without_hole(Vector v) {
  uint32_t lo = min(uint32_t(v.lo), kHole - 1), hi = min(uint32_t(v.hi), kHole - 1);
  v.lo = (v.lo & ~uint64_t(kHole)) | lo;
  v.hi = (v.hi & ~uint64_t(kHole)) | hi;
  return v;
}
static __device__ __forceinline__ bool has_come(Vector v) { return uint32_t(v.lo) != kHole && uint32_t(v.hi) != kHole; }
static __device__ __forceinline__ Vector holes() { return Vector{~0ull, ~0ull}; }

// The slow side of a wait, kept out of the way: the vector once it has come, or holes when the wait is over its bound or another
// block has given up. The first to give up tells the host. It polls as fast as the fast side does, and looks at the clock now and then:
// a look at every poll cost 0.9 us of a call in which a rank comes late.
static __device__ __noinline__ Vector come_late(const Vector *slot, const WbkRank *me, uint64_t timeout_ns, uint32_t op, uint32_t group,
                                                uint32_t rank, uint32_t peer, uint32_t row, uint32_t calls) {
  const uint64_t started = clock_ns();
  for (;;) {
#pragma unroll 1
    for (uint32_t polls = 0; polls < kLatePolls; ++polls) {
      const Vector got = load_relaxed_sys(slot);
      if (has_come(got)) return got;
    }
    if (load_relaxed_gpu(me->control + 1) != 0) return holes();
    if (clock_ns() - started < timeout_ns) continue;
    if (atomicCAS(me->control + 1, 0u, 1u) != 0u) return holes();
    volatile WbkReport *r = me->report;
    r->op = op, r->group = group, r->rank = rank, r->peer = peer, r->row = row;
    r->epoch = calls + 1, r->expected = calls + 1, r->seen = calls;
    __threadfence_system();
    r->valid = 1;
    return holes();
  }
}

// Waits until a warp's vectors have all come, kPatience times as long as told. `actives` are the threads of the warp that own a
// vector. False: gave up.
template <uint32_t kPatience = 1, class Ranks>
static __device__ __forceinline__ bool receive(const PushArgs<Ranks> &a, const WbkRank &me, const Vector *slot, uint32_t actives, uint32_t rank,
                                               uint32_t peer, uint32_t row, uint32_t calls, Vector &got) {
  for (uint32_t polls = 0;; ++polls) {
    got = load_relaxed_sys(slot);
    if (__all_sync(actives, has_come(got))) return true;
    if (polls < kFastPolls) continue;
    if (!has_come(got)) got = come_late(slot, &me, kPatience * a.timeout_ns, a.op, a.group, rank, peer, row, calls);
    return __all_sync(actives, has_come(got));
  }
}

// One rank in one call: what its pushes and waits are told by. `at` counts vectors from row 0 of a plane.
template <class Ranks> struct Member {
  const PushArgs<Ranks> &a;
  const WbkRank &me;
  uint32_t rank, calls;

  __device__ __forceinline__ Vector *slot(uint32_t sender, uint32_t receiver, size_t at) const {
    return a.slots[receiver] + a.layout.plane(calls % kHalves, Layout::peer_place(sender, receiver), a.layout.ranks - 1) + at;
  }

  __device__ __forceinline__ void push(uint32_t to, size_t at, Vector v) const { store_relaxed_sys(slot(rank, to, at), without_hole(v)); }

  __device__ __forceinline__ void push_to_all(size_t at, Vector v) const {
#pragma unroll 4
    for (uint32_t r = 0; r < a.layout.ranks; ++r)
      if (r != rank) push(r, at, v);
  }

  // The sum over all ranks, in their order, of `own` and the peers' vectors at `at`, as they come; puts the sentinel back. False: gave
  // up. Vectors of kWindow ranks are in registers at one time, whatever the number of ranks.
  template <class T> __device__ __forceinline__ bool sum_in_order(size_t at, Vector own, uint32_t row, float (&acc)[Numbers<T>::kCount]) const {
    const uint32_t ranks = a.layout.ranks;
#pragma unroll 1
    for (uint32_t start = 0; start < ranks; start += kWindow) {
      Vector got[kWindow];
      for (uint32_t polls = 0;; ++polls) {
        uint32_t missing = kMaxRanks;
#pragma unroll
        for (uint32_t b = 0; b < kWindow; ++b) {
          const uint32_t r = start + b;
          got[b] = own;
          if (r != rank && r < ranks) got[b] = load_relaxed_sys(slot(r, rank, at));
        }
#pragma unroll
        for (uint32_t b = 0; b < kWindow; ++b) {
          const uint32_t r = start + b;
          if (r != rank && r < ranks && !has_come(got[b])) missing = r;
        }
        if (missing == kMaxRanks) break;
        if (polls >= kFastPolls &&
            !has_come(come_late(slot(missing, rank, at), &me, a.timeout_ns, a.op, a.group, rank, missing, row, calls)))
          return false;
      }
#pragma unroll
      for (uint32_t b = 0; b < kWindow; ++b) {
        const uint32_t r = start + b;
        if (r >= ranks) break;
        float part[Numbers<T>::kCount];
        unpack<T>(got[b], part);
#pragma unroll
        for (int k = 0; k < Numbers<T>::kCount; ++k) acc[k] = r == 0 ? part[k] : acc[k] + part[k];
        if (r != rank) store_relaxed_sys(slot(r, rank, at), holes());
      }
    }
    return true;
  }
};

// Step 4: each warp's part of the row's sum of squares goes to every block of the cluster; a barrier in the receiving block counts
// the bytes. Two sets, used in turn: a block sends for row i + 2 only after it has everybody's part of row i + 1, which was sent after
// row i's parts had been read. `leave`: this thread gives up.
struct RowSum {
  uint64_t arrived[2];
  float parts[2][kMaxParts];

  // open, then meet before the first send: every thread of the cluster, whatever it finds in between. The blocks of a cluster start
  // at their own times, and what lies between hides that. The arrival releases nothing: of what a block has done before it others
  // need only the set-up of its barriers, which the fence publishes. Bytes that come before the first expect_bytes are no harm: a phase
  // does not end before that has arrived.
  __device__ __forceinline__ void open(uint32_t num_parts) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; ++i) {
        barrier_init(&arrived[i], 1);
        barrier_expect_bytes(&arrived[i], num_parts * 4);
      }
      fence_barrier_init();
    }
    cluster_arrive_relaxed();
  }
  __device__ __forceinline__ void meet() { cluster_wait_acquire(); }

  __device__ __forceinline__ void send(uint32_t row, float squares, bool leave, uint32_t block, uint32_t blocks) {
#pragma unroll
    for (int d = 16; d; d >>= 1) squares += __shfl_xor_sync(~0u, squares, d);
    const uint32_t word = __any_sync(~0u, leave) ? kLeave : __float_as_uint(squares), to = threadIdx.x % 32;
    if (to < blocks)
      store_async(address_in_block(shared_address(&parts[row & 1][block * (blockDim.x / 32) + threadIdx.x / 32]), to), word,
                  address_in_block(shared_address(&arrived[row & 1]), to));
  }

  // False: some thread of the cluster gives up, and every block learns it.
  __device__ __forceinline__ bool take(uint32_t row, uint32_t num_parts, float &total) {
    barrier_wait(&arrived[row & 1], (row >> 1) & 1);
    if (threadIdx.x == 0) barrier_expect_bytes(&arrived[row & 1], num_parts * 4);
    bool leave = false;
    total = 0.f;
#pragma unroll 1 // a turn or two; unrolled it takes registers from the vectors in flight
    for (uint32_t p = threadIdx.x % 32; p < num_parts; p += 32) {
      const float part = parts[row & 1][p];
      leave |= __float_as_uint(part) == kLeave;
      total += part;
    }
#pragma unroll
    for (int d = 16; d; d >>= 1) total += __shfl_xor_sync(~0u, total, d); // a butterfly gives every thread the same bits
    return !__any_sync(~0u, leave);
  }
};

// A block's share of one call in the count, by one thread, after every thread of the block has read the count.
static __device__ __forceinline__ void count_call(uint32_t *control) {
  const uint32_t grid = gridDim.x * gridDim.y; // of one rank
  if (threadIdx.x == 0) add_relaxed_gpu(control, blockIdx.x + blockIdx.y == 0 ? kCall - (grid - 1) : 1);
}

} // namespace wbk
