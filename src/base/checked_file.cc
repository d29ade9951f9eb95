#include "src/base/checked_file.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "src/base/config_reader.h"
#include "src/base/crc32c.h"
#include "src/base/json_file.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

using nlohmann::json;

absl::Span<const uint8_t> Bytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

// The checksum covers the header less its key, and the payload.
uint32_t Checksum(const json& header, const std::string& payload) {
  return ExtendCrc32c(Crc32c(Bytes(header.dump())), Bytes(payload));
}

absl::Status Damaged(const CheckedFormat& format, const std::string& path,
                     const std::string& found) {
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": ", found, ": copy the file again, or ", format.make));
}

absl::StatusOr<std::string> ReadAll(const CheckedFormat& format, const std::string& path) {
  const std::string remedy =
      absl::StrCat(": give the path of ", format.what, " that ", format.made_by);
  std::error_code error;
  const std::filesystem::file_status status = std::filesystem::status(path, error);
  if (status.type() == std::filesystem::file_type::not_found) {
    return absl::NotFoundError(absl::StrCat(path, ": there is no such file", remedy));
  }
  if (!std::filesystem::is_regular_file(status)) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": not a regular file", remedy));
  }
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return absl::InvalidArgumentError(absl::StrCat(path, ": ", std::strerror(errno)));
  const int64_t bytes = file.tellg();
  if (bytes > format.max_bytes) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": ", bytes, " bytes, expected at most ",
                                                   format.max_bytes, ": ", format.make));
  }
  std::string text(static_cast<size_t>(bytes), '\0');
  file.seekg(0);
  file.read(text.data(), bytes);
  if (!file) return Damaged(format, path, "could not be read");
  return text;
}

}  // namespace

absl::Status WriteCheckedFile(const CheckedFormat& format, json header, const std::string& payload,
                              const std::string& path) {
  header["format"] = format.format;
  header["version"] = format.version;
  header["crc32c"] = Checksum(header, payload);
  const std::string temporary = absl::StrCat(path, ".", getpid(), ".tmp");
  std::ofstream file(temporary, std::ios::binary | std::ios::trunc);
  file << header.dump() << '\n' << payload;
  file.close();
  if (!file || std::rename(temporary.c_str(), path.c_str()) != 0) {
    const std::string reason = std::strerror(errno);
    std::remove(temporary.c_str());
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": ", reason, ": give a path that can be written"));
  }
  return absl::OkStatus();
}

absl::StatusOr<CheckedFile> ReadCheckedFile(const CheckedFormat& format, const std::string& path) {
  SLUICE_ASSIGN_OR_RETURN(std::string text, ReadAll(format, path));
  const absl::Status not_one = absl::InvalidArgumentError(absl::StrCat(
      path, ": not ", format.what, ": it must begin with a line of JSON whose \"format\" is \"",
      format.format, "\": ", format.make));
  const size_t end = text.find('\n');
  if (end == std::string::npos) return not_one;
  absl::StatusOr<json> header = ParseJsonObject(text.data(), static_cast<int64_t>(end), path);
  if (!header.ok()) return not_one;
  const ConfigReader reader(path, *header);
  const absl::StatusOr<std::string> found = reader.StringOr("format", "");
  if (!found.ok() || *found != format.format) return not_one;
  const auto with_remedy = [&format](const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat(status.message(), ": ", format.make));
  };
  const absl::StatusOr<int64_t> version = reader.Int("version", 0, INT32_MAX);
  if (!version.ok()) return with_remedy(version.status());
  if (*version != format.version) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": version ", *version,
                                                   " of the format, this build reads ",
                                                   format.version, ": ", format.make));
  }
  const absl::StatusOr<int64_t> crc = reader.Int("crc32c", 0, UINT32_MAX);
  if (!crc.ok()) return with_remedy(crc.status());
  CheckedFile file;
  file.path = path;
  file.payload = text.substr(end + 1);
  header->erase("crc32c");
  file.whole = Checksum(*header, file.payload) == *crc;
  header->erase("format");
  header->erase("version");
  file.header = *std::move(header);
  return file;
}

absl::Status CheckWhole(const CheckedFormat& format, const CheckedFile& file, int64_t payload_bytes,
                        const std::string& key, const std::string& of) {
  if (std::ssize(file.payload) != payload_bytes) {
    return Damaged(format, file.path,
                   absl::StrCat(key, ": expected ", payload_bytes, " bytes of ", of, ", found ",
                                file.payload.size()));
  }
  if (file.whole) return absl::OkStatus();
  return Damaged(format, file.path, "crc32c: the checksum of the file is another one");
}

}  // namespace sluice
