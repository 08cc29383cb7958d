// What both attention kernels share: tiles of 64 keys in shared memory, the copies that fill them, and score rules.
//
// The one rule: a tile is made of panels of 64 columns; a panel's row is 128 bytes, and its 16-byte chunk c lies at
// chunk c ^ (row % 8). So the copy engine stores it (its 128-byte swizzle, on panels that begin at multiples of 1024
// bytes), and so eight rows of one column lie in different banks: fragments are read without conflicts.
#ifndef TL_CUDA_ATTENTION_CUH
#define TL_CUDA_ATTENTION_CUH

#include "attention.h"
#include "tensor.cuh"

namespace tl::cuda {

constexpr int kTileTokens = 64;
constexpr int kTilePages = kTileTokens / kPageTokens;
constexpr int kRowBytes = kPanelColumns * 2;  // of a panel
constexpr int kBoxBytes = kPageTokens * kRowBytes;
constexpr int kAlignment = 1024;  // bytes, of a panel

// A matrix of kRows rows and kDim columns in panels.
template <int kRows, int kDim>
struct Tile {
  static constexpr int kPanels = kDim / kPanelColumns;
  static constexpr int kPanelBytes = kRows * kRowBytes;
  static constexpr int kBytes = kPanels * kPanelBytes;

  // Where 16-byte chunk `chunk` of a row lies.
  static __device__ __forceinline__ uint32_t chunk(int row, int chunk) {
    return chunk / 8 * kPanelBytes + row * kRowBytes + ((chunk % 8) ^ (row % 8)) * 16;
  }

  // Where a lane's row of a 16x16 block begins, for load_matrices: `corner` is that of block (0, 0) by one of the two
  // orders below; row is a multiple of 16, and block counts columns in sixteens.
  static __device__ __forceinline__ uint32_t block(uint32_t corner, int row, int block) {
    return block / 4 * kPanelBytes + row * kRowBytes + (corner ^ (block % 4 * 32));
  }
};

// The four 8x8 matrices of a 16x16 block: upper left, lower left, upper right, lower right.
__device__ __forceinline__ uint32_t rows_first(int lane) {
  const int row = lane % 16, half = lane / 16;
  return row * kRowBytes + (half ^ (row % 8)) * 16;
}

// Upper left, upper right, lower left, lower right.
__device__ __forceinline__ uint32_t columns_first(int lane) {
  const int row = lane % 8 + lane / 16 * 8, half = lane / 8 % 2;
  return row * kRowBytes + (half ^ (row % 8)) * 16;
}

// Keys [first, end) of a sequence, not empty unless first == end; tiles begin at multiples of kTileTokens.
struct Keys {
  int first, end;

  __device__ __forceinline__ bool holds(int key) const { return key >= first && key < end; }
  __device__ __forceinline__ bool touches(int key, int count) const { return key < end && key + count > first; }
  __device__ __forceinline__ bool covers(int key, int count) const { return key >= first && key + count <= end; }
  __device__ __forceinline__ int first_tile() const { return first / kTileTokens; }
  __device__ __forceinline__ int end_tile() const { return first < end ? (end - 1) / kTileTokens + 1 : first_tile(); }
};

// The keys that queries at positions first .. last see.
__device__ __forceinline__ Keys visible(int first, int last, int window) {
  const int end = max(last + 1, 0);
  return {min(window > 0 ? max(first + 1 - window, 0) : 0, end), end};
}

// For two neighbouring keys' values in one register: unwanted ones become zero, whatever lies there (0 * NaN is NaN).
__device__ __forceinline__ uint32_t wanted_bits(const Keys &wanted, int key) {
  return (wanted.holds(key) ? 0x0000ffffu : 0u) | (wanted.holds(key + 1) ? 0xffff0000u : 0u);
}

// What weights relative to the best product so far must be multiplied with to be relative to the best one now.
__device__ __forceinline__ float shrink(float best, float now, float factor) {
  return best == -INFINITY ? 0.0f : exp2_fast((best - now) * factor);
}

// A context is cut to what its row of the block table can hold.
__device__ __forceinline__ int context_length(const Sequences &sequences, int span) {
  const int64_t most = static_cast<int64_t>(sequences.table_width) * kPageTokens;
  return static_cast<int>(min(static_cast<int64_t>(max(load_int(sequences.context_lens + span), 0)), most));
}

// Caps products of q and k in place, if they are to be capped. Returns what they must still be multiplied with to be
// logits to the base of 2. tanh(x) is 1 - 2 / (1 + e^(2 x)).
template <int kCount>
__device__ __forceinline__ float cap(const Scores &scores, float (&products)[kCount]) {
  if (scores.cap == 0.0f) return scores.factor;
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    products[i] = scores.cap - __fdividef(2.0f * scores.cap, 1.0f + exp2_fast(products[i] * scores.factor));
  return 1.0f;
}

// One warp fetches tiles of one kv head of one sequence: page by page, panel by panel, keys and values.
template <int kDim>
struct Fetch {
  using Panels = Tile<kTileTokens, kDim>;

  const CUtensorMap *keys, *values;
  const int32_t *table;
  const Keys &wanted;
  int pages, kv_heads, kv_head, lane;
  int page;  // of the tile to come, in lanes 0 .. kTilePages

  __device__ __forceinline__ bool needs(int tile, int index) const {
    return wanted.touches((tile * kTilePages + index) * kPageTokens, kPageTokens);
  }

  // Reads the page ids of a tile, ahead of its copies: they wait for them.
  __device__ __forceinline__ void look_up(int tile) {
    if (lane < kTilePages && needs(tile, lane)) page = load_int(table + tile * kTilePages + lane);
  }

  // Starts the copies of the tile that was looked up. Pages without a wanted key are not fetched.
  __device__ __forceinline__ void start(int tile, uint32_t to_keys, uint32_t to_values, uint32_t barrier) const {
    int count = 0;
#pragma unroll
    for (int index = 0; index < kTilePages; ++index) count += needs(tile, index);
    if (lane == 0) barrier_expect(barrier, count * 2 * Panels::kPanels * kBoxBytes);
#pragma unroll 1
    for (int index = 0; index < kTilePages; ++index) {
      const int id = __shfl_sync(kAllLanes, page, index);
      if (lane != 0 || !needs(tile, index)) continue;
      // A page outside the pools becomes a row before the first: zeros.
      const int row = ((id >= 0 && id < pages ? id : -1) * kv_heads + kv_head) * kPageTokens;
#pragma unroll
      for (int panel = 0; panel < Panels::kPanels; ++panel) {
        const uint32_t offset = panel * Panels::kPanelBytes + index * kBoxBytes;
        copy_box(to_keys + offset, keys, panel * kPanelColumns, row, barrier);
        copy_box(to_values + offset, values, panel * kPanelColumns, row, barrier);
      }
    }
  }
};

}  // namespace tl::cuda

#endif  // TL_CUDA_ATTENTION_CUH
