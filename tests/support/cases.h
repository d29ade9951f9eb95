// Which of its cases a test runs through in a build for a sanitizer, where it takes 3 to 10 times
// as long.
#pragma once

#include <initializer_list>
#include <vector>

namespace sluice::testing {

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

// Returns all cases; under a sanitizer the first and the last one, which go through most of the
// code that the others do.
template <typename T>
std::vector<T> CasesToRun(std::initializer_list<T> all) {
  if (!kSanitized || all.size() <= 2) return all;
  return {*all.begin(), *(all.end() - 1)};
}

}  // namespace sluice::testing
