// What starting, ordering and synchronising kernels costs, without any work in them.
typedef unsigned int u32;
typedef unsigned long long u64;

static __device__ __forceinline__ u64 nanoseconds() {
  u64 now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

extern "C" __global__ void empty() {}

// Starts while its predecessor in the stream still runs, and waits for it before it would touch memory.
extern "C" __global__ void empty_dependent() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Holds the stream until the host writes flag[0], so that what is queued behind runs without waiting for the host.
// flag[1] = 1 where the host took longer than `timeout` nanoseconds.
extern "C" __global__ void hold(volatile u32* flag, u64 timeout) {
  const u64 start = nanoseconds();
  while (flag[0] == 0) {
    if (nanoseconds() - start > timeout) {
      flag[1] = 1;
      break;
    }
  }
}

// Busy for `duration` nanoseconds: raises the clocks.
extern "C" __global__ void spin(u64 duration) {
  const u64 start = nanoseconds();
  while (nanoseconds() - start < duration) {
  }
}

static __device__ __forceinline__ u32 load_acquire(const u32* at) {
  u32 value;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(at) : "memory");
  return value;
}

// Where `seen` [gridDim.x] is given, each block publishes its round and counts in *errors a neighbour that is behind.
static __device__ __forceinline__ void publish(u32* seen, u32 round) {
  if (seen != nullptr) ((volatile u32*)seen)[blockIdx.x] = round;
}

static __device__ __forceinline__ void inspect(u32* seen, u32* errors, u32 round) {
  if (seen != nullptr && ((volatile u32*)seen)[(blockIdx.x + 1) % gridDim.x] < round) atomicAdd(errors, 1);
}

// All blocks count on one word and wait on it. *counter starts at 0 and only grows.
extern "C" __global__ void barrier_counter(u32* counter, u32 rounds, u32* seen, u32* errors) {
  for (u32 round = 1; round <= rounds; round++) {
    if (threadIdx.x == 0) publish(seen, round);
    __syncthreads();
    if (threadIdx.x == 0) {
      asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
      while (load_acquire(counter) < round * gridDim.x) {
      }
      inspect(seen, errors, round);
    }
    __syncthreads();
  }
}

// The last block to count writes a flag on a line of its own, on which the others wait.
extern "C" __global__ void barrier_flag(u32* counter, u32 rounds, u32* seen, u32* errors) {
  u32* flag = counter + 64;
  for (u32 round = 1; round <= rounds; round++) {
    if (threadIdx.x == 0) publish(seen, round);
    __syncthreads();
    if (threadIdx.x == 0) {
      u32 before;
      asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
      if (before == round * gridDim.x - 1) {
        asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(flag), "r"(round) : "memory");
      } else {
        while (load_acquire(flag) < round) {
        }
      }
      inspect(seen, errors, round);
    }
    __syncthreads();
  }
}
