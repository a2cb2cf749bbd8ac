// Push all-reduce, alone or fused with residual-add and RMSNorm, in which the data is its own flag.
//
//   sum[t]  = T(x_0[t] + x_1[t] + ... + x_{n-1}[t] + residual[t])        fp32, in group-rank order, rounded once
//   norm[t] = T(sum[t] * rsqrt(mean(sum[t]^2) + eps) * (weight_bias + weight))
//
// Grid: C >= 2 blocks (a cluster, in x) for each of G lanes (y) of every virtual rank (z). Row t belongs to lane t mod G. A thread owns the
//   same 16-byte vector of every row of its lane. Blocks of some 128 threads did best for few tokens, of some 256 for many; at 48
//   registers a thread the next grid's blocks fit beside this one's, so that they are there when it ends.
// Steps, for every row of a lane:
//   1 push     own vector to every peer's slot; it also stays in registers
//   2 wait     until every peer's vector has come into the own slot; put the sentinel back
//   3 reduce   in rank order, add the residual, round
//   4 square   sum of squares over the row: warp, then all blocks of the cluster at once through distributed shared memory
//   5 norm     scale, multiply by the weight, store
// The next row is pushed between 4's sending and waiting, so the link works while this row is normalised.
//
// Cold start: a rank that comes late finds its peers' data there, and then its own first steps are all that everybody waits for. So
//   before the previous grid has ended  set up the barriers of step 4 and tell the cluster, without waiting for it
//   when it has ended, in one round trip  load the number of calls, x, residual, weight; with two ranks also the own slots of both
//                                         halves, since which half is this call's is known only with the number of calls
//   then  push; wait for the cluster; take the look at this call's half as the first poll, and drop the other
// The early look: it only reads, so no other rank can notice. What it gives for this call's half is what a first poll gives, the
//   sentinel or this call's data, and never data of the last call k - 2 in that half (nor of an older one that used the slot): call
//   k - 2 left no slot without its sentinel when its grid ended, call k - 1's grid began its loads after that, and this thread looks
//   after call k - 1's grid has ended; a later load of a location cannot find an earlier value. That argument needs the end of the
//   previous grid and not the number of calls, which is the same from there until the last block of this grid has counted. A word
//   that had not come is polled as ever, each word for itself, so that the look may find a vector half there. In a dead workspace
//   sentinels may be missing: there the look is not used, nor anything polled.
//
// Bytes a rank, S = tokens*hidden*size: link (n-1)S out and in; memory reads x, residual, slots (n-1)S, writes slots' sentinels
//   (n-1)S, sum, norm.
// Who writes a slot: the peer that owns it writes data, in every second call; its reader writes the sentinel back in the same call.
// The sentinel: 64-bit words are stored and loaded whole, and a word has come when its low half is not 0xffffffff. In every dtype
//   here a low half of 0xffffffff holds a NaN, and 0xfffffffe holds a NaN in the same places: the sender turns the first into the
//   second. A sum in fp32 gives the same (canonical) NaN for both, so no result can differ, and every other pattern (-0.0,
//   subnormals, Inf, all other NaNs) travels as it is.
// What ends an epoch: the end of the grid. A rank pushes in call k + 2 into the half that its peer read in call k. It has ended call
//   k + 1, so it has seen data that the peer pushed in call k + 1, after the peer's call k had ended with all sentinels in memory.
//   Nothing is used twice within a call. (A smaller ring used again within a call needs a fence between sentinel and next push:
//   without one rows were lost in tests on H200s, with one a tenth of the bandwidth.) The number of calls lives in device memory, so graphs
//   replay, and calls of any size and choice mix on one workspace.
// All lanes of a call are resident (launcher), so no lane waits for one that cannot start.
// Contract with the stream (programmatic dependent launch): before the wait for the previous grid the kernel touches shared memory
//   only. Whatever the previous kernel writes may be read here, x, residual and weight included; the next kernel may start early,
//   and must wait for this grid before it reads `sum` or `norm` or writes x, residual or weight.
// Bounded: a wait for a peer longer than timeout_ns is reported once in host-mapped memory; state becomes non-zero, the lane leaves
//   after this row, and later calls leave at once. The parts of step 4 carry the wish to leave, so that a whole cluster leaves together.
// Arch: sm_90 and later (clusters, distributed shared memory). dtypes bf16, fp16, fp32.
#pragma once
#include "steps.cuh"

namespace wbk {

// ---- kernel

template <class T, class Epilogue, class Ranks>
__global__ void __maxnreg__(Ranks::kTwo ? 48 : 80) push_kernel(const __grid_constant__ PushArgs<Ranks> a) {
  constexpr int kCount = Numbers<T>::kCount;
  __shared__ RowSum row_sum;

  const uint32_t entry = Ranks::kPlayed == 1 ? 0 : blockIdx.z;
  const WbkRank &me = a.rank[entry];
  const uint32_t rank = a.first_rank + entry;
  const uint32_t block = blockIdx.x, blocks = gridDim.x, lane = blockIdx.y, step = gridDim.y;
  const uint32_t vectors = a.layout.vectors, vector = block * blockDim.x + threadIdx.x;
  const bool active = vector < vectors;
  const uint32_t actives = __ballot_sync(~0u, active); // of this warp; its first thread is among them if any is
  const uint32_t rows = lane + (a.rows - 1) * step < a.tokens ? a.rows : a.rows - 1;
  const uint32_t num_parts = blocks * (blockDim.x / 32);

  if (a.trigger == WBK_TRIGGER_AT_START) launch_dependents();
  if constexpr (Epilogue::kNorm) row_sum.open(num_parts);
  size_t at = size_t(lane) * vectors + vector; // of the row at hand, in vectors
  const size_t stride = size_t(step) * vectors; // from one row of the lane to the next
  const Vector *x = static_cast<const Vector *>(me.x), *residual = static_cast<const Vector *>(me.residual);
  const Vector *first_x = pinned(x + at), *first_residual = nullptr, *weights = nullptr, *own_slot = nullptr;
  if constexpr (Ranks::kTwo) own_slot = pinned(a.slots[rank] + at);
  if constexpr (Epilogue::kNorm) first_residual = pinned(residual + at), weights = pinned(a.weight + vector);
  const uint32_t *control = pinned(me.control);
  wait_previous_grid();

  // Cold start: one round trip for all that the first row needs, a look at the slots of both halves included.
  const uint2 calls_and_state = load_relaxed_gpu_pair(control);
  Vector own{}, next_residual{}, weight{}, look = holes(), looks[kHalves];
  if (active) {
    own = load_once(first_x);
    if constexpr (Ranks::kTwo)
      for (uint32_t h = 0; h < kHalves; ++h) looks[h] = load_relaxed_sys(own_slot + a.layout.plane(h, 0, 1));
    if constexpr (Epilogue::kNorm) {
      next_residual = load_once(first_residual);
      weight = load_once(weights);
    }
  }
  const uint32_t calls = calls_and_state.x / kCall, half = calls % kHalves;
  const bool dead = calls_and_state.y != 0;

  // 1 push
  const Member<Ranks> member{a, me, rank, calls};
  auto push = [&](size_t to, Vector v) {
    if constexpr (Ranks::kTwo) store_relaxed_sys(a.slots[1 - rank] + a.layout.plane(half, 0, 1) + to, without_hole(v));
    else member.push_to_all(to, v);
  };
  if (active && !dead) push(at, own);
  if (a.trigger == WBK_TRIGGER_AFTER_PUSH) launch_dependents();

  if constexpr (Epilogue::kNorm) row_sum.meet();
  if constexpr (Ranks::kTwo)
    if (active) look = half ? looks[1] : looks[0];

  bool failed = dead;
  for (uint32_t i = 0; i < rows; ++i, at += stride) {
    const bool more = i + 1 < rows;
    Vector next{};
    if (active && more) next = load_once(x + at + stride);

    // 2 wait and 3 reduce
    float acc[kCount];
    if (active && !failed) {
      if constexpr (Ranks::kTwo) {
        Vector *slot = a.slots[rank] + a.layout.plane(half, 0, 1) + at, got = look;
        if (!__all_sync(actives, has_come(got))) failed = !receive(a, me, slot, actives, rank, 1 - rank, lane + i * step, calls, got);
        look = holes();
        float mine[kCount];
        unpack<T>(got, acc);
        unpack<T>(own, mine);
#pragma unroll
        for (int k = 0; k < kCount; ++k) acc[k] += mine[k]; // of two, either order gives the same bits
        store_relaxed_sys(slot, holes());
      } else {
        failed = !member.template sum_in_order<T>(at, own, lane + i * step, acc);
      }
    }
    if (a.trigger == WBK_TRIGGER_AFTER_POLL && i + 1 == rows) launch_dependents();

    if constexpr (!Epilogue::kNorm) {
      if (__any_sync(~0u, failed)) return;
      if (active) {
        store_plain(static_cast<Vector *>(me.sum) + at, pack<T>(acc));
        if (more) {
          push(at + stride, next);
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
      row_sum.send(i, squares, failed, block, blocks);
      if (active && more && !failed) {
        push(at + stride, next);
        own = next;
      }
      if (active && more) next_residual = load_once(residual + at + stride);
      if (active && !failed) store_plain(static_cast<Vector *>(me.sum) + at, sum);

      float total;
      if (!row_sum.take(i, num_parts, total)) return; // alike in every warp of the cluster
      // 5 norm
      const float scale = rsqrtf(total * a.inverse_hidden + a.eps);
      if (active) {
        float by[kCount];
        packed_until_here(weight);
        unpack<T>(weight, by);
#pragma unroll
        for (int k = 0; k < kCount; ++k) acc[k] = acc[k] * scale * (a.weight_bias + by[k]);
        store_plain(static_cast<Vector *>(me.norm) + at, pack<T>(acc));
      }
    }
  }
  if constexpr (!Epilogue::kNorm) __syncthreads(); // every thread has read the count; with a norm the exchange says so
  count_call(me.control);
}

} // namespace wbk
