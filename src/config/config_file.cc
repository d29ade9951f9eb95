#include "src/config/config_file.h"

#include <sys/stat.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/exceptions.h>
#include <yaml-cpp/mark.h>
#include <yaml-cpp/parser.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <map>
#include <sstream>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "src/base/failpoint.h"
#include "src/base/status_macros.h"
#include "src/config/setting.h"

namespace sluice {
namespace {

// Thrown to leave the parser at the first thing that a configuration cannot hold. yaml-cpp reports
// events as it parses, so nothing that is nested deeper than a section is ever read.
struct Refused {
  int line;
  std::string why;
};

// Collects the `key: value` pairs of one mapping and of the sections in it.
class Entries : public YAML::EventHandler {
 public:
  std::vector<ConfigFileEntry> Take() { return std::move(entries_); }

  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}

  void OnNull(const YAML::Mark& mark, YAML::anchor_t) override {
    if (!in_mapping_) return;  // a document with nothing in it
    if (!have_key_) throw Refused{Line(mark), "a setting's name is missing"};
    RefuseScalarSection(mark);
    throw Refused{Line(mark),
                  absl::StrCat(Printable(key_),
                               " has no value: write one, \"\" for an empty text, or leave "
                               "the line out for the default")};
  }

  void OnAlias(const YAML::Mark& mark, YAML::anchor_t) override {
    throw Refused{Line(mark), "aliases (*name) are not read: write the value itself"};
  }

  void OnScalar(const YAML::Mark& mark, const std::string& tag, YAML::anchor_t,
                const std::string& value) override {
    if (!in_mapping_) {
      throw Refused{Line(mark), "expected lines of the form name: value, found a single value"};
    }
    if (!have_key_) {
      const auto [first, added] = lines_.emplace(std::pair(section_, value), Line(mark));
      if (!added) {
        throw Refused{Line(mark), absl::StrCat(Printable(value), " is set twice, first on line ",
                                               first->second)};
      }
      key_ = value;
      key_line_ = Line(mark);
      have_key_ = true;
      return;
    }
    RefuseScalarSection(mark);
    // yaml-cpp tags a quoted scalar "!" and a plain one "?".
    entries_.push_back({section_, std::move(key_), value, tag == "!", key_line_});
    have_key_ = false;
  }

  void OnSequenceStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t,
                       YAML::EmitterStyle::value) override {
    RefuseNested(mark, "a list");
  }
  void OnSequenceEnd() override {}

  void OnMapStart(const YAML::Mark& mark, const std::string&, YAML::anchor_t,
                  YAML::EmitterStyle::value) override {
    if (!in_mapping_) {
      in_mapping_ = true;
      return;
    }
    if (!AtSection()) RefuseNested(mark, "a mapping");
    section_ = std::move(key_);
    have_key_ = false;
  }
  void OnMapEnd() override { section_.clear(); }

 private:
  static int Line(const YAML::Mark& mark) { return mark.line + 1; }

  // Whether the key that was just read names a section.
  bool AtSection() const { return have_key_ && section_.empty() && IsSection(key_); }

  void RefuseScalarSection(const YAML::Mark& mark) const {
    if (!AtSection()) return;
    for (const Setting& setting : AllSettings()) {
      if (setting.section() != key_) continue;
      throw Refused{Line(mark),
                    absl::StrCat(key_, " must be a mapping of settings, such as ",
                                 setting.FileForm(setting.options().default_value()),
                                 ", but is a single value; leave it out for the defaults")};
    }
  }

  [[noreturn]] void RefuseNested(const YAML::Mark& mark, const char* what) const {
    if (have_key_) {
      throw Refused{Line(mark),
                    absl::StrCat(Printable(key_), " must be a ",
                                 AtSection() ? "mapping" : "single value", ", but is ", what)};
    }
    if (in_mapping_) {  // also what yaml-cpp makes of a flow mapping without its end
      throw Refused{Line(mark), absl::StrCat("expected a setting's name, found ", what,
                                             ", or a { that is never closed")};
    }
    throw Refused{Line(mark), absl::StrCat("expected lines of the form name: value, found ", what)};
  }

  std::vector<ConfigFileEntry> entries_;
  std::map<std::pair<std::string, std::string>, int> lines_;  // by section and key
  std::string section_;                                       // empty: the top of the file
  std::string key_;
  int key_line_ = 0;
  bool in_mapping_ = false;
  bool have_key_ = false;
};

absl::Status ErrorAt(const std::string& name, int line, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat(name, ":", line, ": ", why));
}

absl::Status CheckSize(const std::string& name, size_t bytes) {
  if (bytes <= kMaxConfigFileBytes) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      name, " has ", bytes, " bytes; a configuration file may have at most ", kMaxConfigFileBytes));
}

}  // namespace

absl::StatusOr<std::vector<ConfigFileEntry>> ParseConfigText(const std::string& text,
                                                             const std::string& name) {
  SLUICE_RETURN_IF_ERROR(CheckSize(name, text.size()));
  // The last newline is left out: after it yaml-cpp would take a quoted text that never ends for
  // one that does.
  std::istringstream stream(text.substr(0, text.find_last_not_of(" \t\r\n") + 1));
  Entries mapping;
  try {
    YAML::Parser parser(stream);
    if (parser.HandleNextDocument(mapping)) {
      Entries second;
      if (parser.HandleNextDocument(second)) {
        return absl::InvalidArgumentError(
            absl::StrCat(name, " holds more than one YAML document (---): keep one"));
      }
    }
  } catch (const Refused& refused) {
    return ErrorAt(name, refused.line, refused.why);
  } catch (const YAML::Exception& error) {
    return ErrorAt(name, error.mark.line + 1,
                   absl::StrCat("is neither YAML nor JSON: ", Printable(error.msg), " (column ",
                                error.mark.column + 1, ")"));
  }
  return mapping.Take();
}

absl::StatusOr<std::vector<ConfigFileEntry>> ReadConfigFile(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0) {
    const std::string message =
        absl::StrCat("configuration file ", path, ": ", std::strerror(errno));
    return errno == ENOENT ? absl::NotFoundError(message) : absl::InvalidArgumentError(message);
  }
  if (!S_ISREG(info.st_mode)) {
    return absl::InvalidArgumentError(
        absl::StrCat("configuration file ", path, " is not a regular file"));
  }
  SLUICE_RETURN_IF_ERROR(CheckSize(path, static_cast<size_t>(info.st_size)));
  std::ifstream stream(path, std::ios::binary);
  std::string text(static_cast<size_t>(info.st_size), '\0');
  stream.read(text.data(), info.st_size);
  text.resize(static_cast<size_t>(stream.gcount()));
  if (SLUICE_FAILPOINT(kConfigRead)) {
    stream.setstate(std::ios::badbit);
    errno = EIO;
  }
  if (stream.bad() || (!stream && !stream.eof())) {
    return absl::InvalidArgumentError(
        absl::StrCat("configuration file ", path, " cannot be read: ", std::strerror(errno)));
  }
  return ParseConfigText(text, path);
}

}  // namespace sluice
