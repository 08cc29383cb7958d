/* Trunkline's CUDA operators: bf16 activations and weights, fp32 sums, a ragged batch over a paged KV cache.
 *
 * Rules of every call
 *   - Form: tl_cuda_<op>(const tl_cuda_<op>_args *args, void *stream). `args` lies in host memory and is not kept;
 *     the pointers in it are device memory; `stream` is a cudaStream_t of the current device.
 *   - `size` is sizeof of the struct, else TL_ERROR_VERSION; so is a flag that the call does not know.
 *   - Pointers, counts, shapes and alignments are checked before anything is launched. What lies in device memory
 *     (tokens, positions, slots, page ids, lengths) is not seen by the host: out of range it never faults, and each
 *     call says what it does instead.
 *   - Puts one kernel on the stream and returns: allocates nothing, waits for nothing, keeps no state. All calls can
 *     be captured in a graph, after tl_cuda_init().
 *   - Matrices are row-major and contiguous; void pointers are bf16 unless said otherwise, aligned to 16 bytes. Sizes
 *     are counts of elements, never bytes. No rows is no work and TL_OK.
 *   - Inputs and outputs do not overlap unless a call says that it works in place.
 *   - The same arguments give the same bits, in any launch.
 *   - Weights, biases, norms and rotary tables must not be written while calls that read them are on the stream: with
 *     TL_CUDA_PDL they are read before the earlier kernels have ended.
 */
#ifndef TL_CUDA_H
#define TL_CUDA_H

#include "tl_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Raised whenever a signature or a struct changes its meaning. */
#define TL_CUDA_ABI_VERSION 1

/* Flags of every call. */
#define TL_CUDA_PDL 1u /* may start before the kernel before it has ended (programmatic dependent launch);
                          needs compute capability 9.0 */

/* Statuses beside those of tl_kernels.h. */
enum {
  TL_ERROR_DEVICE = 8, /* no GPU, a driver too old, or a GPU older than compute capability 8.0 */
  TL_ERROR_LAUNCH = 9, /* CUDA refused the launch */
  TL_ERROR_CUBLAS = 10 /* cuBLASLt is missing, has no algorithm, or refused the call */
};

/* Version of the ABI this library was built for: TL_CUDA_ABI_VERSION. */
TL_API int32_t tl_cuda_abi_version(void);

/* What the library was built from and for; opaque, for telling builds apart. Never NULL. */
TL_API const char *tl_cuda_build_key(void);

/* A status in words. Never NULL. */
TL_API const char *tl_cuda_status_text(tl_status status);

/* Check the current device and prepare its kernels: once per process and device, before other calls and before any
 * capture. Repeating it is harmless. */
TL_API tl_status tl_cuda_init(void);

/* out[rows, width] = table[tokens, width]; a row whose token is outside the vocabulary is zero. Any table will do:
 * with row numbers for tokens, it gathers. The table may be what an earlier kernel wrote. */
typedef struct tl_cuda_embed_args {
  uint32_t size, flags;
  const int32_t *tokens; /* [rows] */
  const void *table;     /* [vocabulary, width] */
  void *out;             /* [rows, width] */
  int64_t rows, width;   /* width a multiple of 8 */
  int64_t vocabulary;
} tl_cuda_embed_args;
TL_API tl_status tl_cuda_embed(const tl_cuda_embed_args *args, void *stream);

/* out = bf16(x / sqrt(mean(x^2) + eps)) * weight, per row; the product is rounded again. */
typedef struct tl_cuda_rms_norm_args {
  uint32_t size, flags;
  const void *x;       /* [rows, width] */
  const void *weight;  /* [width] */
  void *out;           /* [rows, width]; may be x */
  int64_t rows, width; /* width a multiple of 8, at most 16384 */
  float eps;
} tl_cuda_rms_norm_args;
TL_API tl_status tl_cuda_rms_norm(const tl_cuda_rms_norm_args *args, void *stream);

/* x += delta in place, rounded to bf16; then tl_cuda_rms_norm of the rounded sum. */
typedef struct tl_cuda_add_rms_norm_args {
  uint32_t size, flags;
  void *x;             /* [rows, width], in place */
  const void *delta;   /* [rows, width] */
  const void *weight;  /* [width] */
  void *out;           /* [rows, width]; may be delta */
  int64_t rows, width; /* width a multiple of 8, at most 16384 */
  float eps;
} tl_cuda_add_rms_norm_args;
TL_API tl_status tl_cuda_add_rms_norm(const tl_cuda_add_rms_norm_args *args, void *stream);

/* Rotate q and k in place, pairs (i, i + head_dim / 2), in fp32 and rounded once; write k and v into the pools of a
 * layer at the row's slot. A row whose slot is outside the pools (-1: padding) or whose position is outside the
 * tables is left as it is, and nothing is written for it. Two rows never share a slot. */
typedef struct tl_cuda_rope_cache_args {
  uint32_t size, flags;
  const int32_t *positions; /* [rows] */
  const int32_t *slots;     /* [rows], page * TL_PAGE_TOKENS + offset, or -1 */
  const float *cosines;     /* [table_positions, head_dim / 2], aligned to 16 bytes */
  const float *sines;       /* likewise */
  void *qkv;                /* [rows, (heads + 2 * kv_heads) * head_dim], in place */
  void *keys, *values;      /* [pages, kv_heads, TL_PAGE_TOKENS, head_dim] */
  int64_t rows;
  int32_t heads, kv_heads;
  int32_t head_dim; /* a multiple of 16, at most TL_MAX_HEAD_DIM */
  int32_t pages;
  int32_t table_positions;
} tl_cuda_rope_cache_args;
TL_API tl_status tl_cuda_rope_cache(const tl_cuda_rope_cache_args *args, void *stream);

/* out[rows, width] = bf16(silu(gate)) * up, of gate_up[rows, 2 * width]; the product is rounded again. */
typedef struct tl_cuda_swiglu_args {
  uint32_t size, flags;
  const void *gate_up; /* [rows, 2 * width] */
  void *out;           /* [rows, width] */
  int64_t rows, width; /* width a multiple of 8 */
} tl_cuda_swiglu_args;
TL_API tl_status tl_cuda_swiglu(const tl_cuda_swiglu_args *args, void *stream);

/* Flags of tl_cuda_linear and of its plans. */
#define TL_CUDA_FP32_OUT 2u /* out is fp32 */
#define TL_CUDA_BIAS 4u     /* plans only: calls come with a bias */

/* Most rows of a product without a plan. */
#define TL_CUDA_SKINNY_ROWS 16

/* A product by cuBLASLt: its shape, and an algorithm chosen once. One call at a time per plan. */
typedef struct tl_cuda_linear_plan tl_cuda_linear_plan;

typedef struct tl_cuda_linear_plan_args {
  uint32_t size, flags;    /* TL_CUDA_FP32_OUT, TL_CUDA_BIAS; not both */
  int64_t rows;            /* the most rows of a call: the algorithm is the best for just so many */
  int64_t columns, inner;  /* multiples of 8 */
  int64_t workspace_bytes; /* what each call brings; 32 MiB is plenty on Hopper */
} tl_cuda_linear_plan_args;

/* Choose. Allocates; not to be captured, and run a plan once before its calls are: cuBLASLt loads a kernel when it is
 * first used. cuBLASLt is looked for at the first plan: the copy that the process has loaded already (torch's), else
 * where the system finds it. All plans of a process are for the device current at the first. */
TL_API tl_status tl_cuda_linear_plan_create(const tl_cuda_linear_plan_args *args, tl_cuda_linear_plan **out);

/* NULL is allowed. Graphs that captured its calls live on. */
TL_API void tl_cuda_linear_plan_destroy(tl_cuda_linear_plan *plan);

/* out[rows, columns] = x[rows, inner] * weight^T + bias, summed in fp32, rounded once.
 * Without a plan: at most TL_CUDA_SKINNY_ROWS rows, columns a multiple of 16, inner of 64; a row's bits do not depend
 * on the other rows or their number. With a plan: as many rows as it was made for or fewer; bits may depend on the
 * number of rows, and TL_CUDA_PDL has no effect. */
typedef struct tl_cuda_linear_args {
  uint32_t size, flags;
  const void *x;             /* [rows, inner] */
  const void *weight;        /* [columns, inner] */
  const void *bias;          /* [columns] or NULL */
  void *out;                 /* [rows, columns], bf16, or fp32 with TL_CUDA_FP32_OUT */
  tl_cuda_linear_plan *plan; /* or NULL; host memory */
  void *workspace;           /* with a plan: its workspace_bytes, aligned to 256; not shared by streams */
  int64_t rows, columns, inner;
} tl_cuda_linear_args;
TL_API tl_status tl_cuda_linear(const tl_cuda_linear_args *args, void *stream);

#ifdef __cplusplus
}
#endif

#include "tl_cuda_attention.h"
#include "tl_cuda_sample.h"
#include "tl_cuda_step.h"

#endif /* TL_CUDA_H */
