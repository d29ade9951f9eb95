// Early returns on absl::Status, and checks of invariants that stay in release builds.
#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"

#define SLUICE_CONCAT_INNER_(a, b) a##b
#define SLUICE_CONCAT_(a, b) SLUICE_CONCAT_INNER_(a, b)

#define SLUICE_RETURN_IF_ERROR(expr)                                  \
  do {                                                                \
    if (absl::Status sluice_status_ = (expr); !sluice_status_.ok()) { \
      return sluice_status_;                                          \
    }                                                                 \
  } while (false)

// SLUICE_ASSIGN_OR_RETURN(auto x, F()): x = *F(), or returns F()'s error.
#define SLUICE_ASSIGN_OR_RETURN(lhs, expr) \
  SLUICE_ASSIGN_OR_RETURN_IMPL_(SLUICE_CONCAT_(sluice_statusor_, __LINE__), lhs, expr)
#define SLUICE_ASSIGN_OR_RETURN_IMPL_(statusor, lhs, expr) \
  auto statusor = (expr);                                  \
  if (!statusor.ok()) return std::move(statusor).status(); \
  lhs = *std::move(statusor)

// A broken invariant ends the process, in release builds too. To go on could give a caller another
// sequence's tokens.
#define SLUICE_CHECK(condition, ...)                                      \
  do {                                                                    \
    if (!(condition)) [[unlikely]] {                                      \
      ::sluice::CheckFailed(__FILE__, __LINE__, #condition,               \
                            absl::StrCat("" __VA_OPT__(, ) __VA_ARGS__)); \
    }                                                                     \
  } while (false)

namespace sluice {
[[noreturn]] void CheckFailed(const char* file, int line, const char* condition,
                              const std::string& message);
}  // namespace sluice
