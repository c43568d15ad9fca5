// Sixteen float lanes and the two integer block dot products, for the widest instruction set the build targets.
//
// Every function is lane-wise or reduces in a fixed order, and fused multiply-add is only ever asked for by name
// (the build turns contraction off), so a result never depends on which caller inlined it.
#pragma once

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
#include "simd/avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "simd/avx2.h"
#else
#include "simd/generic.h"
#endif

namespace dragoman::simd {

// e^x. Range reduction by log 2 split in two parts and a degree-6 polynomial (coefficients of Cephes expf,
// relative error about 2e-7). Below -87.3 the result is exactly 0, above 88 it saturates; NaN stays NaN.
inline F exp(F x) {
  const F kept = clamp(x, -87.4f, 88.0f);
  const F n = round(kept * splat(1.44269504088896341f));
  F r = fma(n, splat(-0.693359375f), kept);
  r = fma(n, splat(2.12194440e-4f), r);
  F p = splat(1.9875691500e-4f);
  p = fma(p, r, splat(1.3981999507e-3f));
  p = fma(p, r, splat(8.3334519073e-3f));
  p = fma(p, r, splat(4.1665795894e-2f));
  p = fma(p, r, splat(1.6666665459e-1f));
  p = fma(p, r, splat(5.0000001201e-1f));
  p = fma(p, r * r, r) + splat(1.0f);
  return zero_below(scale_by_power(p, n), x, -87.3f);
}

}  // namespace dragoman::simd
