// Lists that are cut into parts, an arbiter on a thread of the test, and launches of PullAttention
// whose results are held to the reference, for pull_test.cc.
#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#include "kernels/list_parts.h"
#include "kernels/pull_params.h"
#include "tests/kernels/unit_list_support.h"

namespace sluice::kernels {

struct PullCase {
  SparseCase shape;
  int32_t least_units;
  int32_t pullers;
};

// Lists of up to 64 units, which 32 parts of 2 are if a part may be so small; one of 63 units,
// whose last part is short; empty ones; and padded rows. Contexts end within a unit.
inline std::vector<SparseRow> PullRows(int32_t unit) {
  return {{0, 70 * unit - 3, 64}, {-1, 0, 0}, {1, 40 * unit, 0}, {2, 3 * unit + 1, 4},
          {3, 65 * unit - 2, 63}, {-1, 5, 0}, {4, unit / 2, 1},  {5, 40 * unit + 5, 33}};
}

inline std::vector<PullCase> PullCases() {
  constexpr DType kBf16 = DType::kBFloat16, kF32 = DType::kFloat32;
  constexpr SparsePlaces kOwn = SparsePlaces::kOwn, kRing = SparsePlaces::kRing;
  return {
      {{"group 1, head_dim 64", 2, 2, 64, 16, 16, kBf16, kOwn, PullRows(16)}, 1, 1},
      {{"group 3, head_dim 64", 9, 3, 64, 32, 16, kBf16, kOwn, PullRows(16)}, 5, 4},
      {{"group 4, head_dim 128", 8, 2, 128, 32, 32, kBf16, kOwn, PullRows(32)}, 1, 3},
      {{"group 4, head_dim 128, large parts", 8, 2, 128, 64, 16, kBf16, kOwn, PullRows(16)}, 64, 2},
      {{"group 7, head_dim 128", 14, 2, 128, 32, 32, kBf16, kOwn, PullRows(32)}, 9, 8},
      {{"group 12, head_dim 64, ring", 12, 1, 64, 32, 32, kBf16, kRing, PullRows(32)}, 4, 2},
      {{"group 4, float32 cache", 8, 2, 64, 32, 16, kF32, kOwn, PullRows(16)}, 3, 3},
      {{"group 3, head_dim 80", 6, 2, 80, 32, 32, kBf16, kOwn, PullRows(32)}, 7, 3},
      {{"group 2, units of 8", 4, 2, 64, 32, 8, kBf16, kOwn, PullRows(8)}, 2, 5},
      {{"only padding", 4, 2, 64, 32, 16, kBf16, kOwn, {{-1, 0, 0}, {-1, 3, 0}}}, 2, 2},
  };
}

struct GrantedPart {
  int32_t list;
  int32_t part;
};

// The words through which pullers and the arbiter speak. The numbers wrap around soon.
struct Words {
  explicit Words(int32_t pullers) : asks(pullers), grants(pullers), closed(1), missed(1) {
    for (int32_t i = 0; i < pullers; ++i) {
      asks[i].number = grants[i].number = UINT32_MAX - 2 - static_cast<uint32_t>(i);
    }
    closed[0] = missed[0] = 0;
  }
  std::string Damage() const {
    return asks.Damage() + grants.Damage() + closed.Damage() + missed.Damage();
  }

  Guarded<PullAsk> asks;
  Guarded<PullGrant> grants;
  Guarded<uint32_t> closed, missed;
};

// Answers asks on a thread of its own: with the parts in their order, and -1 after the last; or,
// if it falls silent then, with nothing more.
class Arbiter {
 public:
  Arbiter(Words& words, std::vector<GrantedPart> parts, bool falls_silent)
      : words_(words), parts_(std::move(parts)), falls_silent_(falls_silent) {
    for (const PullAsk& ask : words.asks) answered_.push_back(ask.number);
    ended_.resize(answered_.size());
    thread_ = std::thread([this] { Serve(); });
  }
  ~Arbiter() { Stop(); }

  // Returns what pullers did against the contract.
  std::string Stop() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
    for (size_t i = 0; i < answered_.size(); ++i) Look(i);
    if (!falls_silent_ && std::count(ended_.begin(), ended_.end(), false) > 0) {
      wrong_ += "a puller ended without its answer; ";
    }
    if (next_ != parts_.size()) wrong_ += "parts were not asked for; ";
    return wrong_;
  }

 private:
  void Serve() {
    while (!stop_) {
      for (size_t i = 0; i < answered_.size(); ++i) Look(i);
      std::this_thread::yield();
    }
  }

  void Look(size_t i) {
    const auto at = static_cast<int64_t>(i);
    const uint32_t asked = __atomic_load_n(&words_.asks[at].number, __ATOMIC_ACQUIRE);
    if (asked == answered_[i] || (falls_silent_ && next_ == parts_.size())) return;
    if (asked != answered_[i] + 1) wrong_ += "an ask was not one more; ";
    if (ended_[i]) wrong_ += "a puller asked after its last answer; ";
    PullGrant& grant = words_.grants[at];
    ended_[i] = next_ == parts_.size();
    const GrantedPart given = ended_[i] ? GrantedPart{-1, -1} : parts_[next_++];
    grant.list = given.list;
    grant.part = given.part;
    answered_[i] = asked;
    __atomic_store_n(&grant.number, asked, __ATOMIC_RELEASE);
  }

  Words& words_;
  const std::vector<GrantedPart> parts_;
  const bool falls_silent_;
  std::vector<uint32_t> answered_;
  std::vector<bool> ended_;
  size_t next_ = 0;
  std::string wrong_;
  std::atomic<bool> stop_ = false;
  std::thread thread_;
};

struct Merged {
  Guarded<float> o, lse;
};

// A case's lists, the results of its parts and the words.
template <typename Fixture>
class PullSetup {
 public:
  PullSetup(const PullCase& c, Fixture& fixture)
      : case_(c),
        fixture_(fixture),
        lists_(fixture.rows() * c.shape.kv_heads),
        group_(c.shape.heads / c.shape.kv_heads),
        words_(c.pullers),
        part_o_(lists_ * kMostListParts * group_ * c.shape.head_dim),
        part_lse_(lists_ * kMostListParts * group_),
        taken_(lists_) {
    for (uint32_t& bits : taken_) bits = 0;
  }

  Words& words() { return words_; }

  // Returns every part of every list, those of empty lists and padded rows too.
  std::vector<GrantedPart> AllParts() const {
    std::vector<GrantedPart> parts;
    for (int64_t list = 0; list < lists_; ++list) {
      const int32_t count = fixture_.counts()[list];
      for (int32_t part = 0; part < PartsOfList(count, case_.least_units); ++part) {
        parts.push_back({static_cast<int32_t>(list), part});
      }
    }
    return parts;
  }

  // Launches the operator and returns what was wrong. Results of parts start as NaN.
  std::string Launch(const KernelTable& path, const std::vector<GrantedPart>& granted,
                     bool falls_silent, std::chrono::nanoseconds deadline) {
    std::fill_n(part_o_.data(), part_o_.size(), std::numeric_limits<float>::quiet_NaN());
    std::fill_n(part_lse_.data(), part_lse_.size(), std::numeric_limits<float>::quiet_NaN());
    Arbiter arbiter(words_, granted, falls_silent);
    RunWorkers(path.pull_attention, Params(deadline), 2);
    return arbiter.Stop() + CheckTaken(granted) + part_o_.Damage() + part_lse_.Damage() +
           taken_.Damage() + words_.Damage();
  }

  // Merges the parts that the last launch took.
  Merged Merge(const KernelTable& path) {
    Merged merged{Guarded<float>(fixture_.rows() * fixture_.width()),
                  Guarded<float>(fixture_.rows() * case_.shape.heads)};
    const SparseAttentionParams a = fixture_.Params(0, fixture_.rows(), nullptr, nullptr);
    const MergePartsParams p = {
        part_o_.data(),       part_lse_.data(),     taken_.data(), a.slots,
        merged.o.data(),      merged.lse.data(),    a.rows,        case_.shape.heads,
        case_.shape.kv_heads, case_.shape.head_dim, kMostListParts};
    RunWorkers(path.merge_parts, p, 3);
    CHECK(merged.o.Damage() + merged.lse.Damage() + taken_.Damage() == "");
    for (const uint32_t bits : taken_) CHECK(bits == 0);
    return merged;
  }

  // Returns the reference's attention over the units of the granted parts. Padded rows stay NaN.
  Merged Want(const std::vector<GrantedPart>& granted) {
    Guarded<int32_t> units(lists_ * fixture_.capacity()), counts(lists_);
    for (int64_t list = 0; list < lists_; ++list) {
      counts[list] = 0;
      const int32_t count = fixture_.counts()[list];
      const int32_t size = UnitsOfPart(count, case_.least_units);
      const uint32_t bits = BitsOf(granted, list);
      for (int32_t i = 0; i < count; ++i) {
        if ((bits >> (i / size) & 1) == 0) continue;
        units[list * fixture_.capacity() + counts[list]++] =
            fixture_.units()[list * fixture_.capacity() + i];
      }
    }
    Merged want{Guarded<float>(fixture_.rows() * fixture_.width()),
                Guarded<float>(fixture_.rows() * case_.shape.heads)};
    SparseAttentionParams p = fixture_.Params(0, fixture_.rows(), want.o.data(), want.lse.data());
    p.units = units.data();
    p.counts = counts.data();
    RunWorkers(Reference().sparse_attention, p, 1);
    for (int64_t r = 0; r < fixture_.rows(); ++r) {
      if (p.slots[r] >= 0) continue;
      constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
      std::fill_n(want.o.data() + r * fixture_.width(), fixture_.width(), kNan);
      std::fill_n(want.lse.data() + r * case_.shape.heads, case_.shape.heads, kNan);
    }
    return want;
  }

 private:
  PullAttentionParams Params(std::chrono::nanoseconds deadline) {
    PullAttentionParams p{};
    p.attention = fixture_.Params(0, fixture_.rows(), nullptr, nullptr);
    p.least_units = case_.least_units;
    p.most_parts = kMostListParts;
    p.pullers = case_.pullers;
    p.asks = words_.asks.data();
    p.grants = words_.grants.data();
    p.closed = words_.closed.data();
    p.missed = words_.missed.data();
    p.deadline_ns = static_cast<uint64_t>(deadline.count());
    p.part_o = part_o_.data();
    p.part_lse = part_lse_.data();
    p.taken = taken_.data();
    return p;
  }

  static uint32_t BitsOf(const std::vector<GrantedPart>& granted, int64_t list) {
    uint32_t bits = 0;
    for (const GrantedPart& g : granted) bits |= g.list == list ? uint32_t{1} << g.part : 0;
    return bits;
  }

  // The bits of `taken` are those of the granted parts, and no other part's results were written.
  std::string CheckTaken(const std::vector<GrantedPart>& granted) const {
    for (int64_t list = 0; list < lists_; ++list) {
      const uint32_t bits = BitsOf(granted, list);
      if (taken_[list] != bits) return "list " + std::to_string(list) + ": wrong bits are taken; ";
      for (int64_t i = 0; i < kMostListParts * group_; ++i) {
        const int64_t item = list * kMostListParts * group_ + i;
        const float* const o = part_o_.data() + item * case_.shape.head_dim;
        const auto written =
            std::count_if(o, o + case_.shape.head_dim, [](float v) { return !std::isnan(v); });
        const bool is_taken = (bits >> (i / group_) & 1) != 0;
        if (written != (is_taken ? case_.shape.head_dim : 0) ||
            std::isnan(part_lse_[item]) == is_taken) {
          return "list " + std::to_string(list) + ": wrong results are written; ";
        }
      }
    }
    return "";
  }

  const PullCase& case_;
  Fixture& fixture_;
  const int64_t lists_, group_;
  Words words_;
  Guarded<float> part_o_, part_lse_;
  Guarded<uint32_t> taken_;
};

template <typename Check>
void ForEachPullCase(Random& random, Check check) {
  for (const PullCase& c : PullCases()) {
    ForEachSparseCase({c.shape}, random, [&](const SparseCase&, auto& fixture) {
      // The lists of a row's heads differ in length, and some are empty.
      for (int64_t list = 0; list < fixture.counts().size(); ++list) {
        if (list % 3 == 1) fixture.counts()[list] -= std::min(fixture.counts()[list], 5);
      }
      PullSetup setup(c, fixture);
      check(c, setup);
    });
  }
}

}  // namespace sluice::kernels
