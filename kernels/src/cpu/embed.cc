#include <cstring>

#include "cpu.h"

namespace tl::cpu {

void embed(Pool &, const int32_t *tokens, const float *table, float *out, int64_t rows, int64_t width) {
  // A copy of a few kilobytes per row: cheaper than waking anyone.
  for (int64_t row = 0; row < rows; ++row)
    std::memcpy(out + row * width, table + tokens[row] * width, width * sizeof(float));
}

}  // namespace tl::cpu
