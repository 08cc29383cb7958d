// What all device code shares: bf16 vectors, memory accesses, reductions, and programmatic dependent launch.
//
// The one rule: what an earlier kernel of the stream may have written is read (and what it may read is written) only
// after pdl_wait(), and every thread of every kernel calls pdl_wait(). Weights, norms and tables may be loaded before.
#ifndef TL_CUDA_DEVICE_CUH
#define TL_CUDA_DEVICE_CUH

#include <cuda_bf16.h>

#include <cstdint>

namespace tl::cuda {

using bf16 = __nv_bfloat16;

constexpr int kWarp = 32;          // threads
constexpr int kVector = 8;         // bf16 values in one 16-byte access
constexpr int kPageTokens = 16;    // TL_PAGE_TOKENS
constexpr unsigned kAllLanes = ~0u;

// Until every earlier kernel has ended and its writes are visible. No effect in a launch without the PDL attribute.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may be put on free multiprocessors once every block has called this or ended. Says nothing about
// memory: the next kernel's pdl_wait() does, and so it is safe at any place. After this kernel's own pdl_wait() it keeps
// the overlap to two kernels.
__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// 16 bytes that an earlier kernel may have written. Never moved across pdl_wait(), to either side; never by the read-only
// path, whose contract (nobody writes while this kernel lives) does not hold for a kernel that started early.
__device__ __forceinline__ uint4 load16(const void *address) {
  uint4 v;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address)
               : "memory");
  return v;
}

// A 4-byte integer that an earlier kernel may have written.
__device__ __forceinline__ int32_t load_int(const int32_t *address) {
  int32_t v;
  asm volatile("ld.global.s32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
  return v;
}

// 16 bytes that nothing ever writes and that many blocks read: norms, biases, tables. The assembler may move this below
// a pdl_wait(): what is to be asked for before it is read with load16.
__device__ __forceinline__ uint4 load16_constant(const void *address) {
  uint4 v;
  asm volatile("ld.global.nc.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

// For load16_stream: the data is first to leave the L2.
__device__ __forceinline__ uint64_t stream_policy() {
  uint64_t policy;
  asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}

// 16 bytes that nothing ever writes and that are read once: weights.
__device__ __forceinline__ uint4 load16_stream(const void *address, uint64_t policy) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address), "l"(policy));
  return v;
}

__device__ __forceinline__ void store16(void *address, uint4 v) { *static_cast<uint4 *>(address) = v; }

// bf16 is the upper half of fp32; a word holds the lower-addressed value in its lower half.
__device__ __forceinline__ float low_float(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_float(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

// Both rounded to nearest, ties to even; `low` goes to the lower address.
__device__ __forceinline__ uint32_t pack(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t *>(&pair);
}

__device__ __forceinline__ float round_bf16(float value) { return __bfloat162float(__float2bfloat16_rn(value)); }

__device__ __forceinline__ void unpack(uint4 v, float (&out)[kVector]) {
  out[0] = low_float(v.x), out[1] = high_float(v.x), out[2] = low_float(v.y), out[3] = high_float(v.y);
  out[4] = low_float(v.z), out[5] = high_float(v.z), out[6] = low_float(v.w), out[7] = high_float(v.w);
}

__device__ __forceinline__ uint4 pack(const float (&v)[kVector]) {
  return make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
}

// Butterflies: one order, the same bits in every lane. All 32 lanes take part.
__device__ __forceinline__ float warp_sum(float value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(kAllLanes, value, distance);
  return value;
}

__device__ __forceinline__ float warp_max(float value) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    value = fmaxf(value, __shfl_xor_sync(kAllLanes, value, distance));
  return value;
}

// Sum over a block of whole warps, in one order, the same bits in every thread. `scratch` is 32 floats of shared
// memory, free again only after the block's next barrier.
__device__ __forceinline__ float block_sum(float value, float *scratch) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
  value = warp_sum(value);
  if (lane == 0) scratch[warp] = value;
  __syncthreads();
  return warp_sum(lane < warps ? scratch[lane] : 0.0f);
}

}  // namespace tl::cuda

#endif  // TL_CUDA_DEVICE_CUH
