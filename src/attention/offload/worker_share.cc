#include "src/attention/offload/worker_share.h"

#include <algorithm>
#include <bit>
#include <limits>

namespace sluice {

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
  return side;
}

int32_t* CoAttentionMemory::Counts() { return Take<int32_t>(int64_t{options_.max_rows} + 1); }

size_t CoAttentionMemory::Bytes(const CoAttention::Options& options) {
  CoAttentionMemory counter(options, nullptr);
  counter.Side();
  counter.Side();
  counter.Counts();
  return counter.used_;
}

WorkerShare::WorkerShare(const CoAttention::Options& options)
    : options_(options),
      group_(options.heads / options.kv_heads),
      group_floats_(group_ * options.head_dim),
      q_(static_cast<size_t>(options.heads) * static_cast<size_t>(options.head_dim)),
      o_(q_.size()),
      lse_(static_cast<size_t>(options.heads)),
      units_(static_cast<size_t>(options.kv_heads) * static_cast<size_t>(options.capacity)),
      places_(units_.size()),
      counts_(static_cast<size_t>(options.kv_heads)),
      pages_(static_cast<size_t>(options.capacity)) {
  const auto rows = static_cast<size_t>(options.max_rows);
  rows_.reserve(rows);
  mine_.reserve(rows * counts_.size());
  costs_.reserve(rows * counts_.size());
  asked_.resize(counts_.size());
  groups_.reserve(rows);
}

void WorkerShare::TakeQuery(const CoAttentionSide& request, const Row& row, int head) {
  const int64_t width = int64_t{options_.heads} * options_.head_dim;
  std::copy_n(request.q + row.row * width + head * group_floats_, group_floats_,
              q_.begin() + head * group_floats_);
}

void WorkerShare::TakeItems(const CoAttentionSide& request, int channel, uint64_t bit) {
  // Fixed cost of a list beside its tokens, in tokens: queries in, a result out, a switch.
  constexpr int32_t kListTokens = 16;
  const auto heads = static_cast<size_t>(options_.kv_heads);
  costs_.clear();
  groups_.clear();
  mine_.assign(rows_.size() * heads, false);
  // Nearly always all rows have the same servers; they differ only after workers have died.
  const auto group_of = [this](uint64_t servers) -> Group& {
    for (Group& group : groups_) {
      if (group.servers == servers) return group;
    }
    return groups_.emplace_back(Group{servers, 0, 0});
  };
  for (const Row& row : rows_) {
    Group& group = group_of(row.servers);
    if (options_.source != nullptr) {
      options_.source->ListTokens(channel, row.slot, row.position, asked_.data());
    } else {
      for (size_t head = 0; head < heads; ++head) {
        const size_t list = static_cast<size_t>(row.row) * heads + head;
        asked_[head] = request.lists.counts[list] * options_.unit_tokens;
      }
    }
    for (const int32_t tokens : asked_) {
      costs_.push_back(kListTokens + tokens);
      group.cost += costs_.back();
    }
  }
  for (size_t item = 0; item < costs_.size(); ++item) {
    Group& group = group_of(rows_[item / heads].servers);
    const int64_t of = std::popcount(group.servers);
    const int64_t rank = std::popcount(group.servers & (bit - 1));
    // The list is this worker's if its middle lies in the worker's share.
    mine_[item] = (2 * group.before + costs_[item]) * of / (2 * group.cost) == rank;
    group.before += costs_[item];
  }
}

void WorkerShare::TakeList(const CoAttentionSide& request, const ChannelHome& home, const Row& row,
                           int head) {
  const int64_t list = int64_t{row.row} * options_.kv_heads + head;
  const int32_t count = request.lists.counts[list];
  counts_[static_cast<size_t>(head)] = count;
  int32_t* const units = units_.data() + int64_t{head} * options_.capacity;
  int32_t* const places = places_.data() + int64_t{head} * options_.capacity;
  const int32_t* const listed = request.lists.units + list * options_.capacity;
  const int32_t* const table = home.cache.block_table + row.slot * home.cache.table_stride;
  const int32_t per_block = home.cache.block_tokens / options_.unit_tokens;
  int32_t blocks = 0, last = -1;
  for (int32_t i = 0; i < count; ++i) {
    units[i] = listed[i];
    const int32_t block = units[i] / per_block;
    if (block != last) {
      pages_[static_cast<size_t>(blocks++)] = table[block];
      last = block;
    }
    places[i] = (blocks - 1) * per_block + units[i] % per_block;
  }
}

void WorkerShare::Compute(const ChannelHome& home, const Row& row, int head) {
  if (counts_[static_cast<size_t>(head)] == 0) {
    std::fill_n(o_.begin() + head * group_floats_, group_floats_, 0.0f);
    std::fill_n(lse_.begin() + head * group_, group_, -std::numeric_limits<float>::infinity());
    return;
  }
  constexpr int32_t kFirst = 0;  // the copy is of one sequence, in slot 0
  kernels::SparseAttentionParams p{};
  p.q = q_.data();
  p.q_stride = int64_t{options_.heads} * options_.head_dim;
  p.slots = &kFirst;
  p.positions = &row.position;
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
  p.kv_head_begin = head;
  p.kv_head_end = head + 1;
  p.scale = home.scale;
  options_.kernels->sparse_attention(p, {0, 1});
}

CoAttention::Task WorkerShare::TaskOf(const Row& row, int head) {
  CoAttention::Task task;
  task.slot = row.slot;
  task.position = row.position;
  task.head_begin = head;
  task.head_end = head + 1;
  task.q = q_.data();
  task.o = o_.data();
  task.lse = lse_.data();
  return task;
}

void WorkerShare::Give(const CoAttentionSide& answer, const Row& row, int head) {
  const int64_t width = int64_t{options_.heads} * options_.head_dim;
  std::copy_n(o_.begin() + head * group_floats_, group_floats_,
              answer.o + row.slot * width + head * group_floats_);
  std::copy_n(lse_.begin() + head * group_, group_,
              answer.lse + int64_t{row.slot} * options_.heads + head * group_);
  tokens_ += int64_t{counts_[static_cast<size_t>(head)]} * options_.unit_tokens;
}

}  // namespace sluice
