// A value of a StatusOr, or the end of the test with its status.
#pragma once

#include <catch2/catch.hpp>
#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace sluice {

template <typename T>
T OrFail(absl::StatusOr<T> value) {
  INFO(std::string(value.status().ToString()));
  REQUIRE(value.ok());
  return *std::move(value);
}

}  // namespace sluice
