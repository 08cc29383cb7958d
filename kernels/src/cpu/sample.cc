#include "../sample.h"

#include "cpu.h"

namespace tl::cpu {
namespace {

using namespace sampling;

uint64_t best_rank(const float *scores, int64_t count) {
  uint64_t best = 0;
  for (int64_t id = 0; id < count; ++id) {
    const uint64_t rank = rank_of(scores[id], static_cast<int32_t>(id));
    best = rank > best ? rank : best;
  }
  return best;
}

uint64_t total_weight(const float *scores, int64_t count, const Weights &weights) {
  uint64_t total = 0;
  for (int64_t id = 0; id < count; ++id) total += weights.of(scores[id], static_cast<int32_t>(id));
  return total;
}

// The greatest rank r for which the measures of all ranks from r up add up to goal(sum of all measures). The goal is at
// least 1 and at most that sum.
template <typename Measure, typename Goal>
uint64_t select(const float *scores, int64_t count, const Measure &measure, const Goal &goal) {
  uint64_t prefix = 0, left = 0;
  for (int shift = kRankBits - kDigitBits; shift >= 0; shift -= kDigitBits) {
    uint64_t bins[kBins] = {};
    for (int64_t i = 0; i < count; ++i) {
      const int32_t id = static_cast<int32_t>(i);
      const uint64_t rank = rank_of(scores[i], id);
      if (rank >> shift >> kDigitBits == prefix) bins[rank >> shift & (kBins - 1)] += measure(scores[i], id);
    }
    if (shift == kRankBits - kDigitBits) {
      uint64_t total = 0;
      for (const uint64_t bin : bins) total += bin;
      left = goal(total);
    }
    int digit = kBins - 1;
    for (; digit > 0 && bins[digit] < left; --digit) left -= bins[digit];
    prefix = prefix << kDigitBits | static_cast<uint64_t>(digit);
  }
  return prefix;
}

// The least rank among the `wanted` best.
uint64_t select_best(const float *scores, int64_t count, int64_t wanted) {
  return select(
      scores, count, [](float, int32_t) { return uint64_t{1}; },
      [=](uint64_t) { return static_cast<uint64_t>(wanted); });
}

struct Row {
  const tl_sample_args &args;
  const tl_sample_row &row;
  int64_t index;
  const float *logits;
  float *scores;  // the logits with their edits

  Row(const tl_sample_args &all, int64_t at)
      : args(all), row(all.params[at]), index(at), logits(all.logits + at * all.stride),
        scores(all.scores + at * all.stride) {}

  bool known(int32_t id) const { return id >= 0 && id < args.vocabulary; }
  bool counted() const { return row.history >= 0 && row.history < args.history_total; }
  tl_sample_count *history() const { return args.histories + row.history * args.history_capacity; }
  int64_t history_length() const {
    const int64_t length = args.history_lengths[row.history];
    return length < args.history_capacity ? length : args.history_capacity;
  }

  void run() const {
    if (!row.active) return;
    const uint64_t raw = best_rank(logits, args.vocabulary);
    const int32_t token = finite(order_of(raw)) ? pick() : -1;
    args.tokens[index] = token;
    if (row.next >= 0 && row.next < args.next_total) args.next_tokens[row.next] = token < 0 ? 0 : token;
    if (token < 0) return;
    if (args.logprobs != nullptr && row.logprobs >= 0) report(score_of(raw), token);
    if (counted()) count(token);
  }

  int32_t pick() const {
    edit();
    const uint64_t best = best_rank(scores, args.vocabulary);
    if (!finite(order_of(best))) return -1;
    return row.temperature > 0 ? draw(score_of(best)) : id_of(best);
  }

  void edit() const {
    std::memcpy(scores, logits, args.vocabulary * sizeof(float));
    for (int64_t i = 0; i < row.bias_count; ++i) {
      const int64_t at = row.bias_start + i;
      if (at < 0 || at >= args.bias_total || !known(args.biases[at].token)) continue;
      scores[args.biases[at].token] += args.biases[at].bias;
    }
    if (!counted() || !penalised(row)) return;
    for (int64_t i = 0; i < history_length(); ++i) {
      const auto [token, count] = history()[i];
      if (known(token)) scores[token] = penalise(scores[token], count, row);
    }
  }

  int32_t draw(float best) const {
    const int64_t count = args.vocabulary;
    Weights weights{best, row.temperature};
    if (row.top_k > 0 && row.top_k < count) weights.border = with_equals(select_best(scores, count, row.top_k));
    if (row.top_p < 1.0)
      weights.border = select(
          scores, count, [&](float score, int32_t id) { return weights.of(score, id); },
          [&](uint64_t total) { return nucleus(row.top_p, total); });
    weights.min_p = row.min_p;
    const uint64_t bits = random_bits(row.seed, row.choice, row.position);
    uint64_t left = drawn_unit(bits, total_weight(scores, count, weights));
    for (int32_t id = 0; id < count; ++id) {
      const uint64_t weight = weights.of(scores[id], id);
      if (left < weight) return id;
      left -= weight;
    }
    return -1;  // min_p above 1 keeps nothing
  }

  // Log-probabilities of the chosen id and of the best ones, best first.
  void report(float best, int32_t token) const {
    const uint64_t total = total_weight(logits, args.vocabulary, Weights{best, 1.0});
    args.logprobs[index] = log_probability(logits[token], best, total);
    int64_t wanted = row.logprobs < args.tops ? row.logprobs : args.tops;
    wanted = wanted < args.vocabulary ? wanted : args.vocabulary;
    if (wanted == 0) return;
    const uint64_t least = select_best(logits, args.vocabulary, wanted);
    uint64_t ranks[TL_MAX_TOPS];
    int64_t found = 0;
    for (int32_t id = 0; id < args.vocabulary; ++id) {
      const uint64_t rank = rank_of(logits[id], id);
      if (rank < least) continue;
      int64_t at = found++;
      for (; at > 0 && ranks[at - 1] < rank; --at) ranks[at] = ranks[at - 1];
      ranks[at] = rank;
    }
    for (int64_t i = 0; i < found; ++i) {
      args.top_ids[index * args.tops + i] = id_of(ranks[i]);
      args.top_logprobs[index * args.tops + i] = log_probability(score_of(ranks[i]), best, total);
    }
  }

  void count(int32_t token) const {
    const int64_t length = history_length();
    for (int64_t i = 0; i < length; ++i) {
      if (history()[i].token != token) continue;
      ++history()[i].count;
      return;
    }
    if (length < 0 || length >= args.history_capacity) return;
    history()[length] = {token, 1};
    args.history_lengths[row.history] = static_cast<int32_t>(length + 1);
  }
};

}  // namespace

void sample(Pool &pool, const tl_sample_args &args) {
  pool.run(args.rows, [&](int64_t row) { Row(args, row).run(); });
}

}  // namespace tl::cpu
