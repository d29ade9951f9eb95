#include "src/bench/operators/policy_operators.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "src/device/kernel_set.h"

namespace sluice::bench {
namespace {

using namespace kernels;  // NOLINT: a file about them

constexpr int kSteps = 8;  // Steps with different positions.
// After so many bytes of other operands a launch finds its own in no cache.
constexpr double kColdBytes = 2e8;
constexpr int32_t kRank = 32;  // Elements of a partial key.
constexpr int32_t kRing = 2;   // Newest blocks that are always in the device's memory.
constexpr float kMargin = 4.5f;

int SetsOf(double bytes) {
  return static_cast<int>(std::clamp(std::ceil(kColdBytes / bytes), 1.0, 8.0)) + 1;
}

std::vector<int32_t> Shuffled(int64_t count, std::mt19937& random) {
  std::vector<int32_t> values(static_cast<size_t>(count));
  std::iota(values.begin(), values.end(), 0);
  std::shuffle(values.begin(), values.end(), random);
  return values;
}

std::vector<float> Normal(int64_t count, float scale, std::mt19937& random) {
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& v : values) v = normal(random);
  return values;
}

const char* NameOf(GroupReduction reduction) {
  return reduction == GroupReduction::kMax ? "max" : "softmax-sum";
}

}  // namespace

absl::StatusOr<std::unique_ptr<PolicyOperators>> PolicyOperators::Create(Device& device,
                                                                         const PolicyShape& shape) {
  auto made = absl::WrapUnique(new PolicyOperators(device, shape));
  made->operands_.Fail(device.Health());
  if (!made->operands_.status().ok()) return made->operands_.status();
  return made;
}

PolicyOperators::PolicyOperators(Device& device, const PolicyShape& shape)
    : device_(device), shape_(shape), operands_(device) {
  const auto rows = static_cast<size_t>(shape.rows);
  std::vector<int32_t> slots(rows);
  std::iota(slots.begin(), slots.end(), 0);
  slots_ = operands_.Put(slots);
  for (int32_t step = 0; step < kSteps; ++step) {
    positions_.push_back(operands_.Put(std::vector<int32_t>(rows, shape.context - kSteps + step)));
  }
  q_ = operands_.Put(
      Normal(int64_t{shape.rows} * shape.heads * shape.head_dim, 1.0f, operands_.random()));
  AddDigests();
  AddScores();
  AddTopK();
  AddPartial();
  AddResidency();
  AddAttention();
}

PagedRows PolicyOperators::Rows(int64_t rows, int32_t rows_per_page, int32_t dim, DType type,
                                int sets) {
  const int64_t pages = (rows + rows_per_page - 1) / rows_per_page;
  const int64_t head_bytes = rows_per_page * dim * SizeOf(type);
  const int64_t all = pages * shape_.rows * sets;
  const int64_t bytes = all * shape_.kv_heads * head_bytes;
  PagedRows made{};
  // The caller fills in the tables' elements.
  made.base = type == DType::kBFloat16 ? operands_.RandomBf16(MemoryKind::kDevice, bytes)
                                       : operands_.Room(MemoryKind::kDevice, bytes);
  made.page_table = operands_.Put(Shuffled(all, operands_.random()));
  made.table_stride = pages;
  made.page_bytes = shape_.kv_heads * head_bytes;
  made.head_bytes = head_bytes;
  made.rows_per_page = rows_per_page;
  made.dim = dim;
  made.type = type;
  made.kv_heads = shape_.kv_heads;
  return made;
}

PagedCache PolicyOperators::Cache(MemoryKind kind, int64_t blocks, int64_t pages) {
  std::vector<int32_t> table = Shuffled(blocks * shape_.rows, operands_.random());
  for (int32_t& page : table) page = static_cast<int32_t>(page % pages);
  PagedCache cache{};
  cache.base = operands_.RandomBf16(kind, pages * shape_.page_bytes());
  cache.block_table = operands_.Put(table);
  cache.table_stride = blocks;
  cache.page_bytes = shape_.page_bytes();
  cache.block_tokens = shape_.block_tokens;
  cache.kv_heads = shape_.kv_heads;
  cache.head_dim = shape_.head_dim;
  cache.type = DType::kBFloat16;
  return cache;
}

std::vector<int32_t> PolicyOperators::Lists(int32_t units, int32_t count) {
  std::vector<int32_t> lists, middle(static_cast<size_t>(units - 3));
  std::iota(middle.begin(), middle.end(), 1);
  for (int64_t list = 0; list < shape_.lists(); ++list) {
    std::shuffle(middle.begin(), middle.end(), operands_.random());
    std::vector<int32_t> one(middle.begin(), middle.begin() + count - 3);
    one.insert(one.end(), {0, units - 2, units - 1});
    std::sort(one.begin(), one.end());
    lists.insert(lists.end(), one.begin(), one.end());
  }
  return lists;
}

UnitLists PolicyOperators::EmptyLists(int32_t capacity) {
  return {operands_.Room<int32_t>(shape_.lists() * capacity),
          operands_.Room<int32_t>(shape_.lists()), capacity};
}

void PolicyOperators::AddDigests() {
  const double key_block = 2.0 * shape_.kv_heads * shape_.block_tokens * shape_.head_dim;
  DigestParams p{};
  p.digests = Rows(shape_.blocks(), 32, 2 * shape_.head_dim, DType::kBFloat16, 1);
  p.slots = slots_;
  p.rows = shape_.rows;
  p.cache = Cache(MemoryKind::kDevice, shape_.blocks(), shape_.rows * 4);
  all_.push_back({"digest of the newest blocks", shape_.rows * key_block, 0,
                  [this, p](Stream& stream, int number) mutable {
                    p.positions = positions_[static_cast<size_t>(number % kSteps)];
                    device_.kernels().Digest(stream, p);
                  }});
  p.cache = Cache(MemoryKind::kPinned, shape_.blocks(), shape_.blocks());
  p.first_positions = operands_.Put(std::vector<int32_t>{0});
  p.rows = 1;
  all_.push_back({"digests of one whole prompt", 0, shape_.blocks() * key_block,
                  [this, p](Stream& stream, int) mutable {
                    p.positions = positions_[0];
                    device_.kernels().Digest(stream, p);
                  }});
}

void PolicyOperators::AddScores() {
  const double bytes = double(shape_.lists()) * shape_.blocks() * 4 * shape_.head_dim;
  const int sets = SetsOf(bytes);
  DigestScoresParams p{};
  p.q = q_;
  p.q_stride = int64_t{shape_.heads} * shape_.head_dim;
  p.slots = slots_;
  p.digests = Rows(shape_.blocks(), 32, 2 * shape_.head_dim, DType::kBFloat16, sets);
  p.score_stride = shape_.blocks() + 1;
  p.scores = operands_.Room<float>(shape_.lists() * p.score_stride);
  p.positions = positions_[0];
  p.rows = shape_.rows;
  p.heads = shape_.heads;
  p.block_tokens = shape_.block_tokens;
  p.scale = 1 / std::sqrt(static_cast<float>(shape_.head_dim));
  const int64_t of_set = p.digests.table_stride * shape_.rows;
  for (GroupReduction reduction : {GroupReduction::kMax, GroupReduction::kSoftmaxSum}) {
    p.reduction = reduction;
    all_.push_back({absl::StrCat("digest scores, ", NameOf(reduction)), bytes, 0,
                    [this, p, sets, of_set](Stream& stream, int number) {
                      DigestScoresParams one = p;
                      one.digests.page_table += number % sets * of_set;
                      device_.kernels().DigestScores(stream, one);
                    }});
  }
}

void PolicyOperators::AddTopK() {
  const auto add = [&](const char* name, int32_t units, int32_t unit_tokens, int32_t k,
                       int32_t first, int32_t last, float margin) {
    TopKParams p{};
    p.scores = operands_.Put(Normal(shape_.lists() * units, 2.0f, operands_.random()));
    p.score_stride = units;
    p.slots = slots_;
    p.positions = positions_[0];
    p.selected = EmptyLists(k);
    p.rows = shape_.rows;
    p.kv_heads = shape_.kv_heads;
    p.unit_tokens = unit_tokens;
    p.k = k;
    p.first_units = first;
    p.last_units = last;
    p.margin = margin;
    all_.push_back({absl::StrCat(name, ", ", k, " of ", units),
                    double(shape_.lists()) * (units + k) * 4, 0,
                    [this, p](Stream& stream, int) { device_.kernels().TopK(stream, p); }});
  };
  add("top-k of blocks", shape_.blocks(), shape_.block_tokens, shape_.budget_blocks(), 1, kRing,
      std::numeric_limits<float>::infinity());
  add("top-k of tokens, margin", shape_.context, 1, shape_.budget_tokens, 0,
      kRing * shape_.block_tokens, kMargin);
}

void PolicyOperators::AddPartial() {
  const int64_t projection = int64_t{shape_.kv_heads} * shape_.head_dim * kRank;
  const double bytes = double(shape_.lists()) * shape_.context * kRank * 2;
  const int sets = SetsOf(bytes);
  const PagedRows partial = Rows(shape_.context, 512, kRank, DType::kBFloat16, sets);
  const float* const columns = operands_.Put(Normal(projection, 0.1f, operands_.random()));

  PartialKeysParams keys{};
  keys.cache = Cache(MemoryKind::kDevice, shape_.blocks(), shape_.rows * 4);
  keys.projection = columns;
  keys.partial = partial;
  keys.slots = slots_;
  keys.rows = shape_.rows;
  all_.push_back({"partial keys of decode rows",
                  double(projection) * 4 + double(shape_.lists()) * (shape_.head_dim + kRank) * 2,
                  0, [this, keys](Stream& stream, int number) mutable {
                    keys.positions = positions_[static_cast<size_t>(number % kSteps)];
                    device_.kernels().PartialKeys(stream, keys);
                  }});

  PartialScoresParams scores{};
  scores.q = q_;
  scores.q_stride = int64_t{shape_.heads} * shape_.head_dim;
  scores.slots = slots_;
  scores.positions = positions_[0];
  scores.projection = columns;
  scores.partial = partial;
  scores.score_stride = shape_.context;
  scores.scores = operands_.Room<float>(shape_.lists() * scores.score_stride);
  scores.rows = shape_.rows;
  scores.heads = shape_.heads;
  scores.head_dim = shape_.head_dim;
  scores.scale = 1 / std::sqrt(static_cast<float>(shape_.head_dim));
  const int64_t of_set = partial.table_stride * shape_.rows;
  all_.push_back({absl::StrCat("partial scores, rank ", kRank), bytes, 0,
                  [this, scores, sets, of_set](Stream& stream, int number) {
                    PartialScoresParams one = scores;
                    one.partial.page_table += number % sets * of_set;
                    device_.kernels().PartialScores(stream, one);
                  }});
}

void PolicyOperators::AddResidency() {
  const int32_t budget = shape_.budget_blocks(), blocks = shape_.blocks();
  const double list_bytes = double(shape_.lists()) * budget * 4;
  const std::vector<int32_t> selected = Lists(blocks, budget);
  // Every slot except the ring's holds a selected unit. One in eight of the selected units has no
  // slot, and as many slots hold units that are not selected.
  ResidencyTable t{};
  t.ring = kRing;
  t.count = kRing + budget;
  t.place_of = Rows(blocks, blocks, 1, DType::kFloat32, 1);
  t.places = Rows(t.count, t.count, 2, DType::kFloat32, 1);
  std::vector<int32_t> place_of(static_cast<size_t>(shape_.lists() * blocks), -1);
  std::vector<int32_t> places(static_cast<size_t>(shape_.lists() * t.count * 2), -1);
  std::vector<int32_t> missing;
  const std::vector<int32_t> pages = [&] {
    std::vector<int32_t> identity(static_cast<size_t>(shape_.rows));
    std::iota(identity.begin(), identity.end(), 0);
    return identity;
  }();
  t.place_of.page_table = t.places.page_table = operands_.Put(pages);
  for (int64_t list = 0; list < shape_.lists(); ++list) {
    int32_t place = kRing;
    for (int32_t i = 0; i < budget; ++i) {
      const int32_t unit = selected[static_cast<size_t>(list * budget + i)];
      if (unit >= blocks - kRing) continue;
      if (i % 8 == 3) {
        missing.push_back(unit);
        continue;
      }
      place_of[static_cast<size_t>(list * blocks + unit)] = place;
      places[static_cast<size_t>((list * t.count + place) * 2)] = unit;
      places[static_cast<size_t>((list * t.count + place) * 2 + 1)] = unit;
      ++place;
    }
  }
  const auto few = static_cast<int32_t>(missing.size() / static_cast<size_t>(shape_.lists()));
  t.place_of.base = operands_.Put(place_of);
  t.places.base = operands_.Put(places);
  const UnitLists all = {
      operands_.Put(selected),
      operands_.Put(std::vector<int32_t>(static_cast<size_t>(shape_.lists()), budget)), budget};
  const UnitLists lacking = {
      operands_.Put(missing),
      operands_.Put(std::vector<int32_t>(static_cast<size_t>(shape_.lists()), few)), few};

  SplitParams split{};
  split.residency = t;
  split.slots = slots_;
  split.positions = positions_[0];
  split.selected = all;
  split.resident = EmptyLists(t.count);
  split.places = operands_.Room<int32_t>(shape_.lists() * t.count);
  split.missing = EmptyLists(budget);
  split.rows = shape_.rows;
  split.kv_heads = shape_.kv_heads;
  split.unit_tokens = shape_.block_tokens;
  all_.push_back({"split by residency", 4 * list_bytes, 0,
                  [this, split](Stream& stream, int) { device_.kernels().Split(stream, split); }});

  RecallDueParams due{};
  due.slots = slots_;
  due.selected = all;
  due.missing = lacking;
  due.since = operands_.Room<int32_t>(shape_.rows);
  due.counters = operands_.Room<SparseCounters>(shape_.rows);
  due.due = operands_.Room<int32_t>(shape_.rows);
  due.rows = shape_.rows;
  due.kv_heads = shape_.kv_heads;
  due.unit_tokens = shape_.block_tokens;
  due.budget_units = budget;
  due.share_limit = 0.12f;
  all_.push_back({"whether recall is due", double(shape_.lists()) * 8, 0,
                  [this, due](Stream& stream, int) { device_.kernels().RecallDue(stream, due); }});

  RecallParams recall{};
  recall.residency = t;
  recall.slots = slots_;
  recall.missing = lacking;
  recall.home = Cache(MemoryKind::kPinned, blocks, shape_.rows * 4);
  recall.resident = Cache(MemoryKind::kDevice, t.count, shape_.rows * 4);
  recall.source_units = operands_.Room<int32_t>(shape_.lists() * few);
  recall.target_units = operands_.Room<int32_t>(shape_.lists() * few);
  recall.move_counts = operands_.Room<int32_t>(shape_.lists());
  recall.counters = due.counters;
  recall.rows = shape_.rows;
  recall.kv_heads = shape_.kv_heads;
  recall.unit_tokens = shape_.block_tokens;
  all_.push_back({absl::StrCat("recall, tables for ", few, " blocks a list"),
                  double(shape_.lists()) * (t.count + 4 * few) * 8, 0,
                  [this, recall](Stream& stream, int number) mutable {
                    recall.positions = positions_[static_cast<size_t>(number % kSteps)];
                    device_.kernels().Recall(stream, recall);
                  }});

  WriteThroughParams write{};
  const int64_t written = shape_.lists() * 2 * shape_.head_dim * 2;
  write.written = operands_.RandomBf16(MemoryKind::kDevice, written);
  write.slots = slots_;
  write.home = recall.home;
  write.rows = shape_.rows;
  all_.push_back({"write-through of decode rows", 0, double(written),
                  [this, write](Stream& stream, int number) mutable {
                    write.positions = positions_[static_cast<size_t>(number % kSteps)];
                    device_.kernels().WriteThrough(stream, write);
                  }});
}

void PolicyOperators::AddAttention() {
  const int32_t budget = shape_.budget_blocks();
  const double bytes = double(shape_.lists()) * shape_.budget_tokens * 4 * shape_.head_dim;
  const int sets = SetsOf(bytes);
  SparseAttentionParams p{};
  p.q = q_;
  p.q_stride = int64_t{shape_.heads} * shape_.head_dim;
  p.slots = slots_;
  p.positions = positions_[0];
  p.cache =
      Cache(MemoryKind::kDevice, int64_t{budget} * sets, int64_t{budget} * sets * shape_.rows);
  p.units = operands_.Put(Lists(shape_.blocks(), budget));
  std::vector<int32_t> places;
  for (int64_t list = 0; list < shape_.lists(); ++list) {
    const std::vector<int32_t> one = Shuffled(budget, operands_.random());
    places.insert(places.end(), one.begin(), one.end());
  }
  p.places = operands_.Put(places);
  p.counts = operands_.Put(std::vector<int32_t>(static_cast<size_t>(shape_.lists()), budget));
  p.o = operands_.Room<float>(int64_t{shape_.rows} * shape_.heads * shape_.head_dim);
  p.lse = operands_.Room<float>(int64_t{shape_.rows} * shape_.heads);
  p.capacity = budget;
  p.unit_tokens = shape_.block_tokens;
  p.rows = shape_.rows;
  p.heads = shape_.heads;
  p.kv_head_end = shape_.kv_heads;
  p.scale = 1 / std::sqrt(static_cast<float>(shape_.head_dim));
  all_.push_back({absl::StrCat("sparse attention, ", shape_.budget_tokens, " tokens"), bytes, 0,
                  [this, p, sets, budget](Stream& stream, int number) {
                    SparseAttentionParams one = p;
                    one.cache.block_table += number % sets * budget;
                    device_.kernels().SparseAttention(stream, one);
                  }});

  MovingAverageParams average{};
  average.q = q_;
  average.q_stride = p.q_stride;
  average.slots = slots_;
  average.positions = positions_[0];
  average.cache = p.cache;
  average.units = p.units;
  average.places = p.places;
  average.counts = operands_.Put(
      std::vector<int32_t>(static_cast<size_t>(shape_.lists()), std::max(1, budget / 4)));
  average.lse = p.lse;
  average.average = Rows(int64_t{budget} * shape_.block_tokens, budget * shape_.block_tokens, 1,
                         DType::kFloat32, 1);
  average.capacity = budget;
  average.unit_tokens = shape_.block_tokens;
  average.rows = shape_.rows;
  average.heads = shape_.heads;
  average.scale = p.scale;
  average.alpha = 0.1f;
  all_.push_back({absl::StrCat("moving average, ", shape_.budget_tokens / 4, " tokens"),
                  bytes / 8 + double(shape_.lists()) * shape_.budget_tokens / 4 * 8, 0,
                  [this, average, sets, budget](Stream& stream, int number) {
                    MovingAverageParams one = average;
                    one.cache.block_table += number % sets * budget;
                    device_.kernels().MovingAverage(stream, one);
                  }});
}

}  // namespace sluice::bench
