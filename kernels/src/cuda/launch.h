// Host side of every kernel: its one-time preparation, and its launch.
//
// The one rule: a launch allocates nothing, waits for nothing and keeps no state; what must be set on a kernel is set
// once, in init_<file>(), which tl_cuda_init() calls.
#ifndef TL_CUDA_LAUNCH_H
#define TL_CUDA_LAUNCH_H

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "../../include/tl_cuda.h"

namespace tl::cuda {

// Per cent of a multiprocessor's memory kept as shared memory, the same for every kernel of the chain: streamed loads
// land in the rest (all of it shared costs 40 %), and neighbours that differ in it do not overlap.
constexpr int kSharedCarveout = 60;

// Grid, block, bytes of dynamic shared memory, and blocks in a cluster.
struct Shape {
  dim3 grid;
  dim3 block;
  size_t shared = 0;
  unsigned cluster = 1;
};

// A failure leaves no error behind for the next caller of the runtime to find.
inline tl_status checked(cudaError_t error, tl_status otherwise) {
  if (error == cudaSuccess) return TL_OK;
  cudaGetLastError();
  return otherwise;
}

// Once per process and device, before any capture: the carve-out, and leave to use `shared` bytes a block. A GPU for
// which a file was not compiled keeps its other kernels: launches of this one fail.
template <typename... Parameters>
tl_status prepare(void (*kernel)(Parameters...), size_t shared = 0, int carveout = kSharedCarveout) {
  cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, carveout);
  if (error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction)
    return checked(error, TL_OK);
  if (error == cudaSuccess && shared > 0)
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared));
  return checked(error, TL_ERROR_DEVICE);
}

// Puts the kernel on the stream; TL_CUDA_PDL in `flags` lets it start before the one before it has ended.
template <typename... Parameters, typename... Arguments>
tl_status launch(void (*kernel)(Parameters...), const Shape &shape, void *stream, uint32_t flags,
                 Arguments... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  cudaLaunchConfig_t config = {};
  config.gridDim = shape.grid;
  config.blockDim = shape.block;
  config.dynamicSmemBytes = shape.shared;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = attributes;
  if (flags & TL_CUDA_PDL) {
    cudaLaunchAttribute &pdl = attributes[config.numAttrs++];
    pdl.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    pdl.val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.cluster > 1) {
    cudaLaunchAttribute &cluster = attributes[config.numAttrs++];
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = shape.cluster;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  }
  return checked(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), TL_ERROR_LAUNCH);
}

// One per file of kernels.
tl_status init_step();
tl_status init_rows();
tl_status init_linear();
tl_status init_sample();
tl_status init_attention_decode();
tl_status init_attention_prefill();

}  // namespace tl::cuda

#endif  // TL_CUDA_LAUNCH_H
