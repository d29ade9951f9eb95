#include "src/attention/policies/clo/clo_policy.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "kernels/hash_params.h"
#include "src/attention/offload/first_queries.h"
#include "src/attention/offload/offload_policy.h"
#include "src/attention/offload/token_fetch.h"
#include "src/attention/policies/clo/clo_options.h"
#include "src/attention/policies/clo/hash_matrix.h"
#include "src/attention/policies/clo/head_thresholds.h"
#include "src/base/status_macros.h"
#include "src/device/allocation.h"
#include "src/device/kernel_set.h"

namespace sluice {
namespace {

constexpr int32_t kUnitTokens = 1;
constexpr int32_t kRingTokens = 64;  // recent tokens (CLO, 3.1), in whole blocks
// A label is renewed once a quarter of what its head selects has left the ring: a head that never
// missed would never see these tokens.
constexpr int32_t kRefreshes = 4;
// Arrays of the tier, by index.
constexpr size_t kCodes = 0, kLengths = 1;

int32_t RingBlocks(const CacheKind& kv) {
  return static_cast<int32_t>((kRingTokens + kv.block_tokens - 1) / kv.block_tokens);
}

class CloPolicy : public OffloadPolicy {
 public:
  static absl::StatusOr<std::unique_ptr<AttentionPolicy>> Create(const PolicyOptions& options);
  ~CloPolicy() override { AwaitWarmUps(); }

  bool LooksAhead(int layer) const override {
    return !tier().dense(layer) &&
           (heads_[static_cast<size_t>(layer)] != Heads::kPersistent || PersistentAhead(layer));
  }
  bool FollowsDrift() const override { return options().clo.drift; }
  bool LooksEarly() const override { return options().clo.early; }
  // one row, because it reads the whole cache
  int last_rows_wanted(int64_t /*total*/) const override {
    return options().recompute_last == PolicyOptions::RecomputeLast::kOn ? 1 : 0;
  }
  int64_t hint_queries() const override {
    return int64_t{layers()} * options().heads * hash_.head_dim;
  }
  void BeginStep(Stream& /*stream*/, absl::Span<const int32_t> slots,
                 absl::Span<const int32_t> positions) override {
    first_labels_->prompts().BeginStep(slots, positions);
  }
  void Attend(Stream& stream, int layer, kernels::AttentionParams params) override {
    OffloadPolicy::Attend(stream, layer, params);
    if (!tier().dense(layer)) first_labels_->prompts().Keep(stream, layer, params);
    if (layer == layers() - 1) first_labels_->prompts().EndStep(stream);
  }
  void EndPrompt(int slot, int64_t tokens, SelectionHints hints) override {
    first_labels_->EndPrompt(slot, tokens, hints);
    OffloadPolicy::EndPrompt(slot, tokens, std::move(hints));
  }
  int rehearsals() const override { return options().rehearsals; }

  PolicyStatistics Statistics() const override { return fetch_->Statistics(); }
  int64_t MetadataBytes(int64_t tokens) const override {  // codes and lengths
    return tokens * hash_.kv_heads * (hash_.bits / 8 + SizeOf(kernels::DType::kBFloat16));
  }

  // Lookup and prefetch (CLO, 4.2): the predicted queries decide which heads miss. Those select by
  // the scores of codes, their labels become these queries, and what they selected is fetched.
  void Ahead(Stream& stream, int layer, const Queries& predicted) override {
    const int32_t* listed = PersistentAhead(layer) ? nullptr : OffloadedLists(layer);
    const int32_t* selecting = listed;
    if (options().clo.reuse) {
      Lookup(stream, layer, predicted);
      selecting = tables_.missed.as<int32_t>();
    }
    const kernels::TopKParams select = Score(stream, layer, predicted, OfBring(), selecting);
    TokenFetch::Rule rule = RuleOf(listed);
    rule.forget = options().clo.refill == PolicyOptions::Clo::Refill::kReplace;
    fetch_->Bring(stream, LayerBranch(stream, layer), layer, predicted, select, rule);
  }

 protected:
  SlotWorkers* slot_workers() const override { return fetch_->workers(); }

  // Persistent heads that do not select ahead select here, by the queries themselves: nothing of
  // theirs is fetched, so nothing need be known beforehand. In a layer that has others too they
  // select while those attend.
  void AttendSparse(Stream& stream, int layer, const Queries& queries, void* out,
                    kernels::DType out_type) override {
    const Heads heads =
        PersistentAhead(layer) ? Heads::kOffloaded : heads_[static_cast<size_t>(layer)];
    Stream& aside = heads == Heads::kBoth ? AsideBranch(stream) : stream;
    if (heads == Heads::kBoth) aside.After(stream);
    if (heads != Heads::kOffloaded) {
      fetch_->Add(aside, layer, Score(aside, layer, queries, OfAdd(), PersistentLists(layer)));
    }
    if (LooksAhead(layer)) stream.After(LayerBranch(stream, layer));
    if (heads != Heads::kPersistent) {
      fetch_->Attend(stream, layer, queries,
                     heads == Heads::kBoth ? OffloadedLists(layer) : nullptr);
    }
    if (heads == Heads::kBoth) stream.After(aside);
    if (heads != Heads::kOffloaded) fetch_->Attend(stream, layer, queries, PersistentLists(layer));
    fetch_->Finish(stream, queries, out, out_type);
  }

  // Rows attend to every token that has a place, and a head selects as many as a sequence has
  // places for at least. Without reuse it selects the budget, and rows attend to that alone.
  int64_t SparseExactTokens() const override {
    return options().clo.reuse ? LeastPlaces() : options().budget_tokens;
  }

  // A token that leaves the ring stays in HBM while a place is free. Otherwise it waits for its
  // head's next miss, so that a set stays as it was selected.
  void Settle(Stream& stream, int layer, const Queries& rows) override {
    ExtendCodes(stream, layer, tier().Ring(layer), rows.slots, nullptr, rows.positions, rows.rows);
    Retain(stream, layer, rows, /*only_free=*/true);
  }

  void BuildArrays(Stream& stream, int slot, int64_t /*tokens*/,
                   const OffloadTier::BulkRow& row) override {
    for (int layer = tier().options().dense_layers; layer < layers(); ++layer) {
      if (options().clo.centred) {
        kernels().KeyCentres(stream,
                             {tier().Home(layer), row.slots, row.positions, Centres(layer), 1});
      }
      ExtendCodes(stream, layer, tier().Home(layer), row.slots, row.first_positions, row.positions,
                  1);
      first_labels_->Put(stream, layer, slot, labelled(layer) + slot * hash_.kv_heads);
      if (first_labels_->Has(slot)) SelectFirst(stream, layer, slot, row);
    }
  }

  // A sequence with first labels begins with the units that these select, unless it has places for
  // all of its units.
  std::vector<std::vector<int32_t>> FirstUnits(int slot, int64_t tokens,
                                               const SelectionHints& hints) override {
    if (!first_labels_->Has(slot) || PlacesBehindRing(slot, tokens) == UnitsBeforeRing(tokens)) {
      return OffloadPolicy::FirstUnits(slot, tokens, hints);
    }
    const int64_t sparse = layers() - tier().options().dense_layers;
    return std::vector<std::vector<int32_t>>(static_cast<size_t>(sparse * hash_.kv_heads));
  }

  void Joined(int slot) override { first_labels_->prompts().Joined(slot); }

 private:
  // Tables that all sequences share, tables by slot, and scratch of one Ahead.
  struct Tables {
    Buffer hash;                    // float [layers][kv_heads][head_dim][bits]
    Buffer importance, thresholds;  // float [layers][heads], [layers][kv_heads]
    Buffer centres;                 // float [layers][slots][kv_heads][head_dim]
    Buffer labelled;                // int32 [layers][slots][kv_heads]
    Buffer missed;                  // int32 [lists]
    // int32 [rows][heads][planes][words], of the queries that are predicted, of a layer's own, and
    // of a sequence's first labels
    Buffer predicted_codes, q_codes, first_codes;
    // int32 [layers][lists]: whether a list's head is persistent, and whether it is not. They are
    // not made where no head is.
    Buffer persistent, offloaded;
  };
  // Which heads of a layer are offloaded and which are persistent.
  enum class Heads : uint8_t { kOffloaded, kPersistent, kBoth };

  // The scratch of one selection.
  struct Selecting {
    const TokenFetch& fetch;
    TokenFetch::Use use;
    const Buffer& codes;
  };
  Selecting OfBring() const { return {*fetch_, TokenFetch::Use::kBring, tables_.predicted_codes}; }
  Selecting OfAdd() const { return {*fetch_, TokenFetch::Use::kAdd, tables_.q_codes}; }
  Selecting OfFirst() const {
    return {*first_fetch_, TokenFetch::Use::kBring, tables_.first_codes};
  }

  CloPolicy(const PolicyOptions& options, std::unique_ptr<OffloadTier> tier, Buffer written,
            const HashShape& hash, std::unique_ptr<TokenFetch> fetch,
            std::unique_ptr<TokenFetch> first_fetch, std::unique_ptr<FirstQueries> first_labels,
            Tables tables)
      : OffloadPolicy(options, std::move(tier), std::move(written)),
        hash_(hash),
        heads_(HeadsOf(this->tier(), hash)),
        fetch_(std::move(fetch)),
        first_fetch_(std::move(first_fetch)),
        first_labels_(std::move(first_labels)),
        tables_(std::move(tables)) {}
  static absl::StatusOr<Tables> NewTables(const PolicyOptions& options, const HashShape& hash,
                                          const std::vector<uint8_t>& persistent);
  static std::vector<Heads> HeadsOf(const OffloadTier& tier, const HashShape& hash);

  int layers() const { return options().hbm->layout().layers; }
  int32_t words() const { return static_cast<int32_t>(hash_.bits / 32); }
  int32_t kv_heads() const { return static_cast<int32_t>(hash_.kv_heads); }
  const float* Hash(int layer) const {
    return tables_.hash.as<float>() + layer * hash_.kv_heads * hash_.head_dim * hash_.bits;
  }
  float* Centres(int layer) const {
    return tables_.centres.as<float>() +
           int64_t{layer} * options().slots * hash_.kv_heads * hash_.head_dim;
  }
  int32_t* labelled(int layer) const {
    return tables_.labelled.as<int32_t>() + int64_t{layer} * options().slots * hash_.kv_heads;
  }
  // Returns a layer's part of a table [layers][lists]; null where no head is persistent.
  const int32_t* OfLayer(const Buffer& lists, int layer) const {
    return lists.bytes() == 0 ? nullptr
                              : lists.as<int32_t>() + layer * max_decode_rows() * hash_.kv_heads;
  }
  const int32_t* PersistentLists(int layer) const { return OfLayer(tables_.persistent, layer); }
  const int32_t* OffloadedLists(int layer) const { return OfLayer(tables_.offloaded, layer); }
  // Returns whether persistent heads of the layer select by predicted queries.
  bool PersistentAhead(int layer) const {
    const PolicyOptions::Clo& clo = options().clo;
    return clo.persistent_ahead && (heads_[static_cast<size_t>(layer)] != Heads::kPersistent ||
                                    !IsUnpredictable(clo.predicted, layer));
  }
  // Returns the places, in tokens, that a sequence has at least if it is longer.
  int64_t LeastPlaces() const {
    return (tier().options().ring_blocks + tier().options().recall_blocks) * tier().block_tokens();
  }
  // Returns the divisor of a row's tokens that gives how many a head selects, where that is more
  // than the budget; 0: the budget alone counts.
  int32_t divisor() const { return options().clo.budget_divisor; }

  // Extends codes and lengths by positions [first, position] of each row.
  void ExtendCodes(Stream& stream, int layer, const kernels::PagedCache& keys, const int32_t* slots,
                   const int32_t* first, const int32_t* positions, int32_t rows) {
    kernels::HashKeysParams params{};
    params.cache = keys;
    params.hash = Hash(layer);
    params.codes = tier().Array(layer, kCodes);
    params.lengths = tier().Array(layer, kLengths);
    params.slots = slots;
    params.first_positions = first;
    params.positions = positions;
    params.rows = rows;
    params.centres = options().clo.centred ? Centres(layer) : nullptr;
    kernels().HashKeys(stream, params);
  }

  void Lookup(Stream& stream, int layer, const Queries& predicted) {
    kernels::LabelLookupParams params{};
    params.q = predicted.q;
    params.q_stride = predicted.stride;
    params.slots = predicted.slots;
    params.positions = predicted.positions;
    params.importance = tables_.importance.as<float>() + int64_t{layer} * predicted.heads;
    params.thresholds = tables_.thresholds.as<float>() + layer * hash_.kv_heads;
    params.labels = first_labels_->of(layer);
    params.labelled = labelled(layer);
    params.missed = tables_.missed.as<int32_t>();
    params.counters = fetch_->counters(layer);
    params.rows = predicted.rows;
    params.heads = predicted.heads;
    params.kv_heads = kv_heads();
    params.head_dim = static_cast<int32_t>(hash_.head_dim);
    if (options().clo.refresh) {
      params.refresh_tokens = std::max(options().budget_tokens / kRefreshes, 1);
      params.refresh_divisor = kRefreshes * divisor();
    }
    params.rule = options().clo.rule;
    params.wanted = OffloadedLists(layer);
    params.others = PersistentAhead(layer) ? 1 : 0;
    kernels().LabelLookup(stream, params);
  }

  // Scores the tokens of the lists that are wanted. Returns how to select by these scores.
  kernels::TopKParams Score(Stream& stream, int layer, const Queries& queries, const Selecting& of,
                            const int32_t* wanted) {
    auto* const codes = of.codes.as<int32_t>();
    kernels().HashQueries(
        stream,
        {queries.q, queries.stride, queries.slots, Hash(layer), codes, queries.rows, queries.heads,
         kv_heads(), static_cast<int32_t>(hash_.head_dim), words(), options().clo.hash_levels});
    kernels::HashScoresParams params{};
    params.q_codes = codes;
    params.wanted = wanted;
    params.slots = queries.slots;
    params.positions = queries.positions;
    params.codes = tier().Array(layer, kCodes);
    params.lengths = tier().Array(layer, kLengths);
    params.scores = of.fetch.scores(of.use);
    params.score_stride = options().max_context;
    params.rows = queries.rows;
    params.heads = queries.heads;
    params.reduction = options().reduction;
    kernels().HashScores(stream, params);

    kernels::TopKParams select = of.fetch.Selection(queries, of.use);
    select.k = static_cast<int32_t>(SparseExactTokens());  // all of what is exact
    select.k_divisor = divisor();
    select.first_units = kCloSinkTokens;
    select.wanted = wanted;
    return select;
  }

  TokenFetch::Rule RuleOf(const int32_t* listed) const {
    TokenFetch::Rule rule;
    rule.listed = listed;
    rule.whole = options().clo.reuse;
    rule.by_place = true;
    return rule;
  }

  // Fetches what the first labels select, on the stream that warms. `row` is that of the label.
  void SelectFirst(Stream& stream, int layer, int slot, const OffloadTier::BulkRow& row) {
    if (heads_[static_cast<size_t>(layer)] == Heads::kPersistent) return;
    const int64_t stride = options().heads * hash_.head_dim;
    const Queries label{first_labels_->of(layer) + slot * stride,
                        stride,
                        row.slots,
                        row.positions,
                        1,
                        options().heads};
    const int32_t* listed = OffloadedLists(layer);
    const kernels::TopKParams select = Score(stream, layer, label, OfFirst(), listed);
    first_fetch_->Bring(stream, stream, layer, label, select, RuleOf(listed));
  }

  const HashShape hash_;
  const std::vector<Heads> heads_;  // by layer
  const std::unique_ptr<TokenFetch> fetch_;
  const std::unique_ptr<TokenFetch> first_fetch_;  // of one row; its counters are not read
  const std::unique_ptr<FirstQueries> first_labels_;
  const Tables tables_;
};

std::vector<CloPolicy::Heads> CloPolicy::HeadsOf(const OffloadTier& tier, const HashShape& hash) {
  std::vector<Heads> heads;
  for (int layer = 0; layer < hash.layers; ++layer) {
    int64_t persistent = 0;
    for (int head = 0; head < hash.kv_heads; ++head) {
      persistent += tier.persistent(layer, head) ? 1 : 0;
    }
    heads.push_back(persistent == 0               ? Heads::kOffloaded
                    : persistent == hash.kv_heads ? Heads::kPersistent
                                                  : Heads::kBoth);
  }
  return heads;
}

absl::StatusOr<CloPolicy::Tables> CloPolicy::NewTables(const PolicyOptions& options,
                                                       const HashShape& hash,
                                                       const std::vector<uint8_t>& persistent) {
  const BufferAllocator tables(options.device, "tables of clo");
  const int64_t rows = MaxDecodeRows(options), lists = rows * hash.kv_heads;
  const int64_t slots = hash.layers * options.slots;
  Tables t;
  const PolicyOptions::Clo& clo = options.clo;
  const auto or_default = [](const std::vector<float>& values, int64_t count, float value) {
    return values.empty() ? std::vector<float>(static_cast<size_t>(count), value) : values;
  };
  SLUICE_ASSIGN_OR_RETURN(
      t.hash, Uploaded(options.device, clo.hash.empty() ? RandomHash(hash, clo.seed) : clo.hash,
                       "clo's hash matrices"));
  SLUICE_ASSIGN_OR_RETURN(
      t.importance,
      Uploaded(options.device, or_default(clo.importance, hash.layers * options.heads, 1.0f),
               "clo's importance of heads"));
  SLUICE_ASSIGN_OR_RETURN(
      t.thresholds,
      Uploaded(options.device,
               or_default(clo.thresholds, hash.layers * hash.kv_heads, clo.similarity),
               "clo's thresholds"));
  SLUICE_RETURN_IF_ERROR(
      tables.Words(MemoryKind::kDevice, slots * hash.kv_heads * hash.head_dim, &t.centres));
  SLUICE_RETURN_IF_ERROR(tables.Words(MemoryKind::kDevice, slots * hash.kv_heads, &t.labelled));
  SLUICE_RETURN_IF_ERROR(tables.Words(MemoryKind::kDevice, lists, &t.missed));
  const int64_t row_codes = options.heads * kernels::kHashPlanes * hash.bits / 32;
  for (Buffer* codes : {&t.predicted_codes, &t.q_codes}) {
    SLUICE_RETURN_IF_ERROR(tables.Words(MemoryKind::kDevice, rows * row_codes, codes));
  }
  SLUICE_RETURN_IF_ERROR(tables.Words(MemoryKind::kDevice, row_codes, &t.first_codes));
  if (persistent.empty()) return t;
  std::vector<int32_t> is, is_not;
  for (int64_t layer = 0; layer < hash.layers; ++layer) {
    for (int64_t list = 0; list < lists; ++list) {
      is.push_back(persistent[static_cast<size_t>(layer * hash.kv_heads + list % hash.kv_heads)]);
      is_not.push_back(1 - is.back());
    }
  }
  SLUICE_ASSIGN_OR_RETURN(t.persistent, Uploaded(options.device, is, "clo's persistent heads"));
  SLUICE_ASSIGN_OR_RETURN(t.offloaded, Uploaded(options.device, is_not, "clo's offloaded heads"));
  return t;
}

absl::StatusOr<std::unique_ptr<AttentionPolicy>> CloPolicy::Create(const PolicyOptions& options) {
  const CacheLayout& layout = options.hbm->layout();
  const CacheKind& kv = layout.kinds[0];
  HashShape hash;
  hash.layers = layout.layers;
  hash.kv_heads = kv.heads;
  hash.head_dim = kv.part_bytes[0] / SizeOf(kv.element_type);
  hash.bits = options.clo.hash_bits;
  hash.first_kv_head = options.rank_kv_heads.first;
  hash.all_kv_heads = options.rank_kv_heads.all;
  SLUICE_RETURN_IF_ERROR(CheckCloOptions(options, hash, int64_t{RingBlocks(kv)} * kv.block_tokens));
  OffloadTierOptions tier_options;
  tier_options.device = options.device;
  tier_options.hbm = options.hbm;
  tier_options.dram = options.dram;
  tier_options.slots = options.slots;
  tier_options.max_context = options.max_context;
  tier_options.dense_layers = std::min(options.dense_layers, layout.layers);
  tier_options.ring_blocks = RingBlocks(kv);
  tier_options.recall_blocks = static_cast<int>(kv.BlocksFor(options.budget_tokens));
  const int divisor = options.clo.budget_divisor;
  tier_options.recall_share =
      std::max(divisor > 0 ? 1.0 / divisor : 0.0, options.clo.resident_share);
  tier_options.persistent =
      PersistentHeads(hash.layers, hash.kv_heads,
                      {options.clo.difficulty, options.clo.misses, options.clo.predicted},
                      options.clo.persistent_share, options.clo.prefetchable);
  tier_options.unit_tokens = kUnitTokens;
  tier_options.arrays = {
      {"hash codes", 1, static_cast<int32_t>(hash.bits / 32), kernels::DType::kFloat32},
      {"lengths of keys", 1, 1, kernels::DType::kBFloat16}};
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<OffloadTier> tier, OffloadTier::Create(tier_options));
  SLUICE_ASSIGN_OR_RETURN(Buffer written, AllocateWritten(options));
  // A head selects as many tokens as a short sequence has places.
  const int64_t of_short =
      (tier_options.ring_blocks + tier_options.recall_blocks) * kv.block_tokens;
  const int64_t of_longest = divisor > 0 ? options.max_context / divisor : 0;
  TokenFetch::Shape of_first{.most_selected = std::max(of_short, of_longest), .rows = 1};
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<TokenFetch> first_fetch,
                          TokenFetch::Create(options, tier.get(), of_first));
  TokenFetch::Shape of_steps = of_first;
  of_steps.rows = MaxDecodeRows(options);
  of_steps.mover = options.clo.mover;
  of_steps.mover_workers = options.clo.mover_workers;
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<TokenFetch> fetch,
                          TokenFetch::Create(options, tier.get(), of_steps));
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<FirstQueries> first_labels,
                          FirstQueries::Create(options));
  SLUICE_ASSIGN_OR_RETURN(Tables tables, NewTables(options, hash, tier_options.persistent));
  return std::unique_ptr<AttentionPolicy>(
      new CloPolicy(options, std::move(tier), std::move(written), hash, std::move(fetch),
                    std::move(first_fetch), std::move(first_labels), std::move(tables)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<AttentionPolicy>> NewCloPolicy(const PolicyOptions& options) {
  return CloPolicy::Create(options);
}

}  // namespace sluice
