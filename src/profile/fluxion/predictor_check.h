// Compares ways to say how much of the cpu segment each query head needs, on the same rows: what
// they read, and how often the attention is further off than tau.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <mutex>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "src/attention/policies/fluxion/predictor.h"
#include "src/profile/fluxion/document_rows.h"

namespace sluice {

// A way to say it. A head's budgets are shares of the cpu segment, by level.
struct BudgetSource {
  std::string name;
  // Tells of query head `head` of the row.
  std::function<FluxionPredictor::Head(const LayerRow& row, size_t head)> tell;
  // The level that every group takes; -1: the group chooses it (kernels::PlanRetrievalParams).
  int32_t level = -1;
};

// The mean of what the samples of each head need, which knows nothing of the row: budgets are the
// `quantile` of the head's, and it streams if most of its samples do. A predictor must do better.
class HeadTable {
 public:
  HeadTable(absl::Span<const FluxionSample> samples, double quantile);
  FluxionPredictor::Head Tell(int64_t layer, size_t head) const;

 private:
  std::vector<std::vector<FluxionPredictor::Head>> heads_;  // by layer and query head
};

// Return the sources that need no training: a fixed share in blocks of a fixed size; what the row
// needs itself, which no one can know beforehand; what the head needed at the anchor; what it needs
// for an error of `share` of its own output, and for blocks with `share` of its attention.
BudgetSource FixedSource(int32_t level, double share);
BudgetSource OracleSource();
BudgetSource AnchorSource();
BudgetSource OwnOutputSource(double share);
BudgetSource ScoreSource(double share);
// Returns the oracle of another tau than the rows', in blocks of the level's size.
BudgetSource TauSource(double tau, int32_t level);
BudgetSource TableSource(const HeadTable* table);  // outlives it
BudgetSource PredictorSource(const std::string& name, const FluxionPredictor* predictor);  // same

// The sums of one source over rows. Bytes are in tokens of one KV head: the key and the value of a
// token count as one, and so do four vectors of digests.
struct SourceSums {
  int64_t groups = 0, tasks = 0;    // tasks: groups that read anything
  int64_t digests = 0, tokens = 0;  // read; tokens of the union of a group's heads
  int64_t volume = 0;               // equation 3
  int64_t heads = 0, violations = 0;
  int64_t rows = 0;       // of a layer
  double row_errors = 0;  // sum of |o' - o| / |o|, where o is the output of all heads of a row
  int64_t streaming_right = 0, streaming_told = 0, streaming_needed = 0;
  std::array<int64_t, kernels::kFluxionLevels> levels = {};  // tasks by level

  int64_t bytes() const { return digests + tokens; }
  void Add(const SourceSums& more);
};

// Returns the sums of one row under the source. The heads' outputs are appended to `outputs`,
// [heads][head_dim], unless it is null.
SourceSums MeasureSource(const BudgetSource& source, const LayerRow& row,
                         std::vector<double>* outputs);

class PredictorCheck {
 public:
  explicit PredictorCheck(std::vector<BudgetSource> sources);
  // Adds a row to every source's sums. Any thread.
  void Add(const LayerRow& row);
  const std::vector<BudgetSource>& sources() const { return sources_; }
  const std::vector<SourceSums>& sums() const { return sums_; }
  int64_t cpu_tokens() const { return cpu_tokens_; }  // of all groups, whether read or not

 private:
  const std::vector<BudgetSource> sources_;
  std::mutex mutex_;
  std::vector<SourceSums> sums_;
  int64_t cpu_tokens_ = 0;
};

// Returns every source's sums as tools/sluice plot-fluxion reads them, for rows of the model with
// this fingerprint and labels of this tau. The first source is the one that others are compared
// with.
nlohmann::json CheckJson(const PredictorCheck& check, const std::string& model_fingerprint,
                         double tau);

}  // namespace sluice
