#include "src/attention/offload/worker_share.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace sluice {

template <typename T>
T* CoAttentionMemory::Take(int64_t count) {
  constexpr size_t kLine = 64;  // what different threads write shares none
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
      units_(static_cast<size_t>(options.kv_heads) * static_cast<size_t>(options.capacity)),
      places_(units_.size()),
      counts_(static_cast<size_t>(options.kv_heads)),
      pages_(static_cast<size_t>(options.capacity)) {}

// What is read here may be half of another request's, if the worker is late: every number is held
// to its bounds before it is used as an index.
void WorkerShare::TakeCopy(const CoAttentionSide& request, const ChannelHome& home, int row,
                           int slot, int head) {
  const int64_t list = int64_t{row} * options_.kv_heads + head;
  const int32_t count = std::clamp(request.lists.counts[list], 0, options_.capacity);
  position_ = request.positions[row];
  counts_[static_cast<size_t>(head)] = count;
  int32_t* const units = units_.data() + int64_t{head} * options_.capacity;
  int32_t* const places = places_.data() + int64_t{head} * options_.capacity;
  const int32_t* const listed = request.lists.units + list * options_.capacity;
  const int32_t* const table = home.cache.block_table + slot * home.cache.table_stride;
  const int32_t per_block = home.cache.block_tokens / options_.unit_tokens;
  int32_t blocks = 0, last = -1;
  for (int32_t i = 0; i < count; ++i) {
    units[i] = listed[i];
    const int32_t block = static_cast<int32_t>(
        std::clamp<int64_t>(units[i] / per_block, 0, home.cache.table_stride - 1));
    if (block != last) {
      pages_[static_cast<size_t>(blocks++)] = table[block];
      last = block;
    }
    places[i] = (blocks - 1) * per_block + units[i] % per_block;
  }
}

void WorkerShare::Compute(const CoAttentionSide& request, const ChannelHome& home, int row,
                          int slot, int head) {
  const int64_t width = int64_t{options_.heads} * options_.head_dim;
  float* const o = request.o + slot * width;
  float* const lse = request.lse + int64_t{slot} * options_.heads;
  if (counts_[static_cast<size_t>(head)] == 0) {
    const int group = options_.heads / options_.kv_heads;
    std::memset(
        o + int64_t{head} * group * options_.head_dim, 0,
        sizeof(float) * static_cast<size_t>(group) * static_cast<size_t>(options_.head_dim));
    std::fill_n(lse + int64_t{head} * group, group, -std::numeric_limits<float>::infinity());
    return;
  }
  constexpr int32_t kFirst = 0;  // the copy is of one sequence, in slot 0
  kernels::SparseAttentionParams p{};
  p.q = request.q + row * width;
  p.q_stride = width;
  p.slots = &kFirst;
  p.positions = &position_;
  p.cache = home.cache;
  p.cache.block_table = pages_.data();
  p.cache.table_stride = static_cast<int64_t>(pages_.size());
  p.units = units_.data();
  p.places = places_.data();
  p.counts = counts_.data();
  p.o = o;
  p.lse = lse;
  p.capacity = options_.capacity;
  p.unit_tokens = options_.unit_tokens;
  p.rows = 1;
  p.heads = options_.heads;
  p.kv_head_begin = head;
  p.kv_head_end = head + 1;
  p.scale = home.scale;
  options_.kernels->sparse_attention(p, {0, 1});
}

}  // namespace sluice
