// A node in which sequences are preempted, and the number of preemptions.
#pragma once

#include <catch2/catch.hpp>
#include <string>

#include "tests/fixtures/fixtures.h"
#include "tests/support/node.h"

namespace sluice {

inline constexpr char kModel[] = "tiny-llama";

inline const fixtures::GoldenCase& Golden(size_t c) {
  static const auto golden = *fixtures::LoadGolden(kModel);
  return golden[c];
}

inline testing::NodeOptions Options(Metrics* metrics) {
  testing::NodeOptions options;
  options.model_dir = fixtures::ModelDir(kModel);
  options.max_context = 1024;
  options.metrics = metrics;
  return options;
}

inline double Preemptions(const Metrics& metrics) {
  const std::string text = metrics.Render();
  const std::string name = "\nsluice_preemptions_total ";
  const size_t at = text.find(name);
  REQUIRE(at != std::string::npos);
  return std::stod(text.substr(at + name.size()));
}

}  // namespace sluice
