// Times Fluxion's level_scores over digests that no cache holds: the work of the CPU workers that
// select blocks.
#include <algorithm>
#include <numeric>
#include <random>

#include "absl/strings/str_cat.h"
#include "src/base/rng.h"
#include "src/bench/operators/timed_operator.h"

namespace sluice::bench {
namespace {

using namespace kernels;  // NOLINT: a file about them

// Digests are laid out as an offload tier has them: pages of 128 tokens anywhere in memory.
constexpr int32_t kRowsPerPage = kFluxionLargestBlock / LevelTokens(0);
// Calls take turns with as many sets of digests, so that none finds its own in a cache.
constexpr int64_t kSets = 2;

class LevelScores : public TimedOperator {
 public:
  LevelScores(const TimedLevelsCase& c, const KernelTable& path)
      : case_(c),
        path_(path),
        row_bytes_((c.has_spread ? kDigestVectors : kDigestPieces) * c.head_dim),
        position_(kFluxionSinkTokens + c.blocks * LevelTokens(0) + kFluxionLocalTokens - 1),
        pages_of_row_((SegmentsOf(position_).local + kFluxionLargestBlock - 1) /
                      kFluxionLargestBlock),
        page_bytes_(int64_t{c.kv_heads} * kRowsPerPage * row_bytes_),
        digests_(static_cast<size_t>(kSets * c.rows * pages_of_row_ * page_bytes_)),
        pages_(static_cast<size_t>(kSets * c.rows * pages_of_row_)),
        slots_(static_cast<size_t>(c.rows)),
        positions_(slots_.size(), position_),
        levels_(slots_.size() * static_cast<size_t>(c.kv_heads)),
        blocks_(slots_.size() * static_cast<size_t>(c.heads), c.blocks / 10),
        q_(blocks_.size() * static_cast<size_t>(c.head_dim)),
        scores_(blocks_.size() * static_cast<size_t>(ScoreStride())) {
    FillFloat(q_, 1.0f);
    FillDigests();
    std::iota(pages_.begin(), pages_.end(), 0);
    std::shuffle(pages_.begin(), pages_.end(), std::mt19937(1));
  }

  std::string name() const override {
    return absl::StrCat("level scores, ", case_.rows, " rows x ", case_.blocks, " blocks, ",
                        case_.name);
  }
  double bytes() const override {
    return double(case_.rows) * case_.kv_heads * case_.blocks * row_bytes_;
  }
  double flops() const override {
    return 2.0 * case_.rows * case_.heads * case_.blocks * row_bytes_;
  }

  void Run(Crew& crew) override {
    const LevelScoresParams p = Params();
    set_ = (set_ + 1) % kSets;
    const std::function<void(int)> job = [&](int i) { path_.level_scores(p, {i, crew.count()}); };
    crew.Run(job);
  }

  double Error(Crew& crew) override {
    LevelScoresParams p = Params();
    Run(crew);
    const std::vector<float> got(scores_.begin(),
                                 scores_.begin() + int64_t{case_.heads} * ScoreStride());
    std::vector<float> want(got.size());
    p.scores = want.data();
    p.rows = 1;
    FindKernelTable("reference")->level_scores(p, {0, 1});
    return RelativeError(got, want);
  }
  double allowed_error() const override { return 2e-6; }

 private:
  int64_t ScoreStride() const { return SegmentsOf(position_).local / LevelTokens(0); }

  // Fills the digests with finite numbers below 2, and spreads with positive ones.
  void FillDigests() {
    SplitMix64 random(7);
    auto* const words = digests_.as<uint64_t>();
    const int64_t count = static_cast<int64_t>(digests_.bytes()) / 8, of_row = row_bytes_ / 8;
    for (int64_t i = 0; i < count; ++i) {
      const bool is_spread = i % of_row * 8 >= int64_t{kDigestPieces} * case_.head_dim;
      words[i] = random() & (is_spread ? 0x3F3F3F3F3F3F3F3Fu : 0xBFBFBFBFBFBFBFBFu);
    }
  }

  LevelScoresParams Params() {
    for (int32_t row = 0; row < case_.rows; ++row) {
      slots_[static_cast<size_t>(row)] = static_cast<int32_t>(set_) * case_.rows + row;
    }
    LevelScoresParams p = {};
    p.q = q_.data();
    p.q_stride = int64_t{case_.heads} * case_.head_dim;
    p.slots = slots_.data();
    p.positions = positions_.data();
    p.digests.of[0] = {digests_.data(),
                       pages_.data(),
                       pages_of_row_,
                       page_bytes_,
                       kRowsPerPage * row_bytes_,
                       kRowsPerPage,
                       static_cast<int32_t>(row_bytes_),
                       DType::kFloat8E4M3,
                       case_.kv_heads};
    p.levels = levels_.data();
    p.blocks = blocks_.data();
    p.scores = scores_.data();
    p.score_stride = ScoreStride();
    p.rows = case_.rows;
    p.heads = case_.heads;
    p.head_dim = case_.head_dim;
    return p;
  }

  const TimedLevelsCase case_;
  const KernelTable& path_;
  const int64_t row_bytes_;
  const int32_t position_;
  const int64_t pages_of_row_, page_bytes_;
  HugeBuffer digests_;
  std::vector<int32_t> pages_, slots_;
  const std::vector<int32_t> positions_, levels_, blocks_;
  std::vector<float> q_, scores_;
  int64_t set_ = 0;
};

}  // namespace

std::unique_ptr<TimedOperator> NewLevelScores(const TimedLevelsCase& shape,
                                              const KernelTable& path) {
  return std::make_unique<LevelScores>(shape, path);
}

}  // namespace sluice::bench
