// What the kernels use of CUDA's header of this name.
#pragma once

#include "../machine.h"

namespace cooperative_groups {

struct Cluster {
  unsigned block_rank() const { return emulator::current->block->rank; }
  void sync() const { emulator::cluster_meet(); }

  // Where the block of that rank has what `own` points to here.
  template <typename T>
  T *map_shared_rank(T *own, unsigned rank) const {
    const unsigned char *const place = reinterpret_cast<const unsigned char *>(own);
    return reinterpret_cast<T *>(emulator::block_of_rank(rank).memory + (place - emulator::current->block->memory));
  }
};

inline Cluster this_cluster() { return {}; }

}  // namespace cooperative_groups
