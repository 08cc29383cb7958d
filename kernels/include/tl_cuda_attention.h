/* The attention calls of tl_cuda.h, which includes this.
 *
 * Causal attention over a paged cache. Query head h reads kv head h / (heads / kv_heads). The tokens of a span are
 * the last of its sequence: query i of n sits at position context_len - n + i and sees the keys up to its own,
 * with a window of W > 0 only the last W of them.
 *   out = softmax(cap(scale * q k^T)) v, with cap(s) = softcap * tanh(s / softcap), or s where softcap is 0.
 * Scores, weights' sums and outputs are fp32 and rounded once; weights are rounded to bf16 before they meet v.
 *
 * What lies in device memory is taken as it is: a context is cut to what the block table can hold, a page outside the
 * pools reads as zeros, and a row that sees no key is zero. What a cache holds beyond a context never matters, NaN
 * included. Each output row depends, bit for bit, on its own inputs only (and, in decode, on `splits`): not on the
 * other rows, nor on how the sequence was cut into calls.
 *
 * Both need compute capability 9.0.
 */
#ifndef TL_CUDA_ATTENTION_H
#define TL_CUDA_ATTENTION_H

#include "tl_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One query token per span, for steps that only decode. The keys of a sequence are shared out among `splits` thread
 * blocks of one cluster, in runs of 64 keys that depend on its context length alone. */
typedef struct tl_cuda_attention_decode_args {
  uint32_t size, flags;
  const void *q;               /* [spans], rows of q_stride elements that begin with [heads, head_dim] */
  const void *keys, *values;   /* [pages, kv_heads, TL_PAGE_TOKENS, head_dim] */
  const int32_t *context_lens; /* [spans], the query's own token included; 0: an empty row, zeros */
  const int32_t *block_tables; /* [spans, table_width], page ids; only those in use are looked at */
  void *out;                   /* [spans, heads, head_dim] */
  int64_t q_stride;            /* a multiple of 8 */
  int32_t spans;               /* at most 65535 */
  int32_t table_width;
  int32_t pages;
  int32_t heads, kv_heads;
  int32_t head_dim;            /* 64 or 128 */
  int32_t window;              /* 0: none */
  int32_t splits;              /* 1, 2, 4 or 8 */
  int32_t stages;              /* 2 to 4: blocks of 64 keys and values on their way to a thread block at a time */
  float scale, softcap;        /* scale > 0; softcap 0: none */
} tl_cuda_attention_decode_args;
TL_API tl_status tl_cuda_attention_decode(const tl_cuda_attention_decode_args *args, void *stream);

/* Any number of query tokens per span: whole prompts, chunks of them behind a cached prefix, and single tokens. Rows
 * that belong to no span (graph padding) are not written. */
typedef struct tl_cuda_attention_prefill_args {
  uint32_t size, flags;
  const void *q;               /* [rows], rows of q_stride elements that begin with [heads, head_dim] */
  const void *keys, *values;   /* [pages, kv_heads, TL_PAGE_TOKENS, head_dim] */
  const int32_t *query_starts; /* [spans + 1], ascending from 0 to at most rows */
  const int32_t *context_lens; /* [spans], the queries' own tokens included */
  const int32_t *block_tables; /* [spans, table_width], page ids; only those in use are looked at */
  void *out;                   /* [rows, heads, head_dim] */
  int64_t q_stride;            /* a multiple of 8 */
  int32_t rows, spans;
  int32_t table_width;
  int32_t pages;
  int32_t heads, kv_heads;
  int32_t head_dim;            /* 64 or 128 */
  int32_t window;              /* 0: none */
  float scale, softcap;        /* scale > 0; softcap 0: none */
} tl_cuda_attention_prefill_args;
TL_API tl_status tl_cuda_attention_prefill(const tl_cuda_attention_prefill_args *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif /* TL_CUDA_ATTENTION_H */
