// A directory of files that stand for those of /proc and /sys.
#pragma once

#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"

namespace sluice {

struct FakeRoot {
  FakeRoot()
      : root(std::filesystem::temp_directory_path() / absl::StrCat("sluice-root-", getpid())) {
    std::filesystem::remove_all(root);
    std::filesystem::create_directories(root);
  }
  ~FakeRoot() { std::filesystem::remove_all(root); }
  void Write(const std::string& path, const std::string& text) const {
    std::filesystem::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text << "\n";
  }
  const std::filesystem::path root;
};

}  // namespace sluice
