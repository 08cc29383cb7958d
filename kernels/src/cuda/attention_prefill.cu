// Attention of any number of query tokens per sequence: a block for 128 (query, head) rows of one kv head.
//
// The rows of a span are its queries times the query heads of the kv head, head fastest, so that a block's rows share
// keys and values and a short span wastes little. Blocks find their rows from query_starts on the device; the grid is
// as large as any spans of that many rows can need, and what is left over ends at once. Each of four warps owns 32
// rows and walks the tiles of 64 keys in order:
//   scores[row, key] = q[row, d] K^T[d, key]      out[row, d] += weights[row, key] V[key, d]
// Two tiles are in shared memory: one that is worked on, one that the first warp lets the copy engine bring. A row's
// bits depend on its own keys alone: tiles begin at multiples of 64, and a tile without keys for a row adds zeros.

#include "attention.cuh"
#include "launch.h"

namespace tl::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kWarpRows = 32;
constexpr int kRows = kWarps * kWarpRows;
constexpr int kSlabs = kWarpRows / 16;       // a warp's rows by sixteens
constexpr int kKeysAtOnce = 32;              // keys between two looks at the best products; 64 spills
constexpr int kStages = 2;                   // tiles of keys and values in shared memory
constexpr int kBlocksPerMultiprocessor = 2;  // one computes while the other waits
constexpr int kPrefillCarveout = 100;        // per cent: two blocks need 195 KiB

// One block's rows: [first, last] of the queries * group rows that a span has.
struct Rows {
  int span, start, queries;  // start: the span's first row of q
  int first, last;           // last < 0: there are none
  int position;              // of the span's first query
};

// What a block does. It lies in shared memory: registers are for sums.
struct Plan {
  Rows rows;
  Keys wanted;          // what the block's rows see
  Keys seen[kWarps];    // what a warp's rows see
  Keys common[kWarps];  // ... all of them
};

template <int kDim>
struct Layout {
  using Queries = Tile<kRows, kDim>;
  using Panels = Tile<kTileTokens, kDim>;
  static constexpr int kStageBytes = 2 * Panels::kBytes;  // keys, values
  static constexpr int kRingAt = Queries::kBytes;
  static constexpr int kBarriersAt = kRingAt + kStages * kStageBytes;
  static constexpr int kPlanAt = kBarriersAt + kStages * 16;
  static constexpr int kBytes = kPlanAt + sizeof(Plan);
};

struct Queries {
  int start, count;
};

__device__ __forceinline__ Queries queries_of(const int32_t *query_starts, int span, int rows) {
  const int start = min(max(load_int(query_starts + span), 0), rows);
  return {start, min(max(load_int(query_starts + span + 1), start), rows) - start};
}

// Warp: block `index` of all spans' blocks, counted from the last span's last, so that long walks go first.
__device__ __forceinline__ Rows find_rows(const int32_t *query_starts, int spans, int rows, int group, int index) {
  const int lane = threadIdx.x % kWarp;
  for (int end = spans; end > 0; end -= kWarp) {  // 32 spans at a time
    const int span = end - 1 - lane;
    const Queries queries = span >= 0 ? queries_of(query_starts, span, rows) : Queries{0, 0};
    const int blocks = (queries.count * group + kRows - 1) / kRows;
    int upto = blocks;  // of this lane's span and those before it in this order
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const int before = __shfl_up_sync(kAllLanes, upto, distance);
      if (lane >= distance) upto += before;
    }
    const unsigned reached = __ballot_sync(kAllLanes, index < upto);
    if (reached != 0) {
      const int owner = __ffs(reached) - 1;
      const int first = (__shfl_sync(kAllLanes, upto, owner) - 1 - index) * kRows;
      const int start = __shfl_sync(kAllLanes, queries.start, owner);
      const int count = __shfl_sync(kAllLanes, queries.count, owner);
      return {end - 1 - owner, start, count, first, min(first + kRows, count * group) - 1, 0};
    }
    index -= __shfl_sync(kAllLanes, upto, kWarp - 1);
  }
  return {0, 0, 0, 0, -1, 0};
}

// Warp: the plan of block `index`.
__device__ __forceinline__ void make_plan(const Sequences &sequences, const Heads &heads, const int32_t *query_starts,
                                          int spans, int all_rows, int index, Plan *plan) {
  const int lane = threadIdx.x % kWarp;
  Rows rows = find_rows(query_starts, spans, all_rows, heads.group, index);
  rows.position = context_length(sequences, rows.span) - rows.queries;
  const auto position = [&](int row) { return rows.position + row / heads.group; };
  if (lane == 0) {
    plan->rows = rows;
    plan->wanted = visible(position(rows.first), position(rows.last), heads.window);
  }
  if (lane >= kWarps) return;
  const int first = rows.first + lane * kWarpRows, last = min(first + kWarpRows - 1, rows.last);
  const bool any = first <= last;
  plan->seen[lane] = any ? visible(position(first), position(last), heads.window) : Keys{0, 0};
  plan->common[lane] =
      any ? Keys{visible(position(last), position(last), heads.window).first, position(first) + 1} : Keys{0, 0};
}

// For each 16 bytes of a warp's rows: move(offset in shared memory, row of q and out, head in the group, column,
// whether there is such a row).
template <int kDim, typename Move>
__device__ __forceinline__ void each_chunk(const Rows &rows, int group, int first, int lane, Move move) {
  constexpr int kChunks = kDim / 8, kRowsAtOnce = kWarp / kChunks;
  const int chunk = lane % kChunks;
#pragma unroll 4
  for (int row = lane / kChunks; row < kWarpRows; row += kRowsAtOnce) {
    const int packed = rows.first + first + row;
    move(Tile<kRows, kDim>::chunk(first + row, chunk), rows.start + packed / group, packed % group, chunk * 8,
         packed <= rows.last);
  }
}

// A warp's 32 rows. With slab s and half h, a lane holds rows 16 s + 8 h + lane / 4.
template <int kDim>
struct Walk {
  using Panels = Tile<kTileTokens, kDim>;
  static constexpr int kBlocks = kDim / 16;
  static constexpr int kKeyBlocks = kKeysAtOnce / 16;

  int lane;
  uint32_t queries;  // the warp's first row in shared memory
  const Plan &plan;
  const Heads &heads;
  int first;  // the warp's first row in the block
  float best[kSlabs][2];   // the largest product so far
  float total[kSlabs][2];  // sum of the weights, of this lane's keys
  float mixed[kSlabs][2 * kBlocks][4];

  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        best[slab][half] = -INFINITY;
        total[slab][half] = 0.0f;
      }
#pragma unroll
      for (int block = 0; block < 2 * kBlocks; ++block)
        mixed[slab][block][0] = mixed[slab][block][1] = mixed[slab][block][2] = mixed[slab][block][3] = 0.0f;
    }
  }

  // Takes in a tile, whose first key is `key`. kMasked: some row does not see all of it.
  template <bool kMasked>
  __device__ __forceinline__ void tile(uint32_t keys, uint32_t values, int key) {
#pragma unroll 1  // unrolled, registers run out
    for (int row = 0; row < kTileTokens; row += kKeysAtOnce)
      take<kMasked>(keys + row * kRowBytes, values + row * kRowBytes, key + row);
  }

  template <bool kMasked>
  __device__ __forceinline__ void take(uint32_t keys, uint32_t values, int key) {
    float products[kSlabs][2 * kKeyBlocks][4] = {};
    multiply(keys, products);
    const float factor = cap(heads.scores, reinterpret_cast<float(&)[kSlabs * 2 * kKeyBlocks * 4]>(products));
    if (kMasked) mask(key, products);
    soften(factor, products);
    mix<kMasked>(values, key, products);
  }

  __device__ __forceinline__ void multiply(uint32_t keys, float (&products)[kSlabs][2 * kKeyBlocks][4]) const {
    const uint32_t query_corner = rows_first(lane), key_corner = columns_first(lane);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      uint32_t a[kSlabs][4];
#pragma unroll
      for (int slab = 0; slab < kSlabs; ++slab)
        load_matrices(queries + Tile<kRows, kDim>::block(query_corner, slab * 16, block), a[slab]);
#pragma unroll
      for (int part = 0; part < kKeyBlocks; ++part) {
        uint32_t b[4];
        load_matrices(keys + Panels::block(key_corner, part * 16, block), b);
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
          multiply_add(products[slab][2 * part], a[slab], b[0], b[1]);
          multiply_add(products[slab][2 * part + 1], a[slab], b[2], b[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void mask(int key, float (&products)[kSlabs][2 * kKeyBlocks][4]) const {
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = plan.rows.first + first + slab * 16 + half * 8 + lane / 4;
        const int position = row <= plan.rows.last ? plan.rows.position + row / heads.group : -1;
        const Keys seen = visible(position, position, heads.window);
#pragma unroll
        for (int part = 0; part < 2 * kKeyBlocks; ++part)
#pragma unroll
          for (int i = 0; i < 2; ++i)
            if (!seen.holds(key + part * 8 + lane % 4 * 2 + i)) products[slab][part][2 * half + i] = -INFINITY;
      }
  }

  // Products become weights; what was summed before is brought to the new best. A row that has not seen a key yet
  // keeps its best at -infinity, and zeros.
  __device__ __forceinline__ void soften(float factor, float (&products)[kSlabs][2 * kKeyBlocks][4]) {
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab) {
      float keep[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float top = best[slab][half];
#pragma unroll
        for (int part = 0; part < 2 * kKeyBlocks; ++part)
          top = fmaxf(top, fmaxf(products[slab][part][2 * half], products[slab][part][2 * half + 1]));
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 1));
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, 2));
        keep[half] = shrink(best[slab][half], top, factor);
        best[slab][half] = top;
        const float least = top == -INFINITY ? 0.0f : -top * factor;
        float sum = 0.0f;
#pragma unroll
        for (int part = 0; part < 2 * kKeyBlocks; ++part)
#pragma unroll
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            products[slab][part][i] = exp2_fast(fmaf(products[slab][part][i], factor, least));
            sum += products[slab][part][i];
          }
        total[slab][half] = total[slab][half] * keep[half] + sum;
      }
      rescale(slab, keep);
    }
  }

  // Mostly the best does not change, in any row.
  __device__ __forceinline__ void rescale(int slab, const float (&keep)[2]) {
    if (__all_sync(kAllLanes, keep[0] == 1.0f && keep[1] == 1.0f)) return;
#pragma unroll
    for (int block = 0; block < 2 * kBlocks; ++block)
#pragma unroll
      for (int i = 0; i < 4; ++i) mixed[slab][block][i] *= keep[i / 2];
  }

  template <bool kMasked>
  __device__ __forceinline__ void mix(uint32_t values, int key, const float (&weights)[kSlabs][2 * kKeyBlocks][4]) {
    const uint32_t corner = rows_first(lane);
#pragma unroll
    for (int part = 0; part < kKeyBlocks; ++part) {
      uint32_t a[kSlabs][4];
#pragma unroll
      for (int slab = 0; slab < kSlabs; ++slab)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float(&from)[4] = weights[slab][2 * part + i / 2];
          a[slab][i] = pack(from[i % 2 * 2], from[i % 2 * 2 + 1]);
        }
      const int first = key + part * 16 + lane % 4 * 2;
      const uint32_t upper = kMasked ? wanted_bits(plan.wanted, first) : 0;
      const uint32_t lower = kMasked ? wanted_bits(plan.wanted, first + 8) : 0;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        uint32_t b[4];
        load_matrices_transposed(values + Panels::block(corner, part * 16, block), b);
        if (kMasked) b[0] &= upper, b[1] &= lower, b[2] &= upper, b[3] &= lower;
#pragma unroll
        for (int slab = 0; slab < kSlabs; ++slab) {
          multiply_add(mixed[slab][2 * block], a[slab], b[0], b[1]);
          multiply_add(mixed[slab][2 * block + 1], a[slab], b[2], b[3]);
        }
      }
    }
  }

  // Results, where the queries were.
  __device__ __forceinline__ void end() {
#pragma unroll
    for (int slab = 0; slab < kSlabs; ++slab)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float sum = total[slab][half];
        sum += __shfl_xor_sync(kAllLanes, sum, 1);
        sum += __shfl_xor_sync(kAllLanes, sum, 2);
        const float inverse = sum > 0.0f ? 1.0f / sum : 0.0f;
#pragma unroll
        for (int block = 0; block < 2 * kBlocks; ++block) {
          const float(&from)[4] = mixed[slab][block];
          const uint32_t at = Tile<kRows, kDim>::chunk(slab * 16 + half * 8 + lane / 4, block) + lane % 4 * 4;
          store_shared(queries + at, pack(from[2 * half] * inverse, from[2 * half + 1] * inverse));
        }
      }
  }
};

// Grid: kv heads times blocks of rows, kv head fastest.
template <int kDim>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    attention_prefill(const __grid_constant__ PoolMaps maps, const Sequences sequences, const Heads heads,
                      const int32_t *query_starts, int spans, int all_rows) {
  using Shared = Layout<kDim>;
  extern __shared__ __align__(kAlignment) uint8_t shared[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const uint32_t base = shared_address(shared), barriers = base + Shared::kBarriersAt;
  const auto full = [=](int stage) { return barriers + 16 * stage; };
  const auto empty = [=](int stage) { return barriers + 16 * stage + 8; };
  if (threadIdx.x == 0) {
    prefetch_map(&maps.keys);
    prefetch_map(&maps.values);
    for (int stage = 0; stage < kStages; ++stage) {
      barrier_init(full(stage), 1);
      barrier_init(empty(stage), kWarps);
    }
    barriers_ready();
  }
  pdl_trigger();
  pdl_wait();
  Plan &plan = *reinterpret_cast<Plan *>(shared + Shared::kPlanAt);
  const int kv_head = blockIdx.x % heads.kv_heads, group = heads.group;
  if (warp == 0) make_plan(sequences, heads, query_starts, spans, all_rows, blockIdx.x / heads.kv_heads, &plan);
  __syncthreads();
  if (plan.rows.last < 0) return;
  const int first_tile = plan.wanted.first_tile(), end_tile = plan.wanted.end_tile();

  const auto keys_at = [=](int stage) { return base + Shared::kRingAt + stage * Shared::kStageBytes; };
  const int32_t *table = sequences.block_tables + static_cast<int64_t>(plan.rows.span) * sequences.table_width;
  Fetch<kDim> fetch{&maps.keys, &maps.values, table, plan.wanted, sequences.pages, heads.kv_heads, kv_head, lane, 0};
  const auto start = [&](int tile, int stage) {
    fetch.start(tile, keys_at(stage), keys_at(stage) + Shared::Panels::kBytes, full(stage));
    fetch.look_up(tile + 1);
  };
  if (warp == 0 && first_tile < end_tile) {
    global_to_copies();
    fetch.look_up(first_tile);
    start(first_tile, 0);
  }

  const int first_row = warp * kWarpRows, first_head = kv_head * group;
  each_chunk<kDim>(plan.rows, group, first_row, lane, [&](uint32_t at, int64_t row, int head, int column, bool real) {
    const uint16_t *from = heads.q + row * heads.q_stride + (first_head + head) * kDim + column;
    store_shared16(base + at, real ? load16(from) : make_uint4(0, 0, 0, 0));
  });
  __syncwarp();

  Walk<kDim> walk{lane, base + first_row * kRowBytes, plan, heads, first_row};
  walk.begin();
  for (int tile = first_tile; tile < end_tile; ++tile) {
    const int turn = tile - first_tile, stage = turn % kStages, other = stage ^ 1;
    if (warp == 0 && tile + 1 < end_tile) {
      barrier_wait(empty(other), ((turn + 1) / kStages & 1) ^ 1);
      start(tile + 1, other);
    }
    barrier_wait(full(stage), turn / kStages & 1);
    const int key = tile * kTileTokens;
    const uint32_t keys = keys_at(stage), values = keys + Shared::Panels::kBytes;
    if (plan.common[warp].covers(key, kTileTokens))
      walk.template tile<false>(keys, values, key);
    else if (plan.seen[warp].touches(key, kTileTokens))
      walk.template tile<true>(keys, values, key);
    __syncwarp();
    if (lane == 0) barrier_arrive(empty(stage));
  }
  walk.end();
  __syncwarp();
  each_chunk<kDim>(plan.rows, group, first_row, lane, [&](uint32_t at, int64_t row, int head, int column, bool real) {
    uint16_t *to = heads.out + (row * heads.heads + first_head + head) * kDim + column;
    if (real) store16(to, load_shared16(base + at));
  });
}

template <int kDim>
tl_status launch_prefill(const tl_cuda_attention_prefill_args &args, int64_t blocks, void *stream) {
  PoolMaps maps;
  const tl_status status = pool_maps_of(args, &maps);
  if (status != TL_OK) return status;
  const Shape shape{dim3(static_cast<unsigned>(blocks)), dim3(kThreads), Layout<kDim>::kBytes};
  return launch(attention_prefill<kDim>, shape, stream, args.flags, maps, sequences_of(args), heads_of(args),
                args.query_starts, args.spans, args.rows);
}

}  // namespace

tl_status init_attention_prefill() {
  const tl_status status = prepare(attention_prefill<64>, Layout<64>::kBytes, kPrefillCarveout);
  return status != TL_OK ? status : prepare(attention_prefill<128>, Layout<128>::kBytes, kPrefillCarveout);
}

}  // namespace tl::cuda

extern "C" tl_status tl_cuda_attention_prefill(const tl_cuda_attention_prefill_args *args, void *stream) {
  using namespace tl::cuda;
  ArgsCheck check = check_counts(args);
  if (!check.ok()) return check.status();
  check.count(args->rows, 0).count(int64_t{args->rows} * args->heads, 0);
  if (!check.ok() || args->rows == 0 || args->spans == 0) return check.status();
  check_pointers(*args, check);
  check.present(args->query_starts);
  check.words(args->query_starts);
  // Spans need at most one block more than their rows would fill if they were one.
  const int64_t blocks = int64_t{args->rows} * (args->heads / args->kv_heads) / kRows + args->spans;
  check.count(blocks * args->kv_heads, 1);
  if (!check.ok()) return check.status();
  return args->head_dim == 64 ? launch_prefill<64>(*args, blocks * args->kv_heads, stream)
                              : launch_prefill<128>(*args, blocks * args->kv_heads, stream);
}
