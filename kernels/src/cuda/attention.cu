// Tensor maps of the KV pools: how the copy engine finds a page's panel and where it puts it.

#include "attention.h"

#include "launch.h"

namespace tl::cuda {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, found without linking to the driver: the library also opens where there is none.
Encode find_encode() {
  void *found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  constexpr unsigned since = 12000;  // CUDA 12.0
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, since, cudaEnableDefault, &result);
  if (checked(error, TL_ERROR_DEVICE) != TL_OK || result != cudaDriverEntryPointSuccess) return nullptr;
  return reinterpret_cast<Encode>(found);
}

tl_status pool_map(Encode encode, const void *pool, int64_t rows, int32_t head_dim, CUtensorMap *map) {
  const cuuint64_t extents[2] = {static_cast<cuuint64_t>(head_dim), static_cast<cuuint64_t>(rows)};
  const cuuint64_t row_bytes[1] = {static_cast<cuuint64_t>(head_dim) * 2};
  const cuuint32_t box[2] = {kPanelColumns, TL_PAGE_TOKENS};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result = encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void *>(pool), extents,
                                 row_bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) return TL_ERROR_LAUNCH;
  return TL_OK;
}

}  // namespace

tl_status pool_maps(const void *keys, const void *values, int64_t rows, int32_t head_dim, PoolMaps *maps) {
  static const Encode encode = find_encode();
  if (encode == nullptr) return TL_ERROR_DEVICE;
  const tl_status status = pool_map(encode, keys, rows, head_dim, &maps->keys);
  return status != TL_OK ? status : pool_map(encode, values, rows, head_dim, &maps->values);
}

}  // namespace tl::cuda
