/* The sample calls of tl_cuda.h, which includes this. */
#ifndef TL_CUDA_SAMPLE_H
#define TL_CUDA_SAMPLE_H

#include "tl_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* tl_sample, to the same bits but for log-probabilities, whose logarithm is CUDA's. Needs compute capability 9.0. The
 * logits are aligned to 16 bytes, their stride is a multiple of 4, and what lies between vocabulary and stride is read
 * but means nothing; rows are at most 2^20. The room `scores` is not used. Host memory that the device can reach will do
 * for every array. */
typedef tl_sample_args tl_cuda_sample_args;
TL_API tl_status tl_cuda_sample(const tl_cuda_sample_args *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif /* TL_CUDA_SAMPLE_H */
