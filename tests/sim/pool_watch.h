// Watches a pool's pages from outside. Free pages are filled with a pattern, so that a read of one
// gives wrong tokens and a write to one is found.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "src/kv/page_pool.h"

namespace sluice::sim {

class PoolWatch {
 public:
  // `overcommit`: how much may be promised, in pools.
  PoolWatch(PagePool* pool, size_t kind, double overcommit);
  // Returns what is wrong with the pool's counts or its free pages, if anything is.
  std::optional<std::string> Check();
  // Checks the same, and that nothing is taken or promised.
  std::optional<std::string> CheckEmpty();
  // Returns a byte of a free page; null if there is none.
  uint8_t* FreeByte();

 private:
  PagePool* const pool_;
  const size_t kind_;
  const double overcommit_;
  const std::vector<uint8_t> pattern_;  // one page
  std::vector<bool> free_;              // which pages were free at the last check
};

}  // namespace sluice::sim
