// Products by cuBLASLt. Arguments have been checked by the caller (linear.cu).
#ifndef TL_CUDA_LINEAR_PLAN_H
#define TL_CUDA_LINEAR_PLAN_H

#include "../../include/tl_cuda.h"

namespace tl::cuda {

// Shape, bias and workspace are those of the plan.
bool fits_plan(const tl_cuda_linear_args &args, const tl_cuda_linear_plan &plan);

tl_status run_plan(const tl_cuda_linear_args &args, void *stream);

}  // namespace tl::cuda

#endif  // TL_CUDA_LINEAR_PLAN_H
