/* The step calls of tl_cuda.h, which includes this: what the host knew when it planned a step meets what the device has
 * computed since. */
#ifndef TL_CUDA_STEP_H
#define TL_CUDA_STEP_H

#include "tl_kernels.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Copies a step's upload to where the kernels of the step look for it.
 *
 * The first column is tokens. One that is below 0, -1 - i, stands for picks[i]: what the step before drew in its row i,
 * which the host has not seen. An i outside the picks gives 0, and so does a pick below 0 (that row's scores were not
 * finite; the host will drop what follows). The other columns are copied as they are.
 * Of the block tables, row r of the compact upload [table_rows, width] goes to the first `width` entries of row r of the
 * wide table; the rest of that is left alone. */
typedef struct tl_cuda_step_begin_args {
  uint32_t size, flags;
  const int32_t *columns;     /* [column_count, rows] */
  const int32_t *picks;       /* [picks_count]; may be NULL if that is 0 */
  int32_t *columns_out;       /* [column_count, column_stride] */
  const int32_t *tables;      /* [table_rows, width] */
  int32_t *tables_out;        /* [table_rows, table_stride] */
  int64_t rows, column_count; /* column_count from 1 up */
  int64_t column_stride;      /* rows or more */
  int64_t picks_count;
  int64_t table_rows, width;
  int64_t table_stride;       /* width or more */
} tl_cuda_step_begin_args;
TL_API tl_status tl_cuda_step_begin(const tl_cuda_step_begin_args *args, void *stream);

#ifdef __cplusplus
}
#endif

#endif /* TL_CUDA_STEP_H */
