// A policy on the tiny models, beside policy `full` on the same tokens.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "tests/fixtures/fixtures.h"
#include "tests/parity/teacher.h"

namespace sluice::testing {

// A tiny model's golden case with the longest prompt.
fixtures::GoldenCase LongestCase(const std::string& name);

// Dictates the golden tokens to both, and calls visit(logits of full, logits of the other) of every
// step.
void Dictate(
    const fixtures::GoldenCase& golden, Teacher& full, Teacher& other,
    const std::function<void(const std::vector<float>&, const std::vector<float>&)>& visit);

double Cosine(const std::vector<float>& a, const std::vector<float>& b);
double RelativeError(const std::vector<float>& got, const std::vector<float>& want);
int32_t Best(const std::vector<float>& logits);

}  // namespace sluice::testing
