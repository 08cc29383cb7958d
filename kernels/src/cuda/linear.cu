// Products with a weight of bf16: skinny ones here, larger ones by the plans of linear_plan.cu.
//
// A skinny product (at most 16 rows) is the streaming of its weight once, at the memory's speed. One scheme for every
// number of rows, so that a row's bits do not depend on it:
//   - mma.sync.m16n8k16 with the operands swapped: 16 columns of the weight are A, 8 (or two times 8) rows of x are B.
//   - A fragment wants pairs of elements; memory wants 16 bytes a lane. The sum does not care in which order k comes,
//     if A and B agree: a lane takes 8 elements in a row from both and feeds them to two mma as they lie. No shared
//     memory, no packing.
//   - A block has one tile of 16 columns at a time, its warps take chunks of 64 k in turn, and the warps' sums are
//     added in the order of the warps.
//   - Each warp keeps kDepth chunks on their way in registers, across the ends of tiles too: the memory never waits for
//     a sum. The first chunks are asked for before pdl_wait().

#include "linear_plan.h"

#include "check.h"
#include "device.cuh"
#include "launch.h"

namespace tl::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kDepth = 4;     // chunks on their way per warp: 64 KiB of weights per multiprocessor
constexpr int kChunk = 64;    // elements of k: 128 bytes of each of 16 columns
constexpr int kTile = 16;     // columns: m of the mma
constexpr int kMmaRows = 8;   // rows of x: n of the mma
constexpr int kStride = 20;   // floats between rows of a partial sum: no bank conflicts when fragments are written
// More than half of the carve-out, so that two blocks of products never share a multiprocessor (that costs 10 %).
constexpr size_t kShared = 84 * 1024;

struct Product {
  const bf16 *x;
  const bf16 *weight;
  const bf16 *bias;
  void *out;
  int rows, columns, inner;
  bool fp32;
};

// One lane's share of a chunk: elements 8 t .. 8 t + 7 of both halves (32 k each), of columns g and g + 8 of the
// weight and of rows g (and g + 8) of x, where lane = 4 g + t.
template <int kRowTiles>
struct Stage {
  uint4 low[2], high[2], x[kRowTiles][2];
};

// Where a warp is in the work of its block: tiles blockIdx.x, + gridDim.x, ..; steps of each.
struct Cursor {
  int tile, step;
  __device__ void advance(int steps) {
    if (++step < steps) return;
    step = 0;
    tile += gridDim.x;
  }
};

// d += a * b for a tile of 16 columns, 8 rows and 16 k.
__device__ __forceinline__ void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                    uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

template <int kRowTiles>
class Worker {
 public:
  __device__ explicit Worker(const Product &product)
      : a(product), warp(threadIdx.x / kWarp), group(threadIdx.x % kWarp / 4), part(threadIdx.x % 4),
        tiles(a.columns / kTile), chunks(a.inner / kChunk), steps((chunks + kWarps - 1) / kWarps),
        policy(stream_policy()) {}

  __device__ bool done(const Cursor &at) const { return at.tile >= tiles; }
  __device__ bool last_step(const Cursor &at) const { return at.step == steps - 1; }
  __device__ void advance(Cursor &cursor) const { cursor.advance(steps); }

  // What lies past the end of k is zero; what lies past the last tile is never consumed.
  __device__ __forceinline__ void load_weight(Stage<kRowTiles> &stage, const Cursor &at) const {
    const int chunk = at.step * kWarps + warp;
    if (done(at)) return;
    if (chunk >= chunks) {
      stage.low[0] = stage.low[1] = stage.high[0] = stage.high[1] = make_uint4(0, 0, 0, 0);
      return;
    }
    const bf16 *const low = a.weight + (int64_t{at.tile} * kTile + group) * a.inner + chunk * kChunk + part * kVector;
    const bf16 *const high = low + int64_t{8} * a.inner;
    stage.low[0] = load16_stream(low, policy);
    stage.high[0] = load16_stream(high, policy);
    stage.low[1] = load16_stream(low + kChunk / 2, policy);
    stage.high[1] = load16_stream(high + kChunk / 2, policy);
  }

  // Rows that are not there are zero.
  __device__ __forceinline__ void load_x(Stage<kRowTiles> &stage, const Cursor &at) const {
    const int chunk = at.step * kWarps + warp;
#pragma unroll
    for (int tile = 0; tile < kRowTiles; ++tile) {
      const int row = group + tile * kMmaRows;
      stage.x[tile][0] = stage.x[tile][1] = make_uint4(0, 0, 0, 0);
      if (done(at) || chunk >= chunks || row >= a.rows) continue;
      const bf16 *const x = a.x + int64_t{row} * a.inner + chunk * kChunk + part * kVector;
      stage.x[tile][0] = load16(x);
      stage.x[tile][1] = load16(x + kChunk / 2);
    }
  }

  __device__ __forceinline__ void consume(const Stage<kRowTiles> &stage) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 low = stage.low[half], high = stage.high[half];
#pragma unroll
      for (int tile = 0; tile < kRowTiles; ++tile) {
        const uint4 x = stage.x[tile][half];
        mma(sums[tile], low.x, high.x, low.y, high.y, x.x, x.y);
        mma(sums[tile], low.z, high.z, low.w, high.w, x.z, x.w);
      }
    }
  }

  // Add the warps' sums of a tile and write it. All threads of the block come here for the same tile.
  __device__ __forceinline__ void finish(float *shared, int tile) {
    constexpr int kWarpFloats = kRowTiles * kMmaRows * kStride;
    float *const partial = shared + parity * kWarps * kWarpFloats;
#pragma unroll
    for (int rows = 0; rows < kRowTiles; ++rows) {
      float *const even = partial + warp * kWarpFloats + (rows * kMmaRows + 2 * part) * kStride + group;
      float *const odd = even + kStride;
      even[0] = sums[rows][0], odd[0] = sums[rows][1], even[8] = sums[rows][2], odd[8] = sums[rows][3];
      sums[rows][0] = sums[rows][1] = sums[rows][2] = sums[rows][3] = 0.0f;
    }
    // One barrier a tile is enough: who writes this half again has passed the next barrier, and who reads it now has
    // not reached that yet.
    __syncthreads();
    parity ^= 1;
    const int row = threadIdx.x / kTile, column = threadIdx.x % kTile;
    if (row >= a.rows) return;
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum += partial[w * kWarpFloats + row * kStride + column];
    const int64_t out_column = int64_t{tile} * kTile + column, at = row * int64_t{a.columns} + out_column;
    if (a.bias != nullptr) sum += __bfloat162float(a.bias[out_column]);
    if (a.fp32) static_cast<float *>(a.out)[at] = sum;
    else static_cast<bf16 *>(a.out)[at] = __float2bfloat16_rn(sum);
  }

 private:
  const Product &a;
  const int warp, group, part, tiles, chunks, steps;
  const uint64_t policy;
  int parity = 0;
  float sums[kRowTiles][4] = {};
};

template <int kRowTiles>
__global__ void __launch_bounds__(kThreads, 1) skinny_kernel(const __grid_constant__ Product product) {
  extern __shared__ float shared[];  // [2, kWarps, kRowTiles * kMmaRows, kStride]
  Worker<kRowTiles> worker(product);
  Stage<kRowTiles> stages[kDepth];
  const Cursor first = {static_cast<int>(blockIdx.x), 0};

  Cursor next = first;
#pragma unroll
  for (int i = 0; i < kDepth; ++i, worker.advance(next)) worker.load_weight(stages[i], next);
  pdl_wait();
  next = first;
#pragma unroll
  for (int i = 0; i < kDepth; ++i, worker.advance(next)) worker.load_x(stages[i], next);
  pdl_trigger();

  for (Cursor now = first;;) {
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      if (worker.done(now)) return;
      worker.consume(stages[i]);
      worker.load_weight(stages[i], next);
      worker.load_x(stages[i], next);
      worker.advance(next);
      if (worker.last_step(now)) worker.finish(shared, now.tile);
      worker.advance(now);
    }
  }
}

tl_status launch_skinny(const tl_cuda_linear_args &a, void *stream) {
  int device = 0, processors = 0;
  cudaError_t error = cudaGetDevice(&device);
  if (error == cudaSuccess) error = cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device);
  if (error != cudaSuccess) return checked(error, TL_ERROR_LAUNCH);
  const int rows = static_cast<int>(a.rows), columns = static_cast<int>(a.columns), inner = static_cast<int>(a.inner);
  const Product product = {static_cast<const bf16 *>(a.x),    static_cast<const bf16 *>(a.weight),
                           static_cast<const bf16 *>(a.bias), a.out, rows, columns, inner,
                           (a.flags & TL_CUDA_FP32_OUT) != 0};
  const int tiles = columns / kTile;
  const Shape shape = {dim3(tiles < processors ? tiles : processors), dim3(kThreads), kShared};
  const uint32_t flags = a.flags & TL_CUDA_PDL;
  return launch(rows <= kMmaRows ? skinny_kernel<1> : skinny_kernel<2>, shape, stream, flags, product);
}

}  // namespace

tl_status init_linear() {
  const tl_status status = prepare(skinny_kernel<1>, kShared);
  return status == TL_OK ? prepare(skinny_kernel<2>, kShared) : status;
}

}  // namespace tl::cuda

using namespace tl::cuda;

extern "C" tl_status tl_cuda_linear(const tl_cuda_linear_args *args, void *stream) {
  ArgsCheck check(args, TL_CUDA_PDL | TL_CUDA_FP32_OUT);
  if (!check.ok()) return check.status();
  const tl_cuda_linear_args &a = *args;
  check.count(a.rows, 0).count(a.columns, 1).count(a.inner, 1);
  if (a.plan != nullptr) {
    check.fits(check.ok() && fits_plan(a, *a.plan));
  } else {
    check.require(a.rows <= TL_CUDA_SKINNY_ROWS, TL_ERROR_SIZE);
    check.fits(a.columns % kTile == 0 && a.inner % kChunk == 0);
  }
  if (!check.ok() || a.rows == 0) return check.status();
  check.present(a.x, a.weight, a.out);
  if (!check.vectors(a.x, a.weight, a.bias, a.out).ok()) return check.status();
  return a.plan != nullptr ? run_plan(a, stream) : launch_skinny(a, stream);
}
