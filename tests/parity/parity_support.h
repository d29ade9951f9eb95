// What the tests of parity share: tolerances of kernel paths, and comparisons with transformers and
// with oneself.
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
  double margin;  // greedy tokens may differ where the golden margin is no more than this
};

// Float32 activations; activations rounded to bf16, on a CPU and on a GPU, where the probabilities
// that weigh V are rounded too; everything exact but the golden's own rounding.
inline constexpr Tolerance kFloat32{1.0e-2, 0.9999, 0.05};
inline constexpr Tolerance kBFloat16{2.5e-2, 0.9997, 0.1};
inline constexpr Tolerance kCuda{3.0e-2, 0.9995, 0.15};
inline constexpr Tolerance kExact{1.0e-3, 0.999999, 0.05};

Tolerance ToleranceOf(const std::string& path);

// Whether this machine has the path; else the test is skipped.
bool HasPath(const std::string& path);

void CheckLogits(const std::vector<float>& got, const float* want, const Tolerance& tolerance);
// Row i of the golden logits is what follows prompt + tokens[0, i). The prompt is computed in
// chunks, or its caches are the golden ones, of which the last position is computed again.
void CheckTeacherForced(Teacher& teacher, const fixtures::GoldenCase& golden,
                        const Tolerance& tolerance, bool from_cache);
// `ids` are the golden ones, up to a token whose golden margin is no more than `margin`.
void CheckGreedy(const std::vector<int32_t>& ids, const fixtures::GoldenCase& golden,
                 double margin);
// To the bit: the log-probabilities too.
void CheckSame(const Generated& got, const Generated& want);
// Sixteen sequences of one node, each alone and all together: the same, to the bit.
// Returns how often those that ran together were preempted.
NodeOptions TogetherOptions(const std::string& path);
double CheckTogether(NodeOptions options);

}  // namespace sluice::testing
