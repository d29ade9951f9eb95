// Shared parts of the parity tests: tolerances of kernel paths, and comparisons with transformers
// and between runs.
#pragma once

#include <string>
#include <vector>

#include "tests/fixtures/fixtures.h"
#include "tests/parity/teacher.h"
#include "tests/support/node.h"

namespace sluice::testing {

struct Tolerance {
  double relative_l2;
  double cosine;
  double margin;  // Greedy tokens may differ if the golden margin is at most this.
};

// In order: float32 activations; activations rounded to bf16 on a CPU; the same on a GPU, where the
// probabilities that weigh V are rounded too; everything exact but the golden's own rounding.
inline constexpr Tolerance kFloat32{1.0e-2, 0.9999, 0.05};
inline constexpr Tolerance kBFloat16{2.5e-2, 0.9997, 0.1};
inline constexpr Tolerance kCuda{3.0e-2, 0.9995, 0.15};
inline constexpr Tolerance kExact{1.0e-3, 0.999999, 0.05};

Tolerance ToleranceOf(const std::string& path);

// Returns whether this machine has the path; else skips the test.
bool HasPath(const std::string& path);

void CheckLogits(const std::vector<float>& got, const float* want, const Tolerance& tolerance);
// Checks logits under dictation: row i of the golden logits follows prompt + tokens[0, i). The
// prompt is computed in chunks, or its caches are the golden ones and only the last position is
// computed again.
void CheckTeacherForced(Teacher& teacher, const fixtures::GoldenCase& golden,
                        const Tolerance& tolerance, bool from_cache);
// Checks that `ids` are the golden ones, up to a token whose golden margin is at most `margin`.
void CheckGreedy(const std::vector<int32_t>& ids, const fixtures::GoldenCase& golden,
                 double margin);
// Checks that both are the same to the bit, log-probabilities included.
void CheckSame(const Generated& got, const Generated& want);
// Checks that sixteen sequences of one node give the same, to the bit, each alone and all together.
// Returns how often those that ran together were preempted.
NodeOptions TogetherOptions(const std::string& path);
double CheckTogether(NodeOptions options);

}  // namespace sluice::testing
