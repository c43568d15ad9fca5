// Causal attention of a few query rows over one sequence's pages, with an online softmax.
//
// The context is taken in blocks of 64 absolute positions, whatever the page size or the batch, and every row does
// its own arithmetic in the same order whichever rows share the loads: results are row-invariant.
// Keys lie [dim][token] inside a page so that sixteen tokens are sixteen lanes; values lie [token][dim].
// Formulas: Milakov and Gimelshein, "Online normalizer calculation for softmax", arXiv 1805.02867.
#pragma once

#include <algorithm>
#include <cstdint>

#include "simd.h"

namespace dragoman {

inline simd::F load_cached(const float* p) { return simd::load(p); }
inline simd::F load_cached(const uint16_t* p) { return simd::load_half(p); }
inline void store_cached(float* p, float x) { *p = x; }
inline void store_cached(uint16_t* p, float x) { *p = simd::float_to_half(x); }

constexpr int kContextBlock = 64;
constexpr int kMaxHeadDim = 256;

template <class KV>
struct Pages {
  const KV* keys;    // this layer's, moved to one kv head
  const KV* values;
  const int32_t* block_table;
  int page_size, head_dim;
  size_t page_stride;

  // Sixteen tokens from an absolute position that is a multiple of sixteen.
  const KV* key_chunk(int position) const {
    return keys + block_table[position / page_size] * page_stride + position % page_size;
  }
  const KV* value_chunk(int position) const {
    return values + block_table[position / page_size] * page_stride + size_t(position % page_size) * head_dim;
  }
};

template <class KV, int R, int C>
inline void score(const Pages<KV>& pages, const float* const* q, int position, float (*out)[kContextBlock]) {
  using namespace simd;
  const KV* keys[C];
  F s[R][C];
  for (int c = 0; c < C; ++c) keys[c] = pages.key_chunk(position + 16 * c);
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) s[r][c] = splat(0.0f);
  for (int d = 0; d < pages.head_dim; ++d) {
    F k[C];
#pragma GCC unroll 4
    for (int c = 0; c < C; ++c) k[c] = load_cached(keys[c] + size_t(d) * pages.page_size);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F query = splat(q[r][d]);
#pragma GCC unroll 4
      for (int c = 0; c < C; ++c) s[r][c] = fma(query, k[c], s[r][c]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < C; ++c) store(out[r] + position % kContextBlock + 16 * c, s[r][c]);
}

// acc[r][dims] += p[r][t] * V[t][dims] for t in [0, count[r]), D runs of 16 dimensions from `dim`. Tokens past a
// row's own count are never touched: a stale NaN there must not reach it.
template <class KV, int R, int D>
inline void weigh(const KV* const* chunks, int head_dim, int dim, const float (*p)[kContextBlock], const int* count,
                  float (*acc)[kMaxHeadDim]) {
  using namespace simd;
  F sums[R][D];
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < D; ++i) sums[r][i] = load(acc[r] + dim + 16 * i);
  const int shared = *std::min_element(count, count + R);
  for (int t = 0; t < shared; ++t) {
    const KV* row = chunks[t / 16] + size_t(t % 16) * head_dim + dim;
    F v[D];
#pragma GCC unroll 4
    for (int i = 0; i < D; ++i) v[i] = load_cached(row + 16 * i);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F weight = splat(p[r][t]);
#pragma GCC unroll 4
      for (int i = 0; i < D; ++i) sums[r][i] = fma(weight, v[i], sums[r][i]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    for (int t = shared; t < count[r]; ++t) {
      const KV* row = chunks[t / 16] + size_t(t % 16) * head_dim + dim;
#pragma GCC unroll 4
      for (int i = 0; i < D; ++i) sums[r][i] = fma(splat(p[r][t]), load_cached(row + 16 * i), sums[r][i]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int i = 0; i < D; ++i) store(acc[r] + dim + 16 * i, sums[r][i]);
}

// One row's softmax over a block: scores in, weights out; keeps the running maximum and lane-wise denominators.
inline void renormalize(float* scores, int count, int head_dim, float& top, float* denominators, float* acc) {
  using namespace simd;
  const int chunks = (count + 15) / 16;
  F best = splat(-__builtin_inff());
  for (int c = 0; c < chunks; ++c) {
    const F s = keep_first(load(scores + 16 * c), count - 16 * c, -__builtin_inff());
    store(scores + 16 * c, s);
    best = max(best, s);
  }
  const float new_top = std::max(top, max_lane(best));
  const F shift = splat(new_top), correction = exp(splat(top - new_top));
  F total = load(denominators) * correction;
  for (int c = 0; c < chunks; ++c) {
    const F weight = exp(load(scores + 16 * c) - shift);
    store(scores + 16 * c, weight);
    total = total + weight;
  }
  store(denominators, total);
  for (int d = 0; d < head_dim; d += 16) store(acc + d, load(acc + d) * correction);
  top = new_top;
}

// out[r][0:head_dim] = softmax(q[r] . K) V over positions 0..position[r]; q is already scaled.
template <class KV, int R>
void attend(const Pages<KV>& pages, const float* const* q, const int* position, float* const* out) {
  using namespace simd;
  alignas(64) float scores[R][kContextBlock], acc[R][kMaxHeadDim], denominators[R][16];
  float top[R];
  for (int r = 0; r < R; ++r) {
    top[r] = -__builtin_inff();
    store(denominators[r], splat(0.0f));
    for (int d = 0; d < pages.head_dim; d += 16) store(acc[r] + d, splat(0.0f));
  }
  const int length = *std::max_element(position, position + R) + 1;
  for (int base = 0; base < length; base += kContextBlock) {
    const int chunks = (std::min(length - base, kContextBlock) + 15) / 16;
    const KV* values[kContextBlock / 16];
    for (int c = 0; c < chunks; ++c) values[c] = pages.value_chunk(base + 16 * c);
    int c = 0;
    for (; c + kScoreChunks <= chunks; c += kScoreChunks)
      score<KV, R, kScoreChunks>(pages, q, base + 16 * c, scores);
    for (; c < chunks; ++c) score<KV, R, 1>(pages, q, base + 16 * c, scores);
    int count[R];
    for (int r = 0; r < R; ++r) {
      count[r] = std::clamp(position[r] + 1 - base, 0, kContextBlock);
      if (count[r] > 0) renormalize(scores[r], count[r], pages.head_dim, top[r], denominators[r], acc[r]);
    }
    int dim = 0;
    for (; dim + 16 * kDimTile <= pages.head_dim; dim += 16 * kDimTile)
      weigh<KV, R, kDimTile>(values, pages.head_dim, dim, scores, count, acc);
    for (; dim < pages.head_dim; dim += 16) weigh<KV, R, 1>(values, pages.head_dim, dim, scores, count, acc);
  }
  for (int r = 0; r < R; ++r) {
    const F inverse = splat(1.0f / simd::sum(load(denominators[r])));
    for (int d = 0; d < pages.head_dim; d += 16) store(out[r] + d, load(acc[r] + d) * inverse);
  }
}

// attend() for a height known only at run time, 1..kAttentionRows.
template <class KV, int R = simd::kAttentionRows>
void attend_rows(int rows, const Pages<KV>& pages, const float* const* q, const int* position, float* const* out) {
  if (rows == R)
    attend<KV, R>(pages, q, position, out);
  else if constexpr (R > 1)
    attend_rows<KV, R - 1>(rows, pages, q, position, out);
}

}  // namespace dragoman
