#include "src/config/help.h"

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "src/config/setting.h"

namespace sluice {
namespace {

constexpr size_t kColumns = 100;
constexpr size_t kMeaningColumn = 32;

struct ProgramText {
  const char* program;
  const char* summary;
  const char* examples;
};

constexpr ProgramText kPrograms[] = {
    {"sluice-server",
     "Decodes sequences whose KV caches prefill nodes hand over, and streams the tokens.",
     R"(  Serve a Hugging Face directory on the loopback interface:
    sluice-server --model models/smollm2-135m-instruct
  Take any free ports, and write them where a script finds them:
    sluice-server --model DIR --listen 127.0.0.1:0 --admin-listen 127.0.0.1:0 \
      --address-file /tmp/sluice.json
  Look at what a file and the environment make of it, then at what fits into the memory:
    SLUICE_HBM_BYTES=8GiB sluice-server --config configs/server.yaml --check-config
    SLUICE_HBM_BYTES=8GiB sluice-server --config configs/server.yaml --print-plan
)"},
    {"sluice-prefill",
     "Computes the KV caches of prompts and pushes them into a sluice-server, layer by layer.",
     R"(  Prefill for any sluice-server that loaded the same directory:
    sluice-prefill --model models/smollm2-135m-instruct --listen 127.0.0.1:7100
  Share a file with a server on the same node, but not its port:
    sluice-prefill --config configs/server.yaml --listen 127.0.0.1:7100
)"},
};

// A blank at which no line is broken.
constexpr char kHardBlank = '\t';

// Words of `text`, filled into lines from column `indent` on; the first line is already at
// `column`.
std::string Fill(std::string_view text, size_t indent, size_t column) {
  std::string out;
  bool line_start = true;
  const std::vector<std::string> words =
      absl::StrSplit(absl::string_view(text.data(), text.size()), ' ');
  for (const std::string& word : words) {
    if (!line_start && column + 1 + word.size() > kColumns) {
      absl::StrAppend(&out, "\n", std::string(indent, ' '));
      column = indent;
      line_start = true;
    }
    if (!line_start) {
      out += ' ';
      ++column;
    }
    out += word;
    column += word.size();
    line_start = false;
  }
  std::replace(out.begin(), out.end(), kHardBlank, ' ');
  return out + "\n";
}

// "  --flag VALUE      meaning", the meaning on its own lines where the flag is too long.
std::string Entry(const std::string& flag, const std::string& meaning) {
  std::string out = absl::StrCat("  ", flag);
  if (out.size() + 2 > kMeaningColumn) {
    absl::StrAppend(&out, "\n", std::string(kMeaningColumn, ' '));
  } else {
    out.append(kMeaningColumn - out.size(), ' ');
  }
  return out + Fill(meaning, kMeaningColumn, kMeaningColumn);
}

// The flag and what stands for its value: --model DIR, --load-format auto|dummy,
// --[no-]log-prompts.
std::string FlagForm(const Setting& setting) {
  if (setting.is_bool()) return absl::StrCat("--[no-]", setting.flag().substr(2));
  const auto& options = setting.options();
  std::string metavar = options.metavar();
  if (!options.choices().empty()) metavar = absl::StrJoin(options.choices(), "|");
  return absl::StrCat(setting.flag(), " ", metavar.empty() ? "VALUE" : metavar);
}

std::string Meaning(const Setting& setting, std::string_view program) {
  const auto& options = setting.options();
  const std::string fallback = setting.DefaultFor(program);
  if (!fallback.empty()) {
    return absl::StrCat(options.help(), " (default", std::string(1, kHardBlank), fallback, ")");
  }
  return absl::StrCat(options.help(), options.required() ? " (required)" : "");
}

std::string SettingsByGroup(std::string_view program) {
  std::vector<std::string> groups;
  for (const Setting& setting : AllSettings()) {
    const std::string& group = setting.options().group();
    if (std::find(groups.begin(), groups.end(), group) == groups.end()) groups.push_back(group);
  }
  std::string out;
  for (const std::string& group : groups) {
    std::string entries;
    for (const Setting& setting : AllSettings()) {
      if (setting.options().group() != group || !setting.AppliesTo(program)) continue;
      absl::StrAppend(&entries, Entry(FlagForm(setting), Meaning(setting, program)));
    }
    if (!entries.empty()) absl::StrAppend(&out, group, ":\n", entries, "\n");
  }
  return out;
}

std::string InCode(std::string_view text) { return absl::StrCat("`", std::string(text), "`"); }

}  // namespace

std::string HelpText(std::string_view program) {
  const std::string name(program);
  std::string out = absl::StrCat("Usage: ", name, " --model DIR [--config FILE] [FLAGS]\n");
  const char* examples = nullptr;
  for (const ProgramText& text : kPrograms) {
    if (program != text.program) continue;
    absl::StrAppend(&out, text.summary, "\n");
    examples = text.examples;
  }
  absl::StrAppend(
      &out, "\n", SettingsByGroup(program), "Actions:\n",
      Entry("--config FILE", "read settings from this YAML or JSON file"),
      Entry("--check-config",
            "print the effective configuration with the origin of each value, and exit"));
  if (program == "sluice-server") {
    absl::StrAppend(&out,
                    Entry("--print-plan", "print what fits into the configured memory, and exit"));
  }
  absl::StrAppend(
      &out, Entry("--help, -h", "print this, and exit"),
      Entry("--version", "print the version, and exit"), "\nWhere a setting comes from:\n", "  ",
      Fill("A flag wins over the environment, the environment over the file, the file over the "
           "default. --hbm-bytes is SLUICE_HBM_BYTES in the environment and hbm_bytes in the file. "
           "SLUICE_CONFIG names the file where --config does not.",
           2, 2),
      "  ",
      Fill("Unknown names are refused. Settings of another sluice program are passed over in the "
           "environment and in the file, so that the programs of one node can share them.",
           2, 2),
      "\nHow values are written:\n", "  ",
      Fill("BYTES: 1073741824, 512MiB, 1GiB (powers of 1024), 1GB (powers of 1000). TIME: 30 or "
           "30s, "
           "1.5s, 200ms, 2m. ADDR: HOST:PORT, [::1]:7000. Flags take --name VALUE or --name=VALUE; "
           "booleans --name, --no-name or --name=false.",
           2, 2));
  if (examples != nullptr) absl::StrAppend(&out, "\nExamples:\n", examples);
  return out;
}

std::string VersionText(std::string_view program) {
  return absl::StrCat(std::string(program), " ", SLUICE_VERSION);
}

std::string ConfigTableMarkdown() {
  std::string out = "| Setting | Default | Meaning |\n| --- | --- | --- |\n";
  for (const Setting& setting : AllSettings()) {
    const auto& options = setting.options();
    std::string fallback = options.default_value().empty() ? "" : InCode(options.default_value());
    if (fallback.empty() && options.required()) fallback = "required";
    std::string meaning = absl::StrReplaceAll(options.help(), {{"|", "\\|"}});
    for (const std::string& program : options.empty_for()) {
      absl::StrAppend(&meaning, "; empty by default in ", InCode(program));
    }
    if (options.choices_size() > 1) {
      std::vector<std::string> choices;
      for (const std::string& choice : options.choices()) choices.push_back(InCode(choice));
      absl::StrAppend(&meaning, "; one of ", absl::StrJoin(choices, ", "));
    }
    if (!options.programs().empty()) {
      std::vector<std::string> programs;
      for (const std::string& program : options.programs()) programs.push_back(InCode(program));
      absl::StrAppend(&meaning, " (", absl::StrJoin(programs, ", "), " only)");
    }
    absl::StrAppend(&out, "| ", InCode(setting.name()), " | ", fallback, " | ", meaning, " |\n");
  }
  return out;
}

}  // namespace sluice
