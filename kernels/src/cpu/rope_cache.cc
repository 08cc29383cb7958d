#include <cstring>

#include "cpu.h"

namespace tl::cpu {
namespace {

constexpr int64_t kRowsPerPiece = 16;

void rotate(float *head, const float *cosines, const float *sines, int64_t half) {
  for (int64_t i = 0; i < half; ++i) {
    const float low = head[i], high = head[i + half];
    head[i] = low * cosines[i] - high * sines[i];
    head[i + half] = high * cosines[i] + low * sines[i];
  }
}

}  // namespace

void rope_cache(Pool &pool, const tl_batch &batch, const tl_heads &heads, const float *cosines, const float *sines,
                float *qkv, float *keys, float *values) {
  const int64_t dim = heads.head_dim, half = dim / 2, kv_heads = heads.kv_heads;
  const int64_t width = (heads.heads + 2 * kv_heads) * dim;
  pool.run((batch.rows + kRowsPerPiece - 1) / kRowsPerPiece, [&](int64_t piece) {
    const int64_t last = (piece + 1) * kRowsPerPiece < batch.rows ? (piece + 1) * kRowsPerPiece : batch.rows;
    for (int64_t row = piece * kRowsPerPiece; row < last; ++row) {
      float *line = qkv + row * width;
      const int64_t position = batch.positions[row], slot = batch.slots[row];
      for (int64_t head = 0; head < heads.heads + kv_heads; ++head)
        rotate(line + head * dim, cosines + position * half, sines + position * half, half);
      const float *key = line + heads.heads * dim, *value = key + kv_heads * dim;
      for (int64_t head = 0; head < kv_heads; ++head) {
        const int64_t page = slot / TL_PAGE_TOKENS, offset = slot % TL_PAGE_TOKENS;
        const int64_t place = ((page * kv_heads + head) * TL_PAGE_TOKENS + offset) * dim;
        std::memcpy(keys + place, key + head * dim, dim * sizeof(float));
        std::memcpy(values + place, value + head * dim, dim * sizeof(float));
      }
    }
  });
}

}  // namespace tl::cpu
