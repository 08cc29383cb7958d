// The vector type all CPU kernels are written in: GCC/Clang vector extensions at the widest width the build allows.
//
// One rule: an element's result never depends on the lane it sits in, so loops and their tails agree bit for bit.
#ifndef TL_CPU_VECTOR_H
#define TL_CPU_VECTOR_H

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace tl {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
constexpr int kTileRows = 12;  // 12 x 2 panels: 24 accumulators of 32 registers
constexpr int kTilePanels = 2;
constexpr const char *kIsa = "avx512";
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int kLanes = 8;
constexpr int kTileRows = 6;  // 6 x 1 panel of two vectors: 12 accumulators of 16 registers
constexpr int kTilePanels = 1;
constexpr const char *kIsa = "avx2";
#elif defined(__aarch64__)
constexpr int kLanes = 4;
constexpr int kTileRows = 6;  // 6 x 1 panel of four vectors: 24 accumulators of 32 registers
constexpr int kTilePanels = 1;
constexpr const char *kIsa = "neon";
#else
constexpr int kLanes = 4;
constexpr int kTileRows = 2;  // 2 x 1 panel of four vectors: 8 accumulators of 16 registers
constexpr int kTilePanels = 1;
constexpr const char *kIsa = "portable";
#endif

constexpr int kPanel = 16;  // TL_PANEL_COLUMNS
constexpr int kVectors = kPanel / kLanes;

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float))));
typedef int32_t IntVec __attribute__((vector_size(kLanes * sizeof(int32_t))));
typedef float LooseVec __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));

inline Vec load(const float *from) { return *reinterpret_cast<const LooseVec *>(from); }
inline void store(float *to, Vec value) { *reinterpret_cast<LooseVec *>(to) = value; }
inline Vec fill(float value) { return value - Vec{}; }

// a * b + c, rounded once where the processor can. Written out, with the compiler's own contraction turned off: compilers
// fuse some loops and not others, by their shape, and then the shape shows in the bits.
inline Vec multiply_add(Vec a, Vec b, Vec c) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vec>(_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c));
#elif defined(__AVX2__) && defined(__FMA__)
  return reinterpret_cast<Vec>(_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c));
#elif defined(__aarch64__)
  return reinterpret_cast<Vec>(vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b));
#else
  return a * b + c;
#endif
}

inline Vec load_some(const float *from, int64_t count) {
  alignas(64) float lanes[kLanes] = {};
  std::memcpy(lanes, from, count * sizeof(float));
  return load(lanes);
}

inline void store_some(float *to, Vec value, int64_t count) {
  alignas(64) float lanes[kLanes];
  store(lanes, value);
  std::memcpy(to, lanes, count * sizeof(float));
}

inline Vec smaller(Vec a, Vec b) { return a < b ? a : b; }
inline Vec larger(Vec a, Vec b) { return a > b ? a : b; }

// A panel-wide sum or maximum, always of the same 16 positions in the same order whatever the vector width.
struct Wide {
  Vec part[kVectors];
};

inline Wide wide_fill(float value) {
  Wide wide;
  for (int v = 0; v < kVectors; ++v) wide.part[v] = fill(value);
  return wide;
}

inline Wide wide_load(const float *from) {
  Wide wide;
  for (int v = 0; v < kVectors; ++v) wide.part[v] = load(from + v * kLanes);
  return wide;
}

inline Wide wide_load_some(const float *from, int64_t count) {
  alignas(64) float lanes[kPanel] = {};
  std::memcpy(lanes, from, count * sizeof(float));
  return wide_load(lanes);
}

inline float wide_sum(const Wide &wide) {
  alignas(64) float lanes[kPanel];
  for (int v = 0; v < kVectors; ++v) store(lanes + v * kLanes, wide.part[v]);
  for (int half = kPanel / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  return lanes[0];
}

inline float wide_max(const Wide &wide) {
  alignas(64) float lanes[kPanel];
  for (int v = 0; v < kVectors; ++v) store(lanes + v * kLanes, wide.part[v]);
  float best = lanes[0];
  for (int lane = 1; lane < kPanel; ++lane) best = lanes[lane] > best ? lanes[lane] : best;
  return best;
}

// e^x to about one unit in the last place for |x| < 87; beyond, clamped (never 0, inf or NaN from a finite x).
// Range reduction by ln 2 in two parts, then the degree-6 polynomial of the Cephes library.
inline Vec exponential(Vec x) {
  x = larger(smaller(x, fill(88.0f)), fill(-87.0f));
  const Vec shifter = fill(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  const Vec shifted = multiply_add(x, fill(1.44269504088896341f), shifter);
  const Vec n = shifted - shifter;
  Vec r = multiply_add(n, fill(-0.693359375f), x);
  r = multiply_add(n, fill(2.12194440e-4f), r);
  Vec p = fill(1.9875691500e-4f);
  p = multiply_add(p, r, fill(1.3981999507e-3f));
  p = multiply_add(p, r, fill(8.3334519073e-3f));
  p = multiply_add(p, r, fill(4.1665795894e-2f));
  p = multiply_add(p, r, fill(1.6666665459e-1f));
  p = multiply_add(p, r, fill(5.0000001201e-1f));
  p = multiply_add(p, r * r, r + fill(1.0f));
  // The low bits of `shifted` hold n; moved to the exponent they multiply by 2^n.
  const IntVec bits = reinterpret_cast<IntVec>(p) + (reinterpret_cast<IntVec>(shifted) << 23);
  return reinterpret_cast<Vec>(bits);
}

}  // namespace tl

#endif  // TL_CPU_VECTOR_H
