// Worker threads that share the pieces of one job at a time.
//
// One rule: pieces are claimed, not assigned, so a thread whose core is busy elsewhere delays only the piece it holds.
#ifndef TL_CPU_POOL_H
#define TL_CPU_POOL_H

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

namespace tl {

class Pool {
 public:
  static constexpr int64_t kMaxPieces = (int64_t{1} << 31) - 1;

  explicit Pool(int threads);  // throws std::system_error or std::bad_alloc
  ~Pool();
  Pool(const Pool &) = delete;
  Pool &operator=(const Pool &) = delete;

  int threads() const { return static_cast<int>(helpers_.size()) + 1; }

  // Call work(piece) for every piece in [0, pieces); returns when all are done. At most kMaxPieces.
  template <typename Work>
  void run(int64_t pieces, const Work &work) {
    if (pieces <= 1 || helpers_.empty()) {
      for (int64_t piece = 0; piece < pieces; ++piece) work(piece);
      return;
    }
    run_shared(pieces, [](const void *data, int64_t piece) { (*static_cast<const Work *>(data))(piece); }, &work);
  }

 private:
  using Call = void (*)(const void *, int64_t);

  void run_shared(int64_t pieces, Call call, const void *data);
  void help();
  void work_off();
  bool claim(int64_t *piece);
  bool work_left() const;
  void stop();

  // The number of pieces (high half) and the next unclaimed one (low half). A successful claim keeps the job alive
  // until that piece is done, so a late thread can never act on a job that has ended.
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int64_t> undone_{0};
  Call call_ = nullptr;
  const void *data_ = nullptr;

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::atomic<int> sleepers_{0};
  std::atomic<bool> waiting_{false}, stopping_{false};
  std::vector<std::thread> helpers_;
};

}  // namespace tl

struct tl_context {
  explicit tl_context(int threads) : pool(threads) {}
  tl::Pool pool;
};

#endif  // TL_CPU_POOL_H
