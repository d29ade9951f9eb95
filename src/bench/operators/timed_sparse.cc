// Times sparse attention over lists of units anywhere in a sequence as large as the arena: the work
// of co-attention workers.
#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/bench/operators/timed_operator.h"

namespace sluice::bench {
namespace {

using namespace kernels;  // NOLINT: a file about them

class SparseAttention : public TimedOperator {
 public:
  SparseAttention(const TimedSparseCase& c, const KernelTable& path, OperandArena* arena)
      : case_(c), path_(path), arena_(arena->buffer()) {
    page_bytes_ = int64_t{c.kv_heads} * 2 * c.block_tokens * c.head_dim * 2;
    const int64_t blocks = static_cast<int64_t>(arena_.bytes()) / page_bytes_;
    pages_.resize(static_cast<size_t>(blocks));
    std::iota(pages_.begin(), pages_.end(), 0);
    std::mt19937 random(1);
    std::shuffle(pages_.begin(), pages_.end(), random);
    // The arena holds one sequence.
    const int64_t units = blocks * c.block_tokens / c.unit_tokens;
    slots_.assign(static_cast<size_t>(c.rows), 0);
    positions_.assign(static_cast<size_t>(c.rows), static_cast<int32_t>(units * c.unit_tokens - 1));
    capacity_ = c.tokens / c.unit_tokens;
    lists_ = int64_t{c.rows} * c.kv_heads;
    counts_.assign(static_cast<size_t>(lists_), static_cast<int32_t>(capacity_));
    MakeSets(units, random);
    width_ = static_cast<size_t>(c.heads) * static_cast<size_t>(c.head_dim);
    q_.resize(static_cast<size_t>(c.rows) * width_);
    o_.resize(q_.size());
    lse_.resize(static_cast<size_t>(c.rows) * static_cast<size_t>(c.heads));
    FillFloat(q_, 1.0f);
  }

  std::string name() const override {
    return absl::StrCat("sparse attention, ", case_.rows, " rows, ", case_.name);
  }
  double bytes() const override { return double(lists_) * case_.tokens * 2 * case_.head_dim * 2; }
  double flops() const override {
    return double(case_.rows) * case_.heads * case_.tokens * case_.head_dim * 4;
  }

  void Run(Crew& crew) override {
    const SparseAttentionParams p = Params();
    set_ = (set_ + 1) % sets_;
    const std::function<void(int)> job = [&](int i) { Work(p, {i, crew.count()}); };
    crew.Run(job);
  }

  double Error(Crew& crew) override {
    SparseAttentionParams p = Params();
    Run(crew);
    std::vector<float> want(o_.size());
    p.o = want.data();
    p.rows = 1;
    const std::vector<float> got(o_.begin(), o_.begin() + static_cast<int64_t>(width_));
    FindKernelTable("reference")->sparse_attention(p, {0, 1});
    want.resize(width_);
    return RelativeError(got, want);
  }
  double allowed_error() const override { return 1e-5; }

 private:
  // Makes sets of lists in which no two lists share a unit of a head, as many sets as the sequence
  // allows, so that a call reads data that has not been read for as long as possible.
  void MakeSets(int64_t units, std::mt19937& random) {
    const int64_t of_head = case_.rows * capacity_;
    sets_ = units / of_head;
    SLUICE_CHECK(sets_ > 0, "the arena holds the lists of one call");
    units_.resize(static_cast<size_t>(sets_ * lists_ * capacity_));
    std::vector<int32_t> order(static_cast<size_t>(units));
    std::iota(order.begin(), order.end(), 0);
    for (int64_t head = 0; head < case_.kv_heads; ++head) {
      std::shuffle(order.begin(), order.end(), random);
      auto from = order.begin();
      for (int64_t set = 0; set < sets_; ++set) {
        for (int64_t row = 0; row < case_.rows; ++row, from += capacity_) {
          const int64_t list = (set * case_.rows + row) * case_.kv_heads + head;
          const auto to = units_.begin() + list * capacity_;
          std::sort(to, std::copy_n(from, capacity_, to));
        }
      }
    }
  }

  void Work(const SparseAttentionParams& p, Worker worker) const {
    if (!case_.alone) return path_.sparse_attention(p, worker);
    for (int64_t list = lists_ * worker.index / worker.count;
         list < lists_ * (worker.index + 1) / worker.count; ++list) {
      const int64_t row = list / case_.kv_heads;
      SparseAttentionParams one = p;
      one.q += row * p.q_stride;
      one.units += row * case_.kv_heads * capacity_;
      one.o += row * static_cast<int64_t>(width_);
      one.lse += row * case_.heads;
      one.rows = 1;
      one.kv_head_begin = static_cast<int32_t>(list % case_.kv_heads);
      one.kv_head_end = one.kv_head_begin + 1;
      path_.sparse_attention(one, {0, 1});
    }
  }

  SparseAttentionParams Params() {
    SparseAttentionParams p = {};
    p.q = q_.data();
    p.q_stride = static_cast<int64_t>(width_);
    p.slots = slots_.data();
    p.positions = positions_.data();
    p.cache = {arena_.data(),  pages_.data(),      static_cast<int64_t>(pages_.size()),
               page_bytes_,    case_.block_tokens, case_.kv_heads,
               case_.head_dim, DType::kBFloat16};
    p.units = units_.data() + set_ * lists_ * capacity_;
    p.counts = counts_.data();
    p.o = o_.data();
    p.lse = lse_.data();
    p.capacity = static_cast<int32_t>(capacity_);
    p.unit_tokens = case_.unit_tokens;
    p.rows = case_.rows;
    p.heads = case_.heads;
    p.kv_head_end = case_.kv_heads;
    p.scale = 1.0f / std::sqrt(static_cast<float>(case_.head_dim));
    return p;
  }

  const TimedSparseCase case_;
  const KernelTable& path_;
  const HugeBuffer& arena_;
  int64_t page_bytes_ = 0;
  int64_t capacity_ = 0;
  int64_t lists_ = 0;
  int64_t sets_ = 0, set_ = 0;
  size_t width_ = 0;
  std::vector<int32_t> pages_, slots_, positions_, counts_, units_;
  std::vector<float> q_, o_, lse_;
};

}  // namespace

std::unique_ptr<TimedOperator> NewSparseAttention(const TimedSparseCase& shape,
                                                  const KernelTable& path, OperandArena* arena) {
  return std::make_unique<SparseAttention>(shape, path, arena);
}

}  // namespace sluice::bench
