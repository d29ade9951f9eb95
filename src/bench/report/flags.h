// Parses the command line of one sluice-bench subcommand. Each flag is bound to the variable that
// receives its value; the help text is made from the same declarations.
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
  // `about` says in a few lines what the subcommand does. `examples` holds complete command lines.
  Flags(std::string command, std::string about, std::string examples);

  // Each method binds --`name` to *value. The content of *value at that moment is the default,
  // which the help shows. `help` is one sentence or two. Parse() refuses values outside [min, max]
  // and names those bounds.
  void Switch(const std::string& name, const std::string& help, bool* value);
  void Text(const std::string& name, const std::string& meta, const std::string& help,
            std::string* value);
  // Binds a text flag whose value may be left out; *value is "-" then.
  void File(const std::string& name, const std::string& help, std::string* value);
  void Choice(const std::string& name, std::vector<std::string> choices, const std::string& help,
              std::string* value);
  void Integer(const std::string& name, const std::string& help, int64_t min, int64_t max,
               int64_t* value);
  void Number(const std::string& name, const std::string& help, double min, double max,
              double* value);
  // Takes a number, or a time such as 200ms, 1.5s or 2m.
  void Seconds(const std::string& name, const std::string& help, double max, double* value);
  void Integers(const std::string& name, const std::string& help, int64_t min, int64_t max,
                std::vector<int64_t>* value);
  // Declares a flag that may be given several times; `parse` checks each value.
  void Repeated(const std::string& name, const std::string& meta, const std::string& help,
                std::function<absl::Status(const std::string&)> parse);
  // Collects arguments that are not flags in *values. Without this call, Parse() refuses such
  // arguments.
  void Rest(const std::string& meta, const std::string& help, std::vector<std::string>* values);

  // Accepts --name VALUE and --name=VALUE. Returns false if --help is among the arguments.
  // INVALID_ARGUMENT names the flag and the values that it takes; for an unknown flag it names the
  // nearest known one.
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
