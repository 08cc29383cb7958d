// Exchanging rows and columns, a panel of 16 rows at a time: for packing weights and for scoring pages of keys.
#ifndef TL_CPU_TRANSPOSE_H
#define TL_CPU_TRANSPOSE_H

#include "vector.h"

namespace tl {

// a0 b0 a1 b1 … of the lower and of the upper halves.
#if defined(__clang__) || __GNUC__ >= 12
template <int Half, int... Lane>
inline Vec interleave(Vec a, Vec b) {
  return __builtin_shufflevector(a, b, (Half * kLanes / 2 + Lane / 2 + Lane % 2 * kLanes)...);
}
#else
template <int Half, int... Lane>
inline Vec interleave(Vec a, Vec b) {
  return __builtin_shuffle(a, b, IntVec{(Half * kLanes / 2 + Lane / 2 + Lane % 2 * kLanes)...});
}
#endif

template <int Half>
inline Vec interleave_half(Vec a, Vec b) {
  if constexpr (kLanes == 16)
    return interleave<Half, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15>(a, b);
  else if constexpr (kLanes == 8)
    return interleave<Half, 0, 1, 2, 3, 4, 5, 6, 7>(a, b);
  else
    return interleave<Half, 0, 1, 2, 3>(a, b);
}

// Transpose a square of lanes: interleaving rows i and i + n / 2 rotates the bits of (row, lane) by one, so doing it
// log2(n) times exchanges the two.
inline void transpose_square(Vec (&rows)[kLanes]) {
  Vec next[kLanes];
#pragma GCC unroll 4
  for (int half = 1; half < kLanes; half *= 2) {
#pragma GCC unroll 16
    for (int i = 0; i < kLanes / 2; ++i) {
      next[2 * i] = interleave_half<0>(rows[i], rows[i + kLanes / 2]);
      next[2 * i + 1] = interleave_half<1>(rows[i], rows[i + kLanes / 2]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) rows[i] = next[i];
  }
}

// Turn kPanel rows [count, width] into [width, kPanel], zero where there is no row.
inline void transpose_panel(const float *from, int64_t count, int64_t width, float *out) {
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes)
    for (int64_t row = 0; row < kPanel; row += kLanes) {
      Vec rows[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) rows[i] = row + i < count ? load(from + (row + i) * width + d) : Vec{};
      transpose_square(rows);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(out + (d + i) * kPanel + row, rows[i]);
    }
  for (; d < width; ++d)
    for (int64_t row = 0; row < kPanel; ++row) out[d * kPanel + row] = row < count ? from[row * width + d] : 0.0f;
}

}  // namespace tl

#endif  // TL_CPU_TRANSPOSE_H
