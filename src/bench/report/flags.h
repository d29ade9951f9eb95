// The command line of one sluice-bench subcommand: flags bound to where their values go, and the
// help text that they make.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace sluice::bench {

class Flags {
 public:
  // `about`: what the subcommand does, in a few lines; `examples`: complete command lines.
  Flags(std::string command, std::string about, std::string examples);

  // Each binds --`name` to *value, whose content now is the default that the help shows. `help` is
  // one sentence or two. Values outside [min, max] are refused with those bounds.
  void Switch(const std::string& name, const std::string& help, bool* value);
  void Text(const std::string& name, const std::string& meta, const std::string& help,
            std::string* value);
  // Text whose value may be left out: "-" then.
  void File(const std::string& name, const std::string& help, std::string* value);
  void Choice(const std::string& name, std::vector<std::string> choices, const std::string& help,
              std::string* value);
  void Integer(const std::string& name, const std::string& help, int64_t min, int64_t max,
               int64_t* value);
  void Number(const std::string& name, const std::string& help, double min, double max,
              double* value);
  // A number, or 200ms, 1.5s, 2m.
  void Seconds(const std::string& name, const std::string& help, double max, double* value);
  void Integers(const std::string& name, const std::string& help, int64_t min, int64_t max,
                std::vector<int64_t>* value);
  // May be given several times; `parse` judges each.
  void Repeated(const std::string& name, const std::string& meta, const std::string& help,
                std::function<absl::Status(const std::string&)> parse);
  // Arguments that are no flags are taken as these; none are taken without this call.
  void Rest(const std::string& meta, const std::string& help, std::vector<std::string>* values);

  // --name VALUE and --name=VALUE. False: --help is among them. INVALID_ARGUMENT names the flag,
  // what it takes, and for an unknown one the nearest known.
  absl::StatusOr<bool> Parse(std::span<const std::string> args);
  std::string Help() const;

 private:
  struct Flag {
    std::string name, meta, help;
    enum class Value { kNone, kOptional, kNeeded } value = Value::kNeeded;
    std::function<absl::Status(const std::string&)> parse;
    bool repeats = false;
    bool given = false;
  };
  void Add(const std::string& name, const std::string& meta, const std::string& help,
           const std::string& default_value, std::function<absl::Status(const std::string&)> parse);
  absl::StatusOr<Flag*> Find(const std::string& name);

  const std::string command_, about_, examples_;
  std::vector<Flag> flags_;
  std::vector<std::string>* rest_ = nullptr;
  std::string rest_meta_, rest_help_;
};

}  // namespace sluice::bench
