/* Trunkline kernels: the operators of a decoder over a ragged batch and a paged KV cache.
 *
 * Rules of every call
 *   - Returns a tl_status. Arguments are checked before anything is written; nothing is written on an error.
 *   - Allocates nothing, throws nothing, keeps no state outside its tl_context. Only tl_context_create allocates.
 *   - Matrices are row-major, fp32, and contiguous. Sizes are counts of elements, never bytes.
 *   - Inputs and outputs do not overlap unless a call says that it works in place.
 *   - One call at a time per context.
 *   - Each output row depends, bit for bit, on its own inputs only: not on the other rows of the call, on their
 *     number, on how a sequence was cut into calls, or on the number of threads.
 */
#ifndef TL_KERNELS_H
#define TL_KERNELS_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#if defined(__GNUC__)
#define TL_API __attribute__((visibility("default")))
#else
#define TL_API
#endif

/* Raised whenever a signature or a struct changes its meaning. */
#define TL_ABI_VERSION 1

/* Tokens in one page of the KV cache. */
#define TL_PAGE_TOKENS 16

/* Columns in one panel of a packed weight. */
#define TL_PANEL_COLUMNS 16

/* Largest head_dim of attention. */
#define TL_MAX_HEAD_DIM 256

typedef int32_t tl_status;

enum {
  TL_OK = 0,
  TL_ERROR_NULL = 1,      /* a pointer is NULL */
  TL_ERROR_SIZE = 2,      /* a count is negative, zero where it must not be, or beyond a limit */
  TL_ERROR_SHAPE = 3,     /* counts do not fit one another */
  TL_ERROR_RANGE = 4,     /* a token, position, slot or page lies outside what it points into */
  TL_ERROR_ALIGNMENT = 5, /* a float pointer is not aligned to 4 bytes, or packed weights not to 64 */
  TL_ERROR_VERSION = 6,   /* a struct's size field is not what this library knows */
  TL_ERROR_SYSTEM = 7     /* threads or memory could not be had from the system */
};

/* Where calls run: its worker threads. */
typedef struct tl_context tl_context;

/* One step: `spans` sequences with `rows` query tokens in all. */
typedef struct tl_batch {
  uint32_t size;               /* sizeof(tl_batch) */
  int32_t spans;               /* sequences */
  int32_t rows;                /* query tokens of all sequences */
  int32_t table_width;         /* pages per row of block_tables */
  const int32_t *positions;    /* [rows], absolute, from 0 */
  const int32_t *slots;        /* [rows], page * TL_PAGE_TOKENS + offset: where the token's K and V are written */
  const int32_t *query_starts; /* [spans + 1], ascending from 0 to rows */
  const int32_t *context_lens; /* [spans], tokens in the cache after this step */
  const int32_t *block_tables; /* [spans, table_width], page ids; only those in use are looked at */
} tl_batch;

/* Heads, and the KV pools of one layer: keys and values are [pages, kv_heads, TL_PAGE_TOKENS, head_dim]. */
typedef struct tl_heads {
  uint32_t size;     /* sizeof(tl_heads) */
  int32_t heads;     /* query heads, a multiple of kv_heads; head h reads kv head h / (heads / kv_heads) */
  int32_t kv_heads;
  int32_t head_dim;  /* even, at most TL_MAX_HEAD_DIM */
  int32_t pages;     /* pages in a pool */
  int32_t positions; /* rows of the rotary table */
  float scale;       /* of attention scores */
} tl_heads;

/* Version of the ABI this library was built for: TL_ABI_VERSION. */
TL_API int32_t tl_abi_version(void);

/* What the library was built from and for; opaque, for telling builds apart. Never NULL. */
TL_API const char *tl_build_key(void);

/* Name of the instruction set in use, such as "avx512". Never NULL. */
TL_API const char *tl_isa(void);

/* A status in words. Never NULL. */
TL_API const char *tl_status_text(tl_status status);

/* Make a context that runs calls on `threads` threads, the caller's own among them (1 to 256). */
TL_API tl_status tl_context_create(int32_t threads, tl_context **out);

/* End its threads. NULL is allowed. */
TL_API void tl_context_destroy(tl_context *context);

/* out[rows, width] = table[tokens, width]; 0 <= token < vocabulary. */
TL_API tl_status tl_embed(tl_context *context, const int32_t *tokens, const float *table, float *out, int64_t rows,
                          int64_t width, int64_t vocabulary);

/* out = x / sqrt(mean(x^2) + eps) * weight, per row of [rows, width]. */
TL_API tl_status tl_rms_norm(tl_context *context, const float *x, const float *weight, float *out, int64_t rows,
                             int64_t width, float eps);

/* x += delta in place, then tl_rms_norm of x. */
TL_API tl_status tl_add_rms_norm(tl_context *context, float *x, const float *delta, const float *weight, float *out,
                                 int64_t rows, int64_t width, float eps);

/* Floats that a packed weight of `columns` outputs and `inner` inputs takes; -1 if a count is out of range. */
TL_API int64_t tl_linear_packed_size(int64_t columns, int64_t inner);

/* Copy weight[rows, inner] (row = output) into columns first_column .. first_column + rows of a packed weight of
 * `columns` columns, 64-byte aligned. Padding columns are left alone: clear the memory first. */
TL_API tl_status tl_linear_pack(tl_context *context, const float *weight, float *packed, int64_t rows, int64_t inner,
                                int64_t first_column, int64_t columns);

/* out[rows, columns] = x[rows, inner] * weight^T + bias; bias may be NULL. */
TL_API tl_status tl_linear(tl_context *context, const float *x, const float *packed, const float *bias, float *out,
                           int64_t rows, int64_t inner, int64_t columns);

/* Rotate q and k in place in qkv[rows, (heads + 2 * kv_heads) * head_dim], pairs (i, i + head_dim / 2), by
 * cosines and sines [positions, head_dim / 2]; write k and v into the pools at the batch's slots. */
TL_API tl_status tl_rope_cache(tl_context *context, const tl_batch *batch, const tl_heads *heads, const float *cosines,
                               const float *sines, float *qkv, float *keys, float *values);

/* out[rows, heads * head_dim]: causal attention of the q part of qkv over each row's own sequence in the pools. */
TL_API tl_status tl_attention(tl_context *context, const tl_batch *batch, const tl_heads *heads, const float *qkv,
                              const float *keys, const float *values, float *out);

/* out[rows, width] = silu(gate) * up, of gate_up[rows, 2 * width]. */
TL_API tl_status tl_swiglu(tl_context *context, const float *gate_up, float *out, int64_t rows, int64_t width);

#ifdef __cplusplus
}
#endif

#endif /* TL_KERNELS_H */
