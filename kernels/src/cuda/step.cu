// The first kernel of a step: see tl_cuda_step.h.

#include "check.h"
#include "device.cuh"
#include "launch.h"

namespace tl::cuda {
namespace {

constexpr int kThreads = 128;

__device__ int32_t token_of(const tl_cuda_step_begin_args &args, int32_t uploaded) {
  if (uploaded >= 0) return uploaded;
  const int64_t index = -1 - static_cast<int64_t>(uploaded);
  return index < args.picks_count ? max(0, load_int(args.picks + index)) : 0;
}

// One block for each row of the tables, then as many as the columns take.
__global__ void __launch_bounds__(kThreads) step_begin(tl_cuda_step_begin_args args) {
  pdl_trigger();
  pdl_wait();
  const int64_t block = blockIdx.x;
  if (block < args.table_rows) {
    const int32_t *from = args.tables + block * args.width;
    int32_t *to = args.tables_out + block * args.table_stride;
    for (int64_t i = threadIdx.x; i < args.width; i += kThreads) to[i] = load_int(from + i);
    return;
  }
  const int64_t cell = (block - args.table_rows) * kThreads + threadIdx.x;
  const int64_t column = cell / args.rows, row = cell % args.rows;
  if (column >= args.column_count) return;
  const int32_t value = load_int(args.columns + cell);
  args.columns_out[column * args.column_stride + row] = column == 0 ? token_of(args, value) : value;
}

}  // namespace

tl_status init_step() { return prepare(step_begin); }

}  // namespace tl::cuda

extern "C" tl_status tl_cuda_step_begin(const tl_cuda_step_begin_args *args, void *stream) {
  using namespace tl::cuda;
  ArgsCheck check(args);
  if (!check.ok()) return check.status();
  check.count(args->rows, 0).count(args->column_count, 1).count(args->picks_count, 0);
  check.count(args->table_rows, 0).count(args->width, 0);
  check.count(args->column_stride, 0).fits(args->column_stride >= args->rows);
  check.count(args->table_stride, 0).fits(args->table_stride >= args->width);
  if (!check.ok() || (args->rows == 0 && args->table_rows == 0)) return check.status();
  if (args->rows > 0) check.present(args->columns, args->columns_out);
  if (args->table_rows > 0) check.present(args->tables, args->tables_out);
  if (args->picks_count > 0) check.present(args->picks);
  check.words(args->columns, args->columns_out, args->tables, args->tables_out, args->picks);
  const int64_t blocks = args->table_rows + (args->rows * args->column_count + kThreads - 1) / kThreads;
  check.count(blocks, 1);
  if (!check.ok()) return check.status();
  return launch(step_begin, {dim3(static_cast<unsigned>(blocks)), dim3(kThreads)}, stream, args->flags, *args);
}
