// tl_sample on the GPU: one cluster of eight blocks per row, the row in their shared memory.
//
// The one rule: sums are of integers (sample.h), so their order is free, and every block of a row takes the same
// branches: all that decides one is the row's parameters or a value that the whole cluster has agreed on.
//
// Warps own runs of ids in ascending order: block 0's warp 0 the first, block 7's warp 31 the last. So the inverse
// cumulative distribution is a search through blocks, then warps, then lanes.

#include <cooperative_groups.h>

#include "../abi/check_sample.h"
#include "../sample.h"
#include "check.h"
#include "device.cuh"
#include "launch.h"

namespace tl::cuda {
namespace {

using namespace sampling;

constexpr int kBlocks = 8;  // of a cluster: the most that every Hopper GPU runs
constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / kWarp;
constexpr int kLoads = 4;  // 16-byte loads in flight per thread
constexpr int kFloats = 4;
constexpr int64_t kMaxRows = int64_t{1} << 20;
static_assert(kBins == kThreads, "each thread has a bin");
static_assert(kWarps == kWarp && TL_MAX_TOPS <= kWarp && kBlocks <= kWarp, "one lane for each warp, block or best id");

// Ids per warp: a multiple of the lanes, so that lanes can share a run evenly.
int run_of(int64_t vocabulary) {
  const int64_t warps = kBlocks * kWarps;
  const int64_t ids = (vocabulary + warps - 1) / warps;
  return static_cast<int>((ids + kWarp - 1) / kWarp * kWarp);
}

constexpr int kMaxRun = TL_MAX_VOCABULARY / (kBlocks * kWarps);
static_assert(kMaxRun % kWarp == 0 && kMaxRun / kWarp <= kWarp, "a lane's part of a run is at most one warp wide");

// 64-bit sums in two words: shared memory has no 64-bit addition of its own.
struct Bins {
  uint32_t low[kBins], high[kBins];

  __device__ void clear(int bin) { low[bin] = high[bin] = 0; }
  __device__ uint64_t get(int bin) const { return static_cast<uint64_t>(high[bin]) << 32 | low[bin]; }
  __device__ void add(int bin, uint64_t amount) {
    const uint32_t part = static_cast<uint32_t>(amount);
    const uint32_t before = atomicAdd(&low[bin], part);
    const bool carry = before + part < part;
    const uint32_t rest = static_cast<uint32_t>(amount >> 32) + carry;
    if (rest != 0) atomicAdd(&high[bin], rest);
  }
};

struct Shared {
  Bins bins[2];
  uint64_t partial[kWarps];  // one value of each warp
  uint64_t share[2];         // this block's, for the others to read
  uint64_t left;             // of a goal, inside the bin `digit`
  uint64_t tops[kWarp];      // in block 0: ranks of the best ids, in no order
  uint32_t digit;
  uint32_t tops_found;  // in block 0
  int32_t token;
  int32_t counted;
  tl_sample_row row;
};

struct Sum {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a + b; }
};
struct Max {
  __device__ uint64_t operator()(uint64_t a, uint64_t b) const { return a > b ? a : b; }
};

// The same result in every lane.
template <typename Fold>
__device__ uint64_t warp_fold(uint64_t value, Fold fold) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2)
    value = fold(value, __shfl_xor_sync(kAllLanes, value, distance));
  return value;
}

// Sum of this lane's value and those of all lanes below it.
__device__ uint64_t warp_prefix(uint64_t value, int lane) {
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const uint64_t below = __shfl_up_sync(kAllLanes, value, distance);
    if (lane >= distance) value += below;
  }
  return value;
}

// Sum of this lane's value and those of all lanes above it.
__device__ uint64_t warp_suffix(uint64_t value, int lane) {
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const uint64_t above = __shfl_down_sync(kAllLanes, value, distance);
    if (lane + distance < kWarp) value += above;
  }
  return value;
}

// The lane on whose amount unit `left` falls, lanes counted in order, and what of `left` then remains. The unit is in
// one of them.
__device__ int lane_of_unit(uint64_t amount, uint64_t &left, int lane) {
  const uint64_t end = warp_prefix(amount, lane);
  const int found = __ffs(static_cast<int>(__ballot_sync(kAllLanes, left < end))) - 1;
  left -= __shfl_sync(kAllLanes, end - amount, found);
  return found;
}

// What a row comes to. Only its owner block knows a token that was drawn; -1, no token, is known to all.
struct Choice {
  int32_t token;
  bool owner;
};

class Block {
 public:
  __device__ Block(const tl_sample_args &all, int ids_per_warp, Shared &block_memory, float *block_scores)
      : args(all), shared(block_memory), scores(block_scores), run(ids_per_warp),
        rank(static_cast<int>(cooperative_groups::this_cluster().block_rank())), warp(threadIdx.x / kWarp),
        lane(threadIdx.x % kWarp), index(blockIdx.x / kBlocks), first((rank * kWarps + warp) * ids_per_warp) {}

  __device__ void sample() {
    read_row();
    if (!shared.row.active) return;
    shared.bins[0].clear(threadIdx.x);
    if (threadIdx.x == 0) shared.tops_found = 0;
    const uint64_t raw = across(load_scores(), Max());
    pdl_trigger();
    if (!finite(order_of(raw))) return write_token({-1, rank == 0});
    const bool reports = args.logprobs != nullptr && shared.row.logprobs >= 0;
    uint64_t total = 0;
    if (reports) {
      total = across(sum_of_run(Weights{score_of(raw), 1.0}), Sum());
      collect_tops();
    }
    const Choice choice = pick(raw);
    write_token(choice);
    if (choice.token >= 0 && reports) report(choice, score_of(raw), total);
    if (choice.token >= 0 && choice.owner && history() >= 0) count(choice.token);
  }

 private:
  const tl_sample_args &args;
  Shared &shared;
  float *scores;  // of this block's ids, warp after warp
  const int run;  // ids per warp
  const int rank, warp, lane;
  const int64_t index;  // of the row
  const int first;      // id of this warp
  int bins_turn = 0, share_turn = 0;

  __device__ float *run_scores() const { return scores + warp * run; }

  __device__ void read_row() {
    constexpr int words = sizeof(tl_sample_row) / 4;
    const int32_t *source = reinterpret_cast<const int32_t *>(args.params + index);
    if (threadIdx.x < words) reinterpret_cast<int32_t *>(&shared.row)[threadIdx.x] = load_int(source + threadIdx.x);
    __syncthreads();
  }

  // The row into shared memory, ids beyond the vocabulary as -INFINITY; the best rank this thread saw.
  __device__ uint64_t load_scores() {
    const float *logits = args.logits + index * args.stride;
    const int ids = static_cast<int>(args.vocabulary);
    uint64_t best = 0;
    for (int base = 0; base < run; base += kLoads * kWarp * kFloats) {
      uint4 loaded[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int at = base + (i * kWarp + lane) * kFloats;
        // A stride that is a multiple of 4 holds the 4 floats of any id.
        if (at < run && first + at < ids) loaded[i] = load16(logits + first + at);
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int at = base + (i * kWarp + lane) * kFloats;
        if (at >= run) continue;
        const uint32_t words[kFloats] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
        float value[kFloats];
#pragma unroll
        for (int j = 0; j < kFloats; ++j) {
          const int id = first + at + j;
          value[j] = id < ids ? bits_as<float>(words[j]) : -INFINITY;
          best = Max()(best, rank_of(value[j], id));
        }
        *reinterpret_cast<float4 *>(run_scores() + at) = make_float4(value[0], value[1], value[2], value[3]);
      }
    }
    return best;
  }

  // One value of all threads of all blocks, known to each. Shares alternate between two places: one is written again
  // only after a barrier that all have reached who read it.
  template <typename Fold>
  __device__ uint64_t across(uint64_t value, Fold fold) {
    value = warp_fold(value, fold);
    if (lane == 0) shared.partial[warp] = value;
    __syncthreads();
    value = warp_fold(shared.partial[lane], fold);
    return warp_fold(exchange(value), fold);
  }

  // Lane b gets block b's value, lanes beyond the blocks 0.
  __device__ uint64_t exchange(uint64_t value) {
    const auto cluster = cooperative_groups::this_cluster();
    uint64_t *const mine = &shared.share[share_turn++ & 1];
    if (threadIdx.x == 0) *mine = value;
    cluster.sync();
    return lane < kBlocks ? *cluster.map_shared_rank(mine, lane) : 0;
  }

  __device__ uint64_t sum_of_run(const Weights &weights) const {
    uint64_t sum = 0;
    for (int at = lane; at < run; at += kWarp) sum += weights.of(run_scores()[at], first + at);
    return sum;
  }

  // The greatest rank r for which the measures of all ranks from r up add up to goal(sum of all measures): digit by
  // digit, the measures of the ranks that begin with the digits so far are summed by their next digit. The goal is at
  // least 1 and at most the sum.
  template <typename Measure, typename Goal>
  __device__ uint64_t select(const Measure &measure, const Goal &goal) {
    const auto cluster = cooperative_groups::this_cluster();
    uint64_t prefix = 0, left = 0;
    for (int shift = kRankBits - kDigitBits; shift >= 0; shift -= kDigitBits) {
      Bins &bins = shared.bins[bins_turn++ & 1];  // cleared before
      for (int at = lane; at < run; at += kWarp) {
        const float score = run_scores()[at];
        const uint64_t rank = rank_of(score, first + at);
        if (rank >> shift >> kDigitBits != prefix) continue;
        const uint64_t amount = measure(score, first + at);
        if (amount != 0) bins.add(static_cast<int>(rank >> shift) & (kBins - 1), amount);
      }
      cluster.sync();
      uint64_t amount = 0;
      for (int block = 0; block < kBlocks; ++block) amount += cluster.map_shared_rank(&bins, block)->get(threadIdx.x);
      // The other bins were read by all before the barrier above, and are filled after the barriers below.
      shared.bins[bins_turn & 1].clear(threadIdx.x);
      uint64_t from_here = warp_suffix(amount, lane);
      if (lane == 0) shared.partial[warp] = from_here;
      __syncthreads();
      const uint64_t of_warp = shared.partial[lane];
      from_here += warp_fold(lane > warp ? of_warp : 0, Sum());
      if (shift == kRankBits - kDigitBits) left = goal(warp_fold(of_warp, Sum()));
      if (from_here >= left && from_here - amount < left) {  // in one thread
        shared.digit = threadIdx.x;
        shared.left = left - (from_here - amount);
      }
      __syncthreads();
      prefix = prefix << kDigitBits | shared.digit;
      left = shared.left;
    }
    return prefix;
  }

  // The least rank among the `wanted` best.
  __device__ uint64_t select_best(int wanted) {
    return select([](float, int32_t) { return uint64_t{1}; },
                  [=](uint64_t) { return static_cast<uint64_t>(wanted); });
  }

  __device__ Choice pick(uint64_t raw) {
    const bool edited = edit();
    const uint64_t best = edited ? across(best_of_run(), Max()) : raw;
    if (!finite(order_of(best))) return {-1, rank == 0};
    if (shared.row.temperature > 0) return draw(score_of(best));
    return {id_of(best), rank == 0};
  }

  __device__ int history() const {
    const int32_t history = shared.row.history;
    return history < args.history_total ? history : -1;
  }

  __device__ int64_t history_length() const {
    const int64_t length = load_int(args.history_lengths + history());
    return length < args.history_capacity ? length : args.history_capacity;
  }

  // Where this block keeps the score of an id; NULL where another does, or the id is none.
  __device__ float *score_at(int32_t id) const {
    const int64_t at = int64_t{id} - rank * kWarps * run;
    return at >= 0 && at < kWarps * run && id < args.vocabulary ? scores + at : nullptr;
  }

  // True if there was anything to edit. Ids are distinct within biases and within a history: each score has one writer.
  __device__ bool edit() {
    const tl_sample_row &row = shared.row;
    const bool penalises = history() >= 0 && penalised(row);
    if (row.bias_count <= 0 && !penalises) return false;
    __syncthreads();  // scores are read and written by other threads than those that loaded them
    for (int64_t i = threadIdx.x; i < row.bias_count; i += kThreads) {
      const int64_t at = row.bias_start + i;
      if (at < 0 || at >= args.bias_total) continue;
      const int32_t *entry = reinterpret_cast<const int32_t *>(args.biases + at);
      float *const score = score_at(load_int(entry));
      if (score != nullptr) *score += bits_as<float>(load_int(entry + 1));
    }
    __syncthreads();
    if (penalises) {
      const int64_t length = history_length();
      const int32_t *entries = reinterpret_cast<const int32_t *>(args.histories + history() * args.history_capacity);
      for (int64_t i = threadIdx.x; i < length; i += kThreads) {
        float *const score = score_at(load_int(entries + 2 * i));
        if (score != nullptr) *score = penalise(*score, load_int(entries + 2 * i + 1), row);
      }
      __syncthreads();
    }
    return true;
  }

  __device__ uint64_t best_of_run() const {
    uint64_t best = 0;
    for (int at = lane; at < run; at += kWarp) best = Max()(best, rank_of(run_scores()[at], first + at));
    return best;
  }

  __device__ Choice draw(float best) {
    const tl_sample_row &row = shared.row;
    Weights weights{best, row.temperature};
    if (row.top_k > 0 && row.top_k < args.vocabulary) weights.border = with_equals(select_best(row.top_k));
    if (row.top_p < 1.0)
      weights.border = select([&](float score, int32_t id) { return weights.of(score, id); },
                              [&](uint64_t total) { return nucleus(row.top_p, total); });
    weights.min_p = row.min_p;
    return find(weights, random_bits(row.seed, row.choice, row.position));
  }

  // The id on which the draw falls: whose block, whose warp, whose lane's part of the warp's run, which of the part.
  __device__ Choice find(const Weights &weights, uint64_t bits) {
    const uint64_t of_run = warp_fold(sum_of_run(weights), Sum());
    if (lane == 0) shared.partial[warp] = of_run;
    __syncthreads();
    const uint64_t of_warp = shared.partial[lane];
    const uint64_t of_block = exchange(warp_fold(of_warp, Sum()));
    const uint64_t total = warp_fold(of_block, Sum());
    if (total == 0) return {-1, rank == 0};  // min_p above 1 keeps nothing
    uint64_t left = drawn_unit(bits, total);
    if (lane_of_unit(of_block, left, lane) != rank) return {0, false};
    if (lane_of_unit(of_warp, left, lane) == warp) {
      const int part = run / kWarp;
      uint64_t amount = 0;
      for (int i = 0, at = lane * part; i < part; ++i, ++at) amount += weights.of(run_scores()[at], first + at);
      const int base = lane_of_unit(amount, left, lane) * part;
      amount = lane < part ? weights.of(run_scores()[base + lane], first + base + lane) : 0;
      const int32_t token = first + base + lane_of_unit(amount, left, lane);
      if (lane == 0) shared.token = token;
    }
    __syncthreads();
    return {shared.token, true};
  }

  __device__ int tops_wanted() const {
    int64_t wanted = shared.row.logprobs;
    wanted = wanted < args.tops ? wanted : args.tops;
    return static_cast<int>(wanted < args.vocabulary ? wanted : args.vocabulary);
  }

  // The ranks of the best ids, in block 0. Seen there after the next barrier of the cluster.
  __device__ void collect_tops() {
    const int wanted = tops_wanted();
    if (wanted == 0) return;
    const uint64_t least = select_best(wanted);
    Shared *const zero = cooperative_groups::this_cluster().map_shared_rank(&shared, 0);
    for (int at = lane; at < run; at += kWarp) {
      const uint64_t rank = rank_of(run_scores()[at], first + at);
      if (rank < least) continue;
      const uint32_t place = atomicAdd(&zero->tops_found, 1u);
      zero->tops[place] = rank;
    }
  }

  __device__ void write_token(Choice choice) const {
    if (!choice.owner || threadIdx.x != 0) return;
    const int32_t next = shared.row.next;
    args.tokens[index] = choice.token;
    if (next >= 0 && next < args.next_total) args.next_tokens[next] = choice.token < 0 ? 0 : choice.token;
  }

  // Log-probabilities: the owner writes the chosen id's, block 0 those of the best ids, each at the place that the
  // number of better ones gives it.
  __device__ void report(Choice choice, float best, uint64_t total) {
    const int wanted = tops_wanted();
    if (choice.owner && threadIdx.x == 0) {
      const float score = bits_as<float>(load_int(
          reinterpret_cast<const int32_t *>(args.logits + index * args.stride + choice.token)));
      args.logprobs[index] = log_probability(score, best, total);
    }
    if (wanted == 0) return;
    cooperative_groups::this_cluster().sync();
    if (rank != 0 || threadIdx.x >= wanted) return;
    const uint64_t mine = shared.tops[threadIdx.x];
    int64_t at = index * args.tops;
    for (int i = 0; i < wanted; ++i) at += shared.tops[i] > mine;
    args.top_ids[at] = id_of(mine);
    args.top_logprobs[at] = log_probability(score_of(mine), best, total);
  }

  // Adds the chosen id to the history. By all threads of one block.
  __device__ void count(int32_t token) {
    tl_sample_count *const entries = args.histories + history() * args.history_capacity;
    const int64_t length = history_length();
    if (threadIdx.x == 0) shared.counted = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < length; i += kThreads) {
      if (load_int(&entries[i].token) != token) continue;
      entries[i].count = load_int(&entries[i].count) + 1;
      shared.counted = 1;
    }
    __syncthreads();
    if (threadIdx.x != 0 || shared.counted || length < 0 || length >= args.history_capacity) return;
    entries[length] = {token, 1};
    args.history_lengths[history()] = static_cast<int32_t>(length + 1);
  }
};

__global__ void __launch_bounds__(kThreads, 1) sample_kernel(const __grid_constant__ tl_sample_args args, int run) {
  __shared__ Shared shared;
  extern __shared__ float4 scores[];
  pdl_wait();
  Block(args, run, shared, reinterpret_cast<float *>(scores)).sample();
  // No block ends while another may still look into its shared memory.
  cooperative_groups::this_cluster().sync();
}

size_t scores_bytes(int run) { return sizeof(float) * kWarps * run; }

}  // namespace

tl_status init_sample() { return prepare(sample_kernel, scores_bytes(kMaxRun)); }

}  // namespace tl::cuda

extern "C" tl_status tl_cuda_sample(const tl_cuda_sample_args *args, void *stream) {
  using namespace tl::cuda;
  ArgsCheck check(args);
  if (!check.ok()) return check.status();
  tl::check_sample(check, *args);
  check.require(args->rows <= kMaxRows, TL_ERROR_SIZE).fits(args->stride % kFloats == 0);
  if (!check.vectors(args->logits).ok() || args->rows == 0) return check.status();
  const int run = run_of(args->vocabulary);
  const dim3 grid(static_cast<unsigned>(args->rows * kBlocks));
  return launch(sample_kernel, {grid, kThreads, scores_bytes(run), kBlocks}, stream, args->flags, *args, run);
}
