// The operators as the argument checks hand them over: everything has been verified.
#ifndef TL_CPU_CPU_H
#define TL_CPU_CPU_H

#include "../../include/tl_kernels.h"
#include "pool.h"

namespace tl::cpu {

void embed(Pool &pool, const int32_t *tokens, const float *table, float *out, int64_t rows, int64_t width);
void rms_norm(Pool &pool, float *x, const float *delta, const float *weight, float *out, int64_t rows, int64_t width,
              float eps);
void linear_pack(Pool &pool, const float *weight, float *packed, int64_t rows, int64_t inner, int64_t first_column);
void linear(Pool &pool, const float *x, const float *packed, const float *bias, float *out, int64_t rows,
            int64_t inner, int64_t columns);
void rope_cache(Pool &pool, const tl_batch &batch, const tl_heads &heads, const float *cosines, const float *sines,
                float *qkv, float *keys, float *values);
void attention(Pool &pool, const tl_batch &batch, const tl_heads &heads, const float *qkv, const float *keys,
               const float *values, float *out);
void swiglu(Pool &pool, const float *gate_up, float *out, int64_t rows, int64_t width);
void sample(Pool &pool, const tl_sample_args &args);

}  // namespace tl::cpu

#endif  // TL_CPU_CPU_H
