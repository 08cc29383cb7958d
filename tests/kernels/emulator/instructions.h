// In C++, what the kernels say in assembly or by nvcc's intrinsics. Included before everything else of each unit, in
// which the functions of these names that consist of assembly were left out (emulated.py).
#ifndef EMULATOR_INSTRUCTIONS_H
#define EMULATOR_INSTRUCTIONS_H

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include "machine.h"

// ---- intrinsics

inline void __syncthreads() { emulator::meet(emulator::current->block->together, blockDim.x); }

inline void __syncwarp() {
  emulator::collective<int>("__syncwarp", 0, [](const int *, int *) {});
}

// Each lane gets the value of the lane that source(lane) says, its own where there is no such lane.
template <typename T, typename Source>
T emulated_shuffle(const char *name, T value, const Source &source) {
  struct Given {
    T value;
    int source;
  };
  const Given mine{value, source(emulator::lane())};
  return emulator::collective<T>(name, mine, [](const Given *given, T *out) {
    for (int lane = 0; lane < emulator::kLanes; ++lane) {
      const int from = given[lane].source;
      out[lane] = given[from >= 0 && from < emulator::kLanes ? from : lane].value;
    }
  });
}

template <typename T>
T __shfl_sync(unsigned, T value, int source) {
  return emulated_shuffle("__shfl_sync", value, [=](int) { return source; });
}
template <typename T>
T __shfl_xor_sync(unsigned, T value, int mask) {
  return emulated_shuffle("__shfl_xor_sync", value, [=](int lane) { return lane ^ mask; });
}
template <typename T>
T __shfl_up_sync(unsigned, T value, int distance) {
  return emulated_shuffle("__shfl_up_sync", value, [=](int lane) { return lane - distance; });
}
template <typename T>
T __shfl_down_sync(unsigned, T value, int distance) {
  return emulated_shuffle("__shfl_down_sync", value, [=](int lane) { return lane + distance; });
}

inline unsigned __ballot_sync(unsigned, bool holds) {
  return emulator::collective<unsigned>("__ballot_sync", holds, [](const bool *given, unsigned *out) {
    unsigned all = 0;
    for (int lane = 0; lane < emulator::kLanes; ++lane) all |= unsigned{given[lane]} << lane;
    for (int lane = 0; lane < emulator::kLanes; ++lane) out[lane] = all;
  });
}
inline bool __all_sync(unsigned mask, bool holds) { return __ballot_sync(mask, holds) == ~0u; }

inline uint32_t atomicAdd(uint32_t *address, uint32_t amount) {
  const uint32_t before = *address;
  *address += amount;
  emulator::perhaps_pause();
  return before;
}

inline size_t __cvta_generic_to_shared(const void *pointer) {
  const auto *const place = static_cast<const unsigned char *>(pointer);
  return static_cast<size_t>(place - emulator::current->block->memory) + emulator::kWindow;
}

namespace tl::cuda {

// ---- device.cuh

inline void pdl_wait() { emulator::current->waited = true; }
inline void pdl_trigger() {}

inline uint4 load16(const void *address) { return *static_cast<const uint4 *>(emulator::global_at(address, 16)); }
inline uint4 load16_constant(const void *address) { return load16(address); }
inline uint64_t stream_policy() { return 0; }
inline uint4 load16_stream(const void *address, uint64_t) { return load16(address); }

inline int32_t load_int(const int32_t *address) {
  if (!emulator::current->waited) emulator::fail("an integer is read before pdl_wait()");
  return *static_cast<const int32_t *>(emulator::global_at(address, 4));
}

// ---- tensor.cuh: barriers and copies

inline void barrier_init(uint32_t barrier, uint32_t arrivals) { emulator::barrier_init(barrier, arrivals); }
inline void barriers_ready() {}
inline void barrier_arrive(uint32_t barrier) { emulator::barrier_arrive(barrier, 0); }
inline void barrier_expect(uint32_t barrier, uint32_t bytes) { emulator::barrier_arrive(barrier, bytes); }
inline void barrier_wait(uint32_t barrier, uint32_t parity) { emulator::barrier_wait(barrier, parity); }

inline void prefetch_map(const CUtensorMap *) {}
inline void global_to_copies() { emulator::current->fenced = emulator::current->waited; }

inline void copy_box(uint32_t to, const CUtensorMap *map, int column, int row, uint32_t barrier) {
  emulator::TensorMap own;
  std::memcpy(&own, map, sizeof own);
  emulator::start_copy(to, own, column, row, barrier);
}

// ---- tensor.cuh: fragments

struct Fragment {
  uint32_t words[4];
};
using Matrix = uint16_t[8][8];

// Lane l's word of a matrix in fragments.
inline uint32_t word_of(const Matrix &matrix, int lane, bool transposed) {
  const int row = lane / 4, column = lane % 4 * 2;
  const uint32_t low = transposed ? matrix[column][row] : matrix[row][column];
  const uint32_t high = transposed ? matrix[column + 1][row] : matrix[row][column + 1];
  return high << 16 | low;
}

inline void load_four(const char *name, uint32_t address, bool transposed, uint32_t (&out)[4]) {
  const auto load = [=](const uint32_t *addresses, Fragment *loaded) {
    for (int index = 0; index < 4; ++index) {
      Matrix matrix;
      for (int row = 0; row < 8; ++row)
        std::memcpy(matrix[row], emulator::shared_at(addresses[index * 8 + row], 16), sizeof matrix[row]);
      for (int lane = 0; lane < emulator::kLanes; ++lane)
        loaded[lane].words[index] = word_of(matrix, lane, transposed);
    }
  };
  const Fragment own = emulator::collective<Fragment>(name, address, load);
  std::memcpy(out, own.words, sizeof out);
}

inline void load_matrices(uint32_t address, uint32_t (&out)[4]) { load_four("load_matrices", address, false, out); }
inline void load_matrices_transposed(uint32_t address, uint32_t (&out)[4]) {
  load_four("load_matrices_transposed", address, true, out);
}

inline uint32_t transpose_matrix(uint32_t value) {
  return emulator::collective<uint32_t>("transpose_matrix", value, [](const uint32_t *given, uint32_t *out) {
    Matrix matrix;
    std::memcpy(matrix, given, sizeof matrix);  // fragments have a matrix's words row by row
    for (int lane = 0; lane < emulator::kLanes; ++lane) out[lane] = word_of(matrix, lane, true);
  });
}

struct Operands {
  uint32_t a[4], b[2];
};
struct Sums {
  float values[4];
};

// Products of bf16 are exact in fp32; sums are fp64 here, and rounded once.
inline void multiply_fragments(const Operands *given, Sums *out) {
  float a[16][16], b[16][8];
  for (int lane = 0; lane < emulator::kLanes; ++lane)
    for (int i = 0; i < 2; ++i) {
      const int g = lane / 4, t = lane % 4 * 2 + i;
      const auto value = [i](uint32_t word) { return __uint_as_float(i == 0 ? word << 16 : word & 0xffff0000u); };
      a[g][t] = value(given[lane].a[0]), a[g + 8][t] = value(given[lane].a[1]);
      a[g][t + 8] = value(given[lane].a[2]), a[g + 8][t + 8] = value(given[lane].a[3]);
      b[t][g] = value(given[lane].b[0]), b[t + 8][g] = value(given[lane].b[1]);
    }
  for (int lane = 0; lane < emulator::kLanes; ++lane)
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      double sum = 0.0;
      for (int k = 0; k < 16; ++k) sum += double{a[row][k]} * double{b[k][column]};
      out[lane].values[i] = static_cast<float>(sum);
    }
}

inline void multiply_add(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const Operands mine{{a[0], a[1], a[2], a[3]}, {b0, b1}};
  const Sums own = emulator::collective<Sums>("multiply_add", mine, multiply_fragments);
  for (int i = 0; i < 4; ++i) sum[i] += own.values[i];
}

inline float exp2_fast(float x) { return exp2f(x); }

// ---- tensor.cuh: shared memory

template <typename T>
T load_shared_as(emulator::Block &block, uint32_t address) {
  T value;
  std::memcpy(&value, emulator::shared_at(block, address, sizeof value), sizeof value);
  return value;
}

inline void store_shared(uint32_t address, uint32_t value) {
  std::memcpy(emulator::shared_at(address, sizeof value), &value, sizeof value);
}
inline void store_shared16(uint32_t address, uint4 v) { std::memcpy(emulator::shared_at(address, 16), &v, 16); }
inline uint4 load_shared16(uint32_t address) { return load_shared_as<uint4>(*emulator::current->block, address); }

inline void cluster_barrier() { emulator::cluster_meet(); }
inline uint32_t cluster_address(uint32_t address, uint32_t rank) {
  return (rank + 1) << emulator::kRankShift | address;
}

template <typename T>
T load_cluster_as(uint32_t address) {
  emulator::Block &block = emulator::block_of_rank((address >> emulator::kRankShift) - 1);
  return load_shared_as<T>(block, address & ((1u << emulator::kRankShift) - 1));
}
inline float load_cluster(uint32_t address) { return load_cluster_as<float>(address); }
inline float4 load_cluster16(uint32_t address) { return load_cluster_as<float4>(address); }

// ---- linear.cu

inline void mma(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1) {
  multiply_add(d, {a0, a1, a2, a3}, b0, b1);
}

}  // namespace tl::cuda

#endif  // EMULATOR_INSTRUCTIONS_H
