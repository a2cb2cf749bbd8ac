// Two-shot push all-reduce, alone or fused with residual-add and RMSNorm: every token is summed by one rank, without barriers.
//
//   sum[t]  = T(x_0[t] + x_1[t] + ... + x_{n-1}[t] + residual[t])        fp32, in group-rank order, rounded once
//   norm[t] = T(sum[t] * rsqrt(mean(sum[t]^2) + eps) * (weight_bias + weight))
//
// The same numbers, bit for bit, as push.cuh gives; fewer bytes over the links from three ranks on. The residual of a token is its
// owner's: equal on every rank, as the operation has it.
//
// Grid: as in push.cuh, but a lane carries groups of n tokens (n ranks): group g is tokens g*n to g*n + n - 1, and token g*n + r belongs
//   to rank r. The last group may be short: then the last ranks own none of it.
// Steps, for every group of a lane:
//   1 scatter  own vector of each peer's token to that peer
//   2 reduce   own token: wait for every peer's vector, sum in rank order, add the residual, round; hand the result to every peer
//   3 drain    each peer's token: wait for its result
//   4 square, 5 norm, for own and drained tokens alike: as in push.cuh; every rank norms every token
// The blocks of a cluster meet behind the first scatter (push.cuh, cold start); no slot is looked at before its turn.
// The next group is scattered between 2 and 3, so the link works while results are on their way.
//
// Bytes a rank, S = tokens*hidden*size: link 2(n-1)/n S out and in; memory reads x, residual S/n, slots 2(n-1)/n S, writes their
//   sentinels, sum, norm. Handing out the norm as well would save each rank its arithmetic and cost (n-1)/n S more on the link, which
//   is the slower of the two.
// Who writes a slot, and the sentinel: as in push.cuh. The two kinds of rows of a plane do not overlap (cuda_layout.h).
// What ends an epoch: as in push.cuh. A rank that has ended a call has seen, for some token, the result of a rank that had seen a part
//   of every other rank (or it is that rank), so every rank had begun that call and ended the one before. So calls of both algorithms
//   and any size mix on one workspace.
// No wait in a circle: step 1 waits for nobody, 2 only for 1, 3 only for 2, in the same lane; all lanes are resident.
// Contract with the stream: as in push.cuh. sum may be x or residual: a thread has read a vector of either before it writes it.
// Bounded: as in push.cuh; step 3 waits twice as long, so that a rank that stays away is named by step 2 and not the rank that waits for
//   it. With fewer tokens than ranks, ranks that own no token name the owner they wait for.
// Arch: sm_90 and later. dtypes bf16, fp16, fp32.
#pragma once
#include "steps.cuh"

namespace wbk {

// ---- kernel

template <class T, class Epilogue, class Ranks> __global__ void __maxnreg__(80) two_shot_kernel(const __grid_constant__ PushArgs<Ranks> a) {
  constexpr int kCount = Numbers<T>::kCount;
  __shared__ RowSum row_sum;

  const uint32_t entry = Ranks::kPlayed == 1 ? 0 : blockIdx.z;
  const WbkRank &me = a.rank[entry];
  const uint32_t rank = a.first_rank + entry, ranks = a.layout.ranks, groups = a.layout.groups(a.tokens);
  const uint32_t block = blockIdx.x, blocks = gridDim.x, lane = blockIdx.y, step = gridDim.y;
  const uint32_t vectors = a.layout.vectors, vector = block * blockDim.x + threadIdx.x;
  const bool active = vector < vectors;
  const uint32_t actives = __ballot_sync(~0u, active); // of this warp
  const uint32_t num_parts = blocks * (blockDim.x / 32);
  auto at = [=](uint32_t row) { return size_t(row) * vectors + vector; };

  if (a.trigger == WBK_TRIGGER_AT_START) launch_dependents();
  if constexpr (Epilogue::kNorm) row_sum.open(num_parts);
  wait_previous_grid();

  const Vector *x = static_cast<const Vector *>(me.x);
  const uint2 calls_and_state = load_relaxed_gpu_pair(me.control);
  const Member<Ranks> member{a, me, rank, calls_and_state.x / kCall};
  bool failed = __any_sync(~0u, calls_and_state.y != 0);

  // 1 scatter
  auto scatter = [&](uint32_t group) {
#pragma unroll 1
    for (uint32_t start = 0; start < ranks; start += kWindow) {
      Vector v[kWindow];
      auto goes = [&](uint32_t r) { return r < ranks && r != rank && group * ranks + r < a.tokens; };
#pragma unroll
      for (uint32_t b = 0; b < kWindow; ++b)
        if (goes(start + b)) v[b] = load_once(x + at(group * ranks + start + b));
#pragma unroll
      for (uint32_t b = 0; b < kWindow; ++b)
        if (goes(start + b)) member.push(start + b, at(Layout::part_row(group)), v[b]);
    }
  };
  if (active && !failed) scatter(lane);
  if (a.trigger == WBK_TRIGGER_AFTER_PUSH) launch_dependents();

  if constexpr (Epilogue::kNorm) row_sum.meet();

  // Steps 4 and 5. False, alike in a whole cluster (without a norm: warp), if some thread of it gives up.
  uint32_t num_done = 0;
  auto finish = [&](uint32_t row, Vector sum) {
    if constexpr (!Epilogue::kNorm) {
      return !__any_sync(~0u, failed);
    } else {
      float acc[kCount], squares = 0.f, total;
      unpack<T>(sum, acc);
#pragma unroll
      for (int k = 0; k < kCount; ++k) squares += acc[k] * acc[k];
      Vector weight{}; // read for every row: kept, it would not fit beside the vectors of four ranks
      if (active) weight = load_plain(a.weight + vector);
      row_sum.send(num_done, squares, failed, block, blocks);
      if (!row_sum.take(num_done, num_parts, total)) return false;
      ++num_done;
      const float scale = rsqrtf(total * a.inverse_hidden + a.eps);
      if (active) {
        float by[kCount];
        packed_until_here(weight);
        unpack<T>(weight, by);
#pragma unroll
        for (int k = 0; k < kCount; ++k) acc[k] = acc[k] * scale * (a.weight_bias + by[k]);
        store_plain(static_cast<Vector *>(me.norm) + at(row), pack<T>(acc));
      }
      return true;
    }
  };

  for (uint32_t group = lane; group < groups; group += step) {
    // 2 reduce
    const uint32_t own_row = group * ranks + rank, finished = Layout::finished_row(group, groups);
    if (own_row < a.tokens) {
      Vector sum{};
      if (active && !failed) {
        float acc[kCount];
        Vector residual{};
        if constexpr (Epilogue::kNorm) residual = load_once(static_cast<const Vector *>(me.residual) + at(own_row));
        failed = !member.template sum_in_order<T>(at(Layout::part_row(group)), load_once(x + at(own_row)), own_row, acc);
        if constexpr (Epilogue::kNorm) {
          if (a.round_twice) {
            Vector once = pack<T>(acc);
            unpack<T>(once, acc);
          }
          float add[kCount];
          unpack<T>(residual, add);
#pragma unroll
          for (int k = 0; k < kCount; ++k) acc[k] += add[k];
        }
        sum = pack<T>(acc);
        if (!failed) {
          member.push_to_all(at(finished), sum);
          store_plain(static_cast<Vector *>(me.sum) + at(own_row), sum);
        }
      }
      if (!finish(own_row, sum)) return;
    }
    if (active && group + step < groups) scatter(group + step);

    // 3 drain
    for (uint32_t i = 1; i < ranks; ++i) {
      const uint32_t owner = rank + i < ranks ? rank + i : rank + i - ranks, row = group * ranks + owner;
      if (row >= a.tokens) continue;
      Vector sum{};
      if (active && !failed) {
        Vector *slot = member.slot(owner, rank, at(finished));
        failed = !receive<2>(a, me, slot, actives, rank, owner, row, member.calls, sum);
        if (!failed) {
          store_relaxed_sys(slot, holes());
          store_plain(static_cast<Vector *>(me.sum) + at(row), sum);
        }
      }
      if (!finish(row, sum)) return;
    }
  }
  if constexpr (!Epilogue::kNorm) __syncthreads(); // every thread has read the count; with a norm the exchange says so
  count_call(me.control);
}

} // namespace wbk
