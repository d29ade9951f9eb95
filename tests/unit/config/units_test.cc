#include "src/config/units.h"

#include <catch2/catch.hpp>
#include <cmath>

#include "src/base/rng.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

TEST_CASE("bytes are read in binary and decimal units") {
  CHECK(ParseBytes("0") == 0);
  CHECK(ParseBytes("4096") == 4096);
  CHECK(ParseBytes("7B") == 7);
  CHECK(ParseBytes("1KiB") == 1024);
  CHECK(ParseBytes("512MiB") == 536870912);
  CHECK(ParseBytes("1GiB") == 1073741824);
  CHECK(ParseBytes("1gib") == 1073741824);
  CHECK(ParseBytes("2 TiB") == 2199023255552);
  CHECK(ParseBytes("1.5GiB") == 1610612736);
  CHECK(ParseBytes("1GB") == 1000000000);
  CHECK(ParseBytes("0.5kB") == 500);
}

TEST_CASE("what is no count of bytes is refused") {
  for (const char* text :
       {"", "GiB", "-1", "+1", "1G", "1GiBs", "1.5", "1.2345KiB", "1..5GiB", ".", "1.GiB", ".5GiB",
        "0x10", "1e9", "nan", "9223372036854775808", "8388608TiB", "99999999999999999999"}) {
    CAPTURE(text);
    CHECK_FALSE(ParseBytes(text).has_value());
  }
  CHECK(ParseBytes("9223372036854775807") == 9223372036854775807);
}

TEST_CASE("bytes are written so that they read back") {
  CHECK(FormatBytes(0) == "0");
  CHECK(FormatBytes(1073741824) == "1GiB");
  CHECK(FormatBytes(1610612736) == "1536MiB");
  CHECK(FormatBytes(4097) == "4097");
  CHECK(FormatBytes(5000) == "5000");
  SplitMix64 rng(TestSeed());
  for (int i = 0; i < 1000; ++i) {
    const uint64_t bytes = (rng() >> 1) >> rng.Below(63) << rng.Below(30) >> 1;
    CHECK(ParseBytes(FormatBytes(bytes)) == bytes);
  }
}

TEST_CASE("bytes are shown to people in the unit that fits") {
  CHECK(ApproximateBytes(0) == "0 B");
  CHECK(ApproximateBytes(1023) == "1023 B");
  CHECK(ApproximateBytes(23040) == "22.5 KiB");
  CHECK(ApproximateBytes(61 << 20) == "61.0 MiB");
  CHECK(ApproximateBytes(int64_t{3} << 29) == "1.50 GiB");
}

TEST_CASE("times are read as numbers of seconds or with a unit") {
  CHECK(ParseSeconds("30") == 30.0);
  CHECK(ParseSeconds("1.5") == 1.5);
  CHECK(ParseSeconds("1.5s") == 1.5);
  CHECK(ParseSeconds("200ms") == 0.2);
  CHECK(ParseSeconds("2m") == 120.0);
  CHECK(ParseSeconds("1h30m") == 5400.0);
  CHECK(ParseSeconds("-3s") == -3.0);
  for (const char* text : {"", "s", "5 apples", "inf", "-inf", "nan", "1e999", "1d"}) {
    CAPTURE(text);
    CHECK_FALSE(ParseSeconds(text).has_value());
  }
}

TEST_CASE("times are written so that they read back") {
  CHECK(FormatSeconds(30) == "30s");
  CHECK(FormatSeconds(0.05) == "0.05s");
  CHECK(FormatSeconds(100000) == "100000s");
  SplitMix64 rng(TestSeed());
  for (int i = 0; i < 1000; ++i) {
    // Whole microseconds: Abseil's durations hold those exactly.
    const double seconds = static_cast<double>(rng.Below(86'400'000'000)) * 1e-6;
    const auto read = ParseSeconds(FormatSeconds(seconds));
    REQUIRE(read.has_value());
    CHECK(*read == Approx(seconds).epsilon(1e-12).margin(1e-9));
  }
}

TEST_CASE("an address is a host and a port") {
  for (const char* text : {"127.0.0.1:7000", "localhost:0", "0.0.0.0:65535", "[::1]:7000",
                           "[fe80::1%2]:1", "node-3.cluster.local:80"}) {
    CAPTURE(text);
    CHECK(IsAddress(text));
  }
  for (const char* text :
       {"", "7000", ":7000", "localhost", "localhost:", "localhost:x", "localhost:65536",
        "localhost:-1", "::1:7000", "[]:1", "[::1]", "[::1:7", "http://localhost:80", "a b:1"}) {
    CAPTURE(text);
    CHECK_FALSE(IsAddress(text));
  }
}

}  // namespace
}  // namespace sluice
