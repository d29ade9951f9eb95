#include "src/server/address_file.h"

#include <unistd.h>

#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

namespace sluice {
namespace {

std::filesystem::path NewDirectory() {
  std::string name = (std::filesystem::temp_directory_path() / "sluice-test-XXXXXX").string();
  REQUIRE(mkdtemp(name.data()) != nullptr);
  return name;
}

TEST_CASE("the address file holds the addresses and nothing is left beside it") {
  const std::filesystem::path directory = NewDirectory();
  const std::string path = directory / "addresses.json";
  REQUIRE(WriteAddressFile(path, {"127.0.0.1:7000", "127.0.0.1:7001"}).ok());
  REQUIRE(WriteAddressFile(path, {"127.0.0.1:8000", ""}).ok());
  const auto json = nlohmann::json::parse(std::ifstream(path));
  CHECK(json["listen"] == "127.0.0.1:8000");
  CHECK_FALSE(json.contains("admin_listen"));
  CHECK(json["pid"] == getpid());
  CHECK(std::distance(std::filesystem::directory_iterator(directory), {}) == 1);
  std::filesystem::remove_all(directory);
}

TEST_CASE("a path that cannot be written is named") {
  const absl::Status status = WriteAddressFile("/nonexistent/directory/f", {"x:1", ""});
  REQUIRE_FALSE(status.ok());
  CHECK_THAT(std::string(status.message()),
             Catch::Contains("/nonexistent/directory/f") && Catch::Contains("No such file"));
}

}  // namespace
}  // namespace sluice
