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
     "A decode node: takes over the KV caches of prompts from prefill nodes, decodes the sequences "
     "and streams their tokens.",
     R"(  Serve a Hugging Face directory on the loopback interface:
    sluice-server --model models/smollm2-135m-instruct
  Compute prompts here too, so that no prefill node is needed:
    sluice-server --model models/smollm2-135m-instruct --local-prefill always
  Listen on any free ports, and write them to a file for scripts:
    sluice-server --model DIR --listen 127.0.0.1:0 --admin-listen 127.0.0.1:0 \
      --address-file /tmp/sluice.json
  Print the effective configuration, then how many sequences fit into memory:
    SLUICE_HBM_BYTES=8GiB sluice-server --config configs/server.yaml --check-config
    SLUICE_HBM_BYTES=8GiB sluice-server --config configs/server.yaml --print-plan
)"},
    {"sluice-prefill",
     "A prefill node: computes the KV caches of prompts and hands them to a sluice-server, layer "
     "by "
     "layer.",
     R"(  Prefill for every sluice-server that loaded the same directory:
    sluice-prefill --model models/smollm2-135m-instruct --listen 127.0.0.1:7100
  Share the file of a server on the same machine, but not its port:
    sluice-prefill --config configs/server.yaml --listen 127.0.0.1:7100
)"},
};

// A blank at which Fill breaks no line.
constexpr char kHardBlank = '\t';

// Returns the words of `text` filled into lines from column `indent` on. The first line is already
// at `column`.
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

// Returns "  --flag VALUE      meaning". The meaning begins a line of its own after a long flag.
std::string Entry(const std::string& flag, const std::string& meaning) {
  std::string out = absl::StrCat("  ", flag);
  if (out.size() + 2 > kMeaningColumn) {
    absl::StrAppend(&out, "\n", std::string(kMeaningColumn, ' '));
  } else {
    out.append(kMeaningColumn - out.size(), ' ');
  }
  return out + Fill(meaning, kMeaningColumn, kMeaningColumn);
}

// Returns the flag and the form of its value: --model DIR, --load-format auto|dummy,
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

// Returns how a file has a setting of a section: "--ess-warm-up true is ess: {warm_up: true}".
std::string SectionExample() {
  for (const Setting& setting : AllSettings()) {
    const std::string& value = setting.options().default_value();
    if (!setting.section().empty() && !setting.is_bool()) {
      return absl::StrCat(setting.flag(), " ", value, " is ", setting.FileForm(value));
    }
  }
  return "";
}

std::string InCode(std::string_view text) { return absl::StrCat("`", std::string(text), "`"); }

}  // namespace

std::string HelpText(std::string_view program) {
  const std::string name(program);
  std::string out = absl::StrCat("Usage: ", name, " --model DIR [--config FILE] [FLAGS]\n");
  const char* examples = nullptr;
  for (const ProgramText& text : kPrograms) {
    if (program != text.program) continue;
    absl::StrAppend(&out, Fill(text.summary, 0, 0));
    examples = text.examples;
  }
  absl::StrAppend(
      &out, "\n", SettingsByGroup(program), "Actions:\n",
      Entry("--config FILE", "Read settings from this YAML or JSON file."),
      Entry(
          "--check-config",
          "Print the effective configuration as a file, with the source of each value, and exit."));
  if (program == "sluice-server") {
    absl::StrAppend(
        &out, Entry("--print-plan",
                    "Print how the memory of this machine would be used and how many sequences of "
                    "which length fit into it, and exit. No weights are read."));
  }
  absl::StrAppend(
      &out, Entry("--help, -h", "Print this text and exit."),
      Entry("--version", "Print the version and exit."), "\nWhere a setting comes from:\n", "  ",
      Fill("A flag wins over the environment, the environment over the file, and the file over the "
           "default. --hbm-bytes is SLUICE_HBM_BYTES in the environment and hbm_bytes in the file. "
           "SLUICE_CONFIG names the file if --config does not.",
           2, 2));
  if (program == "sluice-server") {
    absl::StrAppend(
        &out, "  ",
        Fill(absl::StrCat("In the file the settings of one policy stand under its name: ",
                          SectionExample(), "."),
             2, 2));
  }
  absl::StrAppend(
      &out, "  ",
      Fill(
          "Unknown names are refused. The environment and the file may also have settings of other "
          "sluice programs, so that the programs of one machine can share them.",
          2, 2),
      "\nHow values are written:\n", "  ",
      Fill("BYTES: 1073741824, 512MiB, 1GiB (powers of 1024), 1GB (powers of 1000). TIME: 30 or "
           "30s, "
           "1.5s, 200ms, 2m. ADDR: HOST:PORT or [::1]:7000. Flags take --name VALUE or "
           "--name=VALUE; "
           "booleans take --name, --no-name or --name=false.",
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
      absl::StrAppend(&meaning, " Empty by default in ", InCode(program), ".");
    }
    if (options.choices_size() > 1) {
      std::vector<std::string> choices;
      for (const std::string& choice : options.choices()) choices.push_back(InCode(choice));
      absl::StrAppend(&meaning, " One of ", absl::StrJoin(choices, ", "), ".");
    }
    if (!options.programs().empty()) {
      std::vector<std::string> programs;
      for (const std::string& program : options.programs()) programs.push_back(InCode(program));
      absl::StrAppend(&meaning, " (", absl::StrJoin(programs, ", "), " only)");
    }
    const std::string name = setting.section().empty()
                                 ? setting.key()
                                 : absl::StrCat(setting.section(), ": ", setting.key());
    absl::StrAppend(&out, "| ", InCode(name), " | ", fallback, " | ", meaning, " |\n");
  }
  return out;
}

}  // namespace sluice
