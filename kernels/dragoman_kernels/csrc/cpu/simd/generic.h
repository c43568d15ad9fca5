// Plain C++ lanes for any CPU; loops of sixteen that a compiler can vectorise.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace dragoman::simd {

constexpr const char* kName = "generic";
constexpr int kTokenTile = 4;
constexpr int kAttentionRows = 3;
constexpr int kScoreChunks = 1;   // runs of 16 keys scored together
constexpr int kDimTile = 2;       // runs of 16 output dimensions summed together

struct F {
  float v[16];
};

template <class Fn>
inline F each(Fn fn) {
  F out;
  for (int i = 0; i < 16; ++i) out.v[i] = fn(i);
  return out;
}

inline F splat(float x) {
  return each([&](int) { return x; });
}
inline F load(const float* p) {
  return each([&](int i) { return p[i]; });
}
inline void store(float* p, F x) { std::memcpy(p, x.v, sizeof x.v); }
inline void store_partial(float* p, F x, int n) { std::memcpy(p, x.v, sizeof(float) * (n < 16 ? n : 16)); }

// IEEE 754 binary16, subnormals, infinities and NaN included.
inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16, exponent = (h >> 10) & 31u, fraction = h & 1023u;
  if (exponent == 0) {
    const float value = std::ldexp(static_cast<float>(fraction), -24);
    return sign ? -value : value;
  }
  const uint32_t bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | (fraction << 13);
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}
// Rounds to nearest, ties to even.
inline uint16_t float_to_half(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7e00u;
  if (magnitude >= 0x47800000u) return sign | 0x7c00u;
  if (magnitude < 0x38800000u) {
    const float value = std::ldexp(std::fabs(x), 24);
    return sign | static_cast<uint16_t>(std::nearbyint(value));
  }
  const uint32_t rebased = magnitude - 0x38000000u;
  return sign | static_cast<uint16_t>((rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13);
}
inline F load_half(const uint16_t* p) {
  return each([&](int i) { return half_to_float(p[i]); });
}
inline void store_half(uint16_t* p, F x) {
  for (int i = 0; i < 16; ++i) p[i] = float_to_half(x.v[i]);
}

inline F operator+(F a, F b) {
  return each([&](int i) { return a.v[i] + b.v[i]; });
}
inline F operator-(F a, F b) {
  return each([&](int i) { return a.v[i] - b.v[i]; });
}
inline F operator*(F a, F b) {
  return each([&](int i) { return a.v[i] * b.v[i]; });
}
inline F operator/(F a, F b) {
  return each([&](int i) { return a.v[i] / b.v[i]; });
}
#ifdef __FP_FAST_FMAF
inline F fma(F a, F b, F c) {
  return each([&](int i) { return std::fma(a.v[i], b.v[i], c.v[i]); });
}
#else
inline F fma(F a, F b, F c) {
  return each([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
#endif
inline F max(F a, F b) {
  return each([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
inline F abs(F a) {
  return each([&](int i) { return std::fabs(a.v[i]); });
}
inline F round(F a) {
  return each([&](int i) { return std::nearbyint(a.v[i]); });
}
inline F scale_by_power(F a, F n) {
  return each([&](int i) { return n.v[i] == n.v[i] ? std::ldexp(a.v[i], static_cast<int>(n.v[i])) : n.v[i]; });
}
inline F clamp(F x, float low, float high) {
  return each([&](int i) { return low > x.v[i] ? low : (high < x.v[i] ? high : x.v[i]); });
}
inline F zero_below(F value, F x, float low) {
  return each([&](int i) { return x.v[i] < low ? 0.0f : value.v[i]; });
}
inline F keep_first(F x, int n, float other) {
  return each([&](int i) { return i < n ? x.v[i] : other; });
}
inline bool all_finite(F x) {
  bool finite = true;
  for (int i = 0; i < 16; ++i) finite &= std::isfinite(x.v[i]);
  return finite;
}
inline float sum(F x) {
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) x.v[i] += x.v[i + width];
  return x.v[0];
}
inline float max_lane(F x) {
  float out = x.v[0];
  for (int i = 1; i < 16; ++i) out = x.v[i] > out ? x.v[i] : out;
  return out;
}
inline void store_int8(int8_t* p, F rounded) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(rounded.v[i]);
}
inline F unpack_bits(const uint8_t* p, int shift, int mask) {
  return each([&](int i) {
    return static_cast<float>((p[4 * i + shift / 8] >> (shift % 8)) & mask);
  });
}

template <int T>
inline void dot_q4(const uint8_t* w, const int8_t* const* a, int at, F* out) {
  for (int t = 0; t < T; ++t) {
    int32_t acc[16] = {};
    for (int i = 0; i < 4; ++i)
      for (int j = 0; j < 4; ++j)
        for (int row = 0; row < 16; ++row) {
          const int x = w[64 * i + 4 * row + j];
          acc[row] += (x & 15) * a[t][at + 8 * i + j] + (x >> 4) * a[t][at + 8 * i + 4 + j];
        }
    out[t] = each([&](int i) { return static_cast<float>(acc[i]); });
  }
}

template <int T>
inline void dot_q8(const uint8_t* w, const int8_t* const* a, int at, const int32_t* offset, F* out) {
  for (int t = 0; t < T; ++t) {
    int32_t acc[16];
    for (int row = 0; row < 16; ++row) acc[row] = offset[t];
    for (int i = 0; i < 8; ++i)
      for (int j = 0; j < 4; ++j)
        for (int row = 0; row < 16; ++row) acc[row] += w[64 * i + 4 * row + j] * a[t][at + 4 * i + j];
    out[t] = each([&](int i) { return static_cast<float>(acc[i]); });
  }
}

}  // namespace dragoman::simd
