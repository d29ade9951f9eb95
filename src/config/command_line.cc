#include "src/config/command_line.h"

#include <algorithm>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "src/base/nearest_name.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

struct ActionFlag {
  const char* name;
  Action action;
};
constexpr ActionFlag kActions[] = {
    {"--check-config", Action::kCheckConfig},
    {"--print-plan", Action::kPrintPlan},
};

absl::Status Error(const std::string& message) { return absl::InvalidArgumentError(message); }

const Setting* FindByFlag(std::string_view flag) {
  for (const Setting& setting : AllSettings()) {
    if (setting.flag() == flag) return &setting;
  }
  return nullptr;
}

// Returns the boolean that --no-NAME turns off, or null.
const Setting* FindByNegation(std::string_view flag) {
  constexpr std::string_view kNo = "--no-";
  if (!flag.starts_with(kNo)) return nullptr;
  const std::string positive = absl::StrCat("--", std::string(flag.substr(kNo.size())));
  const Setting* setting = FindByFlag(positive);
  return setting != nullptr && setting->is_bool() ? setting : nullptr;
}

absl::Status UnknownFlag(std::string_view program, const std::string& flag) {
  std::vector<std::string> known = {"--config", "--help", "--version"};
  for (const ActionFlag& action : kActions) known.emplace_back(action.name);
  for (const Setting& setting : AllSettings()) {
    if (!setting.AppliesTo(program)) continue;
    known.push_back(setting.flag());
    if (setting.is_bool()) known.push_back(absl::StrCat("--no-", setting.flag().substr(2)));
  }
  return Error(absl::StrCat("unknown flag ", Printable(flag), DidYouMean(flag, known),
                            "; --help lists them all"));
}

class Parser {
 public:
  Parser(std::string_view program, std::span<const std::string> args)
      : program_(program), args_(args) {}

  absl::StatusOr<CommandLine> Parse() {
    for (const std::string& arg : args_) {
      if (arg == "--help" || arg == "-h") line_.action = Action::kHelp;
      if (arg == "--version") line_.action = Action::kVersion;
      if (line_.action != Action::kRun) return std::move(line_);
    }
    while (next_ < args_.size()) SLUICE_RETURN_IF_ERROR(ParseOne(args_[next_++]));
    return std::move(line_);
  }

 private:
  absl::Status ParseOne(const std::string& arg) {
    if (!absl::StartsWith(arg, "--") || arg.size() == 2) return NoFlag(arg);
    const size_t equals = arg.find('=');
    spelling_ = arg.substr(0, equals);
    flag_ = absl::StrCat("--", absl::StrReplaceAll(spelling_.substr(2), {{"_", "-"}}));
    value_ = equals == std::string::npos ? std::nullopt : std::optional(arg.substr(equals + 1));

    for (const ActionFlag& action : kActions) {
      if (flag_ == action.name) return TakeAction(action.action);
    }
    if (flag_ == "--config") {
      SLUICE_RETURN_IF_ERROR(RefuseTwice());
      SLUICE_RETURN_IF_ERROR(RequireValue("FILE"));
      line_.config_file = *value_;
      return absl::OkStatus();
    }
    const Setting* negated = FindByNegation(flag_);
    const Setting* setting = negated != nullptr ? negated : FindByFlag(flag_);
    if (setting == nullptr) return UnknownFlag(program_, spelling_);
    flag_ = setting->flag();
    SLUICE_RETURN_IF_ERROR(RefuseTwice());
    if (!setting->AppliesTo(program_)) {
      return Error(absl::StrCat(spelling_, " is a flag of ",
                                absl::StrJoin(setting->options().programs(), " and "), ", not of ",
                                std::string(program_)));
    }
    if (negated != nullptr) {
      if (value_.has_value()) return NoValueTaken();
      value_ = "false";
    } else if (setting->is_bool()) {
      if (!value_.has_value()) value_ = "true";
    } else {
      SLUICE_RETURN_IF_ERROR(RequireValue(setting->options().metavar()));
    }
    line_.flags.push_back({setting, *std::move(value_), spelling_});
    return absl::OkStatus();
  }

  absl::Status NoFlag(const std::string& arg) const {
    const FlagValue* last = line_.flags.empty() ? nullptr : &line_.flags.back();
    if (last != nullptr && last->setting->is_bool() && (arg == "true" || arg == "false")) {
      return Error(absl::StrCat("unexpected argument ", arg, ": write ", last->spelling, "=", arg));
    }
    std::string hint;
    if (arg.size() > 2 && arg[0] == '-' && FindByFlag(absl::StrCat("-", arg)) != nullptr) {
      hint = absl::StrCat(" (did you mean -", arg, "?)");
    }
    return Error(absl::StrCat("unexpected argument \"", Printable(arg), "\"", hint,
                              ": settings are given as --name VALUE; --help lists them"));
  }

  absl::Status TakeAction(Action action) {
    if (value_.has_value()) return NoValueTaken();
    if (action == Action::kPrintPlan && program_ != "sluice-server") {
      return Error(
          absl::StrCat("--print-plan is a flag of sluice-server, not of ", std::string(program_)));
    }
    if (line_.action != Action::kRun && line_.action != action) {
      return Error("--check-config and --print-plan both print and exit: give one of them");
    }
    line_.action = action;
    return absl::OkStatus();
  }

  absl::Status NoValueTaken() const { return Error(absl::StrCat(spelling_, " takes no value")); }

  absl::Status RefuseTwice() {
    if (seen_.insert(flag_).second) return absl::OkStatus();
    return Error(absl::StrCat(flag_, " is given twice"));
  }

  // Takes the value from the next argument unless --name=VALUE gave it.
  absl::Status RequireValue(std::string_view metavar) {
    if (value_.has_value()) return absl::OkStatus();
    const std::string form =
        absl::StrCat(spelling_, " ", metavar.empty() ? "VALUE" : std::string(metavar));
    if (next_ == args_.size()) {
      return Error(absl::StrCat(spelling_, " needs a value (", form, ")"));
    }
    if (absl::StartsWith(args_[next_], "--")) {
      return Error(absl::StrCat(spelling_, " needs a value (", form, "), but is followed by ",
                                Printable(args_[next_]),
                                "; a value that begins with -- is written ", spelling_, "=VALUE"));
    }
    value_ = args_[next_++];
    return absl::OkStatus();
  }

  const std::string_view program_;
  const std::span<const std::string> args_;
  size_t next_ = 0;
  CommandLine line_;
  std::set<std::string> seen_;  // canonical flags
  // The current argument.
  std::string spelling_;  // as it was written
  std::string flag_;      // its canonical name
  std::optional<std::string> value_;
};

}  // namespace

absl::StatusOr<CommandLine> ParseCommandLine(std::string_view program,
                                             std::span<const std::string> args) {
  return Parser(program, args).Parse();
}

}  // namespace sluice
