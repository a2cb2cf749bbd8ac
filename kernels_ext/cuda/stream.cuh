// Streaming push all-reduce for two ranks and many tokens, alone or fused with residual-add and RMSNorm. Formula, slots, sentinel,
// epochs, contract with the stream and bounds are those of push.cuh; what differs is who pushes.
//
// Grid: C blocks (a cluster, in x) for each of `senders + G` lanes (y) of every virtual rank (z). The first `senders` lanes only push,
//   rows in ascending order and without ever waiting, so the link never idles and its back-pressure stops no one else; the other
//   G lanes only receive: row t belongs to lane t mod G.
// Steps of a sender: 1 push     four vectors a thread at a time
// Steps of a receiver, for every row:
//   2 wait     for the peer's vector; put the sentinel back
//   3 reduce   add the own vector (read again: it lies in L2) and the residual, round
//   4 square   as in push.cuh
//   5 norm     as in push.cuh
// Bytes a rank: as in push.cuh, and x once more from L2.
// Arch: sm_90 and later. dtypes bf16, fp16, fp32.
#pragma once
#include "steps.cuh"

namespace wbk {

constexpr uint32_t kBatch = 4; // vectors a sender's thread has on the way

template <class T, class Epilogue, class Ranks>
__global__ void __launch_bounds__(1024, 1) stream_kernel(const __grid_constant__ PushArgs<Ranks> a) {
  constexpr int kCount = Numbers<T>::kCount;
  __shared__ RowSum row_sum;

  const uint32_t entry = Ranks::kEntries == 1 ? 0 : blockIdx.z;
  const WbkRank &me = a.rank[entry];
  const uint32_t rank = a.first_rank + entry, peer = 1 - rank;
  const uint32_t block = blockIdx.x, blocks = gridDim.x, vectors = a.layout.vectors, vector = block * blockDim.x + threadIdx.x;
  const uint32_t num_parts = blocks * (blockDim.x / 32);
  const bool sender = blockIdx.y < a.senders;

  if (a.trigger == WBK_TRIGGER_AT_START) launch_dependents();
  if (Epilogue::kNorm && !sender) row_sum.open(num_parts);
  wait_previous_grid();
  const uint2 calls_and_state = load_relaxed_gpu_pair(me.control);
  const uint32_t calls = calls_and_state.x / kCall, half = calls % kHalves;
  const bool dead = calls_and_state.y != 0;
  if (a.trigger == WBK_TRIGGER_AFTER_PUSH) launch_dependents();

  const Vector *x = static_cast<const Vector *>(me.x);
  if (sender) { // 1 push
    Vector *to = a.slots[peer] + a.layout.plane(half, 0, 1);
    const size_t all = dead ? 0 : size_t(a.tokens) * vectors, chunk = size_t(blockDim.x) * kBatch;
    for (size_t from = (blockIdx.y * blocks + block) * chunk; from < all; from += a.senders * blocks * chunk) {
      Vector v[kBatch];
#pragma unroll
      for (uint32_t b = 0; b < kBatch; ++b)
        if (from + b * blockDim.x + threadIdx.x < all) v[b] = load_plain(x + from + b * blockDim.x + threadIdx.x);
#pragma unroll
      for (uint32_t b = 0; b < kBatch; ++b)
        if (from + b * blockDim.x + threadIdx.x < all) store_relaxed_sys(to + from + b * blockDim.x + threadIdx.x, without_hole(v[b]));
    }
    if (a.trigger == WBK_TRIGGER_AFTER_POLL) launch_dependents();
    __syncthreads(); // every thread has read the count
    count_call(me.control);
    return;
  }

  const uint32_t lane = blockIdx.y - a.senders, step = gridDim.y - a.senders;
  const bool active = vector < vectors;
  const uint32_t actives = __ballot_sync(~0u, active);
  size_t at = size_t(lane) * vectors + vector; // of the row at hand, in vectors
  const size_t stride = size_t(step) * vectors;
  const Vector *residual = static_cast<const Vector *>(me.residual);
  Vector *slots = a.slots[rank] + a.layout.plane(half, 0, 1);
  Vector own{}, add{}, weight{};
  if (active && lane < a.tokens) {
    own = load_plain(x + at);
    if constexpr (Epilogue::kNorm) {
      add = load_once(residual + at);
      weight = load_once(a.weight + vector);
    }
  }
  bool failed = dead;
  for (uint32_t row = lane, i = 0; row < a.tokens; row += step, ++i, at += stride) {
    // 2 wait and 3 reduce
    float acc[kCount], more[kCount];
    if (active && !failed) {
      Vector got;
      failed = !receive<true>(a, me, slots + at, actives, rank, peer, row, calls, got);
      store_relaxed_sys(slots + at, holes());
      unpack<T>(got, acc);
      unpack<T>(own, more);
#pragma unroll
      for (int k = 0; k < kCount; ++k) acc[k] += more[k];
      if (row + step < a.tokens) own = load_plain(x + at + stride);
    }
    if (a.trigger == WBK_TRIGGER_AFTER_POLL && row + step >= a.tokens) launch_dependents();
    if constexpr (!Epilogue::kNorm) {
      if (__any_sync(~0u, failed)) return;
      if (active) store_plain(static_cast<Vector *>(me.sum) + at, pack<T>(acc));
    } else {
      // 4 square
      Vector sum{};
      float squares = 0.f;
      if (active) {
        if (a.round_twice) {
          Vector once = pack<T>(acc);
          unpack<T>(once, acc);
        }
        unpack<T>(add, more);
#pragma unroll
        for (int k = 0; k < kCount; ++k) acc[k] += more[k];
        sum = pack<T>(acc);
        unpack<T>(sum, acc);
#pragma unroll
        for (int k = 0; k < kCount; ++k) squares += acc[k] * acc[k];
      }
      row_sum.send(i, squares, failed, block, blocks);
      if (active && row + step < a.tokens) add = load_once(residual + at + stride);
      if (active && !failed) store_plain(static_cast<Vector *>(me.sum) + at, sum);
      float total;
      if (!row_sum.take(i, num_parts, total)) return; // alike in every warp of the cluster
      // 5 norm
      const float scale = rsqrtf(total * a.inverse_hidden + a.eps);
      if (active) {
        unpack<T>(weight, more);
#pragma unroll
        for (int k = 0; k < kCount; ++k) acc[k] = acc[k] * scale * (a.weight_bias + more[k]);
        store_plain(static_cast<Vector *>(me.norm) + at, pack<T>(acc));
      }
    }
  }
  __syncthreads(); // every thread has read the count (a lane without rows has no exchange that says so)
  count_call(me.control);
}

} // namespace wbk
