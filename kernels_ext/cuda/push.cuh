// Push all-reduce, alone or fused with residual-add and RMSNorm, in which the data is its own flag.
//
//   sum[t]  = T(x_0[t] + x_1[t] + ... + x_{n-1}[t] + residual[t])        fp32, in group-rank order, rounded once
//   norm[t] = T(sum[t] * rsqrt(mean(sum[t]^2) + eps) * (weight_bias + weight))
//
// Grid: `G lanes x C blocks` in x (C = cluster size, a lane is a cluster), virtual ranks in y. Row t belongs to lane t mod G. A thread
//   owns the same 16-byte vector of every row of its lane. C = 7 and few threads for few tokens, C = 1 and a whole row for many.
// Steps, for every row of a lane:
//   1 push     own vector to every peer's slot; it also stays in registers
//   2 wait     until every peer's vector has come into the own slot; put the sentinel back
//   3 reduce   in rank order, add the residual, round
//   4 square   sum of squares over the row: warp, then all blocks of the cluster at once through distributed shared memory
//   5 norm     scale, multiply by the weight, store
// Rows are pushed `kAhead` in advance, so the link works while rows are normalised.
//
// Bytes a rank, S = tokens*hidden*size: link (n-1)S out and in; memory reads x, residual, slots (n-1)S, writes slots' sentinels
//   (n-1)S, sum, norm. Slots are a small ring (cuda_layout.h) that stays in L2.
// Who writes a slot: the peer that owns it writes data, once an epoch; its reader writes the sentinel back, before it pushes again.
// The sentinel: 64-bit words are stored and loaded whole, and a word has come when its low half is not 0xffffffff. In every dtype
//   here a low half of 0xffffffff holds a NaN, and 0xfffffffe holds a NaN in the same places: the sender turns the first into the
//   second. A sum in fp32 gives the same (canonical) NaN for both, so no result can differ, and every other pattern (-0.0,
//   subnormals, Inf, all other NaNs) travels as it is.
// What ends an epoch: a rank pushes row number s of a lane only after it has consumed row s - kAhead of every peer. So on consuming
//   a peer's row s one knows that this peer has consumed every row up to s - kAhead; row s + kAhead, pushed next, takes the slot of
//   row s + kAhead - kDepth <= s - kAhead. The peer wrote that slot's sentinel before it pushed row s. Row numbers go on from call to
//   call and live in device memory (lane records), so graphs replay, and calls of any size and choice mix on one workspace.
// Lanes that run at one time are all resident (launcher), so a lane never waits for one that cannot start.
// Contract with the stream (programmatic dependent launch): before the wait for the previous grid the kernel touches shared memory
//   only. Whatever the previous kernel writes may be read here, x, residual and weight included; the next kernel may start early,
//   and must wait for this grid before it reads `sum` or `norm` or writes x, residual or weight.
// Bounded: a wait for a peer longer than timeout_ns is reported once in host-mapped memory; state becomes non-zero, the lane leaves
//   after this row, and later calls leave at once. Blocks of a cluster agree on leaving through the exchange of step 4.
// Arch: sm_90 and later (clusters, st.async). dtypes bf16, fp16, fp32.
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
  uint32_t first_rank, tokens, trigger, round_twice, group, op;
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
constexpr uint32_t kLeave = 0xffffffffu;  // a partial sum that says "this block gives up"; fp32 arithmetic never makes it
constexpr uint32_t kMaxPartials = 128;    // warps of a cluster; read 32 at a time
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

template <class T, int kRanks, int kAhead, class Epilogue, class Ranks>
__global__ void __launch_bounds__(1024, 1) push_kernel(const __grid_constant__ PushArgs<Ranks> a) {
  constexpr int kCount = Numbers<T>::kCount;
  constexpr int kBatch = kRanks ? kRanks : 4; // slots of how many ranks are polled together
  __shared__ uint64_t arrived[2];
  __shared__ __align__(16) float partials[2][kMaxPartials];

  const uint32_t entry = Ranks::kEntries == 1 ? 0 : blockIdx.y;
  const WbkRank &me = a.rank[entry];
  const uint32_t rank = a.first_rank + entry, ranks = kRanks ? kRanks : a.layout.ranks;
  const uint32_t block = block_of_cluster(), blocks = blocks_of_cluster();
  const uint32_t lane = blockIdx.x / blocks, step = gridDim.x / blocks;
  const uint32_t vectors = a.layout.vectors, vector = block * blockDim.x + threadIdx.x;
  const bool active = vector < vectors;
  const uint32_t rows = (a.tokens - lane + step - 1) / step; // lane < step <= tokens
  const uint32_t warps = blockDim.x / 32, num_partials = blocks * warps;
  const uint32_t thread_of_warp = threadIdx.x % 32;

  if constexpr (Epilogue::kNorm) {
    if (threadIdx.x == 0) {
      for (int i = 0; i < 2; ++i) {
        barrier_init(&arrived[i], 1);
        barrier_expect_bytes(&arrived[i], num_partials * 4);
      }
      fence_barrier_init();
    }
    for (uint32_t p = threadIdx.x; p < 2 * kMaxPartials; p += blockDim.x) partials[0][p] = 0.f; // nobody sends past num_partials
    cluster_arrive_release();
    cluster_wait_acquire();
  }
  if (a.trigger == WBK_TRIGGER_AT_START) launch_dependents();
  wait_previous_grid();

  auto row_offset = [&](uint32_t i) { return size_t(lane + i * step) * vectors + vector; };
  const Vector *x = static_cast<const Vector *>(me.x), *residual = static_cast<const Vector *>(me.residual);
  Vector own[kAhead];
#pragma unroll
  for (int j = 0; j < kAhead; ++j)
    if (active && j < rows) own[j] = load_once(x + row_offset(j));
  const uint32_t first = load_relaxed_gpu(me.lanes + lane * kLaneWords + block);
  const bool dead = load_relaxed_gpu(me.state) != 0;

  // 1 push
  auto push = [&](uint32_t sequence, Vector v) {
    v = without_hole(v);
#pragma unroll
    for (uint32_t r = 0; r < (kRanks ? kRanks : kMaxRanks); ++r) {
      if (kRanks == 2) { // one peer: no loop, no test
        if (r == 0) {
          const uint32_t peer = 1 - rank;
          store_relaxed_sys(a.slots[peer] + a.layout.slot(sequence, 0, lane) + vector, v);
        }
      } else if (r < ranks && r != rank) {
        store_relaxed_sys(a.slots[r] + a.layout.slot(sequence, Layout::peer_place(rank, r), lane) + vector, v);
      }
    }
  };
  if (!dead) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j)
      if (active && j < rows) push(first + j, own[j]);
  }
  if (a.trigger == WBK_TRIGGER_AFTER_PUSH) launch_dependents();

  Vector next_residual{}, weight{};
  if constexpr (Epilogue::kNorm) {
    if (active) {
      next_residual = load_once(residual + row_offset(0));
      weight = load_once(a.weight + vector);
    }
  }

  bool failed = dead;
  for (uint32_t base = 0; base < rows; base += kAhead) {
#pragma unroll
    for (int j = 0; j < kAhead; ++j) {
      const uint32_t i = base + j;
      if (kAhead > 1 && i >= rows) break;
      const uint32_t sequence = first + i;
      const bool more = i + kAhead < rows;
      Vector next{};
      if (active && more) next = load_once(x + row_offset(i + kAhead));

      // 2 wait and 3 reduce
      float acc[kCount];
      if (active && !failed) {
        Vector *slots = a.slots[rank];
        Patience patience{0, 0};
        if constexpr (kRanks == 2) {
          Vector *slot = slots + a.layout.slot(sequence, 0, lane) + vector;
          Vector got;
          while (!has_come(got = load_relaxed_sys(slot)))
            if (patience.over(a.timeout_ns, me.state)) {
              give_up(me, a.op, a.group, rank, 1 - rank, lane, sequence);
              failed = true;
              break;
            }
          float mine[kCount];
          unpack<T>(got, acc);
          unpack<T>(own[j], mine);
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
                got[b] = own[j];
                if (r != rank && r < ranks)
                  got[b] = load_relaxed_sys(slots + a.layout.slot(sequence, Layout::peer_place(r, rank), lane) + vector);
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
              if (r != rank) store_relaxed_sys(slots + a.layout.slot(sequence, Layout::peer_place(r, rank), lane) + vector, holes());
            }
          }
        }
      }
      if (a.trigger == WBK_TRIGGER_AFTER_POLL && i + 1 == rows) launch_dependents();

      if constexpr (!Epilogue::kNorm) {
        if (__any_sync(~0u, failed)) return;
        if (active) {
          store_plain(static_cast<Vector *>(me.sum) + row_offset(i), pack<T>(acc));
          if (more) push(sequence + kAhead, next), own[j] = next;
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
        const uint32_t word = __any_sync(~0u, failed) ? kLeave : __float_as_uint(squares);
        const uint32_t slot = i & 1;
        if (thread_of_warp < blocks)
          store_async(address_in_block(shared_address(&partials[slot][block * warps + threadIdx.x / 32]), thread_of_warp), word,
                      address_in_block(shared_address(&arrived[slot]), thread_of_warp));
        if (active && more && !failed) {
          push(sequence + kAhead, next);
          own[j] = next;
        }
        if (active && i + 1 < rows) next_residual = load_once(residual + row_offset(i + 1));
        if (active && !failed) store_plain(static_cast<Vector *>(me.sum) + row_offset(i), sum);

        barrier_wait(&arrived[slot], (i >> 1) & 1);
        if (threadIdx.x == 0 && i + 2 < rows) barrier_expect_bytes(&arrived[slot], num_partials * 4);
        float4 total{0.f, 0.f, 0.f, 0.f};
        for (uint32_t p = 0; p < num_partials; p += 32) {
#pragma unroll
          for (uint32_t q = 0; q < 32; q += 4) {
            const float4 part = *reinterpret_cast<const float4 *>(&partials[slot][p + q]);
            total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
          }
        }
        const float mean = ((total.x + total.y) + (total.z + total.w)) * a.inverse_hidden;
        if (mean != mean) { // a NaN in the row, or a block that gives up
          bool leave = false;
          for (uint32_t p = 0; p < num_partials; ++p) leave |= __float_as_uint(partials[slot][p]) == kLeave;
          if (leave) return; // alike in every block of the cluster
        }
        // 5 norm
        const float scale = rsqrtf(mean + a.eps);
        if (active) {
          float by[kCount];
          unpack<T>(weight, by);
#pragma unroll
          for (int k = 0; k < kCount; ++k) acc[k] = acc[k] * scale * (a.weight_bias + by[k]);
          store_plain(static_cast<Vector *>(me.norm) + row_offset(i), pack<T>(acc));
        }
      }
    }
  }
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
    if (c.ranks == 2) return c.ahead == 1 ? go<2, 1, Epilogue>() : go<2, 2, Epilogue>();
    if (c.ranks == 4) return go<4, 1, Epilogue>();
    if (c.ranks == 8) return go<8, 1, Epilogue>();
    return go<0, 1, Epilogue>();
  }

  template <int kRanks, int kAhead, class Epilogue> int go() const {
    auto kernel = push_kernel<T, kRanks, kAhead, Epilogue, Ranks>;
    const uint32_t vectors = c.hidden / Numbers<T>::kCount, threads = round_up((vectors + c.cluster - 1) / c.cluster, 32);
    const uint32_t copies = c.virtual_ranks ? c.virtual_ranks : 1;
    if (threads > 1024 || threads / 32 * c.cluster > kMaxPartials || c.lanes * kDepth * (c.ranks - 1) > UINT32_MAX / vectors)
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
    config.gridDim = dim3(lanes * c.cluster, copies);
    if (c.pdl) {
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
