// AVX-512 lanes; integer dots through VNNI where the CPU has it.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace dragoman::simd {

constexpr const char* kName =
#ifdef __AVX512VNNI__
    "avx512-vnni";
#else
    "avx512";
#endif
constexpr int kTokenTile = 8;      // activation rows that share one unpacked weight block
constexpr int kAttentionRows = 6;  // query rows that share one read of K and V
constexpr int kScoreChunks = 4;   // runs of 16 keys scored together
constexpr int kDimTile = 4;       // runs of 16 output dimensions summed together

struct F {
  __m512 v;
};

inline F splat(float x) { return {_mm512_set1_ps(x)}; }
inline F load(const float* p) { return {_mm512_loadu_ps(p)}; }
inline void store(float* p, F x) { _mm512_storeu_ps(p, x.v); }
inline void store_partial(float* p, F x, int n) {
  _mm512_mask_storeu_ps(p, n >= 16 ? 0xffff : static_cast<__mmask16>((1u << n) - 1), x.v);
}
inline F load_half(const uint16_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
inline void store_half(uint16_t* p, F x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(x.v, _MM_FROUND_TO_NEAREST_INT));
}
inline float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
inline uint16_t float_to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

inline F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
inline F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
inline F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
inline F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
inline F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
inline F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
inline F abs(F a) { return {_mm512_abs_ps(a.v)}; }
inline F round(F a) { return {_mm512_roundscale_ps(a.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)}; }
inline F scale_by_power(F a, F n) { return {_mm512_scalef_ps(a.v, n.v)}; }
// The second operand of max/min is what comes back when either is NaN.
inline F clamp(F x, float low, float high) {
  return {_mm512_min_ps(_mm512_set1_ps(high), _mm512_max_ps(_mm512_set1_ps(low), x.v))};
}
inline F zero_below(F value, F x, float low) {
  return {_mm512_mask_mov_ps(value.v, _mm512_cmp_ps_mask(x.v, _mm512_set1_ps(low), _CMP_LT_OQ), _mm512_setzero_ps())};
}
inline F keep_first(F x, int n, float other) {
  if (n >= 16) return x;
  return {_mm512_mask_mov_ps(_mm512_set1_ps(other), static_cast<__mmask16>((1u << n) - 1), x.v)};
}
inline bool all_finite(F x) {
  return _mm512_cmp_ps_mask(_mm512_abs_ps(x.v), _mm512_set1_ps(__builtin_inff()), _CMP_LT_OQ) == 0xffff;
}
inline float sum(F x) {
  const __m256 a = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
inline float max_lane(F x) { return _mm512_reduce_max_ps(x.v); }
inline void store_int8(int8_t* p, F rounded) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(rounded.v)));
}
// ((32-bit lane >> shift) & mask) as a float.
inline F unpack_bits(const uint8_t* p, int shift, int mask) {
  const __m512i x = _mm512_srl_epi32(_mm512_loadu_si512(p), _mm_cvtsi32_si128(shift));
  return {_mm512_cvtepi32_ps(_mm512_and_si512(x, _mm512_set1_epi32(mask)))};
}

inline __m512i broadcast4(const int8_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return _mm512_set1_epi32(x);
}
// acc + dot of 4 unsigned weight bytes with 4 signed activation bytes, a 32-bit lane each.
inline __m512i dot4(__m512i acc, __m512i w, __m512i a) {
#ifdef __AVX512VNNI__
  return _mm512_dpbusd_epi32(acc, w, a);
#else
  // Bytes to 16 bits first: u8 x s8 pairs can exceed 16 bits when the weight is a full byte.
  const __m512i even = _mm512_madd_epi16(_mm512_and_si512(w, _mm512_set1_epi16(255)),
                                         _mm512_srai_epi16(_mm512_slli_epi16(a, 8), 8));
  const __m512i odd = _mm512_madd_epi16(_mm512_srli_epi16(w, 8), _mm512_srai_epi16(a, 8));
  return _mm512_add_epi32(acc, _mm512_add_epi32(even, odd));
#endif
}

// 16 rows x 32 columns of 4-bit weights with T rows of 32 int8 activations; out[t] holds the exact integers.
template <int T>
inline void dot_q4(const uint8_t* w, const int8_t* const* a, int at, F* out) {
  __m512i acc[T];
  for (int t = 0; t < T; ++t) acc[t] = _mm512_setzero_si512();
  const __m512i low = _mm512_set1_epi8(15);
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    const __m512i x = _mm512_loadu_si512(w + 64 * i);
    const __m512i lo = _mm512_and_si512(x, low);
    const __m512i hi = _mm512_and_si512(_mm512_srli_epi16(x, 4), low);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) {
      acc[t] = dot4(acc[t], lo, broadcast4(a[t] + at + 8 * i));
      acc[t] = dot4(acc[t], hi, broadcast4(a[t] + at + 8 * i + 4));
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) out[t].v = _mm512_cvtepi32_ps(acc[t]);
}

// The same for 8-bit weights stored plus 128; offset[t] = -128 * sum of the 32 activations undoes that.
template <int T>
inline void dot_q8(const uint8_t* w, const int8_t* const* a, int at, const int32_t* offset, F* out) {
  __m512i acc[T];
  for (int t = 0; t < T; ++t) acc[t] = _mm512_set1_epi32(offset[t]);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) {
    const __m512i x = _mm512_loadu_si512(w + 64 * i);
#pragma GCC unroll 16
    for (int t = 0; t < T; ++t) acc[t] = dot4(acc[t], x, broadcast4(a[t] + at + 4 * i));
  }
#pragma GCC unroll 16
  for (int t = 0; t < T; ++t) out[t].v = _mm512_cvtepi32_ps(acc[t]);
}

}  // namespace dragoman::simd
