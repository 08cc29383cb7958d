// Argument checks shared by the entry points: first failure wins, nothing is touched before all have passed.
#ifndef TL_ABI_CHECK_H
#define TL_ABI_CHECK_H

#include <cstdint>

#include "../../include/tl_kernels.h"

namespace tl {

constexpr int64_t kMaxCount = int64_t{1} << 31;  // of rows, columns and inner sizes: products stay below 2^63

class Check {
 public:
  template <typename... Pointers>
  Check &present(const Pointers *...pointers) {
    return require((... && (pointers != nullptr)), TL_ERROR_NULL);
  }
  template <typename... Pointers>
  Check &floats(const Pointers *...pointers) {
    return require((... && (reinterpret_cast<uintptr_t>(pointers) % alignof(float) == 0)), TL_ERROR_ALIGNMENT);
  }
  Check &packed(const float *pointer) {
    return require(reinterpret_cast<uintptr_t>(pointer) % 64 == 0, TL_ERROR_ALIGNMENT);
  }
  Check &count(int64_t value, int64_t least) { return require(value >= least && value < kMaxCount, TL_ERROR_SIZE); }
  Check &fits(bool holds) { return require(holds, TL_ERROR_SHAPE); }

  // Every one of values[0 .. count) lies in [0, end). Looked at only if all before has passed.
  Check &within(const int32_t *values, int64_t count, int64_t end) {
    for (int64_t i = 0; status_ == TL_OK && i < count; ++i) require(values[i] >= 0 && values[i] < end, TL_ERROR_RANGE);
    return *this;
  }
  Check &require(bool holds, tl_status otherwise) {
    if (status_ == TL_OK && !holds) status_ = otherwise;
    return *this;
  }

  bool ok() const { return status_ == TL_OK; }
  tl_status status() const { return status_; }

 private:
  tl_status status_ = TL_OK;
};

}  // namespace tl

#endif  // TL_ABI_CHECK_H
