#include "src/bench/simulate/misses.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "kernels/kernel_table.h"
#include "kernels/latent_params.h"
#include "src/base/rng.h"
#include "src/bench/workload/latent_drift.h"
#include "src/bench/workload/topic_path.h"
#include "src/model/parallel.h"

namespace sluice::bench {
namespace {

constexpr int kDim = 64;              // An index key's dimensions that RoPE leaves alone.
constexpr int kHeads = 8;             // Of the indexer's 64: enough for a steady sum.
constexpr int64_t kMostWarm = 16384;  // Entries that a warm-up brings (PoolWarmer).
constexpr int kWarmRows = 32;         // Rows of a prompt whose selections a pool begins with.

std::vector<double> PowerSpread(double least, double most, int count, double power) {
  std::vector<double> values;
  for (int i = 0; i < count; ++i) {
    const double at = count > 1 ? static_cast<double>(i) / (count - 1) : 0.5;
    values.push_back(least + (most - least) * std::pow(at, power));
  }
  return values;
}

double Mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

// The pool of one sequence and layer: tables of one page each, as UpdateResidency takes them.
class Pool {
 public:
  Pool(int64_t tokens, int64_t places, int32_t capacity, int32_t rows)
      : place_of_(static_cast<size_t>(tokens), -1),
        places_(static_cast<size_t>(2 * places), -1),
        lists_(2 * static_cast<size_t>(rows) * static_cast<size_t>(capacity)),
        moves_(lists_.size() * static_cast<size_t>(rows)),
        counts_(3 * static_cast<size_t>(rows)),
        slots_(static_cast<size_t>(rows), 0),
        tokens_(tokens),
        count_(places),
        capacity_(capacity),
        rows_(rows) {}

  // Gives places to the selections of the rows at positions [first, first + count), each of
  // `capacity` ascending units. Returns how many had none.
  int64_t Update(std::vector<int32_t>& units, int64_t first, int32_t count) {
    std::vector<int32_t> positions(static_cast<size_t>(count)), sizes(positions);
    std::iota(positions.begin(), positions.end(), static_cast<int32_t>(first));
    std::fill(sizes.begin(), sizes.end(), capacity_);
    kernels::UpdateResidencyParams p{};
    p.residency.place_of = Rows(place_of_, tokens_, 1);
    p.residency.places = Rows(places_, count_, 2);
    p.residency.count = static_cast<int32_t>(count_);
    p.slots = slots_.data();
    p.positions = positions.data();
    p.selected = {units.data(), sizes.data(), capacity_};
    const int64_t size = int64_t{rows_} * capacity_;
    p.resident = lists_.data();
    p.arriving = lists_.data() + size;
    p.resident_counts = counts_.data();
    p.arriving_counts = counts_.data() + rows_;
    p.move_counts = counts_.data() + 2 * rows_;
    p.move_capacity = rows_ * capacity_;
    p.source_units = moves_.data();
    p.target_units = moves_.data() + size * rows_;
    p.home = Latents(tokens_);
    p.pool = Latents(count_);
    p.rows = count;
    kernels::FindKernelTable("portable")->update_residency(p, {0, 1});
    return p.move_counts[0];
  }

 private:
  kernels::PagedRows Rows(std::vector<int32_t>& values, int64_t rows, int32_t dim) const {
    return {values.data(),
            &zero_,
            1,
            0,
            0,
            static_cast<int32_t>(rows),
            dim,
            kernels::DType::kFloat32,
            1};
  }
  kernels::PagedLatents Latents(int64_t tokens) const {
    kernels::PagedLatents latents{};
    latents.block_table = &zero_;
    latents.table_stride = 1;
    latents.block_tokens = static_cast<int32_t>(tokens);
    latents.rank = kernels::kPackedRank;
    latents.rope = kernels::kPackedRope;
    latents.type = kernels::DType::kFloat8E4M3;
    return latents;
  }

  std::vector<int32_t> place_of_, places_, lists_, moves_, counts_, slots_;
  const int64_t tokens_, count_;
  const int32_t capacity_, rows_;
  const int32_t zero_ = 0;
};

// The index keys of a sequence on one path, and the scores of its rows.
class PathKeys {
 public:
  PathKeys(const DrawnSelections& options, int path, int64_t tokens)
      : keys_(static_cast<size_t>(tokens * kDim)), change_(kHeads), scores_(keys_.size() / kDim) {
    LatentDrift drift;
    drift.seed = options.seed;
    drift.paths = options.paths;
    const TopicPath topics{options.seed, absl::StrCat("path ", path, " "), drift.topics,
                           DriftOfPath(drift, path), drift.noise};
    std::vector<double> key(kDim);
    for (int64_t token = 0; token < tokens; ++token) {
      std::fill(key.begin(), key.end(), 0.0);
      topics.Add(token, absl::MakeSpan(key));
      for (int d = 0; d < kDim; ++d) At(token, d) = static_cast<float>(key[static_cast<size_t>(d)]);
    }
    for (int head = 0; head < kHeads; ++head) {
      std::vector<double>& change = change_[static_cast<size_t>(head)];
      change.resize(kDim * kDim);
      AddUniformRow("head", options.seed, head, drift.head_change / std::sqrt(double{kDim}),
                    absl::MakeSpan(change));
    }
  }

  // Returns the `top_k` tokens up to `token` with the largest scores, ascending.
  void Select(int64_t token, int top_k, int32_t* selected) {
    std::fill(scores_.begin(), scores_.end(), 0.0f);
    for (const std::vector<double>& change : change_) AddScores(Query(token, change), token + 1);
    order_.resize(static_cast<size_t>(token + 1));
    std::iota(order_.begin(), order_.end(), 0);
    std::nth_element(order_.begin(), order_.begin() + top_k - 1, order_.end(),
                     [&](int32_t a, int32_t b) {
                       const float x = scores_[static_cast<size_t>(a)];
                       const float y = scores_[static_cast<size_t>(b)];
                       return x != y ? x > y : a < b;
                     });
    std::sort(order_.begin(), order_.begin() + top_k);
    std::copy_n(order_.begin(), top_k, selected);
  }

 private:
  static constexpr int64_t kBlock = 512;  // Tokens whose scores are summed in one pass.

  // Keys lie by blocks of tokens, and in a block by dimensions.
  float& At(int64_t token, int dim) {
    const int64_t tokens = static_cast<int64_t>(keys_.size()) / kDim;
    const int64_t begin = token / kBlock * kBlock, size = std::min(kBlock, tokens - begin);
    return keys_[static_cast<size_t>(begin * kDim + dim * size + token - begin)];
  }

  std::vector<float> Query(int64_t token, const std::vector<double>& change) {
    std::vector<float> query(kDim);
    for (int d = 0; d < kDim; ++d) {
      double sum = double{At(token, d)};
      const double* const row = change.data() + ptrdiff_t{d} * kDim;
      for (int j = 0; j < kDim; ++j) sum += row[j] * double{At(token, j)};
      query[static_cast<size_t>(d)] = static_cast<float>(sum);
    }
    return query;
  }

  void AddScores(const std::vector<float>& query, int64_t tokens) {
    const int64_t all = static_cast<int64_t>(scores_.size());
    for (int64_t begin = 0; begin < tokens; begin += kBlock) {
      const int64_t size = std::min(kBlock, all - begin);
      float sums[kBlock] = {};
      for (int d = 0; d < kDim; ++d) {
        const float q = query[static_cast<size_t>(d)];
        const float* const keys = keys_.data() + begin * kDim + d * size;
        for (int64_t i = 0; i < size; ++i) sums[i] += q * keys[i];
      }
      float* const scores = scores_.data() + begin;
      for (int64_t i = 0; i < size; ++i) scores[i] += std::max(sums[i], 0.0f);
    }
  }

  std::vector<float> keys_;
  std::vector<std::vector<double>> change_;
  std::vector<float> scores_;
  std::vector<int32_t> order_;
};

// Returns how many units the lists of a step's rows have together. Each list is ascending.
int64_t UnionOf(std::vector<int32_t> units) {
  std::sort(units.begin(), units.end());
  return std::unique(units.begin(), units.end()) - units.begin();
}

// Gives places to the newest tokens, which are the first to lose them, as a warm-up does with what
// hints leave free.
void FillWithNewest(const DrawnSelections& o, Pool* pool) {
  const int64_t most = std::min({o.places, kMostWarm, o.context - kWarmRows});
  std::vector<int32_t> units(static_cast<size_t>(o.top_k));
  const int64_t first = o.context - kWarmRows - most / o.top_k * o.top_k;
  for (int64_t begin = first; begin < o.context - kWarmRows; begin += o.top_k) {
    std::iota(units.begin(), units.end(), static_cast<int32_t>(begin));
    pool->Update(units, o.context - kWarmRows - 1, 1);
  }
}

// Returns -1 where a step selects more than there are places.
double MissesOfPath(const DrawnSelections& o, int path) {
  const int64_t tokens = o.context + int64_t{o.steps} * o.rows;
  PathKeys keys(o, path, tokens);
  Pool pool(tokens, o.places, o.top_k, o.rows);
  std::vector<int32_t> units(static_cast<size_t>(o.rows) * static_cast<size_t>(o.top_k));
  FillWithNewest(o, &pool);
  for (int64_t token = o.context - kWarmRows; token < o.context; ++token) {
    keys.Select(token, o.top_k, units.data());
    pool.Update(units, token, 1);
  }
  int64_t missed = 0;
  for (int64_t first = o.context; first < tokens; first += o.rows) {
    for (int row = 0; row < o.rows; ++row) {
      keys.Select(first + row, o.top_k, units.data() + int64_t{row} * o.top_k);
    }
    if (UnionOf(units) > o.places) return -1;
    missed += pool.Update(units, first, o.rows);
  }
  return static_cast<double>(missed) / o.steps;
}

}  // namespace

std::vector<double> SpreadMisses(double mean, double least, double most, int count) {
  double low = 0.01, high = 100;  // A larger power gives a smaller mean.
  for (int i = 0; i < 60; ++i) {
    const double power = std::sqrt(low * high);
    (Mean(PowerSpread(least, most, count, power)) > mean ? low : high) = power;
  }
  return PowerSpread(least, most, count, low);
}

absl::StatusOr<std::vector<double>> DrawnMisses(const DrawnSelections& o) {
  if (o.context < o.top_k + kWarmRows) {
    return absl::InvalidArgumentError(absl::StrCat("selections of ", o.top_k, " need a context of ",
                                                   o.top_k + kWarmRows, " tokens or more, found ",
                                                   o.context));
  }
  if (o.rows < 1 || o.rows > kernels::kMaxQueryPositions || o.places < o.top_k) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a step has 1 to ", kernels::kMaxQueryPositions, " rows, found ", o.rows,
        ", and at least a place for each of the ", o.top_k, " selected, found ", o.places));
  }
  std::vector<double> misses(static_cast<size_t>(o.paths));
  ParallelFor(o.paths, [&](int64_t path) {
    misses[static_cast<size_t>(path)] = MissesOfPath(o, static_cast<int>(path));
  });
  if (*std::min_element(misses.begin(), misses.end()) < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("the ", o.rows, " rows of a step select more than ", o.places, " entries"));
  }
  return misses;
}

std::vector<double> MissesByLayer(const std::vector<double>& by_path, int layers) {
  LatentDrift drift;
  drift.paths = static_cast<int>(by_path.size());
  std::vector<double> misses;
  misses.reserve(static_cast<size_t>(layers));
  for (int layer = 0; layer < layers; ++layer) {
    misses.push_back(by_path[static_cast<size_t>(PathOfLayer(drift, layer))]);
  }
  return misses;
}

}  // namespace sluice::bench
