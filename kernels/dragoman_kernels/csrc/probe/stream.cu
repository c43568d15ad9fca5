// Streams over device memory in 16-byte words: fill with a known sequence, read once, copy, read again and again.
// Sums are modulo 2^32, so that a stream that misses a word or reads one twice is found exactly.
typedef unsigned int u32;
typedef unsigned long long u64;

static __device__ __forceinline__ uint4 load_once(const uint4* at) {  // no line in L1: nothing is read twice
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}

static __device__ __forceinline__ uint4 load_l2(const uint4* at) {  // past L1, kept in L2
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(at));
  return v;
}

static __device__ __forceinline__ void store_streaming(uint4* at, uint4 v) {
  asm volatile("st.global.cs.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

// sums[blockIdx.x] = the block's total; every thread calls it.
static __device__ void store_sum(u32 total, u32* sums) {
  __shared__ u32 parts[32];
  for (int offset = 16; offset > 0; offset /= 2) total += __shfl_down_sync(~0u, total, offset);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = total;
  __syncthreads();
  if (threadIdx.x == 0) {
    total = 0;
    for (int warp = 0; warp < blockDim.x / 32; warp++) total += parts[warp];
    sums[blockIdx.x] = total;
  }
}

// words[i] = i * 2654435761 + seed.
extern "C" __global__ void fill(uint4* words, u64 count, u32 seed) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) {
    const u32 first = (u32)i * 4u * 2654435761u + seed;
    words[i] = make_uint4(first, first + 2654435761u, first + 2u * 2654435761u, first + 3u * 2654435761u);
  }
}

// `count` words in chunks of `chunk` (a multiple of DEPTH * blockDim.x); a block takes every gridDim.x-th chunk.
template <int DEPTH>
static __device__ __forceinline__ void read_chunks(const uint4* words, u64 count, u32 chunk, u32* sums) {
  u32 total = 0;
  for (u64 start = (u64)blockIdx.x * chunk; start < count; start += (u64)gridDim.x * chunk) {
    for (u32 i = threadIdx.x; i < chunk; i += DEPTH * blockDim.x) {
      uint4 v[DEPTH];
#pragma unroll
      for (int d = 0; d < DEPTH; d++) v[d] = load_once(words + start + i + d * blockDim.x);
#pragma unroll
      for (int d = 0; d < DEPTH; d++) total += v[d].x + v[d].y + v[d].z + v[d].w;
    }
  }
  store_sum(total, sums);
}

template <int DEPTH>
static __device__ __forceinline__ void copy_chunks(const uint4* words, uint4* target, u64 count, u32 chunk) {
  for (u64 start = (u64)blockIdx.x * chunk; start < count; start += (u64)gridDim.x * chunk) {
    for (u32 i = threadIdx.x; i < chunk; i += DEPTH * blockDim.x) {
      uint4 v[DEPTH];
#pragma unroll
      for (int d = 0; d < DEPTH; d++) v[d] = load_once(words + start + i + d * blockDim.x);
#pragma unroll
      for (int d = 0; d < DEPTH; d++) store_streaming(target + start + i + d * blockDim.x, v[d]);
    }
  }
}

// The launch bounds let the compiler keep all DEPTH words in registers; aiming at full occupancy it would load in turns.
#define STREAMS(DEPTH)                                                                                            \
  extern "C" __global__ void __launch_bounds__(1024, 1) read_##DEPTH(const uint4* words, u64 count, u32 chunk, u32* sums) {                  \
    read_chunks<DEPTH>(words, count, chunk, sums);                                                                \
  }                                                                                                               \
  extern "C" __global__ void __launch_bounds__(1024, 1) copy_##DEPTH(const uint4* words, uint4* target, u64 count, u32 chunk) {              \
    copy_chunks<DEPTH>(words, target, count, chunk);                                                              \
  }
STREAMS(1)
STREAMS(2)
STREAMS(4)
STREAMS(8)

// Reads all words `passes` times. A block takes other chunks in each pass, so that no multiprocessor keeps to the part of
// L2 that is near to it.
extern "C" __global__ void __launch_bounds__(1024, 1) reread(const uint4* words, u64 count, u32 passes, u32* sums) {
  const u32 chunk = 4 * blockDim.x;
  u32 total = 0;
  for (u32 pass = 0; pass < passes; pass++) {
    const u32 block = (blockIdx.x + pass * 37) % gridDim.x;
    for (u64 start = (u64)block * chunk; start < count; start += (u64)gridDim.x * chunk) {
      const uint4* at = words + start + threadIdx.x;
      uint4 v[4];
#pragma unroll
      for (int d = 0; d < 4; d++) v[d] = load_l2(at + d * blockDim.x);
#pragma unroll
      for (int d = 0; d < 4; d++) total += v[d].x + v[d].y + v[d].z + v[d].w;
    }
  }
  store_sum(total, sums);
}
