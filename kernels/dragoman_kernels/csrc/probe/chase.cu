// Latency of one load that depends on the one before: a thread follows a ring of pointers.
typedef unsigned int u32;
typedef unsigned long long u64;

// A ring over `count` (a power of two) nodes, `stride` bytes apart, in the order of a linear congruential sequence of full
// period (Hull and Dobell: increment odd, multiplier - 1 divisible by 4). A node holds the address of the next.
extern "C" __global__ void make_ring(char* base, u64 count, u64 stride) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) {
    const u64 next = (i * 1664525u + 1013904223u) & (count - 1);
    *(u64*)(base + i * stride) = (u64)(base + next * stride);
  }
}

// Follows `steps` pointers from `start`, past L1. The last one is stored, so that the next launch can go on from there.
extern "C" __global__ void chase(const char* start, u32 steps, u64* last) {
  u64 at = (u64)start;
#pragma unroll 8
  for (u32 i = 0; i < steps; i++) asm volatile("ld.global.cg.u64 %0, [%0];" : "+l"(at));
  *last = at;
}
