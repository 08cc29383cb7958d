/* The attention calls of tl_cuda.h, which includes this. */
#ifndef TL_CUDA_ATTENTION_H
#define TL_CUDA_ATTENTION_H

#include "tl_kernels.h"

#endif /* TL_CUDA_ATTENTION_H */
