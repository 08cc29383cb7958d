// Operators on rows: gathering, norms, rotary positions with the cache write, and SwiGLU.
//
// The one rule: every output depends on its own row only, and sums over a row have one order, whatever the grid. Values
// are rounded to bf16 where plain torch rounds them (workers/models/standard.py), but for the rotation: its tables stay
// fp32 and its results are rounded once.

#include "check.h"
#include "device.cuh"
#include "launch.h"

namespace tl::cuda {
namespace {

constexpr int kBlock = 128;          // threads of a kernel whose threads have nothing to do with one another
constexpr int kMaxThreads = 1024;    // of a block that sums a row
constexpr int kRowVectors = 2;       // 16-byte vectors of a row that one thread keeps in registers
constexpr int64_t kMaxWidth = int64_t{kMaxThreads} * kRowVectors * kVector;
constexpr int64_t kMaxItems = INT32_MAX;  // of one launch, one thread each: divided in 32 bits
constexpr int32_t kMaxHeads = 1024;

// Blocks for `items` threads.
dim3 blocks_of(int64_t items) { return dim3(static_cast<unsigned>((items + kBlock - 1) / kBlock)); }

__device__ uint32_t item_index() { return blockIdx.x * kBlock + threadIdx.x; }

// ---- embed

// One thread per 16 bytes. The rows of the table are read like activations, since they may be just that.
__global__ void __launch_bounds__(kBlock) embed_kernel(tl_cuda_embed_args a, uint32_t items, uint32_t vectors) {
  pdl_wait();
  const uint32_t item = item_index();
  if (item >= items) return;
  const int64_t row = item / vectors, offset = item % vectors * kVector;
  const int32_t token = load_int(a.tokens + row);
  const bool known = token >= 0 && token < a.vocabulary;
  uint4 value = make_uint4(0, 0, 0, 0);
  if (known) value = load16(static_cast<const bf16 *>(a.table) + token * a.width + offset);
  pdl_trigger();
  store16(static_cast<bf16 *>(a.out) + row * a.width + offset, value);
}

// ---- rms_norm

struct Norm {
  bf16 *x;  // written if there is a delta
  const bf16 *delta;
  const bf16 *weight;
  bf16 *out;
  int width;
  float mean;  // 1 / width
  float eps;
};

Norm make_norm(const void *x, const void *delta, const void *weight, void *out, int64_t width, float eps) {
  const float mean = 1.0f / static_cast<float>(width);
  return {static_cast<bf16 *>(const_cast<void *>(x)), static_cast<const bf16 *>(delta),
          static_cast<const bf16 *>(weight), static_cast<bf16 *>(out), static_cast<int>(width), mean, eps};
}

// One block per row, the row in registers. Thread t has vectors t and t + blockDim.x.
template <bool kAdd>
__global__ void __launch_bounds__(kMaxThreads) norm_kernel(Norm a) {
  __shared__ float scratch[kWarp];
  const int vectors = a.width / kVector;
  const int64_t row = int64_t{blockIdx.x} * a.width;
  uint4 weight[kRowVectors];
  float x[kRowVectors][kVector];

#pragma unroll
  for (int i = 0; i < kRowVectors; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at < vectors) weight[i] = load16(a.weight + at * kVector);
  }
  pdl_wait();
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kRowVectors; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= vectors) continue;
    unpack(load16(a.x + row + at * kVector), x[i]);
    if (kAdd) {
      float delta[kVector];
      unpack(load16(a.delta + row + at * kVector), delta);
#pragma unroll
      for (int j = 0; j < kVector; ++j) x[i][j] = round_bf16(x[i][j] + delta[j]);
      store16(a.x + row + at * kVector, pack(x[i]));
    }
#pragma unroll
    for (int j = 0; j < kVector; ++j) squares += x[i][j] * x[i][j];
  }
  pdl_trigger();
  const float scale = rsqrtf(block_sum(squares, scratch) * a.mean + a.eps);
#pragma unroll
  for (int i = 0; i < kRowVectors; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= vectors) continue;
    float w[kVector];
    unpack(weight[i], w);
#pragma unroll
    for (int j = 0; j < kVector; ++j) x[i][j] = round_bf16(x[i][j] * scale) * w[j];
    store16(a.out + row + at * kVector, pack(x[i]));
  }
}

tl_status check_norm(ArgsCheck &check, int64_t rows, int64_t width) {
  check.count(rows, 0).count(width, 1).require(width <= kMaxWidth, TL_ERROR_SIZE).fits(width % kVector == 0);
  return check.status();
}

template <bool kAdd>
tl_status launch_norm(const Norm &norm, int64_t rows, void *stream, uint32_t flags) {
  // A function of the width alone, and with it the order of the sum.
  const int vectors = norm.width / kVector, warps = (vectors + kWarp - 1) / kWarp;
  const int threads = warps * kWarp < kMaxThreads ? warps * kWarp : kMaxThreads;
  return launch(norm_kernel<kAdd>, {dim3(static_cast<unsigned>(rows)), dim3(threads)}, stream, flags, norm);
}

// ---- rope_cache

// A thread rotates 8 pairs of one head of q or k, or copies 16 elements of one head of v.
__global__ void __launch_bounds__(kBlock) rope_cache_kernel(tl_cuda_rope_cache_args a, uint32_t items) {
  pdl_wait();
  const uint32_t item = item_index();
  if (item >= items) return;
  const int half = a.head_dim / 2;
  const uint32_t parts = half / kVector, all_heads = a.heads + 2 * a.kv_heads;
  const int64_t head_index = item / parts, row = item / parts / all_heads;
  const int part = item % parts, head = item / parts % all_heads;
  const int32_t slot = load_int(a.slots + row), position = load_int(a.positions + row);
  if (slot < 0 || slot / kPageTokens >= a.pages || position < 0 || position >= a.table_positions) return;

  bf16 *const source = static_cast<bf16 *>(a.qkv) + head_index * a.head_dim + part * kVector;
  uint4 low = load16(source), high = load16(source + half);
  pdl_trigger();
  if (head < a.heads + a.kv_heads) {
    const int64_t entry = int64_t{position} * half + part * kVector;
    float l[kVector], h[kVector], rotated_low[kVector], rotated_high[kVector];
    unpack(low, l), unpack(high, h);
#pragma unroll
    for (int quad = 0; quad < kVector; quad += 4) {
      const uint4 cosines = load16_constant(a.cosines + entry + quad), sines = load16_constant(a.sines + entry + quad);
      const float c[4] = {__uint_as_float(cosines.x), __uint_as_float(cosines.y), __uint_as_float(cosines.z),
                          __uint_as_float(cosines.w)};
      const float s[4] = {__uint_as_float(sines.x), __uint_as_float(sines.y), __uint_as_float(sines.z),
                          __uint_as_float(sines.w)};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        rotated_low[quad + j] = l[quad + j] * c[j] - h[quad + j] * s[j];
        rotated_high[quad + j] = h[quad + j] * c[j] + l[quad + j] * s[j];
      }
    }
    low = pack(rotated_low), high = pack(rotated_high);
    store16(source, low), store16(source + half, high);
    if (head < a.heads) return;
  }
  const bool is_value = head >= a.heads + a.kv_heads;
  const int kv_head = head - a.heads - (is_value ? a.kv_heads : 0);
  const int64_t page = slot / kPageTokens, token = slot % kPageTokens;
  bf16 *const pool = static_cast<bf16 *>(is_value ? a.values : a.keys);
  bf16 *const place = pool + ((page * a.kv_heads + kv_head) * kPageTokens + token) * a.head_dim + part * kVector;
  store16(place, low), store16(place + half, high);
}

// ---- swiglu

__global__ void __launch_bounds__(kBlock) swiglu_kernel(tl_cuda_swiglu_args a, uint32_t items, uint32_t vectors) {
  pdl_wait();
  const uint32_t item = item_index();
  if (item >= items) return;
  const int64_t row = item / vectors, offset = item % vectors * kVector;
  const bf16 *const source = static_cast<const bf16 *>(a.gate_up) + row * 2 * a.width + offset;
  float gate[kVector], up[kVector];
  unpack(load16(source), gate), unpack(load16(source + a.width), up);
  pdl_trigger();
#pragma unroll
  for (int j = 0; j < kVector; ++j) gate[j] = round_bf16(gate[j] / (1.0f + expf(-gate[j]))) * up[j];
  store16(static_cast<bf16 *>(a.out) + row * a.width + offset, pack(gate));
}

}  // namespace

tl_status init_rows() {
  tl_status status = prepare(embed_kernel);
  if (status == TL_OK) status = prepare(norm_kernel<false>);
  if (status == TL_OK) status = prepare(norm_kernel<true>);
  if (status == TL_OK) status = prepare(rope_cache_kernel);
  if (status == TL_OK) status = prepare(swiglu_kernel);
  return status;
}

}  // namespace tl::cuda

using namespace tl::cuda;

extern "C" {

tl_status tl_cuda_embed(const tl_cuda_embed_args *args, void *stream) {
  ArgsCheck check(args);
  if (!check.ok()) return check.status();
  const tl_cuda_embed_args &a = *args;
  check.count(a.rows, 0).count(a.width, 1).count(a.vocabulary, 1).fits(a.width % kVector == 0);
  if (!check.ok() || a.rows == 0) return check.status();
  const int64_t vectors = a.width / kVector, items = a.rows * vectors;
  check.require(items <= kMaxItems, TL_ERROR_SIZE).present(a.tokens, a.table, a.out);
  if (!check.words(a.tokens).vectors(a.table, a.out).ok()) return check.status();
  return launch(embed_kernel, {blocks_of(items), kBlock}, stream, a.flags, a, items, vectors);
}

tl_status tl_cuda_rms_norm(const tl_cuda_rms_norm_args *args, void *stream) {
  ArgsCheck check(args);
  if (!check.ok()) return check.status();
  const tl_cuda_rms_norm_args &a = *args;
  if (check_norm(check, a.rows, a.width) != TL_OK || a.rows == 0) return check.status();
  check.present(a.x, a.weight, a.out);
  if (!check.vectors(a.x, a.weight, a.out).ok()) return check.status();
  return launch_norm<false>(make_norm(a.x, nullptr, a.weight, a.out, a.width, a.eps), a.rows, stream, a.flags);
}

tl_status tl_cuda_add_rms_norm(const tl_cuda_add_rms_norm_args *args, void *stream) {
  ArgsCheck check(args);
  if (!check.ok()) return check.status();
  const tl_cuda_add_rms_norm_args &a = *args;
  if (check_norm(check, a.rows, a.width) != TL_OK || a.rows == 0) return check.status();
  check.present(a.x, a.delta, a.weight, a.out);
  if (!check.vectors(a.x, a.delta, a.weight, a.out).ok()) return check.status();
  return launch_norm<true>(make_norm(a.x, a.delta, a.weight, a.out, a.width, a.eps), a.rows, stream, a.flags);
}

tl_status tl_cuda_rope_cache(const tl_cuda_rope_cache_args *args, void *stream) {
  ArgsCheck check(args);
  if (!check.ok()) return check.status();
  const tl_cuda_rope_cache_args &a = *args;
  check.count(a.rows, 0).count(a.heads, 1).count(a.kv_heads, 1).count(a.head_dim, 1).count(a.pages, 1);
  check.count(a.table_positions, 1).require(a.head_dim <= TL_MAX_HEAD_DIM, TL_ERROR_SIZE);
  check.require(a.heads <= kMaxHeads && a.kv_heads <= kMaxHeads, TL_ERROR_SIZE);
  check.fits(a.head_dim % (2 * kVector) == 0);
  if (!check.ok() || a.rows == 0) return check.status();
  const int64_t items = a.rows * (a.heads + 2 * a.kv_heads) * (a.head_dim / (2 * kVector));
  check.require(items <= kMaxItems, TL_ERROR_SIZE);
  check.present(a.positions, a.slots, a.cosines, a.sines, a.qkv, a.keys, a.values).words(a.positions, a.slots);
  if (!check.vectors(a.cosines, a.sines, a.qkv, a.keys, a.values).ok()) return check.status();
  return launch(rope_cache_kernel, {blocks_of(items), kBlock}, stream, a.flags, a, items);
}

tl_status tl_cuda_swiglu(const tl_cuda_swiglu_args *args, void *stream) {
  ArgsCheck check(args);
  if (!check.ok()) return check.status();
  const tl_cuda_swiglu_args &a = *args;
  check.count(a.rows, 0).count(a.width, 1).fits(a.width % kVector == 0);
  if (!check.ok() || a.rows == 0) return check.status();
  const int64_t vectors = a.width / kVector, items = a.rows * vectors;
  check.require(items <= kMaxItems, TL_ERROR_SIZE).present(a.gate_up, a.out);
  if (!check.vectors(a.gate_up, a.out).ok()) return check.status();
  return launch(swiglu_kernel, {blocks_of(items), kBlock}, stream, a.flags, a, items, vectors);
}

}  // extern "C"
