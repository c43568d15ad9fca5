// Random operands of matrix products: how fast a card multiplies depends on the bits it is given (power). Standard normal
// values, as weights and activations are; int8 uniform. One 32-bit word a thread and round.
typedef unsigned int u32;
typedef unsigned long long u64;

static __device__ __forceinline__ u32 mix(u32 x) {  // a hash whose every output bit depends on every input bit
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x ^ (x >> 16);
}

// Two independent standard normal values of one index (Box and Muller).
static __device__ __forceinline__ float2 normal(u64 index, u32 seed) {
  const u32 key = mix((u32)index ^ mix((u32)(index >> 32) + seed));
  const float radius = sqrtf(-2.0f * __logf(((mix(key) >> 8) + 1u) * 0x1p-24f));
  float sine, cosine;
  __sincosf((mix(key ^ 0x9e3779b9u) >> 8) * (6.2831853f * 0x1p-24f), &sine, &cosine);
  return make_float2(radius * cosine, radius * sine);
}

#define FOR_EACH_WORD(i)                                                                \
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x)

extern "C" __global__ void random_bfloat16(u32* words, u64 count, u32 seed) {
  FOR_EACH_WORD(i) {
    const float2 v = normal(i, seed);
    // Round to nearest: half of what is cut off is added first.
    words[i] = ((__float_as_uint(v.x) + 0x8000u) >> 16) | ((__float_as_uint(v.y) + 0x8000u) & 0xffff0000u);
  }
}

extern "C" __global__ void random_float16(u32* words, u64 count, u32 seed) {
  FOR_EACH_WORD(i) {
    const float2 v = normal(i, seed);
    asm("{ .reg .b16 low, high; cvt.rn.f16.f32 low, %1; cvt.rn.f16.f32 high, %2; mov.b32 %0, {low, high}; }"
        : "=r"(words[i]) : "f"(v.x), "f"(v.y));
  }
}

// Four values (e4m3) a word; on a card that has none nothing is written.
extern "C" __global__ void random_float8(u32* words, u64 count, u32 seed) {
#if __CUDA_ARCH__ >= 890
  FOR_EACH_WORD(i) {
    const float2 a = normal(2 * i, seed), b = normal(2 * i + 1, seed);
    asm("{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, %2, %1; cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;"
        " mov.b32 %0, {low, high}; }"
        : "=r"(words[i]) : "f"(a.x), "f"(a.y), "f"(b.x), "f"(b.y));
  }
#endif
}

extern "C" __global__ void random_int8(u32* words, u64 count, u32 seed) {
  FOR_EACH_WORD(i) words[i] = mix((u32)i ^ mix((u32)(i >> 32) + seed));
}
