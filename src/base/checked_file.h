// Files that begin with a line of JSON, the header, and go on with binary data, the payload. The
// header's "format", "version" and "crc32c" say what the file is and that it is whole.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace sluice {

struct CheckedFormat {
  const char* format;   // the header's "format"
  int64_t version;      // that this build writes and reads
  const char* what;     // for messages, as in "a predictor of policy fluxion"
  const char* made_by;  // for messages: what makes such a file, as in "sluice-profile trained"
  const char* make;     // for messages: how to make another one, as in "train it again with ..."
  int64_t max_bytes;    // of the file; a larger one is refused before it is read
};

struct CheckedFile {
  std::string path;
  nlohmann::json header;  // without format, version and checksum
  std::string payload;
  bool whole = false;  // the checksum is right
};

// Writes the file under another name first, so that a reader never sees a part of it.
// INVALID_ARGUMENT: it cannot be written; the message names the path and the remedy.
absl::Status WriteCheckedFile(const CheckedFormat& format, nlohmann::json header,
                              const std::string& payload, const std::string& path);

// NOT_FOUND: there is no such file. INVALID_ARGUMENT: it is not a file of this format and version,
// or its header has no checksum. A checksum that is wrong is no error yet, so that the caller can
// name a key of the header that is.
absl::StatusOr<CheckedFile> ReadCheckedFile(const CheckedFormat& format, const std::string& path);

// Returns INVALID_ARGUMENT with the remedy if the checksum is wrong or the payload does not have
// `payload_bytes` bytes, of which `of` says what they are ("layers: ... bytes of weights").
absl::Status CheckWhole(const CheckedFormat& format, const CheckedFile& file, int64_t payload_bytes,
                        const std::string& key, const std::string& of);

}  // namespace sluice
