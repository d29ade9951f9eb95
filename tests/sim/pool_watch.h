// Watches a pool's pages from outside: those that nobody owns are filled with a pattern, so that
// whoever still reads one gives wrong tokens and whoever still writes one is found out.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "src/kv/page_pool.h"

namespace sluice::sim {

class PoolWatch {
 public:
  // `overcommit`: what may be promised, in pools.
  PoolWatch(PagePool* pool, size_t kind, double overcommit);
  // What is wrong with the pool's counts or its free pages, if anything is.
  std::optional<std::string> Check();
  // The same, and that nothing is taken or promised.
  std::optional<std::string> CheckEmpty();
  // A byte of a page that nobody owns; null if there is none.
  uint8_t* FreeByte();

 private:
  PagePool* const pool_;
  const size_t kind_;
  const double overcommit_;
  const std::vector<uint8_t> pattern_;  // one page
  std::vector<bool> free_;              // at the last check
};

}  // namespace sluice::sim
