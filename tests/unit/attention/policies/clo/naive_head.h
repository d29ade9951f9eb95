// A KV head under policy clo, written without any of its data structures: the model that the
// policy's rows are held to.
#pragma once

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "kernels/hash_params.h"
#include "src/attention/policies/clo/hash_matrix.h"
#include "src/attention/policies/clo/head_thresholds.h"
#include "src/attention/policy_options.h"
#include "tests/unit/attention/policy_rig.h"

namespace sluice::testing {

inline constexpr int kRing = 64, kSink = 4, kBits = 128;

inline bool IsPersistent(const PolicyRig::Shape& shape, const PolicyOptions& options, int layer,
                         int head) {
  const std::vector<uint8_t> persistent =
      PersistentHeads(shape.layers, shape.kv_heads,
                      {options.clo.difficulty, options.clo.misses, options.clo.predicted},
                      options.clo.persistent_share, options.clo.prefetchable);
  return !persistent.empty() && persistent[static_cast<size_t>(layer * shape.kv_heads + head)] != 0;
}

// A layer whose heads are all persistent, because its queries are predicted badly.
inline bool SelectsByOwnQueries(const PolicyRig::Shape& shape, const PolicyOptions& options,
                                int layer) {
  bool all = IsUnpredictable(options.clo.predicted, layer);
  for (int head = 0; head < shape.kv_heads; ++head) {
    all = all && IsPersistent(shape, options, layer, head);
  }
  return all;
}

// NaiveHead decodes one layer and KV head of one sequence, as plainly as CLO describes it.
class NaiveHead {
 public:
  // With `labelled`, the sequence begins with the queries of its prompt's last row as labels.
  NaiveHead(const PolicyRig::Shape& shape, const PolicyOptions& options, PolicyRig::Make make,
            uint64_t seed, std::pair<int, int> layer_and_head, int context, int total,
            bool labelled = false)
      : shape_(shape),
        options_(options),
        make_(std::move(make)),
        seed_(seed),
        layer_(layer_and_head.first),
        head_(layer_and_head.second),
        persistent_(IsPersistent(shape, options, layer_, head_)),
        ahead_(options.clo.persistent_ahead && !SelectsByOwnQueries(shape, options, layer_)),
        fused_(shape.kernels == "cuda") {
    const HashShape hash{shape.layers, shape.kv_heads, shape.head_dim, kBits};
    const auto of_head = static_cast<size_t>(shape.head_dim) * kBits;
    const std::vector<float> all = RandomHash(hash, options.clo.seed);
    const size_t at = static_cast<size_t>(layer_ * shape.kv_heads + head_) * of_head;
    hash_.assign(all.begin() + static_cast<int64_t>(at),
                 all.begin() + static_cast<int64_t>(at + of_head));
    centre_ = CentreOf(context);
    const int bt = shape.block_tokens, divisor = options.clo.budget_divisor;
    const auto blocks_of = [bt](int tokens) { return (tokens + bt - 1) / bt; };
    const int blocks = std::min(kRing / bt + std::max(blocks_of(options.budget_tokens),
                                                      divisor > 0 ? blocks_of(total / divisor) : 0),
                                blocks_of(total));
    places_.assign(static_cast<size_t>(std::max(blocks * bt - kRing, 0)), {-1, 0});
    const int end = std::max(context - kRing + 1, 0);
    const int count = std::min(static_cast<int>(places_.size()), end);
    if (persistent_) return;
    for (int i = 0; i < count && (!labelled || count == end); ++i) {
      places_[static_cast<size_t>(i)].unit = i < bt ? i : end - count + i;
    }
    if (!labelled) return;
    labelled_ = first_label_ = context - 1;
    Replace(labelled_, Select(labelled_));
    selected = fetched = 0;
  }

  // Returns what the row at `position` attends to.
  std::set<int> Attend(int position) {
    if (persistent_) return Select(position);
    if (Misses(position)) Replace(position, Select(position));
    std::set<int> attended;
    for (int t = std::max(0, position - kRing + 1); t <= position; ++t) attended.insert(t);
    for (const Place& place : places_) {
      if (place.unit >= 0) attended.insert(place.unit);
    }
    // The token that leaves the ring takes a free place.
    const int leaving = position + 1 - kRing;
    const bool there = std::ranges::any_of(places_, [&](auto& p) { return p.unit == leaving; });
    const auto free = std::ranges::find_if(places_, [](auto& p) { return p.unit < 0; });
    if (leaving >= 0 && !there && free != places_.end()) *free = {leaving, position};
    return attended;
  }

  int64_t lookups = 0, misses = 0, selected = 0, fetched = 0;

 private:
  struct Place {
    int unit;
    int stamp;
  };
  int Group() const { return shape_.heads / shape_.kv_heads; }
  std::vector<float> Query(int position, int head_of_group) const {
    const PolicyRig::Vectors own = make_(seed_, layer_, position);
    const bool real = (persistent_ && !ahead_) || position == first_label_;
    const std::vector<float>& q = real ? own.q : own.predicted;
    const auto first = q.begin() + (head_ * Group() + head_of_group) * shape_.head_dim;
    return {first, first + shape_.head_dim};
  }
  std::vector<float> Key(int position) const {
    const PolicyRig::Vectors token = make_(seed_, layer_, position);
    const auto first = token.k.begin() + head_ * shape_.head_dim;
    return {first, first + shape_.head_dim};
  }

  static double Cosine(const std::vector<float>& a, const std::vector<float>& b) {
    double ab = 0, aa = 0, bb = 0;
    for (size_t d = 0; d < a.size(); ++d) {
      ab += double{a[d]} * double{b[d]};
      aa += double{a[d]} * double{a[d]};
      bb += double{b[d]} * double{b[d]};
    }
    return ab / std::sqrt(aa * bb);
  }

  bool Misses(int position) {
    double inverse = 0;
    for (int i = 0; i < Group() && labelled_ >= 0; ++i) {
      const double cosine = Cosine(Query(position, i), Query(labelled_, i));
      inverse += cosine > 0 ? 1 / cosine : std::numeric_limits<double>::infinity();
    }
    const int divisor = options_.clo.budget_divisor;
    const int age = options_.budget_tokens / 4 + (divisor > 0 ? position / (4 * divisor) : 0);
    const bool hit = labelled_ >= 0 && labelled_ < position &&
                     Group() / inverse >= double{options_.clo.similarity} &&
                     (!options_.clo.refresh || position - labelled_ < age);
    ++lookups;
    if (hit) return false;
    ++misses;
    labelled_ = position;
    return true;
  }

  // The order of sums matters where a sum is nearly 0.
  std::vector<float> Products(const std::vector<float>& x) const {
    std::vector<float> products(kBits);
    for (size_t bit = 0; bit < kBits; ++bit) {
      float sum = 0;
      for (size_t d = 0; d < x.size(); ++d) {
        const float w = hash_[d * kBits + bit];
        sum = fused_ ? std::fma(x[d], w, sum) : x[d] * w + sum;
      }
      products[bit] = sum;
    }
    return products;
  }
  std::vector<int> LevelsOf(const std::vector<float>& query) const {
    const std::vector<float> products = Products(query);
    float largest = 0;
    for (const float x : products) largest = std::max(largest, std::abs(x));
    const auto most = static_cast<float>(options_.clo.hash_levels);
    std::vector<int> levels;
    for (const float x : products) {
      levels.push_back(most == 1 ? (x > 0 ? 1 : -1)
                                 : static_cast<int>(std::rint(x * (most / largest))));
    }
    return levels;
  }
  // Returns the mean of keys of the prompt at equal distances.
  std::vector<float> CentreOf(int tokens) const {
    std::vector<float> centre(static_cast<size_t>(shape_.head_dim));
    if (!options_.clo.centred) return centre;
    const int count = std::min(tokens, kernels::kCentreKeys);
    for (int i = 0; i < count; ++i) {
      const std::vector<float> key = Key(i * tokens / count);
      for (size_t d = 0; d < key.size(); ++d) centre[d] += key[d];
    }
    for (float& x : centre) x /= static_cast<float>(count);
    return centre;
  }

  std::set<int> Select(int position) const {
    std::vector<std::vector<int>> queries;
    for (int i = 0; i < Group(); ++i) queries.push_back(LevelsOf(Query(position, i)));
    std::vector<std::pair<float, int>> others;
    std::set<int> chosen;
    for (int t = 0; t <= position; ++t) {
      if (t < kSink || t > position - kRing) {
        chosen.insert(t);
        continue;
      }
      std::vector<float> key = Key(t);
      for (size_t d = 0; d < key.size(); ++d) key[d] -= centre_[d];
      const std::vector<float> products = Products(key);
      std::vector<int> agreeing;
      for (const std::vector<int>& query : queries) {
        int& sum = agreeing.emplace_back(0);
        for (size_t bit = 0; bit < kBits; ++bit) {
          sum += products[bit] > 0 ? query[bit] : -query[bit];
        }
      }
      const int of_group = options_.reduction == kernels::GroupReduction::kMax
                               ? std::ranges::max(agreeing)
                               : std::accumulate(agreeing.begin(), agreeing.end(), 0);
      double squares = 0;
      for (const float x : key) squares += double{x} * double{x};
      const float length = RoundedToBf16(static_cast<float>(std::sqrt(squares)));
      others.emplace_back(-static_cast<float>(of_group) * length, t);
    }
    std::sort(others.begin(), others.end());
    const int divisor = options_.clo.budget_divisor;
    const int bt = shape_.block_tokens;
    const int least = kRing + (options_.budget_tokens + bt - 1) / bt * bt;
    const int k = std::max(least, divisor > 0 ? (position + 1) / divisor : 0);
    for (const auto& [minus, t] : others) {
      if (static_cast<int>(chosen.size()) < k) chosen.insert(t);
    }
    return chosen;
  }

  // Refill by difference: what is new takes the places of what was selected longest ago.
  void Replace(int position, const std::set<int>& chosen) {
    selected += std::ssize(chosen);
    if (options_.clo.refill == PolicyOptions::Clo::Refill::kReplace) {
      for (Place& place : places_) place.unit = -1;
    }
    std::vector<int> missing;
    for (const int unit : chosen) {
      if (position - unit < kRing) continue;
      const auto place = std::ranges::find_if(places_, [&](auto& p) { return p.unit == unit; });
      if (place == places_.end()) {
        missing.push_back(unit);
      } else {
        place->stamp = position;
      }
    }
    std::vector<Place*> given;
    for (size_t i = 0; i < missing.size(); ++i) {
      const auto stamp = [](const Place& p) { return p.unit < 0 ? -1 : p.stamp; };
      Place* best = nullptr;
      for (Place& place : places_) {
        if (place.unit >= 0 && place.stamp == position) continue;
        if (best == nullptr || stamp(place) < stamp(*best)) best = &place;
      }
      REQUIRE(best != nullptr);  // every selected token finds a place
      *best = {0, position};     // taken
      given.push_back(best);
      ++fetched;
    }
    std::ranges::sort(given);  // the lowest place goes to the lowest token
    for (size_t i = 0; i < given.size(); ++i) given[i]->unit = missing[i];
  }

  const PolicyRig::Shape shape_;
  const PolicyOptions options_;
  const PolicyRig::Make make_;
  const uint64_t seed_;
  const int layer_, head_;
  const bool persistent_, ahead_, fused_;
  std::vector<float> hash_;  // [head_dim][kBits]
  std::vector<float> centre_;
  std::vector<Place> places_;
  int labelled_ = -1;
  int first_label_ = -1;  // the position of a label that is the real queries of its row
};

}  // namespace sluice::testing
