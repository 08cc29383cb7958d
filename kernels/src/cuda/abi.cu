// The library about itself: versions, statuses in words, and the device it finds.

#include "launch.h"

#ifndef TL_BUILD_KEY
#define TL_BUILD_KEY "unknown"
#endif

namespace {

constexpr int kOldestCapability = 80;  // bf16 in mma, cp.async

// Compute capability of the current device times ten, 0 if there is none to be had.
int capability() {
  int device = 0, major = 0, minor = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return 0;
  if (cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device) != cudaSuccess) return 0;
  return major * 10 + minor;
}

}  // namespace

extern "C" {

int32_t tl_cuda_abi_version(void) { return TL_CUDA_ABI_VERSION; }

const char *tl_cuda_build_key(void) { return TL_BUILD_KEY; }

const char *tl_cuda_status_text(tl_status status) {
  static const char *const texts[] = {
      "ok",
      "a pointer is NULL",
      "a count is out of range",
      "counts do not fit one another",
      "a token, position, slot or page is out of range",
      "a pointer is not aligned",
      "a struct has an unknown size or flag",
      "the system refused threads or memory",
      "no GPU that these kernels run on, or its driver is too old",
      "CUDA refused the launch",
      "cuBLASLt is missing, has no algorithm, or refused the call",
  };
  constexpr tl_status known = sizeof(texts) / sizeof(texts[0]);
  return status >= 0 && status < known ? texts[status] : "unknown status";
}

tl_status tl_cuda_init(void) {
  if (capability() < kOldestCapability) {
    cudaGetLastError();
    return TL_ERROR_DEVICE;
  }
  constexpr tl_status (*files[])() = {
      tl::cuda::init_step,
      tl::cuda::init_rows,
      tl::cuda::init_linear,
      tl::cuda::init_sample,
      tl::cuda::init_attention_decode,
      tl::cuda::init_attention_prefill,
  };
  for (const auto init : files) {
    const tl_status status = init();
    if (status != TL_OK) return status;
  }
  return TL_OK;
}

}  // extern "C"
