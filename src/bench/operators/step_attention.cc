// Latent attention of a decode step, and the indexer's logits and top-k.
#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numeric>

#include "src/base/status_macros.h"
#include "src/bench/operators/device_operands.h"
#include "src/bench/operators/step_points.h"
#include "src/device/kernel_set.h"

namespace sluice::bench {
namespace {

using namespace kernels;  // NOLINT: a file about them

constexpr int32_t kBlockTokens = 64;
// A cache of entries or keys has at most so many bytes; sequences then share pages.
constexpr int64_t kMostCacheBytes = int64_t{4} << 30;
constexpr int64_t kMostKeys = int64_t{1} << 24;  // Keys of a launch.
constexpr int kSets = 3;                         // Page tables that launches take in turn.

// Returns page tables of `rows` sequences of `blocks` blocks, over `pages` pages in any order.
int32_t* PageTable(DeviceOperands& operands, int64_t rows, int64_t blocks, int64_t pages) {
  std::vector<int32_t> order(static_cast<size_t>(pages));
  std::vector<int32_t> table(static_cast<size_t>(rows * blocks));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), operands.random());
  for (size_t i = 0; i < table.size(); ++i) table[i] = order[i % order.size()];
  return operands.Put(table);
}

// Returns kSets of them.
std::vector<int32_t*> PageTables(DeviceOperands& operands, int64_t rows, int64_t blocks,
                                 int64_t pages) {
  std::vector<int32_t*> tables(kSets);
  for (int32_t*& table : tables) table = PageTable(operands, rows, blocks, pages);
  return tables;
}

std::vector<int32_t> Counted(int64_t count) {
  std::vector<int32_t> values(static_cast<size_t>(count));
  std::iota(values.begin(), values.end(), 0);
  return values;
}

absl::Status TimeAttention(Device& device, const StepPointShape& shape, const TimePoint& time) {
  const ModelConfig& c = shape.config;
  const int64_t most = shape.rows.back(), top_k = shape.top_k(), heads = c.heads;
  const int64_t context = shape.contexts.front(), blocks = (context + 63) / kBlockTokens;
  const int64_t page_bytes = kBlockTokens * int64_t{kPackedEntryBytes};
  const int64_t pages = std::min(most * blocks * kSets, kMostCacheBytes / page_bytes);
  DeviceOperands operands(device);
  SparseMlaParams p{};
  p.q = operands.RandomBf16(MemoryKind::kDevice, most * heads * c.latent->entry_dim() * 4);
  p.slots = operands.Put(Counted(most));
  p.cache = {operands.RandomE4M3(MemoryKind::kDevice, pages * page_bytes),
             nullptr,
             blocks,
             page_bytes,
             kBlockTokens,
             c.latent->rank,
             c.latent->rope_dim,
             DType::kFloat8E4M3};
  const auto tables = PageTables(operands, most, blocks, pages);
  std::vector<int32_t> order = Counted(context), entries;
  std::vector<int32_t> first, second;
  for (int64_t row = 0; row < most; ++row) {
    std::shuffle(order.begin(), order.end(), operands.random());
    std::sort(order.begin(), order.begin() + top_k);
    entries.insert(entries.end(), order.begin(), order.begin() + top_k);
    const auto missed = static_cast<int32_t>(std::min<int64_t>(17 + row * 53 % 589, top_k / 2));
    second.push_back(missed);
    first.push_back(static_cast<int32_t>(top_k) - missed);
  }
  const int32_t* const lists = operands.Put(entries);
  const int32_t* const whole =
      operands.Put(std::vector<int32_t>(static_cast<size_t>(most), static_cast<int32_t>(top_k)));
  const int32_t* const first_counts = operands.Put(first);
  const int32_t* const second_counts = operands.Put(second);
  float* const other_o = operands.Room<float>(most * heads * c.latent->rank);
  float* const other_lse = operands.Room<float>(most * heads);
  p.entries = lists;
  p.capacity = top_k;
  p.out = operands.Room<float>(most * heads * c.latent->rank);
  p.scratch_bytes = device.kernels().SparseMlaScratchBytes(
      static_cast<int32_t>(most), static_cast<int32_t>(heads), c.latent->rank, top_k);
  p.scratch = operands.Room(MemoryKind::kDevice, p.scratch_bytes);
  p.heads = static_cast<int32_t>(heads);
  p.scale = 0.07f;
  p.q_type = p.out_type = device.kernels().activation_type();
  SLUICE_RETURN_IF_ERROR(operands.status());
  for (const bool two : {false, true}) {
    p.counts = two ? first_counts : whole;
    p.then_entries = two ? lists : nullptr;
    p.then_counts = two ? second_counts : nullptr;
    p.other_o = two ? other_o : nullptr;
    p.other_lse = two ? other_lse : nullptr;
    for (const int64_t rows : shape.rows) {
      p.rows = p.decode_rows = static_cast<int32_t>(rows);
      StepPoint point{two ? "attention.two_lists" : "attention",
                      two ? "rows of top_k entries in two lists" : "rows of top_k entries",
                      static_cast<double>(rows), 12};
      point.launch = [&](Stream& stream, int number) {
        p.cache.block_table = tables[static_cast<size_t>(number % kSets)];
        device.kernels().SparseMla(stream, p);
      };
      SLUICE_RETURN_IF_ERROR(time(point));
    }
  }
  return absl::OkStatus();
}

// Returns (rows, context) for each number of keys, as few rows as give it.
std::map<int64_t, std::pair<int64_t, int64_t>> KeyCounts(const StepPointShape& shape) {
  std::map<int64_t, std::pair<int64_t, int64_t>> counts;
  for (const int64_t rows : shape.rows) {
    for (const int64_t context : shape.contexts) {
      if (rows * context <= kMostKeys) counts.try_emplace(rows * context, rows, context);
    }
  }
  return counts;
}

absl::Status TimeIndexer(Device& device, const StepPointShape& shape, const TimePoint& time) {
  const int64_t heads = shape.config.latent->indexer->heads, longest = shape.contexts.back();
  const int64_t most = shape.rows.back(), blocks = (longest + 63) / kBlockTokens;
  const int64_t page_bytes = kBlockTokens * (int64_t{kIndexDim} + 4);
  const auto counts = KeyCounts(shape);
  const int64_t most_keys = counts.rbegin()->first;
  const int64_t pages =
      std::min(std::max(most_keys / kBlockTokens * kSets, blocks), kMostCacheBytes / page_bytes);
  DeviceOperands operands(device);
  IndexLogitsParams logits{};
  logits.q = operands.RandomE4M3(MemoryKind::kDevice, most * heads * kIndexDim);
  logits.weights = operands.Put(std::vector<float>(static_cast<size_t>(most * heads), 0.01f));
  logits.slots = operands.Put(Counted(most));
  logits.cache = {operands.RandomE4M3(MemoryKind::kDevice, pages * page_bytes),
                  nullptr,
                  blocks,
                  page_bytes,
                  kBlockTokens,
                  DType::kFloat8E4M3};
  logits.score_stride = (longest + 31) / 32 * 32;
  const int64_t most_scores = most * logits.score_stride;
  std::vector<float> scores(static_cast<size_t>(std::min<int64_t>(most_scores, 1 << 20)));
  std::normal_distribution<float> normal;
  for (float& score : scores) score = std::max(0.0f, normal(operands.random()));
  logits.scores = operands.Room<float>(most_scores);
  operands.Fill(logits.scores, most_scores * 4, scores.data(), std::ssize(scores) * 4);
  logits.heads = static_cast<int32_t>(heads);
  const auto tables = PageTables(operands, most, blocks, pages);
  TopKParams top{};
  top.scores = logits.scores;
  top.score_stride = logits.score_stride;
  top.slots = logits.slots;
  top.selected = {operands.Room<int32_t>(most * shape.top_k()), operands.Room<int32_t>(most),
                  static_cast<int32_t>(shape.top_k())};
  top.kv_heads = top.unit_tokens = 1;
  top.k = static_cast<int32_t>(shape.top_k());
  top.margin = std::numeric_limits<float>::infinity();
  // Top-k comes first: the logits of random keys would replace its scores.
  for (const bool scores_keys : {false, true}) {
    for (const auto& [keys, of] : counts) {
      const auto& [rows, context] = of;
      logits.rows = top.rows = static_cast<int32_t>(rows);
      logits.positions = top.positions = operands.Put(
          std::vector<int32_t>(static_cast<size_t>(rows), static_cast<int32_t>(context - 1)));
      SLUICE_RETURN_IF_ERROR(operands.status());
      StepPoint point{scores_keys ? "index_logits" : "top_k", "keys of all rows",
                      static_cast<double>(keys), 12};
      point.launch = [&](Stream& stream, int number) {
        logits.cache.block_table = tables[static_cast<size_t>(number % kSets)];
        if (scores_keys) {
          device.kernels().IndexLogits(stream, logits);
        } else {
          device.kernels().TopK(stream, top);
        }
      };
      SLUICE_RETURN_IF_ERROR(time(point));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status TimeLatentAttention(Device& device, const StepPointShape& shape,
                                 const TimePoint& time) {
  SLUICE_RETURN_IF_ERROR(TimeAttention(device, shape, time));
  return TimeIndexer(device, shape, time);
}

}  // namespace sluice::bench
