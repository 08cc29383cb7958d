#include "cpu.h"
#include "vector.h"

namespace tl::cpu {
namespace {

constexpr int64_t kColumnsPerPiece = 4096;

inline Vec swiglu(Vec gate, Vec up) { return gate / (fill(1.0f) + exponential(-gate)) * up; }

}  // namespace

void swiglu(Pool &pool, const float *gate_up, float *out, int64_t rows, int64_t width) {
  const int64_t per_row = (width + kColumnsPerPiece - 1) / kColumnsPerPiece;
  pool.run(rows * per_row, [=](int64_t piece) {
    const int64_t row = piece / per_row, first = piece % per_row * kColumnsPerPiece;
    const int64_t last = first + kColumnsPerPiece < width ? first + kColumnsPerPiece : width;
    const float *gate = gate_up + row * 2 * width, *up = gate + width;
    float *line = out + row * width;
    int64_t i = first;
    for (; i + kLanes <= last; i += kLanes) store(line + i, swiglu(load(gate + i), load(up + i)));
    if (i < last) {
      const int64_t rest = last - i;
      store_some(line + i, swiglu(load_some(gate + i, rest), load_some(up + i, rest)), rest);
    }
  });
}

}  // namespace tl::cpu
