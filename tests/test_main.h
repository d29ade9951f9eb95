// Shared by every Catch2 program of the tests.
#pragma once

#include <string>

namespace sluice {

// Marks the running program as skipped: it exits with 77 unless something fails, which ctest
// reports as skipped. Use it where the machine lacks what a case needs, and return from the case.
void SkipTest(const std::string& why);

// Seed for fresh random inputs: SLUICE_TEST_SEED, or drawn and printed.
unsigned long long TestSeed();

}  // namespace sluice
