// Weight matrices repacked so that sixteen output rows sit in sixteen lanes, and products with activation rows.
//
// Group g holds rows 16g..16g+15; along the columns it stores, per kind:
//   F32, F16   [column][16 rows]
//   Q8         [block of 32][8][16 rows][4 columns] bytes plus 128, then [block][16 rows] half scales
//   Q4         [block of 32]{ [4][16 rows][4] bytes, low nibble column 8i+j, high 8i+4+j; 16 half scales; 16 half minima }
// Each lane adds its own row's products in column order whatever the number of activation rows, so results are
// row-invariant by construction.
#pragma once

#include <cstdint>
#include <vector>

#include "buffer.h"
#include "simd.h"

namespace dragoman {

enum class Kind { kF32, kF16, kQ8, kQ4 };

struct Matrix {
  Kind kind = Kind::kF32;
  int rows = 0, cols = 0, groups = 0;
  size_t group_bytes = 0;
  Buffer<uint8_t> data;
  std::vector<float> bias;  // padded to whole groups, empty when there is none

  bool quantized() const { return kind == Kind::kQ8 || kind == Kind::kQ4; }
  const uint8_t* group(int g) const { return data.get() + g * group_bytes; }
};

constexpr int kBlock = 32;
constexpr size_t kQ4BlockBytes = 320;
constexpr size_t kQ8BlockBytes = 512;

// Rows of activations in both arithmetics. Integer parts: value = scale * q; `sum` = scale * sum(q) meets the
// weights' minima; `offset` = -128 * sum(q) undoes the stored bias of Q8.
struct Activations {
  int cols = 0, blocks = 0;
  Buffer<float> x;         // [num_rows, cols]
  Buffer<int8_t> q;        // [num_rows, cols]
  Buffer<float> scale;     // [num_rows, blocks]
  Buffer<float> sum;       // [num_rows, blocks]
  Buffer<int32_t> offset;  // [num_rows, blocks]

  Activations() = default;
  Activations(int rows, int columns) : cols(columns), blocks(columns / kBlock) {
    x = Buffer<float>(size_t(rows) * cols + 16);
    q = Buffer<int8_t>(size_t(rows) * cols + 16);
    scale = Buffer<float>(size_t(rows) * blocks);
    sum = Buffer<float>(size_t(rows) * blocks);
    offset = Buffer<int32_t>(size_t(rows) * blocks);
  }
  float* row(int t) const { return x.get() + size_t(t) * cols; }

  // Quantises one block of 32 to 8 bits around its largest magnitude. A block with a non-finite value gets a NaN
  // scale, so that the row, and only the row, turns NaN.
  void quantize_block(int t, int block, simd::F a, simd::F b) const {
    using namespace simd;
    const float top = max_lane(max(abs(a), abs(b)));
    const bool finite = all_finite(a) && all_finite(b);
    const size_t at = size_t(t) * blocks + block;
    const F inverse = splat(finite && top > 0 ? 127.0f / top : 0.0f);
    const F zero = splat(0.0f);
    const F qa = finite ? round(a * inverse) : zero, qb = finite ? round(b * inverse) : zero;
    int8_t* out = q.get() + size_t(t) * cols + block * kBlock;
    store_int8(out, qa);
    store_int8(out + 16, qb);
    const float total = simd::sum(qa + qb);
    scale[at] = finite ? top / 127.0f : __builtin_nanf("");
    sum[at] = scale[at] * total;
    offset[at] = -128 * static_cast<int32_t>(total);
  }
  void quantize_row(int t) const {
    for (int b = 0; b < blocks; ++b)
      quantize_block(t, b, simd::load(row(t) + b * kBlock), simd::load(row(t) + b * kBlock + 16));
  }
};

// out[t] = 16 rows of group g times activation rows first..first+T-1.
template <int T>
inline void product_q4(const Matrix& m, int g, const Activations& a, int first, simd::F* out) {
  using namespace simd;
  const uint8_t* w = m.group(g);
  const int8_t* q[T];
  for (int t = 0; t < T; ++t) {
    q[t] = a.q.get() + size_t(first + t) * a.cols;
    out[t] = splat(0.0f);
  }
  const float* scale = a.scale.get() + size_t(first) * a.blocks;
  const float* sum = a.sum.get() + size_t(first) * a.blocks;
  for (int b = 0; b < a.blocks; ++b, w += kQ4BlockBytes) {
    F dots[T];
    dot_q4<T>(w, q, b * kBlock, dots);
    const F d = load_half(reinterpret_cast<const uint16_t*>(w + 256));
    const F low = load_half(reinterpret_cast<const uint16_t*>(w + 288));
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      out[t] = fma(dots[t], d * splat(scale[t * a.blocks + b]), out[t]);
      out[t] = fma(low, splat(sum[t * a.blocks + b]), out[t]);
    }
  }
}

template <int T>
inline void product_q8(const Matrix& m, int g, const Activations& a, int first, simd::F* out) {
  using namespace simd;
  const uint8_t* w = m.group(g);
  const uint16_t* d = reinterpret_cast<const uint16_t*>(w + a.blocks * kQ8BlockBytes);
  const int8_t* q[T];
  for (int t = 0; t < T; ++t) {
    q[t] = a.q.get() + size_t(first + t) * a.cols;
    out[t] = splat(0.0f);
  }
  const float* scale = a.scale.get() + size_t(first) * a.blocks;
  const int32_t* offset = a.offset.get() + size_t(first) * a.blocks;
  for (int b = 0; b < a.blocks; ++b, w += kQ8BlockBytes) {
    int32_t offsets[T];
    for (int t = 0; t < T; ++t) offsets[t] = offset[t * a.blocks + b];
    F dots[T];
    dot_q8<T>(w, q, b * kBlock, offsets, dots);
    const F scales = load_half(d + 16 * b);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) out[t] = fma(dots[t], scales * splat(scale[t * a.blocks + b]), out[t]);
  }
}

// Calls use(k, weights of column k) for every column of a group, in order, in fp32.
template <class Use>
inline void each_column(const Matrix& m, int g, Use&& use) {
  using namespace simd;
  const uint8_t* w = m.group(g);
  if (m.kind == Kind::kF32) {
    for (int k = 0; k < m.cols; ++k) use(k, load(reinterpret_cast<const float*>(w) + 16 * k));
  } else if (m.kind == Kind::kF16) {
    for (int k = 0; k < m.cols; ++k) use(k, load_half(reinterpret_cast<const uint16_t*>(w) + 16 * k));
  } else if (m.kind == Kind::kQ4) {
    for (int b = 0; b < m.cols / kBlock; ++b, w += kQ4BlockBytes) {
      const F d = load_half(reinterpret_cast<const uint16_t*>(w + 256));
      const F low = load_half(reinterpret_cast<const uint16_t*>(w + 288));
      for (int i = 0; i < 4; ++i)
        for (int j = 0; j < 8; ++j)
          use(b * kBlock + 8 * i + j, fma(d, unpack_bits(w + 64 * i, 8 * (j % 4) + (j / 4) * 4, 15), low));
    }
  } else {
    const uint16_t* d = reinterpret_cast<const uint16_t*>(w + m.cols / kBlock * kQ8BlockBytes);
    for (int b = 0; b < m.cols / kBlock; ++b, w += kQ8BlockBytes) {
      const F scale = load_half(d + 16 * b);
      for (int i = 0; i < 8; ++i)
        for (int j = 0; j < 4; ++j)
          use(b * kBlock + 4 * i + j, scale * (unpack_bits(w + 64 * i, 8 * j, 255) - splat(128.0f)));
    }
  }
}

template <int T>
inline void product_float(const Matrix& m, int g, const Activations& a, int first, simd::F* out) {
  using namespace simd;
  const float* x = a.row(first);
  F acc[T];
  for (int t = 0; t < T; ++t) acc[t] = splat(0.0f);
  each_column(m, g, [&](int k, F w) {
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) acc[t] = fma(w, splat(x[size_t(t) * a.cols + k]), acc[t]);
  });
  for (int t = 0; t < T; ++t) out[t] = acc[t];
}

template <int T>
inline void product(const Matrix& m, int g, const Activations& a, int first, bool int8, simd::F* out) {
  if (int8 && m.kind == Kind::kQ4)
    product_q4<T>(m, g, a, first, out);
  else if (int8 && m.kind == Kind::kQ8)
    product_q8<T>(m, g, a, first, out);
  else
    product_float<T>(m, g, a, first, out);
  if (!m.bias.empty())
    for (int t = 0; t < T; ++t) out[t] = out[t] + simd::load(m.bias.data() + 16 * g);
}

// Splits `count` rows into tiles of compile-time height: tile(std::integral_constant<int, T>, first row).
template <class Tile>
inline void each_tile(int count, Tile&& tile) {
  int t = 0;
  for (; t + simd::kTokenTile <= count; t += simd::kTokenTile) tile(std::integral_constant<int, simd::kTokenTile>{}, t);
  if constexpr (simd::kTokenTile > 4)
    for (; t + 4 <= count; t += 4) tile(std::integral_constant<int, 4>{}, t);
  for (; t + 2 <= count; t += 2) tile(std::integral_constant<int, 2>{}, t);
  for (; t < count; ++t) tile(std::integral_constant<int, 1>{}, t);
}

// One row of a matrix in fp32, for embedding look-up: the same values each_column gives.
void read_row(const Matrix& m, int row, float* out);

// Repacks rows given in GGUF block layout. `dtype` is one of the codes in `api.h`.
Matrix pack(int dtype, int rows, int cols, const uint8_t* source);

}  // namespace dragoman
