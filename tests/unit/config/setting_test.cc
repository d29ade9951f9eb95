#include "src/config/setting.h"

#include <catch2/catch.hpp>
#include <set>

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

TEST_CASE("every setting says what it is, where it belongs and what stands for its value") {
  const std::set<std::string> groups = {"Model",  "Serving",  "Memory",  "Engine",
                                        "Policy", "Security", "Logging", "Testing"};
  REQUIRE(AllSettings().size() == static_cast<size_t>(Config::descriptor()->field_count()));
  for (const Setting& setting : AllSettings()) {
    CAPTURE(setting.name());
    CHECK_FALSE(setting.options().help().empty());
    CHECK(setting.options().help().back() != '.');
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
  CHECK(FindSetting("hbm-bytes") == nullptr);
}

TEST_CASE("defaults are what the schema says") {
  const Config config = DefaultConfig();
  CHECK(config.model().empty());
  CHECK(config.hbm_bytes() == 1073741824);
  CHECK(config.dram_bytes() == 4294967296);
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
        "must be a whole number of bytes from 1 to 64TiB (such as 1073741824, 512MiB or 1GiB), but "
        "is \"1G\"");
  CHECK(Refusal("lease_seconds", "0") ==
        "must be a time from 0.05s to 86400s (such as 30, 1.5s, 200ms or 2m), but is \"0\"");
  CHECK(absl::StrContains(Refusal("lease_seconds", "nan"), "must be a time"));
  CHECK(Refusal("load_format", "gguf") == "must be one of auto, dummy, but is \"gguf\"");
  CHECK(Refusal("load_format", "") == "must be one of auto, dummy, but is empty");
  CHECK(Refusal("policy", "Full") ==
        "must be one of full, scout, recall, hgca, ess, offload-naive, oracle, but is \"Full\"");
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
