#include "src/model/json_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <set>

#include "src/base/status_macros.h"

namespace sluice {

using nlohmann::json;

absl::StatusOr<json> ParseJsonObject(const char* text, int64_t size, const std::string& what,
                                     const std::string& skip_key) {
  int deepest = 0;
  std::string repeated;
  std::set<std::string> seen;
  // nlohmann's parser and destructor keep their own stacks, so depth is a limit, not a crash.
  const auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
    deepest = std::max(deepest, depth);
    if (event != json::parse_event_t::key) return true;
    const auto& key = parsed.get_ref<const std::string&>();
    if (depth == 1 && !seen.insert(key).second && repeated.empty()) repeated = key;
    return depth > 2 || skip_key.empty() || key != skip_key;
  };
  try {
    json value = json::parse(text, text + size, watch);
    if (deepest > kMaxJsonDepth) {
      return absl::InvalidArgumentError(absl::StrCat(
          what, ": nested ", deepest, " levels deep, expected at most ", kMaxJsonDepth));
    }
    if (!value.is_object()) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, ": expected a JSON object, found ", value.type_name()));
    }
    if (!repeated.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, ": the key \"", repeated, "\" appears twice"));
    }
    return value;
  } catch (const json::exception& e) {
    return absl::InvalidArgumentError(absl::StrCat(what, ": not valid JSON: ", e.what()));
  }
}

absl::StatusOr<json> ReadJsonFile(const std::string& path, int64_t max_bytes,
                                  const std::string& skip_key) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) {
    const std::string message = absl::StrCat(path, ": ", std::strerror(errno));
    return errno == ENOENT || errno == ENOTDIR ? absl::NotFoundError(message)
                                               : absl::InvalidArgumentError(message);
  }
  struct stat st {};
  std::string text;
  absl::Status status;
  if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
    status = absl::InvalidArgumentError(absl::StrCat(path, ": not a regular file"));
  } else if (st.st_size > max_bytes) {
    status = absl::InvalidArgumentError(
        absl::StrCat(path, ": ", st.st_size, " bytes, expected at most ", max_bytes));
  } else {
    text.resize(static_cast<size_t>(st.st_size));
    size_t got = 0;
    while (got < text.size()) {
      const ssize_t n = read(fd, text.data() + got, text.size() - got);
      if (n < 0 && errno == EINTR) continue;
      if (n <= 0) {
        status = absl::DataLossError(absl::StrCat(
            path, ": could not be read: ", n < 0 ? std::strerror(errno) : "it got shorter"));
        break;
      }
      got += static_cast<size_t>(n);
    }
  }
  close(fd);
  SLUICE_RETURN_IF_ERROR(status);
  return ParseJsonObject(text.data(), static_cast<int64_t>(text.size()), path, skip_key);
}

}  // namespace sluice
