// What sampling computes per score, the same bits on the CPU and on the GPU.
//
// The one rule: a weight is an integer, a multiple of 2^-45 of the best id's. Integer sums have no order, so a result
// cannot depend on threads, blocks or other rows; and each fp64 step here is spelled out, so that no compiler fuses
// another multiplication with an addition.
#ifndef TL_SAMPLE_H
#define TL_SAMPLE_H

#include <cmath>
#include <cstdint>
#include <cstring>

#include "../include/tl_kernels.h"

#if defined(__CUDACC__)
#define TL_BOTH __host__ __device__ __forceinline__
#else
#define TL_BOTH inline
#endif

namespace tl::sampling {

template <typename To, typename From>
TL_BOTH To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "the bits of one are the bits of the other");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// Rounded by itself, whatever the compiler's flags.
TL_BOTH double add(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}

TL_BOTH double multiply(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

TL_BOTH float multiply(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

TL_BOTH float divide(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(a, b);
#else
  return a / b;
#endif
}

// --- Order of scores, and of (score, id) ---

constexpr uint32_t kLowest = 0x007fffffu;   // ordered(-INFINITY)
constexpr uint32_t kHighest = 0xff800000u;  // ordered(+INFINITY)

// Ascends with the score; -0 is 0, and a NaN is above all.
TL_BOTH uint32_t ordered(float score) {
  if (score != score) return ~0u;
  const uint32_t bits = bits_as<uint32_t>(score + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

TL_BOTH bool finite(uint32_t order) { return order > kLowest && order < kHighest; }

// A rank ascends with the score and, among equal scores, descends with the id: the greatest is the greedy choice. No two
// ids of a row have the same rank.
constexpr int kIdBits = 18;
constexpr int kRankBits = 32 + kIdBits;
constexpr uint32_t kIdMask = (1u << kIdBits) - 1;
static_assert(TL_MAX_VOCABULARY == 1 << kIdBits, "a rank holds every id");

TL_BOTH uint64_t rank_of(float score, int32_t id) {
  return static_cast<uint64_t>(ordered(score)) << kIdBits | (kIdMask - static_cast<uint32_t>(id));
}
TL_BOTH uint32_t order_of(uint64_t rank) { return static_cast<uint32_t>(rank >> kIdBits); }
TL_BOTH int32_t id_of(uint64_t rank) { return static_cast<int32_t>(kIdMask - (static_cast<uint32_t>(rank) & kIdMask)); }
TL_BOTH float score_of(uint64_t rank) {
  const uint32_t order = order_of(rank);
  return bits_as<float>(order >> 31 ? order & 0x7fffffffu : ~order);
}
TL_BOTH uint64_t with_equals(uint64_t rank) { return rank >> kIdBits << kIdBits; }  // the least rank of that score

// --- Selection by digits of the rank, highest first ---

constexpr int kDigitBits = 10;
constexpr int kDigits = kRankBits / kDigitBits;
constexpr int kBins = 1 << kDigitBits;
static_assert(kDigits * kDigitBits == kRankBits, "digits cover a rank");

// --- Edits of a score ---

TL_BOTH bool penalised(const tl_sample_row &row) {
  return row.repetition_penalty != 1.0f || row.frequency_penalty != 0.0 || row.presence_penalty != 0.0;
}

TL_BOTH float penalise(float score, int32_t count, const tl_sample_row &row) {
  if (row.repetition_penalty != 1.0f)
    score = score < 0 ? multiply(score, row.repetition_penalty) : divide(score, row.repetition_penalty);
  if (count > 0 && (row.frequency_penalty != 0.0 || row.presence_penalty != 0.0))
    score -= static_cast<float>(add(multiply(row.frequency_penalty, double(count)), row.presence_penalty));
  return score;
}

// --- Weights ---

constexpr double kUnit = 0x1p-45;  // of a weight; the best id weighs 2^45, and 2^18 of them fit in 64 bits

constexpr double kNothing = -32.0;  // exp of less is less than half a unit: no unit

// exp(x) for x from kNothing to 0; the error is below 1 unit in the last place. exp(0) is 1.
TL_BOTH double exponential(double x) {
  constexpr double log2e = 0x1.71547652b82fep+0, ln2_high = 0x1.62e42fefa38p-1, ln2_low = 0x1.ef35793c7673p-45;
  constexpr double to_integer = 0x1.8p+52;  // added and taken off again, it rounds to an integer
  constexpr double series[] = {1.0 / 6227020800, 1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880,
                               1.0 / 40320,      1.0 / 5040,      1.0 / 720,      1.0 / 120,     1.0 / 24,
                               1.0 / 6,          1.0 / 2,         1.0,            1.0};  // 1 / 13! ... 1 / 0!
  const double power = add(fma(x, log2e, to_integer), -to_integer);
  const double rest = fma(power, -ln2_low, fma(power, -ln2_high, x));  // at most ln(2) / 2 from 0
  double sum = series[0];
#if defined(__CUDA_ARCH__)
#pragma unroll
#endif
  for (int i = 1; i < 14; ++i) sum = fma(sum, rest, series[i]);
  return multiply(sum, bits_as<double>(static_cast<int64_t>(static_cast<int32_t>(power) + 1023) << 52));
}

// Multiples of kUnit in a weight from 0 to 1, to nearest: at 128 a unit in the last place is 2^-45.
TL_BOTH uint64_t in_units(double weight) { return bits_as<uint64_t>(add(weight, 128.0)) - bits_as<uint64_t>(128.0); }

// What a row's ids weigh: nothing below the border or below min_p.
struct Weights {
  double best;           // the highest score
  double temperature;    // above 0
  double min_p = 0.0;    // of the heaviest
  uint64_t border = 0;   // the least rank that stays

  TL_BOTH uint64_t of(float score, int32_t id) const {
    if (rank_of(score, id) < border) return 0;
    const double exponent = add(score, -best) / temperature;
    if (exponent < kNothing) return 0;
    const double weight = exponential(exponent);
    return weight >= min_p ? in_units(weight) : 0;
  }
};

// How much of `total` top-p keeps at least: an id stays if what ranks above it weighs less.
TL_BOTH uint64_t nucleus(double top_p, uint64_t total) {
  const double wanted = ceil(multiply(top_p, static_cast<double>(total)));
  if (!(wanted >= 1.0)) return 1;
  return wanted < static_cast<double>(total) ? static_cast<uint64_t>(wanted) : total;
}

TL_BOTH float log_probability(float score, double best, uint64_t total) {
  return static_cast<float>(static_cast<double>(score) - best - log(static_cast<double>(total) * kUnit));
}

// --- The draw ---

// 53 random bits: the first two words of Philox4x32-10 (Salmon et al. 2011) of counter (position, choice, 0, 0).
TL_BOTH uint64_t random_bits(uint64_t seed, uint32_t choice, uint32_t position) {
  uint32_t counter[4] = {position, choice, 0, 0};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t left = uint64_t{0xD2511F53} * counter[0], right = uint64_t{0xCD9E8D57} * counter[2];
    counter[0] = static_cast<uint32_t>(right >> 32) ^ counter[1] ^ key[0];
    counter[2] = static_cast<uint32_t>(left >> 32) ^ counter[3] ^ key[1];
    counter[1] = static_cast<uint32_t>(right), counter[3] = static_cast<uint32_t>(left);
    key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u;
  }
  return static_cast<uint64_t>(counter[0] >> 5) << 26 | counter[1] >> 6;
}

// floor(u * total) for u = bits / 2^53: the draw falls on the id that holds this unit, counted in ascending order.
TL_BOTH uint64_t drawn_unit(uint64_t bits, uint64_t total) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(bits << 11, total);
#else
  return static_cast<uint64_t>(static_cast<unsigned __int128>(bits << 11) * total >> 64);
#endif
}

}  // namespace tl::sampling

#endif  // TL_SAMPLE_H
