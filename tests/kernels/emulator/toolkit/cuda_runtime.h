// What the kernels use of CUDA's header of this name, and of what nvcc knows without a header.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>

#define __global__
#define __device__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)

struct uint2 {
  uint32_t x, y;
};
struct uint3 {
  uint32_t x, y, z;
};
struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
inline uint2 make_uint2(uint32_t x, uint32_t y) { return {x, y}; }
inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

struct dim3 {
  dim3(uint32_t x = 1, uint32_t y = 1, uint32_t z = 1) : x(x), y(y), z(z) {}
  uint32_t x, y, z;
};

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

using std::max;
using std::min;
inline float rsqrtf(float value) { return 1.0f / std::sqrt(value); }
inline float __fdividef(float a, float b) { return a / b; }
inline int __ffs(int value) { return __builtin_ffs(value); }

// ---- the runtime

using cudaStream_t = void *;
enum cudaError_t {
  cudaSuccess,
  cudaErrorLaunchFailure,
  cudaErrorNoKernelImageForDevice,
  cudaErrorInvalidDeviceFunction,
};
inline cudaError_t cudaGetLastError() { return cudaSuccess; }

// An attribute's number here is its value: a Hopper GPU with so few multiprocessors that blocks have several tiles.
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor = 9,
  cudaDevAttrComputeCapabilityMinor = 0,
  cudaDevAttrMultiProcessorCount = 3,
};
inline cudaError_t cudaGetDevice(int *device) { return *device = 0, cudaSuccess; }
inline cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int) {
  return *value = attribute, cudaSuccess;
}

enum cudaFuncAttribute {
  cudaFuncAttributePreferredSharedMemoryCarveout,
  cudaFuncAttributeMaxDynamicSharedMemorySize,
};
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel, cudaFuncAttribute, int) {
  return cudaSuccess;
}

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess, cudaDriverEntryPointSymbolNotFound };
constexpr unsigned long long cudaEnableDefault = 0;
cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **found, unsigned version,
                                             unsigned long long flags, cudaDriverEntryPointQueryResult *result);

enum cudaLaunchAttributeID {
  cudaLaunchAttributeProgrammaticStreamSerialization,
  cudaLaunchAttributeClusterDimension,
};
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
    struct {
      unsigned x, y, z;
    } clusterDim;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
  cudaLaunchAttribute *attrs;
  unsigned numAttrs;
};

namespace emulator {
bool run(const dim3 &grid, const dim3 &block, size_t dynamic_bytes, unsigned cluster,
         const std::function<void()> &kernel);
}

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
  unsigned cluster = 1;
  for (unsigned i = 0; i < config->numAttrs; ++i)
    if (config->attrs[i].id == cudaLaunchAttributeClusterDimension) cluster = config->attrs[i].val.clusterDim.x;
  const bool ended = emulator::run(config->gridDim, config->blockDim, config->dynamicSmemBytes, cluster,
                                   [=] { kernel(static_cast<Parameters>(arguments)...); });
  return ended ? cudaSuccess : cudaErrorLaunchFailure;
}
