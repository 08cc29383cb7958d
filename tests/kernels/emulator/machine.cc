// See machine.h.

#include "machine.h"

#include <cuda.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <algorithm>
#include <cstdlib>
#include <random>
#include <string>
#include <utility>

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulator {

Thread *current;

namespace {

constexpr size_t kStackBytes = size_t{64} << 10;  // touched as far as it is used
constexpr size_t kMemoryAlignment = 1024;
constexpr unsigned char kPoison = 0xff;  // NaN in every format
constexpr int kStay = 64;                // of so many turns of a warp one, on average, is its last in a row

struct Copy {
  Block *block;
  uint32_t to;
  TensorMap map;
  int column, row;
  uint32_t barrier;
};

std::mt19937 random_source;
std::string problem;
std::jmp_buf scheduler;
const std::function<void()> *body;
std::vector<Block *> blocks;  // of the cluster that runs
Waiting cluster_together;
std::vector<Copy> copies;
size_t running;      // threads that have not ended
unsigned copy_odds;  // a copy lands at one turn of so many; 0: only when all threads wait
Warp *favourite;     // its threads run on for a while
Warp *sleeper;       // its threads run when no others can: who does not wait for it shows
std::vector<std::pair<uintptr_t, uintptr_t>> readable;  // global memory, [begin, end)
size_t static_used;

unsigned below(size_t count) { return random_source() % static_cast<unsigned>(count); }

void note(const std::string &what) {
  if (problem.empty()) problem = what;
}

// Pages come when they are touched, as zeros.
unsigned char *map_pages(size_t bytes) {
  void *const pages =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (pages == MAP_FAILED) std::abort();
  return static_cast<unsigned char *>(pages);
}

void pause() {
  if (_setjmp(current->state) == 0) _longjmp(scheduler, 1);
}

void wake(Waiting &waiting) {
  for (Thread *const thread : waiting) thread->warp->ready.push_back(thread);
  waiting.clear();
}

void enter() {
  (*body)();
  if (!current->waited) fail("a thread ended without pdl_wait()");
  --current->block->running;
  --running;
  _longjmp(scheduler, 1);
}

void resume(Thread *thread) {
  current = thread;
  threadIdx = {thread->index, 0, 0};
  blockIdx = thread->block->index;
  if (_setjmp(scheduler) != 0) return;
  if (thread->started) _longjmp(thread->state, 1);
  thread->started = true;
  static ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = thread->stack;
  context.uc_stack.ss_size = kStackBytes;
  makecontext(&context, enter, 0);
  setcontext(&context);
}

void complete(Barrier &barrier) {
  if (barrier.pending != 0 || barrier.bytes != 0) return;
  barrier.pending = barrier.arrivals;
  ++barrier.phase;
  wake(barrier.waiting);
}

// move(16 bytes of the box in shared memory, where the copy engine's 128-byte swizzle puts them, row, byte in the row).
template <typename Move>
void each_chunk(const Copy &copy, const Move &move) {
  for (int row = 0; row < copy.map.box_rows; ++row)
    for (int byte = 0; byte < copy.map.box_columns * 2; byte += 16) {
      const uint32_t plain = copy.to + row * 128 + byte;
      move(shared_at(*copy.block, plain ^ (plain / 128 % 8 * 16), 16), copy.row + row, copy.column * 2 + byte);
    }
}

void land_copy() {
  std::swap(copies[below(copies.size())], copies.back());
  const Copy copy = copies.back();
  copies.pop_back();
  each_chunk(copy, [&](unsigned char *to, int64_t row, int64_t byte) {
    const bool inside = row >= 0 && row < copy.map.rows && byte >= 0 && byte < copy.map.columns * 2;
    if (inside) std::memcpy(to, copy.map.base + row * copy.map.row_bytes + byte, 16);
    else std::memset(to, 0, 16);
  });
  --copy.block->copies;
  Barrier &barrier = copy.block->barriers.at(copy.barrier);
  barrier.bytes -= copy.map.box_columns * 2 * copy.map.box_rows;
  complete(barrier);
}

// Any warp with a thread that can go on; NULL if there is none.
Warp *pick_warp(const std::vector<Warp *> &warps) {
  const size_t from = below(warps.size());
  for (size_t i = 0; i < warps.size(); ++i) {
    Warp *const warp = warps[(from + i) % warps.size()];
    if (warp != sleeper && !warp->ready.empty()) return warp;
  }
  Warp *const last = sleeper->ready.empty() ? nullptr : sleeper;
  if (last != nullptr) sleeper = warps[from];
  return last;
}

// A thread that can go on, mostly of the warp that had the last turn; NULL if there is none.
Thread *pick(const std::vector<Warp *> &warps) {
  if (favourite == nullptr || favourite->ready.empty() || below(kStay) == 0) favourite = pick_warp(warps);
  if (favourite == nullptr) return nullptr;
  std::vector<Thread *> &ready = favourite->ready;
  std::swap(ready[below(ready.size())], ready.back());
  Thread *const thread = ready.back();
  ready.pop_back();
  return thread;
}

void schedule(const std::vector<Warp *> &warps) {
  favourite = nullptr;
  sleeper = warps[below(warps.size())];
  while (problem.empty() && running > 0) {
    Thread *const thread = pick(warps);
    const bool lands = thread == nullptr || (copy_odds > 0 && below(copy_odds) == 0);
    if (lands && !copies.empty()) land_copy();
    else if (thread == nullptr) note("all threads wait: a barrier or collective that not all reach");
    if (thread != nullptr) resume(thread);
  }
  for (const Block *const block : blocks)
    if (block->copies > 0) note("a block ended with copies on their way");
}

// A cluster, whose first block is `first`.
void run_cluster(uint3 first, unsigned size, unsigned threads_each, size_t dynamic_bytes, unsigned char *stacks) {
  const size_t bytes = kStaticBytes + dynamic_bytes;
  std::vector<Block> all(size);
  std::vector<Thread> threads(size_t{size} * threads_each);
  std::vector<std::vector<unsigned char>> memories(size);
  std::vector<Warp *> warps;
  for (unsigned rank = 0; rank < size; ++rank) {
    Block &block = all[rank];
    memories[rank].assign(bytes + kMemoryAlignment, kPoison);
    const uintptr_t start = reinterpret_cast<uintptr_t>(memories[rank].data());
    block.memory = memories[rank].data() + (kMemoryAlignment - start % kMemoryAlignment) % kMemoryAlignment;
    block.index = {first.x + rank, first.y, first.z};
    block.rank = rank;
    block.bytes = bytes;
    block.running = threads_each;
    block.warps.resize(threads_each / kLanes);
    for (unsigned i = 0; i < threads_each; ++i) {
      Thread &thread = threads[size_t{rank} * threads_each + i];
      thread.block = &block;
      thread.warp = &block.warps[i / kLanes];
      thread.index = i;
      thread.stack = stacks + kStackBytes * (size_t{rank} * threads_each + i);
      thread.warp->ready.push_back(&thread);
    }
    blocks.push_back(&block);
    for (Warp &warp : block.warps) warps.push_back(&warp);
  }
  running = threads.size();
  schedule(warps);
  blocks.clear();
  cluster_together.clear();
  copies.clear();
}

}  // namespace

void fail(const char *what) {
  const uint3 block = current->block->index;
  note(std::string(what) + " (block " + std::to_string(block.x) + ", " + std::to_string(block.y) + ", " +
       std::to_string(block.z) + ", thread " + std::to_string(current->index) + ")");
  for (;;) pause();
}

void meet(Waiting &together, size_t count) {
  together.push_back(current);
  if (together.size() == count) wake(together);
  pause();
}

void cluster_meet() { meet(cluster_together, blocks.size() * blockDim.x); }

void perhaps_pause() {
  if (below(8) != 0) return;
  current->warp->ready.push_back(current);
  pause();
}

const void *global_at(const void *address, size_t bytes) {
  const uintptr_t from = reinterpret_cast<uintptr_t>(address);
  if (from % bytes != 0) fail("a load is not aligned");
  for (const auto &[begin, end] : readable)
    if (begin <= from && from + bytes <= end) return address;
  fail("a load from outside the call's arrays");
}

Block &block_of_rank(unsigned rank) {
  if (rank >= blocks.size()) fail("the cluster has no block of that rank");
  if (blocks[rank]->running == 0) fail("the memory of a block that has ended");
  return *blocks[rank];
}

unsigned char *shared_at(Block &block, uint32_t address, size_t bytes) {
  if (address < kWindow || address - kWindow + bytes > block.bytes) fail("outside the block's shared memory");
  if (address % bytes != 0) fail("a shared address is not aligned");
  return block.memory + (address - kWindow);
}

size_t reserve_static(size_t bytes) {
  const size_t offset = static_used;
  static_used += (bytes + 15) / 16 * 16;
  if (static_used > kStaticBytes) fail("too many __shared__ variables for the emulator");
  return offset;
}

void barrier_init(uint32_t address, uint32_t arrivals) {
  shared_at(*current->block, address, 8);
  current->block->barriers[address] = {arrivals, arrivals, 0, 0, {}};
}

static Barrier &barrier_at(uint32_t address) {
  const auto found = current->block->barriers.find(address);
  if (found == current->block->barriers.end()) fail("no barrier was made there");
  return found->second;
}

void barrier_arrive(uint32_t address, uint32_t announced_bytes) {
  Barrier &barrier = barrier_at(address);
  if (barrier.pending == 0) fail("more arrivals than the barrier was made for");
  barrier.bytes += announced_bytes;
  --barrier.pending;
  complete(barrier);
}

void barrier_wait(uint32_t address, uint32_t parity) {
  Barrier &barrier = barrier_at(address);
  while (barrier.phase % 2 == parity) {
    barrier.waiting.push_back(current);
    pause();
  }
}

// From now on the place holds no values: who still reads what was there, or reads before the copy landed, gets NaN.
void start_copy(uint32_t to, const TensorMap &map, int column, int row, uint32_t barrier) {
  barrier_at(barrier);
  if (to % 128 != 0) fail("a copy's place is not aligned");
  if (!current->fenced) fail("a copy without global_to_copies() before");
  ++current->block->copies;
  copies.push_back({current->block, to, map, column, row, barrier});
  each_chunk(copies.back(), [](unsigned char *place, int64_t, int64_t) { std::memset(place, kPoison, 16); });
}

bool run(const dim3 &grid, const dim3 &block, size_t dynamic_bytes, unsigned cluster,
         const std::function<void()> &kernel) {
  if (block.x % kLanes != 0 || block.y != 1 || block.z != 1 || grid.x % cluster != 0) {
    note("the emulator runs blocks of whole warps along x, and whole clusters");
    return false;
  }
  constexpr unsigned odds[] = {0, 4, 64, 1024};
  copy_odds = odds[below(4)];
  body = &kernel, gridDim = grid, blockDim = block;
  std::vector<uint3> firsts;
  for (unsigned z = 0; z < grid.z; ++z)
    for (unsigned y = 0; y < grid.y; ++y)
      for (unsigned x = 0; x < grid.x; x += cluster) firsts.push_back({x, y, z});
  std::shuffle(firsts.begin(), firsts.end(), random_source);
  const size_t stack_bytes = kStackBytes * cluster * block.x;
  unsigned char *const stacks = map_pages(stack_bytes);
  for (const uint3 first : firsts)
    if (problem.empty()) run_cluster(first, cluster, block.x, dynamic_bytes, stacks);
  munmap(stacks, stack_bytes);
  return problem.empty();
}

}  // namespace emulator

using namespace emulator;

extern "C" {

// ---- for the tests

// Before each call: what was said of the one before is forgotten.
__attribute__((visibility("default"))) void emulator_begin(uint32_t seed) {
  random_source.seed(seed);
  problem.clear();
  readable.clear();
}

// The call may load from this array.
__attribute__((visibility("default"))) void emulator_readable(const void *array, size_t bytes) {
  const uintptr_t begin = reinterpret_cast<uintptr_t>(array);
  readable.push_back({begin, begin + bytes});
}

// Of the call; empty if it went well.
__attribute__((visibility("default"))) const char *emulator_problem(void) { return problem.c_str(); }

// ---- CUDA's own, as far as the kernels use them

CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType, cuuint32_t rank, void *base,
                                const cuuint64_t *extents, const cuuint64_t *strides, const cuuint32_t *box,
                                const cuuint32_t *, CUtensorMapInterleave, CUtensorMapSwizzle,
                                CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  if (rank != 2 || box[0] * 2 > 128 || strides[0] % 16 != 0 || reinterpret_cast<uintptr_t>(base) % 16 != 0)
    return CUDA_ERROR_INVALID_VALUE;
  const TensorMap own{static_cast<const unsigned char *>(base),
                      static_cast<int64_t>(extents[0]),
                      static_cast<int64_t>(extents[1]),
                      static_cast<int64_t>(strides[0]),
                      static_cast<int>(box[0]),
                      static_cast<int>(box[1])};
  static_assert(sizeof own <= sizeof *map);
  std::memcpy(map, &own, sizeof own);
  return CUDA_SUCCESS;
}

}  // extern "C"

cudaError_t cudaGetDriverEntryPointByVersion(const char *, void **found, unsigned, unsigned long long,
                                             cudaDriverEntryPointQueryResult *result) {
  *found = reinterpret_cast<void *>(&cuTensorMapEncodeTiled);
  *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
