#include "src/facade/tokenizer_archive.h"

#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <string>

namespace sluice {
namespace {

TEST_CASE("the archive has the directory's tokenizer, the same bytes each time") {
  const auto folder = std::filesystem::temp_directory_path() / "sluice-tokenizer-archive";
  std::filesystem::remove_all(folder);
  std::filesystem::create_directories(folder);
  CHECK(absl::IsNotFound(MakeTokenizerArchive(folder.string()).status()));
  const std::string text(200'000, 'x');
  std::ofstream(folder / "tokenizer.json") << text;
  std::ofstream(folder / "config.json") << "{}";
  const auto archive = MakeTokenizerArchive(folder.string());
  REQUIRE(archive.ok());
  CHECK(archive->zip.substr(0, 4) == "PK\x03\x04");
  CHECK(archive->zip.find(text) != std::string::npos);  // stored
  CHECK(archive->sha256.size() == 64);
  CHECK(MakeTokenizerArchive(folder.string())->sha256 == archive->sha256);
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace sluice
