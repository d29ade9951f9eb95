#define CATCH_CONFIG_RUNNER
#include "tests/test_main.h"

#include <catch2/catch.hpp>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <random>

namespace sluice {
namespace {
bool skipped = false;
bool drew_seed = false;
}  // namespace

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
    drew_seed = true;
    return value;
  }();
  return seed;
}

}  // namespace sluice

int main(int argc, char** argv) {
  // So that what was said last, and the seed, is there when a case crashes or is out of its time.
  std::setvbuf(stdout, nullptr, _IOLBF, BUFSIZ);
  const int failed = Catch::Session().run(argc, argv);
  // Again, behind whatever failed: the end of an output is what is kept of it.
  if (failed != 0 && sluice::drew_seed) {
    std::cout << "SLUICE_TEST_SEED=" << sluice::TestSeed() << std::endl;
  }
  if (failed != 0) return failed > 255 ? 255 : failed;
  return sluice::skipped ? 77 : 0;
}
