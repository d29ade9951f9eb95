#include "tests/sim/hash_fluxion.h"

#include <cstring>
#include <vector>

#include "tests/sim/hash.h"

namespace sluice::sim {
namespace {

// Returns results of attention as numbers that keys could be, [rows][kHeads][kHeadDim].
std::vector<float> AsNumbers(const float* o, int64_t rows) {
  std::vector<float> numbers(static_cast<size_t>(rows * kHeads * kHeadDim));
  for (int64_t at = 0; at < rows * kHeads * kHeadDim; at += kHeadDim) {
    uint64_t sum;
    std::memcpy(&sum, o + at, sizeof(sum));
    sum = Mix(sum, 0) & kNumberBits;
    std::memcpy(&numbers[static_cast<size_t>(at)], &sum, sizeof(sum));
  }
  return numbers;
}

void PredictFromHashes(const kernels::PredictBudgetsParams& p, kernels::Worker worker) {
  const std::vector<float> sink = AsNumbers(p.sink_o, p.rows), local = AsNumbers(p.local_o, p.rows);
  kernels::PredictBudgetsParams numbers = p;
  numbers.sink_o = sink.data();
  numbers.local_o = local.data();
  kernels::FindKernelTable("reference")->predict_budgets(numbers, worker);
}

}  // namespace

void UseFluxionHashes(kernels::KernelTable* table) {
  const kernels::KernelTable& reference = *kernels::FindKernelTable("reference");
  table->level_digests = reference.level_digests;
  table->anchor_statistics = reference.anchor_statistics;
  table->level_scores = reference.level_scores;
  table->predict_budgets = &PredictFromHashes;
}

}  // namespace sluice::sim
