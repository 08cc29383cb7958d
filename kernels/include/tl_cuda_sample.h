/* The sample calls of tl_cuda.h, which includes this. */
#ifndef TL_CUDA_SAMPLE_H
#define TL_CUDA_SAMPLE_H

#include "tl_kernels.h"

#endif /* TL_CUDA_SAMPLE_H */
