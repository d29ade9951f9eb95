#include "src/facade/tokenizer_archive.h"

#include <isa-l/crc.h>

#include <array>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "src/base/json_file.h"
#include "src/base/sha256.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

constexpr std::array<const char*, 6> kFiles = {
    "tokenizer.json",      "tokenizer_config.json", "special_tokens_map.json",
    "chat_template.jinja", "config.json",           "generation_config.json"};

void Put16(std::string& out, uint32_t value) {
  out.push_back(static_cast<char>(value & 0xff));
  out.push_back(static_cast<char>(value >> 8 & 0xff));
}

void Put32(std::string& out, uint32_t value) {
  Put16(out, value & 0xffff);
  Put16(out, value >> 16);
}

// Returns the fields that the local header of a member and its entry in the directory share
// (APPNOTE.TXT 4.3.7, from "version needed to extract" to "extra field length"). The member is
// stored, with no time: 1980-01-01 00:00.
std::string MemberFields(absl::string_view name, absl::string_view bytes) {
  std::string out;
  Put16(out, 10);          // version 1.0
  Put16(out, 0);           // flags
  Put16(out, 0);           // method: stored
  Put16(out, 0);           // time
  Put16(out, 1 << 5 | 1);  // date: year 0, month 1, day 1
  Put32(out,
        crc32_gzip_refl(0, reinterpret_cast<const unsigned char*>(bytes.data()), bytes.size()));
  Put32(out, static_cast<uint32_t>(bytes.size()));  // compressed
  Put32(out, static_cast<uint32_t>(bytes.size()));
  Put16(out, static_cast<uint32_t>(name.size()));
  Put16(out, 0);  // extra field
  return out;
}

class ZipWriter {
 public:
  void Add(absl::string_view name, absl::string_view bytes) {
    const std::string fields = MemberFields(name, bytes);
    const auto offset = static_cast<uint32_t>(out_.size());
    Put32(out_, 0x04034b50);
    absl::StrAppend(&out_, fields, name, bytes);
    Put32(directory_, 0x02014b50);
    Put16(directory_, 10);  // made by version 1.0
    directory_ += fields;
    Put16(directory_, 0);  // comment
    Put16(directory_, 0);  // disk
    Put16(directory_, 0);  // internal attributes
    Put32(directory_, 0);  // external attributes
    Put32(directory_, offset);
    absl::StrAppend(&directory_, name);
    ++members_;
  }
  std::string Finish() {
    const auto offset = static_cast<uint32_t>(out_.size());
    out_ += directory_;
    Put32(out_, 0x06054b50);
    Put16(out_, 0);  // this disk
    Put16(out_, 0);  // the directory's disk
    Put16(out_, members_);
    Put16(out_, members_);
    Put32(out_, static_cast<uint32_t>(directory_.size()));
    Put32(out_, offset);
    Put16(out_, 0);  // comment
    return std::move(out_);
  }

 private:
  std::string out_;
  std::string directory_;
  uint32_t members_ = 0;
};

}  // namespace

absl::StatusOr<TokenizerArchive> MakeTokenizerArchive(const std::string& directory) {
  ZipWriter zip;
  int64_t left = kMaxTokenizerBytes;
  for (const char* name : kFiles) {
    std::ifstream file(absl::StrCat(directory, "/", name), std::ios::binary);
    std::string bytes;
    bool read = file.is_open();
    if (read) {
      bytes.resize(1 << 16);
      size_t size = 0;
      while (file.read(bytes.data() + size, static_cast<std::streamsize>(bytes.size() - size)) ||
             file.gcount() > 0) {
        size += static_cast<size_t>(file.gcount());
        if (static_cast<int64_t>(size) > left) {
          return absl::ResourceExhaustedError(absl::StrCat(
              "the tokenizer in ", directory, " has more than ", kMaxTokenizerBytes, " bytes"));
        }
        if (size == bytes.size()) bytes.resize(2 * size);
      }
      bytes.resize(size);
      read = file.eof();
    }
    if (!read) {
      if (absl::string_view(name) != kFiles[0]) continue;
      return absl::NotFoundError(
          absl::StrCat(directory, " has no tokenizer.json that can be read"));
    }
    left -= static_cast<int64_t>(bytes.size());
    zip.Add(name, bytes);
  }
  TokenizerArchive out;
  out.zip = zip.Finish();
  out.sha256 = Sha256Hex(out.zip);
  return out;
}

}  // namespace sluice
