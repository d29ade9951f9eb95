#include "src/attention/policies/clo/clo_options.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "kernels/hash_params.h"
#include "src/base/status_macros.h"
#include "src/device/mailbox.h"

namespace sluice {
namespace {

absl::Status OutOfRange(const PolicyOptions& options, const char* field,
                        const std::string& expected, double found) {
  return absl::InvalidArgumentError(
      absl::StrCat(field, ": policy ", options.name, " expected ", expected, ", found ", found));
}

absl::Status CheckCount(const PolicyOptions& options, const char* field, size_t found,
                        int64_t expected) {
  if (found == 0 || found == static_cast<size_t>(expected)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, ": policy ", options.name, " expected ",
                                                 expected, " numbers or none, found ", found));
}

}  // namespace

absl::Status CheckCloOptions(const PolicyOptions& options, const HashShape& hash, int64_t ring) {
  const PolicyOptions::Clo& clo = options.clo;
  const int64_t lists = hash.layers * hash.kv_heads;
  SLUICE_RETURN_IF_ERROR(CheckCount(options, "clo.hash", clo.hash.size(), hash.elements()));
  SLUICE_RETURN_IF_ERROR(
      CheckCount(options, "clo.importance", clo.importance.size(), hash.layers * options.heads));
  SLUICE_RETURN_IF_ERROR(CheckCount(options, "clo.thresholds", clo.thresholds.size(), lists));
  SLUICE_RETURN_IF_ERROR(CheckCount(options, "clo.difficulty", clo.difficulty.size(), lists));
  SLUICE_RETURN_IF_ERROR(CheckCount(options, "clo.misses", clo.misses.size(), lists));
  SLUICE_RETURN_IF_ERROR(CheckCount(options, "clo.predicted", clo.predicted.size(), hash.layers));
  if (options.budget_tokens < ring + kCloSinkTokens) {
    return OutOfRange(
        options, "budget_tokens",
        absl::StrCat("at least ", ring + kCloSinkTokens, ", the newest ", ring,
                     " tokens and the first ", kCloSinkTokens, ", to which it always attends"),
        options.budget_tokens);
  }
  if (clo.budget_divisor < 0) {
    return OutOfRange(options, "clo_budget_divisor", "0 or more", clo.budget_divisor);
  }
  if (!(clo.similarity >= -1 && clo.similarity <= 1)) {
    return OutOfRange(options, "clo_similarity", "a cosine from -1 to 1", clo.similarity);
  }
  if (!(clo.persistent_share >= 0 && clo.persistent_share <= 1)) {
    return OutOfRange(options, "clo_persistent_share", "0 to 1", clo.persistent_share);
  }
  if (!(clo.resident_share >= 0 && clo.resident_share <= 1)) {
    return OutOfRange(options, "clo_resident_share", "0 to 1", clo.resident_share);
  }
  if (clo.hash_bits < 32 || clo.hash_bits > kernels::kMaxHashBits || clo.hash_bits % 32 != 0) {
    return OutOfRange(options, "clo_hash_bits",
                      absl::StrCat("a multiple of 32 up to ", kernels::kMaxHashBits),
                      clo.hash_bits);
  }
  if (clo.hash_levels != 1 && clo.hash_levels != kernels::kMostHashLevels) {
    return OutOfRange(options, "clo_hash_levels", absl::StrCat("1 or ", kernels::kMostHashLevels),
                      clo.hash_levels);
  }
  if (options.heads > kernels::kMaxHashGroup * hash.kv_heads) {
    return OutOfRange(options, "heads",
                      absl::StrCat("a model of at most ", kernels::kMaxHashGroup,
                                   " query heads for each of its ", hash.kv_heads, " KV heads"),
                      options.heads);
  }
  if (options.reduction == kernels::GroupReduction::kSoftmaxSum) {
    return absl::InvalidArgumentError(
        absl::StrCat("score_reduction: policy ", options.name,
                     " scores by hash codes, which give no softmax: expected max or mean"));
  }
  if (clo.mover == PolicyOptions::Mover::kAuto) {
    return absl::InvalidArgumentError(
        absl::StrCat("clo.mover: policy ", options.name, " measures none: expected uva or cpu"));
  }
  if (clo.mover == PolicyOptions::Mover::kCpu &&
      (clo.mover_workers < 1 || clo.mover_workers > Mailbox::kMaxWorkers)) {
    return OutOfRange(options, "clo_mover_workers",
                      absl::StrCat("1 to ", Mailbox::kMaxWorkers, " CPU workers"),
                      clo.mover_workers);
  }
  return absl::OkStatus();
}

}  // namespace sluice
