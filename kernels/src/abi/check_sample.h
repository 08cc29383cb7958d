// The arguments of sampling, alike for the CPU and the CUDA call.
#ifndef TL_ABI_CHECK_SAMPLE_H
#define TL_ABI_CHECK_SAMPLE_H

#include "check.h"

namespace tl {

inline void check_sample(Check &check, const tl_sample_args &args) {
  check.count(args.rows, 0).count(args.vocabulary, 1).count(args.stride, 1);
  check.require(args.vocabulary <= TL_MAX_VOCABULARY, TL_ERROR_SIZE).fits(args.stride >= args.vocabulary);
  check.count(args.bias_total, 0).count(args.history_total, 0).count(args.history_capacity, 0);
  check.count(args.next_total, 0).count(args.tops, 0).require(args.tops <= TL_MAX_TOPS, TL_ERROR_SIZE);
  if (!check.ok() || args.rows == 0) return;
  check.present(args.logits, args.params, args.tokens);
  if (args.bias_total > 0) check.present(args.biases);
  if (args.history_total > 0) check.present(args.histories, args.history_lengths);
  if (args.next_total > 0) check.present(args.next_tokens);
  if (args.tops > 0) check.present(args.logprobs, args.top_ids, args.top_logprobs);
  check.floats(args.logits, args.biases, args.histories, args.history_lengths, args.tokens, args.next_tokens);
  check.floats(args.logprobs, args.top_ids, args.top_logprobs, args.scores);
  check.require(reinterpret_cast<uintptr_t>(args.params) % alignof(tl_sample_row) == 0, TL_ERROR_ALIGNMENT);
}

}  // namespace tl

#endif  // TL_ABI_CHECK_SAMPLE_H
