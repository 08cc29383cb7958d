#include <cmath>

#include "cpu.h"
#include "vector.h"

namespace tl::cpu {
namespace {

constexpr int64_t kRowsPerPiece = 16;

// x += delta, returning the sum of squares of the result; one pass, 16 running sums, then a fixed tree.
float add_and_square(float *x, const float *delta, int64_t width) {
  Wide squares = wide_fill(0.0f);
  int64_t i = 0;
  for (; i + kPanel <= width; i += kPanel) {
    Wide value = wide_load(x + i);
    for (int v = 0; v < kVectors; ++v) {
      if (delta != nullptr) {
        value.part[v] += load(delta + i + v * kLanes);
        store(x + i + v * kLanes, value.part[v]);
      }
      squares.part[v] = multiply_add(value.part[v], value.part[v], squares.part[v]);
    }
  }
  if (i < width) {
    if (delta != nullptr)
      for (int64_t j = i; j < width; ++j) x[j] += delta[j];
    const Wide value = wide_load_some(x + i, width - i);
    for (int v = 0; v < kVectors; ++v) squares.part[v] = multiply_add(value.part[v], value.part[v], squares.part[v]);
  }
  return wide_sum(squares);
}

void scale_row(const float *x, const float *weight, float *out, int64_t width, float factor) {
  for (int64_t i = 0; i < width; ++i) out[i] = x[i] * factor * weight[i];
}

}  // namespace

void rms_norm(Pool &pool, float *x, const float *delta, const float *weight, float *out, int64_t rows, int64_t width,
              float eps) {
  pool.run((rows + kRowsPerPiece - 1) / kRowsPerPiece, [=](int64_t piece) {
    const int64_t last = (piece + 1) * kRowsPerPiece < rows ? (piece + 1) * kRowsPerPiece : rows;
    for (int64_t row = piece * kRowsPerPiece; row < last; ++row) {
      float *line = x + row * width;
      const float squares = add_and_square(line, delta == nullptr ? nullptr : delta + row * width, width);
      const float factor = 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
      scale_row(line, weight, out + row * width, width, factor);
    }
  });
}

}  // namespace tl::cpu
