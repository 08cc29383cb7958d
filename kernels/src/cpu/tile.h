// The one inner loop of all products: C[R, 16 P] (+)= A[R, K] * B[K, 16 P], k strictly ascending.
//
// One rule: each element is one chain of fused multiply-adds over k, whatever the tile's shape, so the shape never
// shows in the bits. Weights, scores and mixed values are all computed here.
#ifndef TL_CPU_TILE_H
#define TL_CPU_TILE_H

#include "vector.h"

namespace tl {

struct TileArgs {
  const float *a;        // [rows, inner], row stride `a_stride`
  int64_t a_stride;
  const float *b;        // row k of panel p at b + p * panel_stride + k * b_stride
  int64_t b_stride;
  int64_t panel_stride;
  float *c;              // [rows, panels * 16], row stride `c_stride`
  int64_t c_stride;
  int64_t inner;
  bool add;              // start from C instead of from zero
};

template <int R, int P>
inline void tile(const TileArgs &args) {
  constexpr int N = P * kVectors;
  Vec sum[R][N];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) sum[r][n] = args.add ? load(args.c + r * args.c_stride + n * kLanes) : Vec{};

  const float *a = args.a, *b = args.b;
  const int64_t a_stride = args.a_stride, b_stride = args.b_stride, panel_stride = args.panel_stride;
  for (int64_t k = 0; k < args.inner; ++k, b += b_stride) {
    Vec column[N];
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) column[n] = load(b + (n / kVectors) * panel_stride + (n % kVectors) * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vec scalar = fill(a[r * a_stride + k]);
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) sum[r][n] = multiply_add(scalar, column[n], sum[r][n]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 16
    for (int n = 0; n < N; ++n) store(args.c + r * args.c_stride + n * kLanes, sum[r][n]);
}

// Any number of rows from 1 to kTileRows.
template <int P, int R = kTileRows>
inline void tile_rows(int64_t rows, const TileArgs &args) {
  if constexpr (R == 1) {
    tile<1, P>(args);
  } else {
    if (rows == R) return tile<R, P>(args);
    tile_rows<P, R - 1>(rows, args);
  }
}

// All rows of a block, cut into tiles of nearly equal height.
template <int P>
inline void tile_block(int64_t rows, TileArgs args) {
  for (int64_t tiles = (rows + kTileRows - 1) / kTileRows; tiles > 0; --tiles) {
    const int64_t height = (rows + tiles - 1) / tiles;
    tile_rows<P>(height, args);
    args.a += height * args.a_stride;
    args.c += height * args.c_stride;
    rows -= height;
  }
}

}  // namespace tl

#endif  // TL_CPU_TILE_H
