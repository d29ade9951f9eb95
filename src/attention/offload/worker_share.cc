#include "src/attention/offload/worker_share.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <optional>

namespace sluice {
namespace {

// Fixed cost of a part beside its tokens, in tokens: queries in, a result out, a switch.
constexpr int32_t kPartTokens = 16;

}  // namespace

template <typename T>
T* CoAttentionMemory::Take(int64_t count) {
  constexpr size_t kLine = 64;  // threads write to separate cache lines
  T* const out = begin_ == nullptr ? nullptr : reinterpret_cast<T*>(begin_ + used_);
  used_ += (sizeof(T) * static_cast<size_t>(count) + kLine - 1) / kLine * kLine;
  return out;
}

CoAttentionSide CoAttentionMemory::Side() {
  const int64_t lists = int64_t{options_.max_rows} * options_.kv_heads;
  const int64_t width = int64_t{options_.heads} * options_.head_dim;
  CoAttentionSide side;
  side.rows = Take<int32_t>(1);
  side.slots = Take<int32_t>(options_.max_rows);
  side.positions = Take<int32_t>(options_.max_rows);
  side.q = Take<float>(options_.max_rows * width);
  side.lists.units = Take<int32_t>(lists * options_.capacity);
  side.lists.counts = Take<int32_t>(lists);
  side.lists.capacity = options_.capacity;
  side.o = Take<float>(options_.slots * width);
  side.lse = Take<float>(int64_t{options_.slots} * options_.heads);
  side.words = Take<PartWords>(WordArrays() * lists);
  if (options_.maker != nullptr) side.maker_words = side.words + lists;
  return side;
}

int32_t* CoAttentionMemory::Counts() { return Take<int32_t>(int64_t{options_.max_rows} + 1); }

PartWords* CoAttentionMemory::NoWords() {
  return Take<PartWords>(int64_t{options_.max_rows} * options_.kv_heads);
}

size_t CoAttentionMemory::Bytes(const CoAttention::Options& options) {
  CoAttentionMemory counter(options, nullptr);
  counter.Side();
  counter.Side();
  counter.Counts();
  counter.NoWords();
  return counter.used_;
}

int32_t CoAttentionPartUnits(const CoAttention::Options& options, int64_t element_bytes) {
  constexpr int64_t kKeysAndValues = 2;
  if (options.source != nullptr) return 1;
  const int64_t unit = kKeysAndValues * options.unit_tokens * options.head_dim * element_bytes;
  return static_cast<int32_t>(std::clamp<int64_t>(options.part_bytes / unit, 1, options.capacity));
}

int CoAttentionMostParts(const CoAttention::Options& options) {
  if (options.source != nullptr) return 1;
  const int64_t largest = kernels::SizeOf(kernels::DType::kFloat32);
  return PartBoard::MostParts(options.capacity, CoAttentionPartUnits(options, largest));
}

PartAnswers::PartAnswers(const CoAttention::Options& options)
    : kernels_(options.kernels),
      heads_(options.kv_heads),
      group_(options.heads / options.kv_heads),
      head_dim_(options.head_dim),
      most_parts_(CoAttentionMostParts(options)) {}

PartAnswers::Place PartAnswers::PlaceOf(const CoAttentionSide& answer,
                                        const CoAttentionPart& part) const {
  if (part.parts == 1) {
    const int64_t at = part.row.slot * heads_ + part.head;
    return {answer.o + at * group_floats(), answer.lse + at * group_};
  }
  const int64_t at = part.list * most_parts_ + part.part;
  return {answer.part_o + at * group_floats(), answer.part_lse + at * group_};
}

void PartAnswers::Finish(const PartBoard& board, const CoAttentionSide& answer,
                         const CoAttentionPart& part) const {
  if (!board.Finish(part.list, part.part) || part.parts == 1) return;
  const int64_t from = part.list * most_parts_;
  const int64_t to = part.row.slot * heads_ + part.head;
  kernels::MergeParams p{};
  p.o = answer.part_o + from * group_floats();
  p.lse = answer.part_lse + from * group_;
  p.out = answer.o + to * group_floats();
  p.out_lse = answer.lse + to * group_;
  p.parts = part.parts;
  p.rows = 1;
  p.heads = static_cast<int32_t>(group_);
  p.head_dim = head_dim_;
  p.out_type = kernels::DType::kFloat32;
  kernels_->merge(p, {0, 1});
}

WorkerShare::WorkerShare(const CoAttention::Options& options)
    : options_(options),
      answers_(options),
      heads_(options.kv_heads),
      group_floats_(answers_.group_floats()),
      plan_(static_cast<size_t>(options.max_rows) * static_cast<size_t>(options.kv_heads)),
      made_(static_cast<size_t>(options.max_rows) * static_cast<size_t>(options.kv_heads)),
      q_(static_cast<size_t>(options.heads) * static_cast<size_t>(options.head_dim)),
      o_(q_.size()),
      lse_(static_cast<size_t>(options.heads)),
      units_(static_cast<size_t>(options.kv_heads) * static_cast<size_t>(options.capacity)),
      places_(units_.size()),
      counts_(static_cast<size_t>(options.kv_heads)),
      pages_(static_cast<size_t>(options.capacity)) {
  const auto rows = static_cast<size_t>(options.max_rows);
  rows_.reserve(rows);
  asked_.resize(counts_.size());
}

// The plan has all KV heads of all taken rows, in order.
void WorkerShare::Divide(const PartBoard& board, const CoAttentionSide& request, int channel,
                         uint64_t bit) {
  if (options_.maker != nullptr) return DivideLists(bit);
  plan_.Clear();
  for (const Row& row : rows_) {
    if (options_.source != nullptr) {
      options_.source->ListTokens(channel, row.slot, row.position, asked_.data());
    } else {
      const int32_t* const counts = request.lists.counts + row.row * heads_;
      for (int64_t head = 0; head < heads_; ++head) {
        asked_[static_cast<size_t>(head)] = counts[head] * options_.unit_tokens;
      }
    }
    for (int64_t head = 0; head < heads_; ++head) {
      const int64_t list = row.row * heads_ + head, tokens = asked_[static_cast<size_t>(head)];
      const int parts = board.Parts(list);
      const int64_t part_tokens =
          parts == 1 ? tokens : int64_t{board.UnitsOf(list, 0).end} * options_.unit_tokens;
      plan_.Add(list, row.servers, parts, tokens, part_tokens, kPartTokens);
    }
  }
  plan_.Divide(bit);
}

// Rows nearly always have the same servers, and then no two workers begin at the same list.
void WorkerShare::DivideLists(uint64_t bit) {
  made_.Clear();
  for (const Row& row : rows_) {
    for (int64_t head = 0; head < heads_; ++head) made_.Add(row.row * heads_ + head, row.slot);
  }
  const uint64_t servers = rows_.front().servers;
  const auto rank = static_cast<size_t>(std::popcount(servers & (bit - 1)));
  const size_t lists = rows_.size() * static_cast<size_t>(heads_);
  made_.BeginAt(rank * lists / static_cast<size_t>(std::popcount(servers)));
}

bool WorkerShare::Claim(const PartBoard& board, const CoAttentionSide& request,
                        const ChannelHome& home) {
  const std::optional<ClaimPlan::Claimed> claimed =
      options_.maker == nullptr ? plan_.Next(board) : made_.Next(board);
  if (!claimed.has_value()) return false;
  const Row& row = rows_[claimed->item / static_cast<size_t>(heads_)];
  const int head = static_cast<int>(claimed->item % static_cast<size_t>(heads_));
  const int64_t list = row.row * heads_ + head;
  part_ = {row, head, list, claimed->part, board.Parts(list)};
  std::copy_n(request.q + list * group_floats_, group_floats_, q_.begin() + head * group_floats_);
  if (options_.source == nullptr) TakeUnits(request, home, board.UnitsOf(list, claimed->part));
  return true;
}

void WorkerShare::TakeUnits(const CoAttentionSide& request, const ChannelHome& home,
                            PartBoard::Units units) {
  count_ = units.end - units.begin;
  counts_[static_cast<size_t>(part_.head)] = count_;
  int32_t* const taken = units_.data() + int64_t{part_.head} * options_.capacity;
  int32_t* const places = places_.data() + int64_t{part_.head} * options_.capacity;
  const int32_t* const listed = request.lists.units + part_.list * options_.capacity + units.begin;
  const int32_t* const table = home.cache.block_table + part_.row.slot * home.cache.table_stride;
  const int32_t per_block = home.cache.block_tokens / options_.unit_tokens;
  int32_t blocks = 0, last = -1;
  for (int32_t i = 0; i < count_; ++i) {
    taken[i] = listed[i];
    const int32_t block = taken[i] / per_block;
    if (block != last) {
      pages_[static_cast<size_t>(blocks++)] = table[block];
      last = block;
    }
    places[i] = (blocks - 1) * per_block + taken[i] % per_block;
  }
}

void WorkerShare::Compute(const ChannelHome& home) {
  if (count_ == 0) {
    std::fill_n(o_.begin() + part_.head * group_floats_, group_floats_, 0.0f);
    std::fill_n(lse_.begin() + part_.head * answers_.group(), answers_.group(),
                -std::numeric_limits<float>::infinity());
    return;
  }
  constexpr int32_t kFirst = 0;  // the copy is of one sequence, in slot 0
  kernels::SparseAttentionParams p{};
  p.q = q_.data();
  p.q_stride = int64_t{options_.heads} * options_.head_dim;
  p.slots = &kFirst;
  p.positions = &part_.row.position;
  p.cache = home.cache;
  p.cache.block_table = pages_.data();
  p.cache.table_stride = static_cast<int64_t>(pages_.size());
  p.units = units_.data();
  p.places = places_.data();
  p.counts = counts_.data();
  p.o = o_.data();
  p.lse = lse_.data();
  p.capacity = options_.capacity;
  p.unit_tokens = options_.unit_tokens;
  p.rows = 1;
  p.heads = options_.heads;
  p.kv_head_begin = part_.head;
  p.kv_head_end = part_.head + 1;
  p.scale = home.scale;
  options_.kernels->sparse_attention(p, {0, 1});
}

CoAttention::Task WorkerShare::TaskOf() {
  CoAttention::Task task;
  task.slot = part_.row.slot;
  task.position = part_.row.position;
  task.head_begin = part_.head;
  task.head_end = part_.head + 1;
  task.q = q_.data();
  task.o = o_.data();
  task.lse = lse_.data();
  return task;
}

void WorkerShare::Give(const PartBoard& board, const CoAttentionSide& answer) {
  const PartAnswers::Place to = answers_.PlaceOf(answer, part_);
  std::copy_n(o_.begin() + part_.head * group_floats_, group_floats_, to.o);
  std::copy_n(lse_.begin() + part_.head * answers_.group(), answers_.group(), to.lse);
  tokens_ += int64_t{count_} * options_.unit_tokens;
  answers_.Finish(board, answer, part_);
}

}  // namespace sluice
