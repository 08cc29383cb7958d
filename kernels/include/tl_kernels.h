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

/* Largest vocabulary of sampling, and most best ids it reports. */
#define TL_MAX_VOCABULARY 262144
#define TL_MAX_TOPS 20

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

/* What is added to the score of one id; -INFINITY bans it. */
typedef struct tl_sample_bias {
  int32_t token;
  float bias;
} tl_sample_bias;

/* One distinct id of a sequence so far, and how often it is in the output (0: in the prompt alone). */
typedef struct tl_sample_count {
  int32_t token;
  int32_t count;
} tl_sample_count;

/* How one row is sampled. Numbers are finite; temperature <= 0 is greedy. */
typedef struct tl_sample_row {
  uint64_t seed;
  double temperature;
  double top_p;              /* off from 1 on */
  double min_p;              /* 0 = off */
  double presence_penalty;   /* of ids in the output; 0 = off */
  double frequency_penalty;  /* likewise, per occurrence */
  float repetition_penalty;  /* of ids in prompt and output, above 0; 1 = off */
  int32_t active;            /* 0: nothing is read or written for this row */
  int32_t top_k;             /* 0 = off */
  int32_t logprobs;          /* -1 = none; n = the chosen id's and the n best's, at most TL_MAX_TOPS */
  int32_t choice, position;  /* with the seed, all that the draw depends on */
  int32_t bias_start;        /* the row's biases: distinct ids, in any order */
  int32_t bias_count;
  int32_t history;           /* the row's history, of no other row of the call; -1 = none, no penalties */
  int32_t next;              /* entry of next_tokens that gets the token; -1 = none */
} tl_sample_row;

/* One call of sampling. What is out of range in `params`, `biases` and `histories` is ignored: an id, a start, an index.
 * Unused arrays are NULL with a count of 0. */
typedef struct tl_sample_args {
  uint32_t size, flags;        /* sizeof(tl_sample_args); flags are those of the CUDA call, 0 here */
  const float *logits;         /* [rows, stride], the first `vocabulary` of each row */
  const tl_sample_row *params; /* [rows] */
  const tl_sample_bias *biases;
  tl_sample_count *histories;  /* [history_total, history_capacity] */
  int32_t *history_lengths;    /* [history_total] */
  int32_t *tokens;             /* [rows]; -1 where the scores are not finite */
  int32_t *next_tokens;        /* [next_total]; 0 in place of -1 */
  float *logprobs;             /* [rows], or NULL: none for any row */
  int32_t *top_ids;            /* [rows, tops], best first, equals by id */
  float *top_logprobs;         /* [rows, tops] */
  float *scores;               /* [rows, stride]: room for the CPU call to work in; NULL for the CUDA call */
  int64_t rows;
  int64_t vocabulary;          /* at most TL_MAX_VOCABULARY */
  int64_t stride;              /* at least vocabulary */
  int64_t bias_total;          /* biases of all rows */
  int64_t history_total;
  int64_t history_capacity;    /* distinct ids that fit; further ones are not counted */
  int64_t next_total;
  int64_t tops;                /* at most TL_MAX_TOPS; further best ids are not written */
} tl_sample_args;

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

/* One token per active row of logits. In this order: biases; repetition, then frequency and presence penalties; and, at
 * a temperature above 0, top-k (ties with the last stay), top-p (by score, equals by id; at least one), min-p, and one
 * draw from Philox4x32-10 (seed, choice, position) by the inverse cumulative distribution in ascending order of ids.
 * Greedy is the highest score, of equals the lowest id. Log-probabilities are those of the logits as they came.
 *
 * A weight is exp((score - best) / temperature) in fp64, rounded to a multiple of 2^-45, so sums are exact, whatever
 * their order. A sampler that sums in fp64 picks the same id unless a border (of top-p, or of the draw) lies within the
 * roundings' sum of it: 2^-28 of the best id's weight at worst, about 2^-37 in practice. What weighs less than 2^-46 of
 * the best is never drawn.
 *
 * A row with a NaN or +INFINITY, or with nothing above -INFINITY, before or after its edits, has no token: -1. Of such a
 * row only tokens and next_tokens are written. Log-probabilities and best ids that were not asked for are not written.
 * The chosen id is counted in the row's history. */
TL_API tl_status tl_sample(tl_context *context, const tl_sample_args *args);

#ifdef __cplusplus
}
#endif

#endif /* TL_KERNELS_H */
