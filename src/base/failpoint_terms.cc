// The terms that arm failpoints: NAME=ACTION[(ARGUMENT)][%PROBABILITY][*COUNT][@SKIP].
#include <algorithm>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "src/base/failpoint.h"
#include "src/base/nearest_name.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

using Action = FailpointTerm::Action;

constexpr size_t kMaxShown = 80;

// Returns `text` as the type that Abseil's functions take.
absl::string_view View(std::string_view text) { return {text.data(), text.size()}; }

absl::Status Wrong(std::string_view term, const std::string& why) {
  return absl::InvalidArgumentError(absl::StrCat("'", View(term.substr(0, kMaxShown)), "': ", why));
}

const char* ActionsOf(FailpointKind kind) {
  switch (kind) {
    case FailpointKind::kFault:
      return "error, delay(50ms), kill or off";
    case FailpointKind::kPause:
      return "delay(50ms), kill or off";
    case FailpointKind::kClock:
      return "jump(1h), jump(-1h) or off";
  }
  return "";
}

bool Takes(FailpointKind kind, Action action) {
  switch (action) {
    case Action::kOff:
      return true;
    case Action::kError:
      return kind == FailpointKind::kFault;
    case Action::kDelay:
    case Action::kKill:
      return kind != FailpointKind::kClock;
    case Action::kJump:
      return kind == FailpointKind::kClock;
  }
  return false;
}

const char* ActionName(Action action) {
  switch (action) {
    case Action::kOff:
      return "off";
    case Action::kError:
      return "error";
    case Action::kDelay:
      return "delay";
    case Action::kJump:
      return "jump";
    case Action::kKill:
      return "kill";
  }
  return "";
}

absl::StatusOr<Failpoint> FindFailpoint(std::string_view term, std::string_view name) {
  std::vector<std::string> known;
  for (size_t i = 0; i < kFailpoints; ++i) {
    known.emplace_back(InfoOf(static_cast<Failpoint>(i)).name);
    if (known.back() == name) return static_cast<Failpoint>(i);
  }
  return Wrong(term, absl::StrCat("there is no failpoint of that name", DidYouMean(name, known),
                                  "; tools/sluice failpoint list names them all"));
}

// Cuts the part that follows the last `mark` off `text`.
std::optional<std::string> TakeSuffix(std::string_view* text, char mark) {
  const size_t at = text->rfind(mark);
  if (at == std::string_view::npos) return std::nullopt;
  std::string out(text->substr(at + 1));
  *text = text->substr(0, at);
  return out;
}

// Cuts %PROBABILITY, *COUNT and @SKIP, in this order, off the end of `text`.
absl::Status TakeConditions(std::string_view term, std::string_view* text, FailpointTerm* out) {
  if (const auto skip = TakeSuffix(text, '@'); skip.has_value()) {
    if (!absl::SimpleAtoi(*skip, &out->skip)) {
      return Wrong(term, "after @ comes the number of hits to skip, as in error@10");
    }
  }
  if (const auto count = TakeSuffix(text, '*'); count.has_value()) {
    if (!absl::SimpleAtoi(*count, &out->count) || out->count == 0) {
      return Wrong(term, "after * comes how often it happens at most, from 1, as in error*3");
    }
  }
  if (const auto probability = TakeSuffix(text, '%'); probability.has_value()) {
    if (!absl::SimpleAtod(*probability, &out->probability) ||
        !(out->probability > 0 && out->probability <= 1)) {
      return Wrong(term, "after % comes a probability above 0 and at most 1, as in error%0.2");
    }
  }
  return absl::OkStatus();
}

absl::Status ParseAction(std::string_view term, std::string_view text, FailpointTerm* out) {
  const FailpointKind kind = InfoOf(out->point).kind;
  const auto refuse = [&] {
    return Wrong(term, absl::StrCat("its action must be ", ActionsOf(kind)));
  };
  std::string_view name = text, argument;
  const bool has_argument = text.ends_with(')');
  if (has_argument) {
    const size_t open = text.find('(');
    if (open == std::string_view::npos) return refuse();
    name = text.substr(0, open);
    argument = text.substr(open + 1, text.size() - open - 2);
  }
  const Action actions[] = {Action::kOff, Action::kError, Action::kDelay, Action::kJump,
                            Action::kKill};
  const auto* action = std::find_if(std::begin(actions), std::end(actions),
                                    [&](Action a) { return name == ActionName(a); });
  if (action == std::end(actions) || !Takes(kind, *action)) return refuse();
  out->action = *action;
  const bool wants_argument = *action == Action::kDelay || *action == Action::kJump;
  if (has_argument != wants_argument) return refuse();
  if (!wants_argument) return absl::OkStatus();
  const bool jump = *action == Action::kJump;
  const absl::Duration most = jump ? kMaxFailpointJump : kMaxFailpointDelay;
  const absl::Duration least = jump ? -most : absl::ZeroDuration();
  if (!absl::ParseDuration(View(argument), &out->argument) || out->argument < least ||
      out->argument > most) {
    return Wrong(
        term, absl::StrCat("its argument must be a time from ", absl::FormatDuration(least), " to ",
                           absl::FormatDuration(most), ", with a unit, such as 50ms"));
  }
  return absl::OkStatus();
}

absl::StatusOr<FailpointTerm> ParseTerm(std::string_view term) {
  const size_t equals = term.find('=');
  if (equals == std::string_view::npos) {
    return Wrong(term, "a term is NAME=ACTION, such as kv.reserve=error*1");
  }
  FailpointTerm out;
  SLUICE_ASSIGN_OR_RETURN(out.point, FindFailpoint(term, term.substr(0, equals)));
  std::string_view rest = term.substr(equals + 1);
  SLUICE_RETURN_IF_ERROR(TakeConditions(term, &rest, &out));
  SLUICE_RETURN_IF_ERROR(ParseAction(term, rest, &out));
  return out;
}

}  // namespace

absl::StatusOr<std::vector<FailpointTerm>> ParseFailpoints(std::string_view terms) {
  std::vector<FailpointTerm> out;
  for (absl::string_view part : absl::StrSplit(View(terms), ';')) {
    part = absl::StripAsciiWhitespace(part);
    if (part.empty()) continue;
    SLUICE_ASSIGN_OR_RETURN(FailpointTerm term, ParseTerm({part.data(), part.size()}));
    const bool twice = std::any_of(out.begin(), out.end(), [&](const FailpointTerm& other) {
      return other.point == term.point;
    });
    if (twice) return Wrong({part.data(), part.size()}, "this failpoint is given twice");
    out.push_back(term);
  }
  return out;
}

std::string FormatFailpoint(const FailpointTerm& term) {
  std::string out = absl::StrCat(InfoOf(term.point).name, "=", ActionName(term.action));
  if (term.action == Action::kDelay || term.action == Action::kJump) {
    absl::StrAppend(&out, "(", absl::FormatDuration(term.argument), ")");
  }
  if (term.probability < 1) absl::StrAppend(&out, "%", term.probability);
  if (term.count != UINT64_MAX) absl::StrAppend(&out, "*", term.count);
  if (term.skip > 0) absl::StrAppend(&out, "@", term.skip);
  return out;
}

}  // namespace sluice
