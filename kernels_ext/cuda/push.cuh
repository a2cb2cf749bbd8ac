// Push all-reduce, alone or fused with residual-add and RMSNorm, in which the data is its own flag.
//
//   sum[t]  = T(x_0[t] + x_1[t] + ... + x_{n-1}[t] + residual[t])        fp32, in group-rank order, rounded once
//   norm[t] = T(sum[t] * rsqrt(mean(sum[t]^2) + eps) * (weight_bias + weight))
//
// Grid: C blocks (a cluster, in x) for each of G lanes (y) of every virtual rank (z). Row t belongs to lane t mod G. A thread owns the
//   same 16-byte vector of every row of its lane. C = 7 or 8 and few threads for few tokens, C = 1 and a whole row for many.
// Steps, for every row of a lane:
//   1 push     own vector to every peer's slot; it also stays in registers
//   2 wait     until every peer's vector has come into the own slot; put the sentinel back
//   3 reduce   in rank order, add the residual, round
//   4 square   sum of squares over the row: each warp sends its part to all blocks of the cluster, marked with the row's number
//   5 norm     scale, multiply by the weight, store
// The next row is pushed between 3 and 4, so the link works while this row is normalised.
//
// Bytes a rank, S = tokens*hidden*size: link (n-1)S out and in; memory reads x, residual, slots (n-1)S, writes slots' sentinels
//   (n-1)S, sum, norm. Slots are a small ring (cuda_layout.h) that stays in L2.
// Who writes a slot: the peer that owns it writes data, once an epoch; its reader writes the sentinel back, before it pushes again.
// The sentinel: 64-bit words are stored and loaded whole, and a word has come when its low half is not 0xffffffff. In every dtype
//   here a low half of 0xffffffff holds a NaN, and 0xfffffffe holds a NaN in the same places: the sender turns the first into the
//   second. A sum in fp32 gives the same (canonical) NaN for both, so no result can differ, and every other pattern (-0.0,
//   subnormals, Inf, all other NaNs) travels as it is.
// What ends an epoch: a rank pushes row number s of a lane only after it has consumed row s - 1 of every peer. So a peer that pushes
//   row s + kDepth into the slot of row s has seen row s + kDepth - 1 of the slot's reader, which consumed row s long before. That the
//   sentinel of row s is in memory before that data comes is the work of a fence on both sides, every kDepth/2 rows between a wait
//   and the next push: whatever s is, the reader's fence follows its sentinel within kDepth/2 rows, and the peer's next fence lies
//   between the wait for a row pushed after that and the push of row s + kDepth. (Without fences, and with two rows in advance in
//   four slots, H200s did lose rows.) Between calls the end of the grid does the same. Row numbers go on from call to call and live
//   in device memory (lane records), so graphs replay, and calls of any size and choice mix on one workspace.
// All lanes of a call are resident (launcher), so no lane waits for one that cannot start.
// Contract with the stream (programmatic dependent launch): before the wait for the previous grid the kernel touches shared memory
//   only. Whatever the previous kernel writes may be read here, x, residual and weight included; the next kernel may start early,
//   and must wait for this grid before it reads `sum` or `norm` or writes x, residual or weight.
// Bounded: a wait for a peer longer than timeout_ns is reported once in host-mapped memory; state becomes non-zero, the lane leaves
//   after this row, and later calls leave at once. The parts of step 4 carry the wish to leave, so that a whole cluster leaves together.
// Arch: sm_90 and later (clusters, distributed shared memory). dtypes bf16, fp16, fp32.
#pragma once
#include <cuda_runtime.h>

#include <mutex>
#include <vector>

#include "../include/wbk/cuda_abi.h"
#include "../include/wbk/cuda_layout.h"
#include "../include/wbk/numbers.cuh"

namespace wbk {

// ---- parameters

struct OneRank {
  static constexpr uint32_t kEntries = 1;
};
struct VirtualRanks {
  static constexpr uint32_t kEntries = kMaxRanks;
};

template <class Ranks> struct PushArgs {
  WbkRank rank[Ranks::kEntries];
  Vector *slots[kMaxRanks];
  const Vector *weight;
  uint64_t timeout_ns;
  Layout layout;
  uint32_t first_rank, tokens, rows, trigger, lead, nap_ns, round_twice, group, op; // rows: of lane 0
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
constexpr uint32_t kLeave = 1u << 31;     // in the mark of a part: this warp gives up
constexpr uint32_t kMaxParts = 128;       // warps of a cluster
constexpr uint32_t kSlowPolls = 256;      // polls between two looks at the clock

static __device__ __forceinline__ Vector without_hole(Vector v) {
  uint32_t lo = min(uint32_t(v.lo), kHole - 1), hi = min(uint32_t(v.hi), kHole - 1);
  v.lo = (v.lo & ~uint64_t(kHole)) | lo;
  v.hi = (v.hi & ~uint64_t(kHole)) | hi;
  return v;
}
static __device__ __forceinline__ bool has_come(Vector v) { return uint32_t(v.lo) != kHole && uint32_t(v.hi) != kHole; }
static __device__ __forceinline__ Vector holes() { return Vector{~0ull, ~0ull}; }

struct Patience { // the slow side of a wait
  uint64_t started;
  uint32_t polls;

  // True when the wait is over its bound, or another block has given up.
  __device__ __forceinline__ bool over(uint64_t timeout_ns, const uint32_t *state) {
    if (++polls % kSlowPolls) return false;
    if (polls == kSlowPolls) started = clock_ns();
    return clock_ns() - started > timeout_ns || load_relaxed_gpu(state) != 0;
  }
};

static __device__ __noinline__ void give_up(const WbkRank &me, uint32_t op, uint32_t group, uint32_t rank, uint32_t peer, uint32_t lane,
                                            uint32_t sequence) {
  if (atomicCAS(me.state, 0u, 1u) != 0u) return; // the first one tells
  volatile WbkReport *r = me.report;
  r->op = op, r->group = group, r->rank = rank, r->peer = peer, r->lane = lane;
  r->epoch = sequence + 1, r->expected = sequence + 1, r->seen = sequence;
  __threadfence_system();
  r->valid = 1;
}

// ---- kernel

template <class T, int kRanks, class Epilogue, class Ranks>
__global__ void __launch_bounds__(1024, 1) push_kernel(const __grid_constant__ PushArgs<Ranks> a) {
  constexpr int kCount = Numbers<T>::kCount;
  constexpr int kBatch = kRanks ? kRanks : 4; // slots of how many ranks are polled together
  __shared__ uint64_t parts[2][kMaxParts]; // {part of the sum of squares, row number in this call + 1}: double, by the row's parity

  const uint32_t entry = Ranks::kEntries == 1 ? 0 : blockIdx.z;
  const WbkRank &me = a.rank[entry];
  const uint32_t rank = a.first_rank + entry, ranks = kRanks ? kRanks : a.layout.ranks;
  const uint32_t block = blockIdx.x, blocks = gridDim.x, lane = blockIdx.y, step = gridDim.y;
  const uint32_t vectors = a.layout.vectors, vector = block * blockDim.x + threadIdx.x;
  const uint32_t here = lane * vectors + vector, peers = (kRanks ? kRanks : ranks) - 1;
  const bool active = vector < vectors;
  const uint32_t actives = __ballot_sync(~0u, active); // of this warp; its first thread is among them if any is
  const uint32_t rows = lane + (a.rows - 1) * step < a.tokens ? a.rows : a.rows - 1;
  const uint32_t warps = blockDim.x / 32, num_parts = blocks * warps;
  const uint32_t thread_of_warp = threadIdx.x % 32;

  if (a.trigger == WBK_TRIGGER_AT_START) launch_dependents();
  if constexpr (Epilogue::kNorm) {
    for (uint32_t p = threadIdx.x; p < num_parts; p += blockDim.x) parts[0][p] = parts[1][p] = 0;
    cluster_arrive_release(); // awaited before the first exchange
  }
  size_t at = size_t(lane) * vectors + vector; // of the row at hand, in vectors
  const Vector *x = pinned(static_cast<const Vector *>(me.x) + at), *residual = static_cast<const Vector *>(me.residual) + at;
  const uint32_t *count = pinned(me.lanes + lane * kLaneWords + block), *state = pinned(me.state);
  const size_t stride = size_t(step) * vectors; // from one row of the lane to the next
  wait_previous_grid();

  const uint32_t first = load_relaxed_gpu(count);
  const bool dead = load_relaxed_gpu(state) != 0;
  Vector own{};
  if (active) own = load_once(x);

  // 1 push
  auto push = [&](uint32_t sequence, Vector v) {
    v = without_hole(v);
#pragma unroll
    for (uint32_t r = 0; r < (kRanks ? kRanks : kMaxRanks); ++r) {
      if (kRanks == 2) { // one peer: no loop, no test
        if (r == 0) {
          const uint32_t peer = 1 - rank;
          store_relaxed_sys(a.slots[peer] + a.layout.plane_of(sequence, 0, peers) + here, v);
        }
      } else if (r < ranks && r != rank) {
        store_relaxed_sys(a.slots[r] + a.layout.plane_of(sequence, Layout::peer_place(rank, r), peers) + here, v);
      }
    }
  };
  if (active && !dead) push(first, own);
  if (a.trigger == WBK_TRIGGER_AFTER_PUSH) launch_dependents();

  Vector next_residual{}, weight{};
  if constexpr (Epilogue::kNorm) {
    if (active) {
      next_residual = load_once(residual);
      weight = load_once(a.weight + vector);
    }
  }

  bool failed = dead;
  for (uint32_t i = 0; i < rows; ++i, at += stride) {
    const uint32_t sequence = first + i;
    const bool more = i + 1 < rows, fence_now = i % (kDepth / 2) == kDepth / 2 - 1;
    Vector next{};
    if (active && more) next = load_once(x += stride);

    // 2 wait and 3 reduce
    float acc[kCount];
    if (active && !failed) {
      Vector *slots = a.slots[rank];
      Patience patience{0, 0};
      if constexpr (kRanks == 2) {
        Vector *slot = slots + a.layout.plane_of(sequence, 0, peers) + here;
        Vector got;
        if (a.lead) {
          while (!__all_sync(actives, has_come(got = load_relaxed_sys(slot)))) {
            if (thread_of_warp == 0)
              do
                failed = patience.over(a.timeout_ns, me.state);
              while (!failed && !has_come(load_relaxed_sys(slot)));
            failed = __any_sync(actives, failed);
            if (failed) break;
          }
          if (failed && thread_of_warp == 0) give_up(me, a.op, a.group, rank, 1 - rank, lane, sequence);
        } else {
          while (!has_come(got = load_relaxed_sys(slot))) {
            if (patience.over(a.timeout_ns, me.state)) {
              give_up(me, a.op, a.group, rank, 1 - rank, lane, sequence);
              failed = true;
              break;
            }
            if (a.nap_ns) __nanosleep(a.nap_ns);
          }
        }
        float mine[kCount];
        unpack<T>(got, acc);
        unpack<T>(own, mine);
#pragma unroll
        for (int k = 0; k < kCount; ++k) acc[k] += mine[k]; // of two, either order gives the same bits
        store_relaxed_sys(slot, holes());
      } else {
#pragma unroll
        for (uint32_t start = 0; start < (kRanks ? kRanks : kMaxRanks); start += kBatch) {
          if (start >= ranks) break;
          Vector got[kBatch];
          int missing;
          do {
            missing = -1;
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
              const uint32_t r = start + b;
              got[b] = own;
              if (r != rank && r < ranks)
                got[b] = load_relaxed_sys(slots + a.layout.plane_of(sequence, Layout::peer_place(r, rank), peers) + here);
            }
#pragma unroll
            for (int b = 0; b < kBatch; ++b) {
              const uint32_t r = start + b;
              if (r != rank && r < ranks && !has_come(got[b])) missing = r;
            }
            if (missing >= 0 && patience.over(a.timeout_ns, me.state)) {
              give_up(me, a.op, a.group, rank, missing, lane, sequence);
              failed = true;
              break;
            }
          } while (missing >= 0);
#pragma unroll
          for (int b = 0; b < kBatch; ++b) {
            const uint32_t r = start + b;
            if (r >= ranks) break;
            float part[kCount];
            unpack<T>(got[b], part);
#pragma unroll
            for (int k = 0; k < kCount; ++k) acc[k] = r == 0 ? part[k] : acc[k] + part[k];
            if (r != rank) store_relaxed_sys(slots + a.layout.plane_of(sequence, Layout::peer_place(r, rank), peers) + here, holes());
          }
        }
      }
    }
    if (a.trigger == WBK_TRIGGER_AFTER_POLL && i + 1 == rows) launch_dependents();

    if constexpr (!Epilogue::kNorm) {
      if (__any_sync(~0u, failed)) return;
      if (active) {
        store_plain(static_cast<Vector *>(me.sum) + at, pack<T>(acc));
        if (more) {
          if (fence_now) fence_acq_rel_sys();
          push(sequence + 1, next);
          own = next;
        }
      }
    } else {
      // 4 square
      Vector sum{};
      float squares = 0.f;
      if (active) {
        if (a.round_twice) {
          Vector once = pack<T>(acc);
          unpack<T>(once, acc);
        }
        float add[kCount];
        unpack<T>(next_residual, add);
#pragma unroll
        for (int k = 0; k < kCount; ++k) acc[k] += add[k];
        sum = pack<T>(acc);
        unpack<T>(sum, acc);
#pragma unroll
        for (int k = 0; k < kCount; ++k) squares += acc[k] * acc[k];
      }
#pragma unroll
      for (int d = 16; d; d >>= 1) squares += __shfl_xor_sync(~0u, squares, d);
      const uint32_t mark = (i + 1) | (__any_sync(~0u, failed) ? kLeave : 0);
      if (i == 0) cluster_wait_acquire();
      if (thread_of_warp < blocks)
        store_relaxed_cluster(address_in_block(shared_address(&parts[i & 1][block * warps + threadIdx.x / 32]), thread_of_warp),
                              __float_as_uint(squares), mark);
      if (active && more && !failed) {
        if (fence_now) fence_acq_rel_sys();
        push(sequence + 1, next);
        own = next;
      }
      if (active && more) next_residual = load_once(residual += stride);
      if (active && !failed) store_plain(static_cast<Vector *>(me.sum) + at, sum);

      float total = 0.f;
      uint32_t marks = 0;
      for (uint32_t p = thread_of_warp; p < num_parts; p += 32) {
        uint2 part;
        do
          part = load_relaxed_cluster(&parts[i & 1][p]);
        while ((part.y & ~kLeave) != i + 1);
        total += __uint_as_float(part.x);
        marks |= part.y;
      }
      if (__any_sync(~0u, marks & kLeave)) return; // alike in every warp of the cluster
#pragma unroll
      for (int d = 16; d; d >>= 1) total += __shfl_xor_sync(~0u, total, d); // a butterfly gives every thread the same bits
      // 5 norm
      const float scale = rsqrtf(total * a.inverse_hidden + a.eps);
      if (active) {
        float by[kCount];
        unpack<T>(weight, by);
#pragma unroll
        for (int k = 0; k < kCount; ++k) acc[k] = acc[k] * scale * (a.weight_bias + by[k]);
        store_plain(static_cast<Vector *>(me.norm) + at, pack<T>(acc));
      }
    }
  }
  if constexpr (!Epilogue::kNorm) __syncthreads(); // every warp has read the count; with a norm the exchange says so
  // The lane's row count, in the words of all blocks that may share it; a word of a running block is written by that block alone.
  if (block == 0 ? threadIdx.x == 0 || (threadIdx.x >= blocks && threadIdx.x < kLaneWords) : threadIdx.x == 0)
    store_relaxed_gpu(me.lanes + lane * kLaneWords + (block == 0 ? threadIdx.x : block), first + rows);
}

// ---- launcher: one instance of this template a dtype (push_bf16.cu, ...)

constexpr int kBadArguments = -1, kTooManyLanes = -2, kBadChoice = -3;

inline uint32_t round_up(uint32_t n, uint32_t unit) { return (n + unit - 1) / unit * unit; }

// Rows are dealt evenly: with at most `most` lanes some lane carries ceil(tokens/most) rows; no more lanes than that needs.
inline uint32_t lanes_for(uint32_t tokens, uint32_t most) {
  if (tokens == 0 || most == 0) return 0;
  const uint32_t rows = (tokens + most - 1) / most;
  return (tokens + rows - 1) / rows;
}

template <class T, class Ranks> struct Push {
  const WbkCall &c;
  cudaStream_t stream;
  uint32_t *resident; // where to put the answer; null: launch

  int run() const {
    const bool norm = c.op == WBK_OP_ALL_REDUCE_ADD_RMS_NORM;
    return norm ? with_ranks<AddNorm>() : with_ranks<SumOnly>();
  }

  template <class Epilogue> int with_ranks() const {
    if (c.ranks == 2) return go<2, Epilogue>();
    if (c.ranks == 4) return go<4, Epilogue>();
    if (c.ranks == 8) return go<8, Epilogue>();
    return go<0, Epilogue>();
  }

  template <int kRanks, class Epilogue> int go() const {
    auto kernel = push_kernel<T, kRanks, Epilogue, Ranks>;
    const uint32_t vectors = c.hidden / Numbers<T>::kCount, threads = round_up((vectors + c.cluster - 1) / c.cluster, 32);
    const uint32_t copies = c.virtual_ranks ? c.virtual_ranks : 1;
    if (threads > 1024 || threads / 32 * c.cluster > kMaxParts || c.lanes * kDepth * (c.ranks - 1) > UINT32_MAX / vectors)
      return kBadChoice;

    cudaLaunchAttribute attributes[3];
    cudaLaunchConfig_t config{};
    config.blockDim = dim3(threads);
    config.stream = stream;
    config.attrs = attributes;
    attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
    attributes[config.numAttrs].val.clusterDim = {c.cluster, 1, 1};
    config.numAttrs += 1;
    config.gridDim = dim3(c.cluster);

    int most = 0;
    if (int code = resident_clusters(reinterpret_cast<const void *>(kernel), config, &most)) return code;
    most /= copies;
    if (resident) return *resident = most, 0;

    const uint32_t allowed = c.max_lanes && c.max_lanes < c.lanes ? c.max_lanes : c.lanes;
    const uint32_t lanes = lanes_for(c.tokens, allowed);
    if (lanes == 0) return 0;
    if (lanes > uint32_t(most)) return kTooManyLanes;
    config.gridDim = dim3(c.cluster, lanes, copies);
    if (c.pdl && !c.virtual_ranks) {
      attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[config.numAttrs].val.programmaticStreamSerializationAllowed = 1;
      config.numAttrs += 1;
    }
    if (c.virtual_ranks) { // one rank's blocks wait for another's: all must be resident, or none may start
      attributes[config.numAttrs].id = cudaLaunchAttributeCooperative;
      attributes[config.numAttrs].val.cooperative = 1;
      config.numAttrs += 1;
    }

    PushArgs<Ranks> args{};
    for (uint32_t i = 0; i < copies; ++i) args.rank[i] = c.rank[i];
    for (uint32_t r = 0; r < c.ranks; ++r) args.slots[r] = static_cast<Vector *>(c.slots[r]);
    args.weight = static_cast<const Vector *>(c.weight);
    args.timeout_ns = c.timeout_ns;
    args.layout = {c.ranks, c.lanes, vectors};
    args.first_rank = c.first_rank, args.tokens = c.tokens, args.trigger = c.trigger;
    args.rows = (c.tokens + lanes - 1) / lanes, args.lead = c.lead, args.nap_ns = c.nap_ns;
    args.round_twice = c.round_twice, args.group = c.group, args.op = c.op;
    args.inverse_hidden = 1.f / float(c.hidden), args.eps = c.eps, args.weight_bias = c.weight_bias;
    return cudaLaunchKernelEx(&config, kernel, args);
  }

  static int resident_clusters(const void *kernel, const cudaLaunchConfig_t &config, int *most) {
    struct Entry {
      const void *kernel;
      uint32_t threads, cluster;
      int device, clusters;
    };
    static std::mutex guard;
    static std::vector<Entry> known;
    int device = 0;
    if (int code = cudaGetDevice(&device)) return code;
    const uint32_t cluster = config.gridDim.x;
    std::lock_guard<std::mutex> hold(guard);
    for (const Entry &e : known)
      if (e.kernel == kernel && e.threads == config.blockDim.x && e.cluster == cluster && e.device == device) return *most = e.clusters, 0;
    if (cluster > 8)
      if (int code = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1)) return code;
    int clusters = 0;
    if (int code = cudaOccupancyMaxActiveClusters(&clusters, kernel, &config)) return code;
    known.push_back({kernel, config.blockDim.x, cluster, device, clusters});
    return *most = clusters, 0;
  }
};

template <class T> int push_of(const WbkCall &c, cudaStream_t stream, uint32_t *resident) {
  return c.virtual_ranks ? Push<T, VirtualRanks>{c, stream, resident}.run() : Push<T, OneRank>{c, stream, resident}.run();
}

} // namespace wbk
