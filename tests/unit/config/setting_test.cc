#include "src/config/setting.h"

#include <catch2/catch.hpp>
#include <set>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"

namespace sluice {
namespace {

std::string Refusal(const char* name, std::string_view text) {
  const Setting* setting = FindSetting(name);
  REQUIRE(setting != nullptr);
  Config config;
  const absl::Status status = setting->Parse(text, &config);
  CHECK(status.code() == absl::StatusCode::kInvalidArgument);
  CHECK(config.ByteSizeLong() == 0);  // a refused value leaves no trace
  return std::string(status.message());
}

TEST_CASE("every setting has help in whole sentences, a group and a name for its value") {
  const std::set<std::string> groups = {"Model",  "Serving",  "Memory",  "Engine",
                                        "Policy", "Security", "Logging", "Testing"};
  REQUIRE(AllSettings().size() == static_cast<size_t>(Config::descriptor()->field_count()));
  for (const Setting& setting : AllSettings()) {
    CAPTURE(setting.name());
    const std::string& help = setting.options().help();
    REQUIRE_FALSE(help.empty());
    CHECK(help.back() == '.');
    CHECK(absl::ascii_isupper(static_cast<unsigned char>(help.front())));
    CHECK(groups.contains(setting.options().group()));
    CHECK((setting.is_bool() || !setting.options().choices().empty() ||
           !setting.options().metavar().empty()));
  }
}

TEST_CASE("names in files, flags and the environment follow from the field") {
  const Setting* setting = FindSetting("hbm_bytes");
  REQUIRE(setting != nullptr);
  CHECK(setting->flag() == "--hbm-bytes");
  CHECK(setting->env() == "SLUICE_HBM_BYTES");
  CHECK(setting->key() == "hbm_bytes");
  CHECK(setting->FileForm("1GiB") == "hbm_bytes: 1GiB");
  CHECK(FindSetting("hbm-bytes") == nullptr);

  const Setting* nested = FindSetting("ess_warm_up");
  REQUIRE(nested != nullptr);
  CHECK(nested->flag() == "--ess-warm-up");
  CHECK(nested->env() == "SLUICE_ESS_WARM_UP");
  CHECK(nested->section() == "ess");
  CHECK(nested->key() == "warm_up");
  CHECK(nested->FileForm("true") == "ess: {warm_up: true}");
  CHECK(FindSetting("ess", "warm_up") == nested);
  CHECK(FindSetting("", "ess_warm_up") == nullptr);
  CHECK(IsSection("ess"));
  CHECK_FALSE(IsSection("full"));
  CHECK_FALSE(IsSection(""));
}

TEST_CASE("the settings of a section follow one another in the schema") {
  std::set<std::string> closed;
  std::string open;
  for (const Setting& setting : AllSettings()) {
    CAPTURE(setting.name());
    if (setting.section() != open) closed.insert(open);
    open = setting.section();
    CHECK((open.empty() || !closed.contains(open)));
  }
}

TEST_CASE("a count of bytes that may be chosen by the program takes the word auto") {
  Config config;
  for (const char* name : {"hbm_bytes", "dram_bytes", "hold_bytes"}) {
    CAPTURE(name);
    const Setting* setting = FindSetting(name);
    REQUIRE(setting->Parse("auto", &config).ok());
    CHECK(setting->Format(config) == "auto");
    REQUIRE(setting->Parse("2GiB", &config).ok());
    CHECK(setting->Format(config) == "2GiB");
  }
  CHECK(absl::StrContains(Refusal("max_chunk_bytes", "auto"), "must be a whole number of bytes"));
}

TEST_CASE("a count that may be chosen by the program takes the word auto") {
  Config config;
  const Setting* setting = FindSetting("ess_prefetch");
  REQUIRE(setting->Parse("auto", &config).ok());
  CHECK(config.ess_prefetch() == kAutoCount);
  CHECK(setting->Format(config) == "auto");
  REQUIRE(setting->Parse("0", &config).ok());
  CHECK(setting->Format(config) == "0");
  CHECK(Refusal("ess_prefetch", "some") ==
        "must be a whole number from 0 to 65536, or auto, but is \"some\"");
  CHECK(absl::StrContains(Refusal("max_sequences", "auto"), "must be a whole number"));
}

TEST_CASE("defaults are what the schema says") {
  const Config config = DefaultConfig();
  CHECK(config.model().empty());
  CHECK(config.hbm_bytes() == kAutoBytes);
  CHECK(config.dram_bytes() == kAutoBytes);
  CHECK(config.max_chunk_bytes() == 8388608);
  CHECK(config.max_sequences() == 32);
  CHECK(config.listen() == "127.0.0.1:7000");
  CHECK(config.lease_seconds() == 60.0);
  CHECK_FALSE(config.log_prompts());
}

TEST_CASE("every default is written so that it reads back") {
  const Config config = DefaultConfig();
  Config copy;
  for (const Setting& setting : AllSettings()) {
    if (setting.options().required() && setting.options().default_value().empty()) continue;
    CAPTURE(setting.name());
    REQUIRE(setting.Parse(setting.Format(config), &copy).ok());
    CHECK(setting.Format(copy) == setting.Format(config));
  }
  CHECK(copy.SerializeAsString() == config.SerializeAsString());
}

TEST_CASE("a refused value says what is allowed and what was found") {
  CHECK(Refusal("max_sequences", "0") == "must be a whole number from 1 to 4096, but is \"0\"");
  CHECK(Refusal("max_sequences", "4097") ==
        "must be a whole number from 1 to 4096, but is \"4097\"");
  CHECK(Refusal("max_sequences", "many") ==
        "must be a whole number from 1 to 4096, but is \"many\"");
  CHECK(Refusal("max_sequences", "-1") == "must be a whole number from 1 to 4096, but is \"-1\"");
  CHECK(Refusal("max_sequences", "3.5") == "must be a whole number from 1 to 4096, but is \"3.5\"");
  CHECK(Refusal("seed", "18446744073709551616") ==
        "must be a whole number of at least 0, but is \"18446744073709551616\"");
  CHECK(Refusal("hbm_bytes", "1G") ==
        "must be a whole number of bytes from 1 to 64TiB, or auto (such as 1073741824, 512MiB or "
        "1GiB), but is \"1G\"");
  CHECK(Refusal("lease_seconds", "0") ==
        "must be a time from 0.05s to 86400s (such as 30, 1.5s, 200ms or 2m), but is \"0\"");
  CHECK(absl::StrContains(Refusal("lease_seconds", "nan"), "must be a time"));
  CHECK(Refusal("load_format", "gguf") == "must be one of auto, dummy, but is \"gguf\"");
  CHECK(Refusal("load_format", "") == "must be one of auto, dummy, but is empty");
  CHECK(Refusal("policy", "Full") ==
        "must be one of full, scout, recall, hgca, clo, fluxion, ess, auto, but is \"Full\"");
  CHECK(Refusal("log_prompts", "maybe") == "must be true or false, but is \"maybe\"");
  CHECK(Refusal("listen", "7000") ==
        "must be host:port with a port from 0 to 65535, but is \"7000\"");
  CHECK(Refusal("listen", "") == "must not be empty");
  CHECK(Refusal("model", "") == "must not be empty");
  CHECK(absl::StrContains(Refusal("admin_listen", "x"), ", or empty for none, but"));
}

TEST_CASE("texts are bounded, and errors do not repeat them whole or raw") {
  CHECK(Refusal("address_file", std::string(4097, 'a')) ==
        "must be at most 4096 bytes long, but is 4097 long");
  CHECK(Refusal("address_file", "a\nb") ==
        "must be text without control characters, but is \"a?b\"");
  CHECK(Refusal("address_file", std::string_view("a\0b", 3)) ==
        "must be text without control characters, but is \"a?b\"");
  CHECK(Refusal("max_sequences", std::string(100000, '9')).size() < 200);
}

TEST_CASE("bounds themselves are allowed") {
  Config config;
  CHECK(FindSetting("max_sequences")->Parse("1", &config).ok());
  CHECK(FindSetting("max_sequences")->Parse("4096", &config).ok());
  CHECK(FindSetting("hbm_bytes")->Parse("64TiB", &config).ok());
  CHECK(FindSetting("seed")->Parse("18446744073709551615", &config).ok());
  CHECK(config.seed() == 18446744073709551615u);
  CHECK(FindSetting("admin_listen")->Parse("", &config).ok());
}

}  // namespace
}  // namespace sluice
