#include <cstring>

#include "cpu.h"
#include "tile.h"
#include "transpose.h"

namespace tl::cpu {
namespace {

constexpr int64_t kKeys = 64;  // keys between two rescalings, at fixed absolute positions
constexpr int64_t kPages = kKeys / TL_PAGE_TOKENS;
constexpr int64_t kPairs = 48;  // (query, head) pairs that share a block of keys; all of one kv head
constexpr int64_t kMaxDim = TL_MAX_HEAD_DIM;

// The running state of up to kPairs queries against one sequence's keys.
struct Group {
  alignas(64) float query[kPairs * kMaxDim];
  alignas(64) float mixed[kPairs * kMaxDim];
  alignas(64) float score[kPairs * kKeys];
  alignas(64) float keys[kKeys * kMaxDim];
  float best[kPairs], total[kPairs];
  int64_t limit[kPairs];  // last visible key
  int64_t pairs, dim;

  void begin(int64_t count, int64_t width) {
    pairs = count;
    dim = width;
    std::memset(mixed, 0, sizeof(float) * pairs * dim);
    for (int64_t pair = 0; pair < pairs; ++pair) {
      best[pair] = -__builtin_inff();
      total[pair] = 0.0f;
    }
  }

  // Scores become weights relative to the best so far; what was mixed before is scaled to the new best.
  void soften(int64_t pair, int64_t first_key, float scale) {
    float *line = score + pair * kKeys;
    const int64_t visible = limit[pair] - first_key + 1;
    if (visible <= 0) {
      std::memset(line, 0, sizeof(float) * kKeys);
      return;
    }
    Wide top = wide_fill(-__builtin_inff());
    for (int64_t key = 0; key < kKeys; ++key) line[key] = key < visible ? line[key] * scale : -__builtin_inff();
    for (int64_t key = 0; key < kKeys; key += kPanel)
      for (int v = 0; v < kVectors; ++v) top.part[v] = larger(top.part[v], load(line + key + v * kLanes));
    const float block_best = wide_max(top), now = block_best > best[pair] ? block_best : best[pair];
    rescale(pair, now);
    Wide sum = wide_fill(0.0f);
    for (int64_t key = 0; key < kKeys; key += kPanel)
      for (int v = 0; v < kVectors; ++v) {
        float *lane = line + key + v * kLanes;
        const Vec logit = load(lane);
        const Vec weight = logit > fill(-__builtin_inff()) ? exponential(logit - fill(now)) : Vec{};
        store(lane, weight);
        sum.part[v] += weight;
      }
    total[pair] += wide_sum(sum);
  }

  void rescale(int64_t pair, float now) {
    if (now == best[pair]) return;
    alignas(64) float factor[kLanes];
    store(factor, exponential(fill(best[pair] - now)));
    const float shrink = total[pair] > 0.0f ? factor[0] : 0.0f;
    for (int64_t d = 0; d < dim; ++d) mixed[pair * dim + d] *= shrink;
    total[pair] *= shrink;
    best[pair] = now;
  }
};

struct Attention {
  const tl_batch &batch;
  const tl_heads &heads;
  const float *qkv, *keys, *values;
  float *out;

  int64_t share() const { return heads.heads / heads.kv_heads; }
  int64_t groups(int64_t span) const {
    const int64_t queries = batch.query_starts[span + 1] - batch.query_starts[span];
    return (queries * share() + kPairs - 1) / kPairs;
  }

  // One group of one kv head: gather its queries, walk its keys, write its rows.
  void run(int64_t span, int64_t kv_head, int64_t group) const {
    Group state;
    const int64_t first = group * kPairs, row = batch.query_starts[span];
    const int64_t all = (batch.query_starts[span + 1] - row) * share();
    state.begin(all - first < kPairs ? all - first : kPairs, heads.head_dim);
    int64_t last_key = 0;
    for (int64_t pair = 0; pair < state.pairs; ++pair) {
      const int64_t query = row + (first + pair) / share();
      std::memcpy(state.query + pair * state.dim, query_at(query, kv_head, first + pair), sizeof(float) * state.dim);
      state.limit[pair] = batch.positions[query];
      last_key = state.limit[pair] > last_key ? state.limit[pair] : last_key;
    }
    for (int64_t key = 0; key <= last_key; key += kKeys) block(state, span, kv_head, key, last_key + 1);
    for (int64_t pair = 0; pair < state.pairs; ++pair) finish(state, row, kv_head, first, pair);
  }

  const float *query_at(int64_t query, int64_t kv_head, int64_t pair) const {
    const int64_t width = (heads.heads + 2 * heads.kv_heads) * heads.head_dim;
    return qkv + query * width + (kv_head * share() + pair % share()) * heads.head_dim;
  }

  // Where the page that holds key `key` of a sequence begins in either pool.
  int64_t place(int64_t span, int64_t kv_head, int64_t key) const {
    const int64_t page = batch.block_tables[span * batch.table_width + key / TL_PAGE_TOKENS];
    return (page * heads.kv_heads + kv_head) * TL_PAGE_TOKENS * heads.head_dim;
  }

  // Pages lie anywhere, so the processor cannot guess the next one; with few queries the reads are what takes time.
  void fetch(const Group &state, const float *page) const {
    if (state.pairs > kTileRows) return;
    for (int64_t at = 0; at < TL_PAGE_TOKENS * state.dim; at += 16) __builtin_prefetch(page + at);
  }

  // Keys [first, first + kKeys) of the sequence, as far as `end`.
  void block(Group &state, int64_t span, int64_t kv_head, int64_t first, int64_t end) const {
    const int64_t count = end - first < kKeys ? end - first : kKeys;
    const int64_t pages = (count + TL_PAGE_TOKENS - 1) / TL_PAGE_TOKENS;
    const float *page_values[kPages];
    for (int64_t page = 0; page < pages; ++page) {
      const int64_t start = page * TL_PAGE_TOKENS, at = place(span, kv_head, first + start);
      page_values[page] = values + at;
      fetch(state, page_values[page]);
      if (first + start + TL_PAGE_TOKENS < end) fetch(state, keys + place(span, kv_head, first + start + TL_PAGE_TOKENS));
      transpose_panel(keys + at, smaller_count(count - start), state.dim, state.keys + page * kPanel * state.dim);
    }
    score_pages(state, pages);
    for (int64_t pair = 0; pair < state.pairs; ++pair) state.soften(pair, first, heads.scale);
    for (int64_t page = 0; page < pages; ++page)
      mix(state, page, page_values[page], smaller_count(count - page * TL_PAGE_TOKENS));
  }

  static int64_t smaller_count(int64_t count) { return count < TL_PAGE_TOKENS ? count : TL_PAGE_TOKENS; }

  // score[pairs, pages * 16] = query * keys, a tile's width of pages at a time.
  void score_pages(Group &state, int64_t pages) const {
    const int64_t dim = state.dim;
    for (int64_t page = 0; page < pages;) {
      const TileArgs args{state.query, dim, state.keys + page * kPanel * dim, kPanel, kPanel * dim,
                          state.score + page * kPanel, kKeys, dim, false};
      page += widest(state.pairs, pages - page, args);
    }
  }

  // mixed += weights of one page * its values, a tile's width of columns at a time.
  void mix(Group &state, int64_t page, const float *page_values, int64_t count) const {
    const int64_t dim = state.dim, panels = dim / kPanel;
    for (int64_t panel = 0; panel < panels;) {
      const TileArgs args{state.score + page * kPanel, kKeys, page_values + panel * kPanel, dim, kPanel,
                          state.mixed + panel * kPanel, dim, count, true};
      panel += widest(state.pairs, panels - panel, args);
    }
    for (int64_t pair = 0; pair < state.pairs; ++pair)
      for (int64_t key = 0; key < count; ++key)
        for (int64_t d = panels * kPanel; d < dim; ++d)
          state.mixed[pair * dim + d] += state.score[pair * kKeys + page * kPanel + key] * page_values[key * dim + d];
  }

  // Run the widest tile that fits; returns the panels it took.
  static int64_t widest(int64_t rows, int64_t panels, const TileArgs &args) {
    if (panels < kTilePanels) {
      tile_block<1>(rows, args);
      return 1;
    }
    tile_block<kTilePanels>(rows, args);
    return kTilePanels;
  }

  void finish(const Group &state, int64_t row, int64_t kv_head, int64_t first, int64_t pair) const {
    const int64_t query = row + (first + pair) / share(), head = kv_head * share() + (first + pair) % share();
    float *to = out + (query * heads.heads + head) * state.dim;
    const float inverse = 1.0f / state.total[pair];
    for (int64_t d = 0; d < state.dim; ++d) to[d] = state.mixed[pair * state.dim + d] * inverse;
  }
};

}  // namespace

void attention(Pool &pool, const tl_batch &batch, const tl_heads &heads, const float *qkv, const float *keys,
               const float *values, float *out) {
  const Attention job{batch, heads, qkv, keys, values, out};
  int64_t groups = 0;
  for (int64_t span = 0; span < batch.spans; ++span) groups += job.groups(span);
  pool.run(groups * heads.kv_heads, [&](int64_t piece) {
    int64_t group = piece / heads.kv_heads, span = 0;
    while (group >= job.groups(span)) group -= job.groups(span++);
    job.run(span, piece % heads.kv_heads, group);
  });
}

}  // namespace tl::cpu
