// The public entry points: check once, then hand over.

#include <new>
#include <system_error>

#include "../cpu/cpu.h"
#include "../cpu/vector.h"
#include "check.h"
#include "check_sample.h"

#ifndef TL_BUILD_KEY
#define TL_BUILD_KEY "unknown"
#endif

namespace {

using tl::Check;

static_assert(tl::kPanel == TL_PANEL_COLUMNS && tl::kPanel == TL_PAGE_TOKENS, "a page of keys is one panel");

constexpr int32_t kMaxThreads = 256;

// Both structs of a step: versions, counts, and the batch's pointers.
Check check_step(const tl_batch *batch, const tl_heads *heads) {
  Check check;
  if (!check.present(batch, heads).ok()) return check;
  const bool known = batch->size == sizeof(tl_batch) && heads->size == sizeof(tl_heads);
  if (!check.require(known, TL_ERROR_VERSION).ok()) return check;
  check.count(heads->heads, 1).count(heads->kv_heads, 1).count(heads->head_dim, 2).count(heads->pages, 1);
  check.count(heads->positions, 1).require(heads->head_dim <= TL_MAX_HEAD_DIM, TL_ERROR_SIZE);
  check.count(batch->spans, 0).count(batch->rows, 0).count(batch->table_width, 0);
  if (!check.ok()) return check;
  check.fits(heads->heads % heads->kv_heads == 0 && heads->head_dim % 2 == 0);
  if (batch->rows > 0)
    check.present(batch->positions, batch->slots, batch->query_starts, batch->context_lens, batch->block_tables);
  return check;
}

// The spans tile the rows, and each row sees only what its span's pages hold.
void check_spans(Check &check, const tl_batch &batch, const tl_heads &heads) {
  if (!check.ok()) return;
  check.fits(batch.query_starts[0] == 0 && batch.query_starts[batch.spans] == batch.rows);
  for (int64_t span = 0; check.ok() && span < batch.spans; ++span) {
    const int64_t first = batch.query_starts[span], count = batch.query_starts[span + 1] - first;
    const int64_t context = batch.context_lens[span];
    if (!check.fits(count >= 0 && first + count <= batch.rows).ok()) return;
    check.require(context >= 0 && context <= int64_t{batch.table_width} * TL_PAGE_TOKENS, TL_ERROR_RANGE);
    check.within(batch.positions + first, count, context);
    const int64_t used = (context + TL_PAGE_TOKENS - 1) / TL_PAGE_TOKENS;
    check.within(batch.block_tables + span * batch.table_width, used, heads.pages);
  }
}

}  // namespace

extern "C" {

int32_t tl_abi_version(void) { return TL_ABI_VERSION; }

const char *tl_build_key(void) { return TL_BUILD_KEY; }

const char *tl_isa(void) { return tl::kIsa; }

const char *tl_status_text(tl_status status) {
  static const char *const texts[] = {
      "ok",
      "a pointer is NULL",
      "a count is out of range",
      "counts do not fit one another",
      "a token, position, slot or page is out of range",
      "a pointer is not aligned",
      "a struct has an unknown size",
      "the system refused threads or memory",
  };
  constexpr tl_status known = sizeof(texts) / sizeof(texts[0]);
  return status >= 0 && status < known ? texts[status] : "unknown status";
}

tl_status tl_context_create(int32_t threads, tl_context **out) {
  Check check;
  check.present(out).require(threads >= 1 && threads <= kMaxThreads, TL_ERROR_SIZE);
  if (!check.ok()) return check.status();
  try {
    *out = new tl_context(threads);
  } catch (const std::bad_alloc &) {
    return TL_ERROR_SYSTEM;
  } catch (const std::system_error &) {
    return TL_ERROR_SYSTEM;
  }
  return TL_OK;
}

void tl_context_destroy(tl_context *context) { delete context; }

tl_status tl_embed(tl_context *context, const int32_t *tokens, const float *table, float *out, int64_t rows,
                   int64_t width, int64_t vocabulary) {
  Check check;
  check.count(rows, 0).count(width, 1).count(vocabulary, 1);
  if (!check.ok() || rows == 0) return check.status();
  check.present(context, tokens, table, out).floats(table, out).within(tokens, rows, vocabulary);
  if (check.ok()) tl::cpu::embed(context->pool, tokens, table, out, rows, width);
  return check.status();
}

tl_status tl_rms_norm(tl_context *context, const float *x, const float *weight, float *out, int64_t rows,
                      int64_t width, float eps) {
  Check check;
  check.count(rows, 0).count(width, 1);
  if (!check.ok() || rows == 0) return check.status();
  check.present(context, x, weight, out).floats(x, weight, out);
  // Without a delta x is only read.
  if (check.ok()) tl::cpu::rms_norm(context->pool, const_cast<float *>(x), nullptr, weight, out, rows, width, eps);
  return check.status();
}

tl_status tl_add_rms_norm(tl_context *context, float *x, const float *delta, const float *weight, float *out,
                          int64_t rows, int64_t width, float eps) {
  Check check;
  check.count(rows, 0).count(width, 1);
  if (!check.ok() || rows == 0) return check.status();
  check.present(context, x, delta, weight, out).floats(x, delta, weight, out);
  if (check.ok()) tl::cpu::rms_norm(context->pool, x, delta, weight, out, rows, width, eps);
  return check.status();
}

int64_t tl_linear_packed_size(int64_t columns, int64_t inner) {
  if (!Check().count(columns, 1).count(inner, 1).ok()) return -1;
  return (columns + TL_PANEL_COLUMNS - 1) / TL_PANEL_COLUMNS * TL_PANEL_COLUMNS * inner;
}

tl_status tl_linear_pack(tl_context *context, const float *weight, float *packed, int64_t rows, int64_t inner,
                         int64_t first_column, int64_t columns) {
  Check check;
  check.count(rows, 0).count(inner, 1).count(first_column, 0).count(columns, 1);
  check.require(first_column + rows <= columns, TL_ERROR_SHAPE);
  if (!check.ok() || rows == 0) return check.status();
  check.present(context, weight, packed).floats(weight).packed(packed);
  if (check.ok()) tl::cpu::linear_pack(context->pool, weight, packed, rows, inner, first_column);
  return check.status();
}

tl_status tl_linear(tl_context *context, const float *x, const float *packed, const float *bias, float *out,
                    int64_t rows, int64_t inner, int64_t columns) {
  Check check;
  check.count(rows, 0).count(inner, 1).count(columns, 1);
  if (!check.ok() || rows == 0) return check.status();
  check.present(context, x, packed, out).floats(x, bias, out).packed(packed);
  if (check.ok()) tl::cpu::linear(context->pool, x, packed, bias, out, rows, inner, columns);
  return check.status();
}

tl_status tl_rope_cache(tl_context *context, const tl_batch *batch, const tl_heads *heads, const float *cosines,
                        const float *sines, float *qkv, float *keys, float *values) {
  Check check = check_step(batch, heads);
  if (!check.ok() || batch->rows == 0) return check.status();
  check.present(context, cosines, sines, qkv, keys, values).floats(cosines, sines, qkv, keys, values);
  check.within(batch->positions, batch->rows, heads->positions);
  check.within(batch->slots, batch->rows, int64_t{heads->pages} * TL_PAGE_TOKENS);
  if (check.ok()) tl::cpu::rope_cache(context->pool, *batch, *heads, cosines, sines, qkv, keys, values);
  return check.status();
}

tl_status tl_attention(tl_context *context, const tl_batch *batch, const tl_heads *heads, const float *qkv,
                       const float *keys, const float *values, float *out) {
  Check check = check_step(batch, heads);
  if (!check.ok() || batch->rows == 0) return check.status();
  check.present(context, qkv, keys, values, out).floats(qkv, keys, values, out);
  check_spans(check, *batch, *heads);
  if (check.ok()) tl::cpu::attention(context->pool, *batch, *heads, qkv, keys, values, out);
  return check.status();
}

tl_status tl_swiglu(tl_context *context, const float *gate_up, float *out, int64_t rows, int64_t width) {
  Check check;
  check.count(rows, 0).count(width, 1);
  if (!check.ok() || rows == 0) return check.status();
  check.present(context, gate_up, out).floats(gate_up, out);
  if (check.ok()) tl::cpu::swiglu(context->pool, gate_up, out, rows, width);
  return check.status();
}

tl_status tl_sample(tl_context *context, const tl_sample_args *args) {
  Check check;
  if (!check.present(args).require(args != nullptr && args->size == sizeof(tl_sample_args), TL_ERROR_VERSION).ok())
    return check.status();
  check.require(args->flags == 0, TL_ERROR_VERSION);
  tl::check_sample(check, *args);
  if (!check.ok() || args->rows == 0) return check.status();
  check.present(context, args->scores);
  if (check.ok()) tl::cpu::sample(context->pool, *args);
  return check.status();
}

}  // extern "C"
