// Options of a node in which sequences are preempted.
#pragma once

#include "tests/fixtures/fixtures.h"
#include "tests/support/node.h"

namespace sluice {

inline constexpr char kModel[] = "tiny-llama";

inline const fixtures::GoldenCase& Golden(size_t c) {
  static const auto golden = *fixtures::LoadGolden(kModel);
  return golden[c];
}

inline testing::NodeOptions Options() {
  testing::NodeOptions options;
  options.model_dir = fixtures::ModelDir(kModel);
  options.max_context = 1024;
  return options;
}

}  // namespace sluice
