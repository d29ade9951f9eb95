#include "src/bench/report/flags.h"

#include <cmath>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "src/base/nearest_name.h"
#include "src/base/status_macros.h"
#include "src/config/units.h"

namespace sluice::bench {
namespace {

absl::StatusOr<int64_t> ParseInteger(const std::string& text, int64_t min, int64_t max) {
  int64_t value = 0;
  if (absl::SimpleAtoi(text, &value) && value >= min && value <= max) return value;
  return absl::InvalidArgumentError(
      absl::StrCat("takes a whole number from ", min, " to ", max, ", but is '", text, "'"));
}

// Returns `text` in lines of at most `width` columns. Each line after the first is indented by
// `indent` blanks.
std::string Wrap(const std::string& text, size_t indent, size_t width) {
  std::string out;
  size_t column = indent;
  for (const auto word : absl::StrSplit(text, ' ')) {
    if (column > indent && column + 1 + word.size() > width) {
      absl::StrAppend(&out, "\n", std::string(indent, ' '));
      column = indent;
    } else if (column > indent) {
      out += ' ';
      ++column;
    }
    absl::StrAppend(&out, word);
    column += word.size();
  }
  return out;
}

}  // namespace

Flags::Flags(std::string command, std::string about, std::string examples)
    : command_(std::move(command)), about_(std::move(about)), examples_(std::move(examples)) {}

void Flags::Add(const std::string& name, const std::string& meta, const std::string& help,
                const std::string& default_value,
                std::function<absl::Status(const std::string&)> parse) {
  Flag flag;
  flag.name = "--" + name;
  flag.meta = meta;
  flag.help = default_value.empty() ? help : absl::StrCat(help, " (default ", default_value, ")");
  flag.parse = std::move(parse);
  flags_.push_back(std::move(flag));
}

void Flags::Switch(const std::string& name, const std::string& help, bool* value) {
  Add(name, "", help, "", [value](const std::string&) {
    *value = true;
    return absl::OkStatus();
  });
  flags_.back().value = Flag::Value::kNone;
}

void Flags::Text(const std::string& name, const std::string& meta, const std::string& help,
                 std::string* value) {
  Add(name, meta, help, *value, [value](const std::string& text) {
    *value = text;
    return absl::OkStatus();
  });
}

void Flags::File(const std::string& name, const std::string& help, std::string* value) {
  Add(name, "[FILE]", help, "", [value](const std::string& text) {
    *value = text.empty() ? "-" : text;
    return absl::OkStatus();
  });
  flags_.back().value = Flag::Value::kOptional;
}

void Flags::Choice(const std::string& name, std::vector<std::string> choices,
                   const std::string& help, std::string* value) {
  const std::string meta = absl::StrJoin(choices, "|");
  Add(name, meta, help, *value, [=](const std::string& text) {
    for (const std::string& choice : choices) {
      if (text != choice) continue;
      *value = text;
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(absl::StrCat("takes ", absl::StrJoin(choices, " or "),
                                                   ", but is '", text, "'",
                                                   DidYouMean(text, choices)));
  });
}

void Flags::Integer(const std::string& name, const std::string& help, int64_t min, int64_t max,
                    int64_t* value) {
  Add(name, "N", help, absl::StrCat(*value), [=](const std::string& text) {
    SLUICE_ASSIGN_OR_RETURN(*value, ParseInteger(text, min, max));
    return absl::OkStatus();
  });
}

void Flags::Number(const std::string& name, const std::string& help, double min, double max,
                   double* value) {
  Add(name, "X", help, absl::StrCat(*value), [=](const std::string& text) {
    double parsed = 0;
    if (!absl::SimpleAtod(text, &parsed) || !(parsed >= min && parsed <= max)) {
      return absl::InvalidArgumentError(
          absl::StrCat("takes a number from ", min, " to ", max, ", but is '", text, "'"));
    }
    *value = parsed;
    return absl::OkStatus();
  });
}

void Flags::Seconds(const std::string& name, const std::string& help, double max, double* value) {
  Add(name, "TIME", help, FormatSeconds(*value), [=](const std::string& text) {
    const std::optional<double> parsed = ParseSeconds(text);
    if (!parsed.has_value() || *parsed < 0 || *parsed > max) {
      return absl::InvalidArgumentError(absl::StrCat("takes a time up to ", FormatSeconds(max),
                                                     ", such as 200ms or 2m, but is '", text, "'"));
    }
    *value = *parsed;
    return absl::OkStatus();
  });
}

void Flags::Integers(const std::string& name, const std::string& help, int64_t min, int64_t max,
                     std::vector<int64_t>* value) {
  Add(name, "N,N,...", help, absl::StrJoin(*value, ","), [=](const std::string& text) {
    std::vector<int64_t> parsed;
    for (const auto part : absl::StrSplit(text, ',')) {
      SLUICE_ASSIGN_OR_RETURN(const int64_t one, ParseInteger(std::string(part), min, max));
      parsed.push_back(one);
    }
    *value = parsed;
    return absl::OkStatus();
  });
}

void Flags::Repeated(const std::string& name, const std::string& meta, const std::string& help,
                     std::function<absl::Status(const std::string&)> parse) {
  Add(name, meta, help, "", std::move(parse));
  flags_.back().repeats = true;
}

void Flags::Rest(const std::string& meta, const std::string& help,
                 std::vector<std::string>* values) {
  rest_meta_ = meta;
  rest_help_ = help;
  rest_ = values;
}

absl::StatusOr<Flags::Flag*> Flags::Find(const std::string& name) {
  std::vector<std::string> names = {"--help"};
  for (Flag& flag : flags_) {
    if (flag.name == name) return &flag;
    names.push_back(flag.name);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("there is no flag ", name, DidYouMean(name, names)));
}

absl::StatusOr<bool> Flags::Parse(std::span<const std::string> args) {
  for (const std::string& arg : args) {
    if (arg == "--help" || arg == "-h") return false;
  }
  for (size_t i = 0; i < args.size(); ++i) {
    const std::string& arg = args[i];
    if (arg.size() < 2 || arg.compare(0, 2, "--") != 0) {
      if (rest_ == nullptr) {
        return absl::InvalidArgumentError(absl::StrCat("'", arg, "' is not a flag"));
      }
      rest_->push_back(arg);
      continue;
    }
    const size_t equals = arg.find('=');
    SLUICE_ASSIGN_OR_RETURN(Flag* const flag, Find(arg.substr(0, equals)));
    if (flag->given && !flag->repeats) {
      return absl::InvalidArgumentError(absl::StrCat(flag->name, " is given twice"));
    }
    flag->given = true;
    std::string value;
    if (equals != std::string::npos) {
      if (flag->value == Flag::Value::kNone) {
        return absl::InvalidArgumentError(absl::StrCat(flag->name, " takes no value"));
      }
      value = arg.substr(equals + 1);
    } else if (flag->value == Flag::Value::kNeeded) {
      if (i + 1 >= args.size()) {
        return absl::InvalidArgumentError(
            absl::StrCat(flag->name, " needs a value: ", flag->name, " ", flag->meta));
      }
      value = args[++i];
    } else if (flag->value == Flag::Value::kOptional && i + 1 < args.size() &&
               args[i + 1].compare(0, 2, "--") != 0) {
      value = args[++i];
    }
    if (const absl::Status status = flag->parse(value); !status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat(flag->name, " ", status.message()));
    }
  }
  return true;
}

std::string Flags::Help() const {
  std::string out = absl::StrCat(command_, rest_ == nullptr ? "" : " ", rest_meta_, "\n\n", about_);
  if (rest_ != nullptr) absl::StrAppend(&out, "\n  ", rest_meta_, ": ", rest_help_, "\n");
  constexpr size_t kHelpColumn = 28, kWidth = 100;
  absl::StrAppend(&out, "\nFlags:\n");
  for (const Flag& flag : flags_) {
    std::string left = absl::StrCat("  ", flag.name, flag.meta.empty() ? "" : " ", flag.meta);
    if (left.size() + 2 > kHelpColumn) {
      absl::StrAppend(&left, "\n", std::string(kHelpColumn, ' '));
    } else {
      left.resize(kHelpColumn, ' ');
    }
    absl::StrAppend(&out, left, Wrap(flag.help, kHelpColumn, kWidth), "\n");
  }
  absl::StrAppend(&out, "  --help                    this text\n\nExamples:\n", examples_);
  return out;
}

}  // namespace sluice::bench
