#include "pool.h"

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

namespace tl {
namespace {

// How long a thread looks before it sleeps. The gaps between the calls of one step are shorter than the first; past
// the second, another process holds the core of a thread that owes a piece, and sleeping lets the system move it here.
constexpr int kSpinsForWork = 2000;
constexpr int kSpinsForEnd = 1000;

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

inline uint64_t ticket_of(int64_t pieces, int64_t next) {
  return static_cast<uint64_t>(pieces) << 32 | static_cast<uint64_t>(next);
}

}  // namespace

Pool::Pool(int threads) {
  try {
    for (int helper = 1; helper < threads; ++helper) helpers_.emplace_back([this] { help(); });
  } catch (...) {
    stop();
    throw;
  }
}

Pool::~Pool() { stop(); }

void Pool::stop() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_all();
  for (std::thread &helper : helpers_) helper.join();
}

void Pool::run_shared(int64_t pieces, Call call, const void *data) {
  call_ = call;
  data_ = data;
  undone_ = pieces;
  ticket_ = ticket_of(pieces, 0);
  if (sleepers_ > 0) {
    { std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
  }
  work_off();
  for (int spin = 0; undone_.load(std::memory_order_acquire) > 0; ++spin) {
    if (spin < kSpinsForEnd) {
      relax();
      continue;
    }
    std::unique_lock<std::mutex> lock(mutex_);
    waiting_ = true;
    done_.wait(lock, [this] { return undone_ == 0; });
    waiting_ = false;
  }
}

bool Pool::work_left() const {
  const uint64_t ticket = ticket_;
  return (ticket & 0xffffffffu) < (ticket >> 32);
}

bool Pool::claim(int64_t *piece) {
  uint64_t ticket = ticket_.load(std::memory_order_acquire);
  while ((ticket & 0xffffffffu) < (ticket >> 32)) {
    if (ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel)) {
      *piece = static_cast<int64_t>(ticket & 0xffffffffu);
      return true;
    }
  }
  return false;
}

void Pool::work_off() {
  int64_t piece;
  while (claim(&piece)) {
    call_(data_, piece);
    // Sequentially consistent against `waiting_`: the caller either sees the end or is woken.
    if (undone_.fetch_sub(1) == 1 && waiting_) {
      { std::lock_guard<std::mutex> lock(mutex_); }
      done_.notify_one();
    }
  }
}

void Pool::help() {
  while (!stopping_) {
    for (int spin = 0; spin < kSpinsForWork && !work_left(); ++spin) relax();
    work_off();
    if (work_left()) continue;
    std::unique_lock<std::mutex> lock(mutex_);
    ++sleepers_;
    wake_.wait(lock, [this] { return stopping_ || work_left(); });
    --sleepers_;
  }
}

}  // namespace tl
