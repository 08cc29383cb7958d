// A GPU on one CPU thread: each thread of a cluster of blocks is a fiber, and the fibers run in random order.
//
// The one rule: a fiber runs until it waits for others (a collective of its warp, a barrier, a copy). Who runs next,
// and when a copy's bytes land, is drawn at random: what only some orders show, several seeds show.
#ifndef EMULATOR_MACHINE_H
#define EMULATOR_MACHINE_H

#include <csetjmp>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <vector>

#include <cuda_runtime.h>

namespace emulator {

constexpr int kLanes = 32;
constexpr uint32_t kWindow = 1024;                // shared address of a block's first byte: 0 is never valid
constexpr size_t kStaticBytes = size_t{64} << 10;  // of __shared__ variables; dynamic shared memory follows
constexpr int kRankShift = 24;                    // in the cluster's window a block's rank + 1 stands above its address

struct Block;
struct Warp;

struct Thread {
  Block *block;
  Warp *warp;
  unsigned index;
  unsigned char *stack;
  bool started = false, waited = false, fenced = false;  // waited: for the kernels before; fenced: their writes
  std::jmp_buf state;
};

using Waiting = std::vector<Thread *>;

struct Warp {
  std::vector<Thread *> ready;
  Waiting together;        // at a collective
  const char *collective;  // its name
  alignas(16) unsigned char in[kLanes * 32], out[kLanes * 32];
};

// In shared memory: a phase ends when its arrivals and its bytes are complete.
struct Barrier {
  uint32_t arrivals, pending;
  int64_t bytes;
  uint64_t phase;
  Waiting waiting;
};

struct Block {
  uint3 index;
  unsigned rank;
  unsigned char *memory;  // [kStaticBytes + dynamic], aligned as the copy engine's swizzle wants it
  size_t bytes;
  std::vector<Warp> warps;
  Waiting together;
  std::map<uint32_t, Barrier> barriers;
  unsigned running;  // threads that have not ended
  int copies = 0;    // on their way
};

// What a CUtensorMap holds: a matrix of 2-byte elements, and the box of it that one copy brings.
struct TensorMap {
  const unsigned char *base;
  int64_t columns, rows, row_bytes;
  int box_columns, box_rows;
};

extern Thread *current;

// Ends the launch with an error; `what` is what emulator_problem() says.
[[noreturn]] void fail(const char *what);

void meet(Waiting &together, size_t count);  // until `count` threads are here
void cluster_meet();
void perhaps_pause();  // lets others run first, or not

// `bytes` at an address that must be aligned to them, inside an array of the call and inside the block's memory.
const void *global_at(const void *address, size_t bytes);
unsigned char *shared_at(Block &block, uint32_t address, size_t bytes);

Block &block_of_rank(unsigned rank);
size_t reserve_static(size_t bytes);  // an offset, the same in every block

void barrier_init(uint32_t address, uint32_t arrivals);
void barrier_arrive(uint32_t address, uint32_t announced_bytes);
void barrier_wait(uint32_t address, uint32_t parity);
void start_copy(uint32_t to, const TensorMap &map, int column, int row, uint32_t barrier);

// Runs a kernel to its end. False: it failed.
bool run(const dim3 &grid, const dim3 &block, size_t dynamic_bytes, unsigned cluster,
         const std::function<void()> &kernel);

inline int lane() { return static_cast<int>(current->index % kLanes); }
inline unsigned char *shared_at(uint32_t address, size_t bytes) { return shared_at(*current->block, address, bytes); }

// Each lane brings an In; the last to come computes every lane's Out from all of them.
template <typename Out, typename In, typename Compute>
Out collective(const char *name, const In &mine, const Compute &compute) {
  static_assert(sizeof(In) <= 32 && sizeof(Out) <= 32);
  Warp &warp = *current->warp;
  if (!warp.together.empty() && std::strcmp(warp.collective, name) != 0) fail("a warp's lanes are at two instructions");
  warp.collective = name;
  std::memcpy(warp.in + lane() * sizeof(In), &mine, sizeof(In));
  if (warp.together.size() == kLanes - 1)
    compute(reinterpret_cast<const In *>(warp.in), reinterpret_cast<Out *>(warp.out));
  meet(warp.together, kLanes);
  Out out;
  std::memcpy(&out, warp.out + lane() * sizeof(Out), sizeof(Out));
  return out;
}

// What `__shared__ T name` and `extern __shared__ T name[]` become. kLine tells variables of one type apart.
template <typename T, int kLine>
T &shared_variable() {
  static const size_t offset = reserve_static(sizeof(T));
  return *reinterpret_cast<T *>(current->block->memory + offset);
}

template <typename T>
T *dynamic_shared() {
  return reinterpret_cast<T *>(current->block->memory + kStaticBytes);
}

}  // namespace emulator

#endif  // EMULATOR_MACHINE_H
