// AVX2 lanes (two halves of eight); integer dots through AVX-VNNI where the CPU has it.
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace dragoman::simd {

constexpr const char* kName =
#ifdef __AVXVNNI__
    "avx2-vnni";
#else
    "avx2";
#endif
constexpr int kTokenTile = 4;
constexpr int kAttentionRows = 3;
constexpr int kScoreChunks = 1;   // runs of 16 keys scored together
constexpr int kDimTile = 2;       // runs of 16 output dimensions summed together

struct F {
  __m256 a, b;
};

inline F splat(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void store(float* p, F x) {
  _mm256_storeu_ps(p, x.a);
  _mm256_storeu_ps(p + 8, x.b);
}
inline void store_partial(float* p, F x, int n) {
  float lanes[16];
  store(lanes, x);
  std::memcpy(p, lanes, sizeof(float) * (n < 16 ? n : 16));
}
inline F load_half(const uint16_t* p) {
  return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline void store_half(uint16_t* p, F x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(x.a, _MM_FROUND_TO_NEAREST_INT));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), _mm256_cvtps_ph(x.b, _MM_FROUND_TO_NEAREST_INT));
}
inline float half_to_float(uint16_t h) { return _cvtsh_ss(h); }
inline uint16_t float_to_half(float x) { return _cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT); }

inline F operator+(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
inline F operator-(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
inline F operator*(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
inline F operator/(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
inline F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
inline F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
inline F abs(F x) {
  const __m256 sign = _mm256_set1_ps(-0.0f);
  return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
inline F round(F x) {
  constexpr int mode = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(x.a, mode), _mm256_round_ps(x.b, mode)};
}
inline __m256 scale_half(__m256 x, __m256 n) {
  const __m256i e = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(x, _mm256_castsi256_ps(e));
}
inline F scale_by_power(F x, F n) { return {scale_half(x.a, n.a), scale_half(x.b, n.b)}; }
// The second operand of max/min is what comes back when either is NaN.
inline F clamp(F x, float low, float high) {
  const __m256 lo = _mm256_set1_ps(low), hi = _mm256_set1_ps(high);
  return {_mm256_min_ps(hi, _mm256_max_ps(lo, x.a)), _mm256_min_ps(hi, _mm256_max_ps(lo, x.b))};
}
inline F zero_below(F value, F x, float low) {
  const __m256 lo = _mm256_set1_ps(low);
  return {_mm256_andnot_ps(_mm256_cmp_ps(x.a, lo, _CMP_LT_OQ), value.a),
          _mm256_andnot_ps(_mm256_cmp_ps(x.b, lo, _CMP_LT_OQ), value.b)};
}
inline F keep_first(F x, int n, float other) {
  if (n >= 16) return x;
  const __m256i count = _mm256_set1_epi32(n), lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  const __m256 fill = _mm256_set1_ps(other);
  const __m256i high = _mm256_add_epi32(lane, _mm256_set1_epi32(8));
  return {_mm256_blendv_ps(fill, x.a, _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, lane))),
          _mm256_blendv_ps(fill, x.b, _mm256_castsi256_ps(_mm256_cmpgt_epi32(count, high)))};
}
inline bool all_finite(F x) {
  const F y = abs(x);
  const __m256 inf = _mm256_set1_ps(__builtin_inff());
  return _mm256_movemask_ps(
             _mm256_and_ps(_mm256_cmp_ps(y.a, inf, _CMP_LT_OQ), _mm256_cmp_ps(y.b, inf, _CMP_LT_OQ))) == 0xff;
}
inline float sum(F x) {
  const __m256 a = _mm256_add_ps(x.a, x.b);
  __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_add_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
}
inline float max_lane(F x) {
  const __m256 a = _mm256_max_ps(x.a, x.b);
  __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  b = _mm_max_ps(b, _mm_movehl_ps(b, b));
  return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
}
inline void store_int8(int8_t* p, F rounded) {
  const __m256i x = _mm256_packs_epi32(_mm256_cvtps_epi32(rounded.a), _mm256_cvtps_epi32(rounded.b));
  const __m256i y = _mm256_permute4x64_epi64(x, 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi16(_mm256_castsi256_si128(y), _mm256_extracti128_si256(y, 1)));
}
inline __m256 unpack_half(const uint8_t* p, int shift, int mask) {
  const __m256i x = _mm256_srl_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), _mm_cvtsi32_si128(shift));
  return _mm256_cvtepi32_ps(_mm256_and_si256(x, _mm256_set1_epi32(mask)));
}
inline F unpack_bits(const uint8_t* p, int shift, int mask) {
  return {unpack_half(p, shift, mask), unpack_half(p + 32, shift, mask)};
}

inline __m256i load_bytes(const uint8_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
inline __m256i broadcast4(const int8_t* p) {
  int32_t x;
  std::memcpy(&x, p, 4);
  return _mm256_set1_epi32(x);
}

template <int T>
inline void dot_q4(const uint8_t* w, const int8_t* const* a, int at, F* out) {
  const __m256i low = _mm256_set1_epi8(15);
  for (int half = 0; half < 2; ++half) {
    __m256i acc[T];
    for (int t = 0; t < T; ++t) acc[t] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m256i x = load_bytes(w + 64 * i + 32 * half);
      const __m256i lo = _mm256_and_si256(x, low);
      const __m256i hi = _mm256_and_si256(_mm256_srli_epi16(x, 4), low);
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) {
        const __m256i a_lo = broadcast4(a[t] + at + 8 * i), a_hi = broadcast4(a[t] + at + 8 * i + 4);
#ifdef __AVXVNNI__
        acc[t] = _mm256_dpbusd_avx_epi32(_mm256_dpbusd_avx_epi32(acc[t], lo, a_lo), hi, a_hi);
#else
        // 16-bit sums: 8 pairs of at most 2 * 15 * 127 stay below 32767.
        acc[t] = _mm256_add_epi16(acc[t], _mm256_maddubs_epi16(lo, a_lo));
        acc[t] = _mm256_add_epi16(acc[t], _mm256_maddubs_epi16(hi, a_hi));
#endif
      }
    }
    for (int t = 0; t < T; ++t) {
#ifndef __AVXVNNI__
      acc[t] = _mm256_madd_epi16(acc[t], _mm256_set1_epi16(1));
#endif
      (half ? out[t].b : out[t].a) = _mm256_cvtepi32_ps(acc[t]);
    }
  }
}

template <int T>
inline void dot_q8(const uint8_t* w, const int8_t* const* a, int at, const int32_t* offset, F* out) {
  for (int half = 0; half < 2; ++half) {
    __m256i acc[T];
#ifdef __AVXVNNI__
    for (int t = 0; t < T; ++t) acc[t] = _mm256_set1_epi32(offset[t]);
#else
    (void)offset;
    for (int t = 0; t < T; ++t) acc[t] = _mm256_setzero_si256();
#endif
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      const __m256i x = load_bytes(w + 64 * i + 32 * half);
#ifndef __AVXVNNI__
      const __m256i s = _mm256_xor_si256(x, _mm256_set1_epi8(-128));
      const __m256i magnitude = _mm256_abs_epi8(s);
#endif
#pragma GCC unroll 16
      for (int t = 0; t < T; ++t) {
        const __m256i y = broadcast4(a[t] + at + 4 * i);
#ifdef __AVXVNNI__
        acc[t] = _mm256_dpbusd_avx_epi32(acc[t], x, y);
#else
        // |w| x (a with w's sign): pairs of at most 2 * 128 * 127 fit 16 bits.
        const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(y, s));
        acc[t] = _mm256_add_epi32(acc[t], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
      }
    }
    for (int t = 0; t < T; ++t) (half ? out[t].b : out[t].a) = _mm256_cvtepi32_ps(acc[t]);
  }
}

}  // namespace dragoman::simd
