// Attention of one query token per sequence: a cluster of `splits` blocks for each (sequence, kv head, 8 query heads).
//
// A block walks its share of the sequence's tiles of 64 keys. One warp fetches (a ring of tiles in shared memory, the
// copy engine, barriers); four warps compute, each on one page of a tile, with query heads as the narrow side:
//   scores[key, head] = K[key, d] q^T[d, head]      out^T[d, head] += V^T[d, key] weights[key, head]
// so that eight heads fill the tensor cores' n. Each warp keeps its own running softmax; nothing is exchanged until
// the end. Then the four warps' parts are merged in shared memory, and the blocks' through the cluster's shared
// memory, always in the same order.

#include "attention.cuh"
#include "launch.h"

namespace tl::cuda {
namespace {

constexpr int kWorkers = 4;  // warps that compute: a page of the tile each
constexpr int kThreads = (kWorkers + 1) * kWarp;
constexpr int kHeads = 8;  // query heads of a block
constexpr int kMinStages = 2, kMaxStages = 4;

static_assert(kWorkers == kTilePages);

// Shared memory of a block: the ring, and after it, when the ring is done with, the parts that are merged.
template <int kDim>
struct Layout {
  using Panels = Tile<kTileTokens, kDim>;
  static constexpr int kStageBytes = 2 * Panels::kBytes;  // keys, values
  static constexpr int kHeadFloats = kDim + 4;            // a head's row; the 4 spread heads over the banks
  static constexpr int kPartFloats = kHeads * kHeadFloats;
  static constexpr int kParts = kWorkers + 1;  // the fifth: their sum
  static constexpr int kBarrierBytes = 2 * kMaxStages * 8;
  static constexpr int kSumBytes = 2 * kParts * kHeads * 4;

  static constexpr int shared_bytes(int stages) { return stages * kStageBytes + kBarrierBytes + kSumBytes; }

  static_assert(kParts * kPartFloats * 4 <= kMinStages * kStageBytes, "the parts lie where the ring was");
};

struct Ring {
  uint32_t stages_at, barriers_at;
  int stages;

  __device__ __forceinline__ uint32_t full(int stage) const { return barriers_at + 16 * stage; }
  __device__ __forceinline__ uint32_t empty(int stage) const { return barriers_at + 16 * stage + 8; }
};

// Where a walk through the ring stands.
struct Turn {
  int stage = 0;
  uint32_t phase = 0;

  __device__ __forceinline__ void next(int stages) {
    if (++stage < stages) return;
    stage = 0;
    phase ^= 1;
  }
};

// A part of a block's result: softmax sums of some keys. Logits are to the base of 2.
template <int kDim>
struct Part {
  float *mixed;  // [kHeads, kHeadFloats]: values times weights
  float *best;   // [kHeads]: the largest logit, -infinity without keys
  float *total;  // [kHeads]: sum of weights 2^(logit - best)
};

template <int kDim>
__device__ __forceinline__ Part<kDim> part_at(float *parts, float *sums, int index) {
  float *own = sums + index * 2 * kHeads;
  return {parts + index * Layout<kDim>::kPartFloats, own, own + kHeads};
}

template <int kDim>
__device__ __forceinline__ void fetch_tiles(Fetch<kDim> fetch, const Ring &ring, int first, int end) {
  Turn turn;
  fetch.look_up(first);
  for (int tile = first; tile < end; ++tile) {
    barrier_wait(ring.empty(turn.stage), turn.phase ^ 1);
    const uint32_t keys = ring.stages_at + turn.stage * Layout<kDim>::kStageBytes;
    fetch.start(tile, keys, keys + Tile<kTileTokens, kDim>::kBytes, ring.full(turn.stage));
    fetch.look_up(tile + 1);
    turn.next(ring.stages);
  }
}

// One warp's state: lane holds heads 2 * (lane % 4) and the next.
template <int kDim>
struct Worker {
  using Panels = Tile<kTileTokens, kDim>;
  static constexpr int kBlocks = kDim / 16;

  int lane;
  uint32_t q[kBlocks][2] = {};
  float mixed[kBlocks][4] = {};
  float best[2] = {-INFINITY, -INFINITY};
  float total[2] = {};  // of this lane's keys

  // From the block's first head of `heads` on; the missing ones of eight are zero.
  __device__ __forceinline__ void load_q(const uint16_t *heads_q, int heads) {
    const int head = lane / 4;
    const int32_t *words = reinterpret_cast<const int32_t *>(heads_q + head * kDim) + lane % 4;
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      q[block][0] = head < heads ? load_int(words + block * 8) : 0;
      q[block][1] = head < heads ? load_int(words + block * 8 + 4) : 0;
    }
  }

  // Takes in the 16 keys from `key` on, which are row `row` and on of the tile.
  __device__ __forceinline__ void page(uint32_t keys, uint32_t values, int row, int key, const Keys &wanted,
                                       const Scores &scores) {
    float logits[4];
    score(keys, row, logits);
    const float factor = cap(scores, logits);
    const int upper = key + lane / 4;
#pragma unroll
    for (int i = 0; i < 4; ++i) logits[i] = wanted.holds(upper + i / 2 * 8) ? logits[i] * factor : -INFINITY;
    soften(logits);
    const uint32_t weights[2] = {transpose_matrix(pack(logits[0], logits[1])),
                                 transpose_matrix(pack(logits[2], logits[3]))};
    mix(values, row, key, wanted, weights);
  }

  // Two sums, so that one product does not wait for the one before.
  __device__ __forceinline__ void score(uint32_t keys, int row, float (&out)[4]) const {
    float odd[4] = {};
    out[0] = out[1] = out[2] = out[3] = 0.0f;
    const uint32_t corner = rows_first(lane);
#pragma unroll
    for (int block = 0; block < kBlocks; block += 2) {
      uint32_t a[4], b[4];
      load_matrices(keys + Panels::block(corner, row, block), a);
      load_matrices(keys + Panels::block(corner, row, block + 1), b);
      multiply_add(out, a, q[block][0], q[block][1]);
      multiply_add(odd, b, q[block + 1][0], q[block + 1][1]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] += odd[i];
  }

  // Logits become weights; what was summed before is brought to the new best. At least one key is wanted, so that
  // the new best is finite.
  __device__ __forceinline__ void soften(float (&logits)[4]) {
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      float top = fmaxf(logits[head], logits[head + 2]);
#pragma unroll
      for (int distance = 4; distance < kWarp; distance *= 2)
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, distance));
      const float now = fmaxf(best[head], top), keep = shrink(best[head], now, 1.0f);
      best[head] = now;
      logits[head] = exp2_fast(logits[head] - now);
      logits[head + 2] = exp2_fast(logits[head + 2] - now);
      total[head] = total[head] * keep + (logits[head] + logits[head + 2]);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        mixed[block][head] *= keep;
        mixed[block][head + 2] *= keep;
      }
    }
  }

  __device__ __forceinline__ void mix(uint32_t values, int row, int key, const Keys &wanted,
                                      const uint32_t (&weights)[2]) {
    const uint32_t corner = columns_first(lane);
    const uint32_t upper = wanted_bits(wanted, key + lane % 4 * 2), lower = wanted_bits(wanted, key + lane % 4 * 2 + 8);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      uint32_t a[4];
      load_matrices_transposed(values + Panels::block(corner, row, block), a);
      a[0] &= upper, a[1] &= upper, a[2] &= lower, a[3] &= lower;
      multiply_add(mixed[block], a, weights[0], weights[1]);
    }
  }

  // Into shared memory; the sums of weights are added up over lanes first.
  __device__ __forceinline__ void store(const Part<kDim> &part) {
#pragma unroll
    for (int head = 0; head < 2; ++head)
#pragma unroll
      for (int distance = 4; distance < kWarp; distance *= 2)
        total[head] += __shfl_xor_sync(kAllLanes, total[head], distance);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int head = lane % 4 * 2 + i % 2, d = lane / 4 + i / 2 * 8;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block)
        part.mixed[head * Layout<kDim>::kHeadFloats + block * 16 + d] = mixed[block][i];
    }
    if (lane >= 4) return;
#pragma unroll
    for (int head = 0; head < 2; ++head) {
      part.best[lane * 2 + head] = best[head];
      part.total[lane * 2 + head] = total[head];
    }
  }
};

template <int kDim>
__device__ __forceinline__ void compute_tiles(Worker<kDim> &worker, const Ring &ring, int first, int end, int warp,
                                              const Keys &wanted, const Scores &scores) {
  Turn turn;
  for (int tile = first; tile < end; ++tile) {
    barrier_wait(ring.full(turn.stage), turn.phase);
    const uint32_t keys = ring.stages_at + turn.stage * Layout<kDim>::kStageBytes;
    const int row = warp * kPageTokens, key = tile * kTileTokens + row;
    if (wanted.touches(key, kPageTokens))
      worker.page(keys, keys + Tile<kTileTokens, kDim>::kBytes, row, key, wanted, scores);
    __syncwarp();
    if (worker.lane == 0) barrier_arrive(ring.empty(turn.stage));
    turn.next(ring.stages);
  }
}

// The fifth part becomes the sum of the warps' four, in their order.
template <int kDim>
__device__ __forceinline__ void merge_warps(float *parts, float *sums) {
  const Part<kDim> sum = part_at<kDim>(parts, sums, kWorkers);
  for (int i = threadIdx.x; i < kHeads * kDim; i += kThreads) {
    const int head = i / kDim, at = head * Layout<kDim>::kHeadFloats + i % kDim;
    float best = -INFINITY, mixed = 0.0f, total = 0.0f;
#pragma unroll
    for (int warp = 0; warp < kWorkers; ++warp) best = fmaxf(best, part_at<kDim>(parts, sums, warp).best[head]);
#pragma unroll
    for (int warp = 0; warp < kWorkers; ++warp) {
      const Part<kDim> part = part_at<kDim>(parts, sums, warp);
      const float weight = shrink(part.best[head], best, 1.0f);
      mixed += part.mixed[at] * weight;
      total += part.total[head] * weight;
    }
    sum.mixed[at] = mixed;
    if (i % kDim == 0) sum.best[head] = best, sum.total[head] = total;
  }
}

// Four columns of one head: the sum of all blocks' parts, in the order of their ranks, over the sum of weights.
template <int kDim>
__device__ __forceinline__ uint2 merge_blocks(const Part<kDim> &own, int head, int column, int splits) {
  const uint32_t best_at = shared_address(own.best + head), total_at = shared_address(own.total + head);
  const uint32_t mixed_at = shared_address(own.mixed + head * Layout<kDim>::kHeadFloats + column);
  float best = -INFINITY, total = 0.0f;
  float4 mixed = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  for (int rank = 0; rank < splits; ++rank) best = fmaxf(best, load_cluster(cluster_address(best_at, rank)));
  for (int rank = 0; rank < splits; ++rank) {
    const float weight = shrink(load_cluster(cluster_address(best_at, rank)), best, 1.0f);
    const float4 part = load_cluster16(cluster_address(mixed_at, rank));
    total += load_cluster(cluster_address(total_at, rank)) * weight;
    mixed.x += part.x * weight, mixed.y += part.y * weight, mixed.z += part.z * weight, mixed.w += part.w * weight;
  }
  const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
  return make_uint2(pack(mixed.x * inverse, mixed.y * inverse), pack(mixed.z * inverse, mixed.w * inverse));
}

// Grid: (splits, kv heads * head tiles, spans), clusters along x.
template <int kDim>
__global__ void __launch_bounds__(kThreads, 2)
    attention_decode(const __grid_constant__ PoolMaps maps, const Sequences sequences, const Heads heads, int stages) {
  using Shared = Layout<kDim>;
  extern __shared__ __align__(kAlignment) uint8_t shared[];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const Ring ring{shared_address(shared), shared_address(shared) + stages * Shared::kStageBytes, stages};
  if (threadIdx.x == 0) {
    prefetch_map(&maps.keys);
    prefetch_map(&maps.values);
#pragma unroll
    for (int stage = 0; stage < kMaxStages; ++stage) {
      barrier_init(ring.full(stage), 1);
      barrier_init(ring.empty(stage), kWorkers);
    }
    barriers_ready();
  }
  pdl_trigger();
  __syncthreads();
  pdl_wait();

  const int head_tiles = (heads.group + kHeads - 1) / kHeads;
  const int kv_head = blockIdx.y / head_tiles, head_tile = blockIdx.y % head_tiles, span = blockIdx.z;
  const int first_head = kv_head * heads.group + head_tile * kHeads;
  const int own_heads = min(kHeads, heads.group - head_tile * kHeads);
  const int splits = gridDim.x, split = blockIdx.x;

  const int length = context_length(sequences, span);
  const Keys wanted = visible(length - 1, length - 1, heads.window);
  const int first = wanted.first_tile(), tiles = wanted.end_tile() - first;
  const int begin = first + tiles * split / splits, end = first + tiles * (split + 1) / splits;

  float *parts = reinterpret_cast<float *>(shared);
  float *sums = reinterpret_cast<float *>(shared + stages * Shared::kStageBytes + Shared::kBarrierBytes);
  Worker<kDim> worker{lane};
  if (warp == kWorkers) {
    global_to_copies();
    const int32_t *table = sequences.block_tables + static_cast<int64_t>(span) * sequences.table_width;
    fetch_tiles(Fetch<kDim>{&maps.keys, &maps.values, table, wanted, sequences.pages, heads.kv_heads, kv_head, lane, 0},
                ring, begin, end);
  } else {
    worker.load_q(heads.q + span * heads.q_stride + first_head * kDim, own_heads);
    compute_tiles(worker, ring, begin, end, warp, wanted, heads.scores);
  }
  __syncthreads();  // all warps are done with the ring, and all its copies have come
  if (warp < kWorkers) worker.store(part_at<kDim>(parts, sums, warp));
  __syncthreads();
  merge_warps<kDim>(parts, sums);
  cluster_barrier();
  const Part<kDim> own = part_at<kDim>(parts, sums, kWorkers);
  uint16_t *out = heads.out + (static_cast<int64_t>(span) * heads.heads + first_head) * kDim;
  // Neighbouring ranks take neighbouring pieces: each reads as much of the others as they of it.
  for (int piece = threadIdx.x * splits + split; piece < own_heads * kDim / 4; piece += kThreads * splits)
    *reinterpret_cast<uint2 *>(out + piece * 4) =
        merge_blocks<kDim>(own, piece / (kDim / 4), piece % (kDim / 4) * 4, splits);
  cluster_barrier();  // nobody leaves while others read its shared memory
}

template <int kDim>
tl_status launch_decode(const tl_cuda_attention_decode_args &args, void *stream) {
  PoolMaps maps;
  const tl_status status = pool_maps_of(args, &maps);
  if (status != TL_OK) return status;
  const Heads heads = heads_of(args);
  const unsigned head_tiles = (heads.group + kHeads - 1) / kHeads;
  const Shape shape{dim3(args.splits, heads.kv_heads * head_tiles, args.spans), dim3(kThreads),
                    static_cast<size_t>(Layout<kDim>::shared_bytes(args.stages)), static_cast<unsigned>(args.splits)};
  return launch(attention_decode<kDim>, shape, stream, args.flags, maps, sequences_of(args), heads, args.stages);
}

}  // namespace

tl_status init_attention_decode() {
  const tl_status status = prepare(attention_decode<64>, Layout<64>::shared_bytes(kMaxStages));
  return status != TL_OK ? status : prepare(attention_decode<128>, Layout<128>::shared_bytes(kMaxStages));
}

}  // namespace tl::cuda

extern "C" tl_status tl_cuda_attention_decode(const tl_cuda_attention_decode_args *args, void *stream) {
  using namespace tl::cuda;
  constexpr int32_t most = 65535;  // blocks along y and z of a grid
  ArgsCheck check = check_counts(args);
  if (!check.ok()) return check.status();
  check.fits(args->splits == 1 || args->splits == 2 || args->splits == 4 || args->splits == 8);
  check.fits(args->stages >= kMinStages && args->stages <= kMaxStages);
  check.require(args->spans <= most && args->heads <= most, TL_ERROR_SIZE);
  if (!check.ok() || args->spans == 0) return check.status();
  check_pointers(*args, check);
  if (!check.ok()) return check.status();
  return args->head_dim == 64 ? launch_decode<64>(*args, stream) : launch_decode<128>(*args, stream);
}
