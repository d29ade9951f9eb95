#include "src/base/json_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <set>

#include "src/base/status_macros.h"

namespace sluice {

using nlohmann::json;

namespace {

constexpr size_t kMaxShownBytes = 80;

// Stops the parser when the nesting passes its limit, because every level costs memory.
struct TooDeep {};

// The cut comes before a UTF-8 sequence, not inside it.
std::string Cut(std::string_view text, size_t max_bytes) {
  if (text.size() <= max_bytes) return std::string(text);
  while (max_bytes > 0 && (static_cast<uint8_t>(text[max_bytes]) & 0xC0) == 0x80) --max_bytes;
  return std::string(text.substr(0, max_bytes)) + "...";
}

// Returns the text escaped as in a JSON string, with bytes that are not UTF-8 replaced.
std::string OneLine(const std::string& text) {
  const std::string quoted = json(text).dump(-1, ' ', false, json::error_handler_t::replace);
  return quoted.substr(1, quoted.size() - 2);
}

}  // namespace

std::string Shown(std::string_view text) { return OneLine(Cut(text, kMaxShownBytes)); }

std::string ShownJson(const json& value) {
  if (value.is_string()) {
    return absl::StrCat("\"", Shown(value.get_ref<const std::string&>()), "\"");
  }
  if (value.size() > kMaxShownBytes) {
    return absl::StrCat(value.type_name(), " of ", value.size(), " entries");
  }
  return Cut(value.dump(), kMaxShownBytes);  // which escapes what is not printable
}

absl::StatusOr<json> ParseJsonObject(const char* text, int64_t size, const std::string& what,
                                     const std::string& skip_key) {
  std::string repeated;
  std::set<std::string> seen;
  const auto watch = [&](int depth, json::parse_event_t event, json& parsed) {
    if (depth > kMaxJsonDepth) throw TooDeep();
    if (event != json::parse_event_t::key) return true;
    const auto& key = parsed.get_ref<const std::string&>();
    if (depth == 1 && !seen.insert(key).second && repeated.empty()) repeated = key;
    return depth > 2 || skip_key.empty() || key != skip_key;
  };
  try {
    json value = json::parse(text, text + size, watch);
    if (!value.is_object()) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, ": expected a JSON object, found ", value.type_name()));
    }
    if (!repeated.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat(what, ": the key \"", Shown(repeated), "\" appears twice"));
    }
    return value;
  } catch (const TooDeep&) {
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": nested more than ", kMaxJsonDepth, " levels deep"));
  } catch (const json::exception& e) {
    // The parser quotes the last token that it read, however long.
    constexpr size_t kMaxBytes = 400;
    return absl::InvalidArgumentError(
        absl::StrCat(what, ": not valid JSON: ", OneLine(Cut(e.what(), kMaxBytes))));
  }
}

absl::StatusOr<json> ReadJsonFile(const std::string& path, int64_t max_bytes,
                                  const std::string& skip_key) {
  // With O_NONBLOCK a FIFO opens without a writer, and is then refused.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
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
