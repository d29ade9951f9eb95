#include "src/server/own_profile.h"

#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "src/attention/policy_profile.h"
#include "src/base/logging.h"
#include "src/server/ranks.h"

namespace sluice {
namespace {

// Returns the folder of a user's caches for this program; empty if there is no home directory.
std::string CacheFolder() {
  const char* const caches = std::getenv("XDG_CACHE_HOME");
  if (caches != nullptr && caches[0] == '/') return absl::StrCat(caches, "/sluice");
  const char* const home = std::getenv("HOME");
  if (home != nullptr && home[0] == '/') return absl::StrCat(home, "/.cache/sluice");
  return "";
}

// Writes under another name first, so that no start reads a part of the file.
absl::Status Write(const PolicyProfile& profile, const std::string& path) {
  const std::string part = absl::StrCat(path, ".part");
  if (absl::Status status = WritePolicyProfile(profile, part); !status.ok()) return status;
  std::error_code error;
  std::filesystem::rename(part, path, error);
  if (error) return absl::InvalidArgumentError(absl::StrCat(path, ": ", error.message()));
  return absl::OkStatus();
}

// Returns why no file can be written there, or an empty string.
std::string WhyNotWritable(const std::string& path) {
  const std::filesystem::path folder = std::filesystem::path(path).parent_path();
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  if (error) return absl::StrCat(folder.string(), ": ", error.message());
  const std::filesystem::path trial = absl::StrCat(path, ".part");
  PolicyProfile empty;
  empty.model_fingerprint = std::string(64, '0');
  if (const absl::Status status = WritePolicyProfile(empty, trial.string()); !status.ok()) {
    return std::string(status.message());
  }
  std::filesystem::remove(trial, error);
  return "";
}

}  // namespace

std::string OwnProfilePath(const Config& config, const std::string& fingerprint) {
  std::string folder = config.policy_profile_folder();
  if (config.policy() != "ess" || !config.policy_profile().empty() || folder == "none" ||
      RanksOf(config) > 1) {
    return "";
  }
  if (folder == "auto") folder = CacheFolder();
  return folder.empty() ? "" : absl::StrCat(folder, "/ess-", fingerprint.substr(0, 16), ".json");
}

void UseOwnProfile(const Config& config, const std::string& fingerprint, const CacheLayout& layout,
                   PolicyOptions* options) {
  const std::string path = OwnProfilePath(config, fingerprint);
  if (path.empty()) return;
  absl::StatusOr<PolicyProfile> read = ReadPolicyProfile(path);
  if (read.ok()) {
    const absl::Status applied = ApplyPolicyProfile(*read, fingerprint, layout, options);
    if (applied.ok()) {
      Log(LogLevel::kInfo, "policy ess: the profile of an earlier start's traffic is used",
          {{"file", path}});
      return;
    }
    read = applied;
  }
  if (!absl::IsNotFound(read.status())) {
    Log(LogLevel::kWarn,
        "policy ess: the profile of an earlier start cannot be used; it is made anew",
        {{"file", path}, {"error", std::string(read.status().message())}});
  }
  if (const std::string why = WhyNotWritable(path); !why.empty()) {
    Log(LogLevel::kInfo,
        "policy ess: no profile is made of the first traffic: set policy_profile_folder to a "
        "folder "
        "that can be written, or to none",
        {{"error", why}});
    return;
  }
  options->ess.on_misses = [path, fingerprint](std::vector<MissProfile::Point> points) {
    PolicyProfile profile;
    profile.model_fingerprint = fingerprint;
    profile.misses.points = std::move(points);
    if (const absl::Status status = Write(profile, path); !status.ok()) {
      Log(LogLevel::kWarn, "policy ess: the profile of the first traffic cannot be written",
          {{"error", std::string(status.message())}});
      return;
    }
    Log(LogLevel::kInfo,
        "policy ess: the first traffic made a profile; the next start divides places and "
        "prefetches "
        "by it",
        {{"file", path}});
  };
}

}  // namespace sluice
