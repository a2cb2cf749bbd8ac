// The arithmetic: sum rows over the ranks, then either round, or add the residual and normalise.
//
//   sum          = ((x_0 + x_1) + x_2) ...                                fp32, group-rank order
//   residual_out = T(sum + residual), or T(fp32(T(sum)) + residual) for FusedTwice
//   norm_out     = T(residual_out * (1 / sqrt(mean(residual_out^2) + eps)) * (weight_bias + weight))
//
// A row is read once from every rank; its norm is taken while residual_out is still in the nearest cache. The result of an
// element depends only on its column, never on alignment or on which rank computes: all ranks get equal bits.
// Bytes per row and rank: reads (num_ranks + 1) rows and the weight, writes 2 rows (SumOnly: reads num_ranks, writes 1).
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
  void* residual_out;  // SumOnly: the rounded sum
  void* norm_out;
  float eps;
  float weight_bias;
};

struct SumOnly {};
struct FusedOnce {};
struct FusedTwice {};

template <class Mode>
constexpr bool kFused = true;
template <>
constexpr bool kFused<SumOnly> = false;

template <class T>
WBK_INLINE Block finish(Block sum, Block, SumOnly) { return sum; }
template <class T>
WBK_INLINE Block finish(Block sum, Block residual, FusedOnce) { return sum + residual; }
template <class T>
WBK_INLINE Block finish(Block sum, Block residual, FusedTwice) { return rounded<T>(sum) + residual; }

inline float sum_of_lanes(Block x) {
  const Lanes both = x.a + x.b;
  float parts[4] = {};
  for (int i = 0; i < kLanes; i += 4)
    for (int j = 0; j < 4; ++j) parts[j] += both[i + j];
  return (parts[0] + parts[1]) + (parts[2] + parts[3]);
}

// One row: the sum (plus residual) into out. Gives back the sum of its squares, by lane.
template <class T, class Mode>
inline Block reduce_row(const T* const* inputs, uint32_t num_ranks, uint64_t hidden, const T* residual, T* out) {
  Block squares[2] = {};
  uint64_t column = 0;
  for (; column + 2 * kBlock <= hidden; column += 2 * kBlock) {
    Block sum[2] = {load(inputs[0] + column), load(inputs[0] + column + kBlock)};
#pragma GCC unroll 1
    for (uint32_t g = 1; g < num_ranks; ++g) {
      sum[0] = sum[0] + load(inputs[g] + column);
      sum[1] = sum[1] + load(inputs[g] + column + kBlock);
    }
    for (int u = 0; u < 2; ++u) {
      const uint64_t at = column + u * kBlock;
      const Block value = store(out + at, finish<T>(sum[u], kFused<Mode> ? load(residual + at) : Block{}, Mode{}));
      if (kFused<Mode>) squares[u] = squares[u] + value * value;
    }
  }
  while (column < hidden) {
    const uint64_t left = hidden - column < kBlock ? hidden - column : kBlock;
    Block sum = load_some(inputs[0] + column, left);
    for (uint32_t g = 1; g < num_ranks; ++g) sum = sum + load_some(inputs[g] + column, left);
    const Block other = kFused<Mode> ? load_some(residual + column, left) : Block{};
    const Block value = store_some(out + column, finish<T>(sum, other, Mode{}), left);
    if (kFused<Mode>) squares[0] = squares[0] + value * value;
    column += left;
  }
  return squares[0] + squares[1];
}

template <class T>
inline void normalise_row(const T* row, const T* weight, uint64_t hidden, float mean_square, float eps,
                          float weight_bias, T* norm) {
  const Block scale = splat(1.0f / std::sqrt(mean_square + eps));
  const Block bias = splat(weight_bias);
  uint64_t column = 0;
  for (; column + kBlock <= hidden; column += kBlock)
    store(norm + column, load(row + column) * scale * (bias + load(weight + column)));
  if (const uint64_t left = hidden - column)
    store_some(norm + column, load_some(row + column, left) * scale * (bias + load_some(weight + column, left)), left);
}

template <class T, class Mode>
void reduce_rows(const RowsJob& job) {
  const uint64_t hidden = job.hidden;
  for (uint64_t row = 0; row < job.num_rows; ++row) {
    const uint64_t first = row * hidden;
    const T* inputs[16];
    for (uint32_t g = 0; g < job.num_ranks; ++g) inputs[g] = static_cast<const T*>(job.inputs[g]) + first;
    const T* residual = kFused<Mode> ? static_cast<const T*>(job.residual) + first : nullptr;
    T* out = static_cast<T*>(job.residual_out) + first;
    const Block squares = reduce_row<T, Mode>(inputs, job.num_ranks, hidden, residual, out);
    if (kFused<Mode>)
      normalise_row(out, static_cast<const T*>(job.weight), hidden,
                    sum_of_lanes(squares) / static_cast<float>(hidden), job.eps, job.weight_bias,
                    static_cast<T*>(job.norm_out) + first);
  }
}

template <class T>
void reduce_rows_of(const RowsJob& job, bool fused, bool twice) {
  if (!fused) return reduce_rows<T, SumOnly>(job);
  if (twice) return reduce_rows<T, FusedTwice>(job);
  return reduce_rows<T, FusedOnce>(job);
}

}  // namespace wbk
