#include "src/profile/traffic.h"

#include <catch2/catch.hpp>

namespace sluice {
namespace {

void CheckRefused(const std::string& text, const std::string& words) {
  INFO(text);
  const auto prompts = ParseTraffic(text, "traffic.jsonl", 100);
  REQUIRE_FALSE(prompts.ok());
  INFO(std::string(prompts.status().message()));
  CHECK(std::string(prompts.status().message()).find(words) != std::string::npos);
}

}  // namespace

TEST_CASE("prompts are read in every form, line by line") {
  const auto prompts = ParseTraffic(
      "1 2 3\n\n  4,5, 6\r\n[7, 8]\n{\"prompt_token_ids\": [9], \"more\": 1}", "t", 100);
  REQUIRE(prompts.ok());
  CHECK(*prompts == std::vector<Prompt>{{1, 2, 3}, {4, 5, 6}, {7, 8}, {9}});
}

TEST_CASE("traffic that is none is refused, with its line") {
  CheckRefused("", "prompts");
  CheckRefused("1 2\n3 x", "traffic.jsonl:2: expected token ids from 0 to 99, found x");
  CheckRefused("100", "found 100");
  CheckRefused("-1", "found -1");
  CheckRefused("[]", "found none");
  CheckRefused("[1, 2.5]", "found 2.5");
  CheckRefused("[1, 18446744073709551615]", "found 18446744073709551615");
  CheckRefused("[1", "list");
  CheckRefused("{\"tokens\": [1]}", "prompt_token_ids");
  CheckRefused("{\"prompt_token_ids\": 3}", "found 3");
  CheckRefused("{\"prompt_token_ids\"", "JSON");
}

TEST_CASE("a traffic file that is not there is named") {
  const auto prompts = ReadTraffic("/no/such/traffic", 100);
  CHECK(absl::IsNotFound(prompts.status()));
  CHECK(std::string(prompts.status().message()).find("/no/such/traffic") != std::string::npos);
}

TEST_CASE("random traffic is the same for the same seed, and inside the vocabulary") {
  const auto one = RandomTraffic(3, 50, 10, 7);
  CHECK(one == RandomTraffic(3, 50, 10, 7));
  CHECK(one != RandomTraffic(3, 50, 10, 8));
  for (const Prompt& prompt : one) {
    CHECK(prompt.size() == 50);
    for (const int32_t id : prompt) CHECK((id >= 0 && id < 10));
  }
}

}  // namespace sluice
