#include "src/config/config.h"
#include "src/config/help.h"

#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "absl/strings/match.h"
#include "src/config/config_file.h"

namespace sluice {
namespace {

using Args = std::vector<std::string>;

LoadedConfig Loaded(const Args& args, const Environment& environment = {},
                    std::string_view program = "sluice-server") {
  auto result = LoadConfig(program, args, environment);
  INFO(result.status().message());
  REQUIRE(result.ok());
  return *std::move(result);
}

std::string Refusal(const Args& args, const Environment& environment = {},
                    std::string_view program = "sluice-server") {
  const auto result = LoadConfig(program, args, environment);
  CHECK(result.status().code() == absl::StatusCode::kInvalidArgument);
  return std::string(result.status().message());
}

// A file in a folder of its own, gone at the end.
class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& text) {
    REQUIRE(mkdtemp(folder_.data()) != nullptr);
    std::ofstream(path()) << text;
  }
  ~TemporaryFile() { std::filesystem::remove_all(folder_); }
  std::string path() const { return folder_ + "/c.yaml"; }

 private:
  std::string folder_ = std::filesystem::temp_directory_path() / "sluice_config_test_XXXXXX";
};

TEST_CASE("a flag wins over the environment, that over the file, that over the default") {
  const TemporaryFile file("threads: 1\nmax_sequences: 2\nmax_context: 3\nmodel: from-file\n");
  const LoadedConfig loaded = Loaded({"--config", file.path(), "--threads", "10"},
                                     {{"SLUICE_THREADS", "20"}, {"SLUICE_MAX_SEQUENCES", "30"}});
  CHECK(loaded.config.threads() == 10);
  CHECK(loaded.config.max_sequences() == 30);
  CHECK(loaded.config.max_context() == 3);
  CHECK(loaded.config.max_waiting() == 1024);
  CHECK(loaded.config.model() == "from-file");
  CHECK(loaded.origins.at("threads") == "--threads");
  CHECK(loaded.origins.at("max_sequences") == "SLUICE_MAX_SEQUENCES");
  CHECK(loaded.origins.at("max_context") == file.path() + ":3");
  CHECK(loaded.origins.at("max_waiting") == "default");
}

TEST_CASE("flags are read with a blank or an equals sign, hyphens or underscores") {
  for (const Args& args :
       {Args{"--model", "m", "--hbm-bytes", "2GiB"}, Args{"--hbm-bytes=2GiB", "--model=m"},
        Args{"--hbm_bytes", "2GiB", "--model", "m"}}) {
    const LoadedConfig loaded = Loaded(args);
    CHECK(loaded.config.hbm_bytes() == 2147483648);
    CHECK(loaded.config.model() == "m");
    CHECK(loaded.action == Action::kRun);
  }
  CHECK(Loaded({"--model=a=b"}).config.model() == "a=b");
  CHECK(Loaded({"--model", "-"}).config.model() == "-");
  CHECK(Loaded({"--model=m", "--admin-listen="}).config.admin_listen().empty());
  CHECK(Loaded({"--model=m", "--admin-listen", ""}).config.admin_listen().empty());
}

TEST_CASE("booleans take no value, one after an equals sign, or no-") {
  const auto log_prompts = [](const std::string& flag) {
    return Loaded({"--model=m", flag}, {{"SLUICE_LOG_PROMPTS", "true"}}).config.log_prompts();
  };
  CHECK(Loaded({"--model=m", "--log-prompts"}).config.log_prompts());
  CHECK(Loaded({"--model=m", "--log_prompts=yes"}).config.log_prompts());
  CHECK_FALSE(log_prompts("--log-prompts=false"));
  CHECK_FALSE(log_prompts("--no-log-prompts"));
  CHECK_FALSE(log_prompts("--no_log_prompts"));
  CHECK(Refusal({"--no-log-prompts=true"}) == "--no-log-prompts takes no value");
  CHECK(Refusal({"--log-prompts", "false"}) ==
        "unexpected argument false: write --log-prompts=false");
  CHECK(
      absl::StartsWith(Refusal({"--no-model"}), "unknown flag --no-model (did you mean --model?)"));
}

TEST_CASE("a command line that is wrong says what is wrong") {
  CHECK(Refusal({"--hmb-bytes", "1GiB"}) ==
        "unknown flag --hmb-bytes (did you mean --hbm-bytes?); --help lists them all");
  CHECK(Refusal({"--chek-config"}) ==
        "unknown flag --chek-config (did you mean --check-config?); --help lists them all");
  CHECK(Refusal({"--zzzzzzzzzzzz"}) == "unknown flag --zzzzzzzzzzzz; --help lists them all");
  CHECK(Refusal({"--model"}) == "--model needs a value (--model DIR)");
  CHECK(absl::StartsWith(Refusal({"--model", "--threads=3"}),
                         "--model needs a value (--model DIR), but is followed by --threads=3"));
  CHECK(Refusal({"--seed=1", "--seed", "2"}) == "--seed is given twice");
  CHECK(Refusal({"--log-prompts", "--no-log-prompts"}) == "--log-prompts is given twice");
  CHECK(Refusal({"--config=a", "--config=b"}) == "--config is given twice");
  CHECK(absl::StartsWith(Refusal({"models/x"}), "unexpected argument \"models/x\": settings are"));
  CHECK(absl::StartsWith(Refusal({"-model", "x"}),
                         "unexpected argument \"-model\" (did you mean --model?)"));
  CHECK(absl::StartsWith(Refusal({"--"}), "unexpected argument \"--\""));
  CHECK(Refusal({"--check-config=1"}) == "--check-config takes no value");
  CHECK(absl::StartsWith(Refusal({"--check-config", "--print-plan"}), "--check-config and"));
  CHECK(
      absl::StartsWith(Refusal({}), "model is required: give --model DIR, SLUICE_MODEL, or model"));
}

TEST_CASE("a wrong value is named with the place that it came from") {
  CHECK(Refusal({"--model=m", "--max_sequences", "0"}) ==
        "max_sequences (--max_sequences) must be a whole number from 1 to 4096, but is \"0\"");
  CHECK(Refusal({"--model=m"}, {{"SLUICE_MAX_SEQUENCES", "x"}}) ==
        "max_sequences (SLUICE_MAX_SEQUENCES) must be a whole number from 1 to 4096, but is \"x\"");
  const TemporaryFile file("# one\nmodel: m\nmax_sequences: 99999\n");
  CHECK(Refusal({"--config", file.path()}) ==
        "max_sequences (" + file.path() +
            ":3) must be a whole number from 1 to 4096, but is \"99999\"");
  // A value that another source would overrule is checked all the same.
  CHECK(
      absl::StartsWith(Refusal({"--config", file.path(), "--max-sequences=3"}), "max_sequences ("));
}

TEST_CASE("unknown keys and variables are refused with the nearest name") {
  const TemporaryFile file("model: m\nhbm-bytes: 1GiB\n");
  CHECK(Refusal({"--config", file.path()}) ==
        "unknown setting hbm-bytes (" + file.path() +
            ":2) (did you mean hbm_bytes?); --help lists them all");
  CHECK(
      Refusal({"--model=m"}, {{"SLUICE_HBM_BYTE", "1GiB"}}) ==
      "unknown environment variable SLUICE_HBM_BYTE (did you mean SLUICE_HBM_BYTES?); unset it, or "
      "see --help for the names");
}

TEST_CASE("settings of a policy stand under its name in a file") {
  const TemporaryFile file(
      "model: m\ness: {sparse_memory_ratio: 0.2}\nscout:\n  share_limit: 0.5\npolicy: ess\n");
  const LoadedConfig loaded = Loaded({"--config", file.path()});
  CHECK(loaded.config.ess_sparse_memory_ratio() == 0.2);
  CHECK(loaded.config.scout_share_limit() == 0.5);
  CHECK(loaded.config.policy() == "ess");
  CHECK(loaded.origins.at("scout_share_limit") == file.path() + ":4");
  CHECK(Loaded({"--config", file.path(), "--ess-sparse-memory-ratio", "0.3"},
               {{"SLUICE_SCOUT_SHARE_LIMIT", "0.7"}})
            .config.scout_share_limit() == 0.7);
  Loaded({"--config", file.path()}, {}, "sluice-prefill");  // which passes over them
}

TEST_CASE("a policy's setting in another place of a file is refused with the form that is read") {
  const auto refusal = [](const std::string& text) {
    const TemporaryFile file("model: m\n" + text);
    std::string message = Refusal({"--config", file.path()});
    const size_t at = message.find(file.path());
    return at == std::string::npos ? message : message.replace(at, file.path().size(), "f");
  };
  CHECK(refusal("ess_sparse_memory_ratio: 0.2\n") ==
        "ess_sparse_memory_ratio (f:2) is written in a file as ess: {sparse_memory_ratio: 0.2}");
  CHECK(refusal("ess: {ess_warm_up: false}\n") ==
        "ess_warm_up (f:2) is written in a file as ess: {warm_up: false}");
  CHECK(refusal("ess:\n  threads: 4\n") ==
        "threads (f:3) is written in a file as threads: 4 at its top");
  CHECK(refusal("ess: {warmup: false}\n") ==
        "unknown setting warmup of ess (f:2) (did you mean warm_up?); --help lists them all");
  CHECK(refusal("recal: {margin: 1}\n") ==
        "--config: f:2: recal must be a single value, but is a mapping");
  CHECK(refusal("ess: {warm_up: 7}\n") == "ess_warm_up (f:2) must be true or false, but is \"7\"");
  CHECK(refusal("ess: {lru: false}\n") ==
        "unknown setting lru of ess (f:2); --help lists them all");
}

TEST_CASE("quoted numbers and booleans in a file are the wrong type, quantities are texts") {
  const TemporaryFile number("{\"model\": \"m\", \"threads\": \"4\"}");
  CHECK(absl::StrContains(Refusal({"--config", number.path()}), "is the quoted text \"4\""));
  const TemporaryFile boolean("{\"model\": \"m\", \"log_prompts\": \"true\"}");
  CHECK(absl::StrContains(Refusal({"--config", boolean.path()}), "must be true or false"));
  const TemporaryFile good(
      "{\"model\": \"m\", \"hbm_bytes\": \"2GiB\", \"dram_bytes\": 4096, \"lease_seconds\": 1.5, "
      "\"log_prompts\": true}");
  const Config config = Loaded({"--config", good.path()}).config;
  CHECK(config.hbm_bytes() == 2147483648);
  CHECK(config.dram_bytes() == 4096);
  CHECK(config.lease_seconds() == 1.5);
  CHECK(config.log_prompts());
}

TEST_CASE("variables of tests, builds and Kubernetes are passed over") {
  const Environment environment = {
      {"SLUICE_TEST_SEED", "1"},
      {"SLUICE_CUDA", "OFF"},
      {"SLUICE_DECODE", "127.0.0.1:7000"},
      {"SLUICE_PREFILL", "127.0.0.1:7100"},
      {"SLUICE_SERVICE_HOST", "10.0.0.1"},
      {"SLUICE_DECODE_SERVICE_PORT_GRPC", "7000"},
      {"SLUICE_PORT", "tcp://10.0.0.1:7000"},
      {"SLUICE_PORT_7000_TCP_ADDR", "10.0.0.1"},
      {"PATH", "/bin"},
  };
  CHECK(Loaded({"--model=m"}, environment).config.model() == "m");
  CHECK(
      absl::StrContains(Refusal({"--model=m"}, {{"SLUICE_PORT", "7000"}}), "unknown environment"));
  CHECK(absl::StrContains(Refusal({"--model=m"}, {{"SLUICE_CUDAS", "1"}}), "unknown environment"));
}

TEST_CASE("failpoints are a setting whose terms are checked") {
  const Environment environment = {{"SLUICE_FAILPOINTS", "kv.reserve=error*1"}};
  CHECK(Loaded({"--model=m"}, environment).config.failpoints() == "kv.reserve=error*1");
  CHECK(Loaded({"--model=m"}, environment, "sluice-prefill").config.failpoints() ==
        "kv.reserve=error*1");
  const std::string refusal = Refusal({"--model=m", "--failpoints=kv.resrve=error"});
  CHECK(absl::StartsWith(refusal, "failpoints (--failpoints) has 'kv.resrve=error'"));
  CHECK(absl::StrContains(refusal, "did you mean kv.reserve?"));
}

TEST_CASE("a setting of another program is refused as a flag and passed over elsewhere") {
  CHECK(Refusal({"--model=m", "--max-sequences=3"}, {}, "sluice-prefill") ==
        "--max-sequences is a flag of sluice-server, not of sluice-prefill");
  CHECK(Refusal({"--print-plan"}, {}, "sluice-prefill") ==
        "--print-plan is a flag of sluice-server, not of sluice-prefill");
  const TemporaryFile file("model: m\nmax_sequences: 7\n");
  const LoadedConfig loaded =
      Loaded({"--config", file.path()}, {{"SLUICE_DRAM_BYTES", "7MiB"}}, "sluice-prefill");
  CHECK(loaded.config.max_sequences() == 32);
  CHECK(loaded.origins.at("max_sequences") == "default");
  CHECK(loaded.config.dram_bytes() == kAutoBytes);
  // Wrong is wrong for every program that shares the file.
  const TemporaryFile wrong("model: m\nmax_sequences: 0\n");
  CHECK(
      absl::StrContains(Refusal({"--config", wrong.path()}, {}, "sluice-prefill"), ":2) must be"));
}

TEST_CASE("a quality is refused beside a policy by name") {
  CHECK(Loaded({"--model=m", "--policy=auto", "--quality=high"}).config.quality() == "high");
  CHECK(Loaded({"--model=m", "--policy=auto"}).config.quality() == "exact");
  CHECK(Refusal({"--model=m", "--policy=scout"}, {{"SLUICE_QUALITY", "fast"}}) ==
        "quality (SLUICE_QUALITY) is for policy auto, and policy is scout (--policy): set policy "
        "to auto, or leave quality out");
  CHECK(absl::StrContains(Refusal({"--model=m", "--quality=high"}), "policy is full (default)"));
  // What --check-config prints has the default, and reads back.
  CHECK(Loaded({"--model=m", "--policy=scout", "--quality=exact"}).config.policy() == "scout");
  CHECK(absl::StartsWith(Refusal({"--model=m", "--policy=auto", "--quality=best"}),
                         "quality (--quality) must be"));
}

TEST_CASE("a default may be empty in one program, which takes the setting all the same") {
  CHECK(Loaded({"--model=m"}).config.admin_listen() == "127.0.0.1:7001");
  CHECK(Loaded({"--model=m"}, {}, "sluice-prefill").config.admin_listen().empty());
  CHECK(Loaded({"--model=m", "--admin-listen=localhost:1"}, {}, "sluice-prefill")
            .config.admin_listen() == "localhost:1");
  CHECK(absl::StrContains(HelpText("sluice-server"), "127.0.0.1:7001"));
  CHECK_FALSE(absl::StrContains(HelpText("sluice-prefill"), "127.0.0.1:7001"));
}

TEST_CASE("SLUICE_CONFIG names the file where --config does not") {
  const TemporaryFile one("model: one\n");
  const TemporaryFile two("model: two\n");
  CHECK(Loaded({}, {{"SLUICE_CONFIG", one.path()}}).config.model() == "one");
  CHECK(Loaded({"--config", two.path()}, {{"SLUICE_CONFIG", one.path()}}).config.model() == "two");
  CHECK(Loaded({"--model=m"}, {{"SLUICE_CONFIG", ""}}).config.model() == "m");
  const auto absent = LoadConfig("sluice-server", Args{}, {{"SLUICE_CONFIG", "/nowhere/c.yaml"}});
  CHECK(absent.status().code() == absl::StatusCode::kNotFound);
  CHECK(absl::StrContains(absent.status().message(), "SLUICE_CONFIG: configuration file /nowhere"));
  CHECK(Refusal({"--config="}) == "--config names no file");
}

TEST_CASE("help and version win over everything else") {
  CHECK(Loaded({"--nonsense", "--help"}).action == Action::kHelp);
  CHECK(Loaded({"-h"}).action == Action::kHelp);
  CHECK(Loaded({"--version"}, {{"SLUICE_NONSENSE", "1"}}).action == Action::kVersion);
  CHECK(Loaded({"--model=m", "--check-config"}).action == Action::kCheckConfig);
  CHECK(Loaded({"--print-plan", "--model=m"}).action == Action::kPrintPlan);
}

TEST_CASE("the effective configuration reads back as the same one") {
  const LoadedConfig loaded =
      Loaded({"--model", "C:\\models\\\"x\" #1: y", "--log-prompts", "--lease-seconds=250ms",
              "--admin-listen=", "--hbm-bytes=1536MiB", "--seed=18446744073709551615",
              "--ess-warm-up=false", "--ess-sparse-memory-ratio=0.2"},
             {{"SLUICE_DRAM_BYTES", "123456789"}});
  const std::string yaml = EffectiveConfigYaml("sluice-server", loaded);
  INFO(yaml);
  CHECK(absl::StrContains(yaml, "# --lease-seconds\n"));
  CHECK(absl::StrContains(yaml, "# SLUICE_DRAM_BYTES\n"));
  CHECK(absl::StrContains(yaml, "# default\n"));
  CHECK(absl::StrContains(yaml, "\ness:\n  sparse_memory_ratio: 0.2 "));
  const TemporaryFile file(yaml);
  CHECK(Loaded({"--config", file.path()}).config.SerializeAsString() ==
        loaded.config.SerializeAsString());
  CHECK_FALSE(absl::StrContains(EffectiveConfigYaml("sluice-prefill", loaded), "max_sequences"));
}

TEST_CASE("SluiceEnvironment takes the SLUICE_ variables of the process") {
  setenv("SLUICE_TEST_SOMETHING", "a=b", 1);
  setenv("NOT_SLUICE_THREADS", "1", 1);
  const Environment environment = SluiceEnvironment();
  unsetenv("SLUICE_TEST_SOMETHING");
  unsetenv("NOT_SLUICE_THREADS");
  REQUIRE(environment.contains("SLUICE_TEST_SOMETHING"));
  CHECK(environment.at("SLUICE_TEST_SOMETHING") == "a=b");
  CHECK_FALSE(environment.contains("NOT_SLUICE_THREADS"));
}

TEST_CASE("the example files load, and name only settings that their program takes") {
  for (const char* program : {"server", "prefill"}) {
    const std::string path = std::string(SLUICE_SOURCE_DIR "/configs/") + program + ".yaml";
    const std::string name = std::string("sluice-") + program;
    CAPTURE(path);
    CHECK_FALSE(Loaded({"--config", path}, {}, name).config.model().empty());
    const auto entries = ReadConfigFile(path);
    REQUIRE(entries.ok());
    CHECK(entries->size() >= 5);
    for (const ConfigFileEntry& entry : *entries) {
      CAPTURE(entry.key);
      CHECK(FindSetting(entry.section, entry.key)->AppliesTo(name));
    }
  }
}

}  // namespace
}  // namespace sluice
