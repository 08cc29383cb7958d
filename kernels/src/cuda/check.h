// Argument checks of the CUDA calls, all on the host and before any CUDA call.
#ifndef TL_CUDA_CHECK_H
#define TL_CUDA_CHECK_H

#include "../../include/tl_cuda.h"
#include "../abi/check.h"

namespace tl::cuda {

class ArgsCheck : public Check {
 public:
  // The struct is there, is this version's, and has only flags that its call knows.
  template <typename Args>
  explicit ArgsCheck(const Args *args, uint32_t known_flags = TL_CUDA_PDL) {
    if (!present(args).ok() || !require(args->size == sizeof(Args), TL_ERROR_VERSION).ok()) return;
    require((args->flags & ~known_flags) == 0, TL_ERROR_VERSION);
  }

  // As in Check, and can be followed by what is below.
  template <typename... Pointers>
  ArgsCheck &present(const Pointers *...pointers) {
    return Check::present(pointers...), *this;
  }
  ArgsCheck &count(int64_t value, int64_t least) { return Check::count(value, least), *this; }
  ArgsCheck &fits(bool holds) { return Check::fits(holds), *this; }
  ArgsCheck &require(bool holds, tl_status otherwise) { return Check::require(holds, otherwise), *this; }

  // Device arrays that are read or written 16 bytes at a time. NULL passes: present() speaks about that.
  template <typename... Pointers>
  ArgsCheck &vectors(const Pointers *...pointers) {
    return require((... && (reinterpret_cast<uintptr_t>(pointers) % 16 == 0)), TL_ERROR_ALIGNMENT);
  }
  // Device arrays of int32 or fp32.
  template <typename... Pointers>
  ArgsCheck &words(const Pointers *...pointers) {
    return require((... && (reinterpret_cast<uintptr_t>(pointers) % 4 == 0)), TL_ERROR_ALIGNMENT);
  }
};

}  // namespace tl::cuda

#endif  // TL_CUDA_CHECK_H
