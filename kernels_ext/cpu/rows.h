// The arithmetic: sum rows over the ranks, then either round, or add the residual and normalise.
//
//   sum          = ((x_0 + x_1) + x_2) ...                                fp32, group-rank order
//   residual_out = T(sum + residual), or T(fp32(T(sum)) + residual) for Twice
//   norm_out     = T(residual_out * (1 / sqrt(mean(residual_out^2) + eps)) * (weight_bias + weight))
//
// A row is read once from every rank; its norm is taken while residual_out is still in the first cache. The result of an
// element depends only on its column, never on alignment or on which rank computes: all ranks get equal bits.
// Bytes per row and rank: reads (num_ranks + 1) rows and the weight, writes 2 rows (1 row for the all-reduce alone).
#pragma once

#include <cmath>

#include "lanes.h"

namespace wbk {

struct RowsJob {
  uint32_t num_ranks;
  uint64_t hidden;
  uint64_t num_rows;
  const void* inputs[16];  // first row of each rank, in group-rank order
  const void* residual;
  const void* weight;
  void* residual_out;  // or the sum, for the all-reduce alone
  void* norm_out;
  float eps;
  float weight_bias;
};

struct SumOnly {};
struct FusedOnce {};
struct FusedTwice {};

template <class T>
WBK_INLINE const T* row_of(const void* first, uint64_t row, uint64_t hidden) {
  return static_cast<const T*>(first) + row * hidden;
}

template <class T>
WBK_INLINE Lanes finish(Lanes sum, Lanes, SumOnly) { return sum; }
template <class T>
WBK_INLINE Lanes finish(Lanes sum, Lanes residual, FusedOnce) { return sum + residual; }
template <class T>
WBK_INLINE Lanes finish(Lanes sum, Lanes residual, FusedTwice) { return rounded(sum, T{}) + residual; }

template <class Mode>
struct is_fused { static constexpr bool value = true; };
template <>
struct is_fused<SumOnly> { static constexpr bool value = false; };

template <class T>
inline void normalise_row(const RowsJob& job, const T* row, Lanes squares, T* norm) {
  float total = 0.0f;
  for (int i = 0; i < kLanes; ++i) total += squares[i];
  const float scale = 1.0f / std::sqrt(total / static_cast<float>(job.hidden) + job.eps);
  const Lanes scale_lanes = splat(scale);
  const Lanes bias = splat(job.weight_bias);
  const T* weight = static_cast<const T*>(job.weight);
  uint64_t column = 0;
  for (; column + kLanes <= job.hidden; column += kLanes)
    store(norm + column, load(row + column) * scale_lanes * (bias + load(weight + column)));
  if (const uint64_t left = job.hidden - column)
    store_some(norm + column,
               load_some(row + column, left) * scale_lanes * (bias + load_some(weight + column, left)), left);
}

template <class T, class Mode>
void reduce_rows(const RowsJob& job) {
  constexpr int kUnroll = 4;
  constexpr bool kFused = is_fused<Mode>::value;
  for (uint64_t r = 0; r < job.num_rows; ++r) {
    const T* inputs[16];
    for (uint32_t g = 0; g < job.num_ranks; ++g) inputs[g] = row_of<T>(job.inputs[g], r, job.hidden);
    const T* residual = kFused ? row_of<T>(job.residual, r, job.hidden) : nullptr;
    T* out = static_cast<T*>(job.residual_out) + r * job.hidden;
    Lanes squares[kUnroll] = {};
    uint64_t column = 0;
    for (; column + kUnroll * kLanes <= job.hidden; column += kUnroll * kLanes) {
      Lanes sum[kUnroll];
      for (int u = 0; u < kUnroll; ++u) sum[u] = load(inputs[0] + column + u * kLanes);
      for (uint32_t g = 1; g < job.num_ranks; ++g)
        for (int u = 0; u < kUnroll; ++u) sum[u] += load(inputs[g] + column + u * kLanes);
      for (int u = 0; u < kUnroll; ++u) {
        const uint64_t at = column + u * kLanes;
        const Lanes value = store(out + at, finish<T>(sum[u], kFused ? load(residual + at) : Lanes{}, Mode{}));
        if (kFused) squares[u] += value * value;
      }
    }
    while (column < job.hidden) {
      const uint64_t left = job.hidden - column < kLanes ? job.hidden - column : kLanes;
      Lanes sum = load_some(inputs[0] + column, left);
      for (uint32_t g = 1; g < job.num_ranks; ++g) sum += load_some(inputs[g] + column, left);
      const Lanes value = store_some(
          out + column, finish<T>(sum, kFused ? load_some(residual + column, left) : Lanes{}, Mode{}), left);
      if (kFused) squares[0] += value * value;
      column += left;
    }
    if (kFused)
      normalise_row<T>(job, out, (squares[0] + squares[1]) + (squares[2] + squares[3]),
                       static_cast<T*>(job.norm_out) + r * job.hidden);
  }
}

template <class T>
void reduce_rows_of(const RowsJob& job, bool fused, bool twice) {
  if (!fused) return reduce_rows<T, SumOnly>(job);
  if (twice) return reduce_rows<T, FusedTwice>(job);
  return reduce_rows<T, FusedOnce>(job);
}

}  // namespace wbk
