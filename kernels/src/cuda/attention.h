// Host side of both attention kernels: what they are told about sequences, heads and pools, and how it is checked.
#ifndef TL_CUDA_ATTENTION_KERNELS_H
#define TL_CUDA_ATTENTION_KERNELS_H

#include <cuda.h>

#include "check.h"

namespace tl::cuda {

constexpr int kPanelColumns = 64;  // of keys or values that one copy brings, for TL_PAGE_TOKENS tokens
constexpr float kMaxFactor = 1e30f;   // of scale and softcap: their products stay finite

// Where sequences lie in the pools.
struct Sequences {
  const int32_t *context_lens;  // [spans]
  const int32_t *block_tables;  // [spans, table_width]
  int32_t table_width;
  int32_t pages;
};

// With p = q k^T: logits to the base of 2 are p * factor, or, if capped, cap * tanh with 2^(p * factor) = e^(2 x).
struct Scores {
  float factor;
  float cap;  // 0: none
};

// Rows of queries and of outputs; bf16 as bits.
struct Heads {
  const uint16_t *q;
  uint16_t *out;
  int64_t q_stride;
  int32_t heads, kv_heads, group;  // group: query heads of one kv head
  int32_t window;
  Scores scores;
};

// Copies of boxes of [TL_PAGE_TOKENS, kPanelColumns] out of the two pools.
struct PoolMaps {
  CUtensorMap keys, values;
};

// Counts and factors that both calls have.
template <typename Args>
ArgsCheck check_counts(const Args *args) {
  ArgsCheck check(args);
  if (!check.ok()) return check;
  check.count(args->spans, 0).count(args->table_width, 1).count(args->pages, 1).count(args->window, 0);
  check.count(args->heads, 1).count(args->kv_heads, 1).count(args->q_stride, 1);
  if (!check.ok()) return check;
  check.fits(args->heads % args->kv_heads == 0 && (args->head_dim == 64 || args->head_dim == 128));
  check.fits(args->q_stride % 8 == 0 && args->q_stride >= int64_t{args->heads} * args->head_dim);
  check.count(int64_t{args->pages} * args->kv_heads * TL_PAGE_TOKENS, 1);
  check.require(args->scale > 0.0f && args->scale < kMaxFactor, TL_ERROR_RANGE);
  check.require(args->softcap >= 0.0f && args->softcap < kMaxFactor, TL_ERROR_RANGE);
  return check;
}

// Pointers that both calls have; only where there is work.
template <typename Args>
void check_pointers(const Args &args, ArgsCheck &check) {
  check.present(args.q, args.keys, args.values, args.context_lens, args.block_tables, args.out);
  check.vectors(args.q, args.keys, args.values, args.out).words(args.context_lens, args.block_tables);
}

template <typename Args>
Sequences sequences_of(const Args &args) {
  return {args.context_lens, args.block_tables, args.table_width, args.pages};
}

template <typename Args>
Heads heads_of(const Args &args) {
  constexpr float log2e = 1.4426950408889634f;
  const Scores plain{args.scale * log2e, 0.0f};
  const Scores capped{2.0f * args.scale * log2e / args.softcap, args.softcap * log2e};
  return {static_cast<const uint16_t *>(args.q),
          static_cast<uint16_t *>(args.out),
          args.q_stride,
          args.heads,
          args.kv_heads,
          args.heads / args.kv_heads,
          args.window,
          args.softcap > 0.0f ? capped : plain};
}

// Maps of pools [pages, kv_heads, TL_PAGE_TOKENS, head_dim], seen as one matrix of rows of head_dim.
tl_status pool_maps(const void *keys, const void *values, int64_t rows, int32_t head_dim, PoolMaps *maps);

template <typename Args>
tl_status pool_maps_of(const Args &args, PoolMaps *maps) {
  const int64_t rows = int64_t{args.pages} * args.kv_heads * TL_PAGE_TOKENS;
  return pool_maps(args.keys, args.values, rows, args.head_dim, maps);
}

}  // namespace tl::cuda

#endif  // TL_CUDA_ATTENTION_KERNELS_H
