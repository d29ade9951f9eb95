#define CATCH_CONFIG_RUNNER
#include "tests/test_main.h"

#include <catch2/catch.hpp>
#include <cstdlib>
#include <iostream>
#include <random>

namespace sluice {
namespace {
bool skipped = false;
}

void SkipTest(const std::string& why) {
  skipped = true;
  std::cout << "skipped: " << why << "\n";
}

unsigned long long TestSeed() {
  static const unsigned long long seed = [] {
    const char* given = std::getenv("SLUICE_TEST_SEED");
    const unsigned long long value =
        given != nullptr ? std::strtoull(given, nullptr, 10) : std::random_device{}();
    std::cout << "SLUICE_TEST_SEED=" << value << "\n";
    return value;
  }();
  return seed;
}

}  // namespace sluice

int main(int argc, char** argv) {
  const int failed = Catch::Session().run(argc, argv);
  if (failed != 0) return failed > 255 ? 255 : failed;
  return sluice::skipped ? 77 : 0;
}
