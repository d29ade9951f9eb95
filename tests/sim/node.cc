#include "tests/sim/node.h"

#include <utility>

#include "src/attention/policy_factory.h"
#include "src/base/status_macros.h"
#include "src/engine/ngram_drafter.h"
#include "src/model/policy_model.h"
#include "tests/sim/hash.h"
#include "tests/support/guessing_drafter.h"

namespace sluice::sim {
namespace {

absl::StatusOr<std::unique_ptr<PagePool>> MakePool(const char* name, int64_t pages, MemoryKind kind,
                                                   const TierShape& shape, const NodeSpec& spec,
                                                   double overcommit, Device* device) {
  // PagePool keeps 4096 bytes for the alignment of each kind.
  const auto kinds = static_cast<int64_t>(shape.layout.kinds.size());
  SLUICE_ASSIGN_OR_RETURN(
      Buffer arena,
      device->Allocate(
          kind, static_cast<size_t>(pages * PageBytes(spec.block_tokens) + 4096 * kinds), name));
  return PagePool::Create(name, shape, std::move(arena), overcommit);
}

std::unique_ptr<Drafter> DrafterOf(const NodeSpec& spec) {
  if (spec.ngram) return NewNgramDrafter();
  testing::GuessingDrafter::Options guess;
  guess.seed = spec.engine.seed;
  guess.vocab = kVocab;
  guess.known = spec.known;
  return std::make_unique<testing::GuessingDrafter>(std::move(guess));
}

// Offers the drafts of another drafter, and holds those of the device against what they must be.
class CheckingDrafter : public Drafter {
 public:
  CheckingDrafter(std::unique_ptr<Drafter> offers, const Engine::Options& engine)
      : offers_(std::move(offers)), drafts_(engine.draft_tokens), context_(engine.max_context) {}
  const char* name() const override { return offers_->name(); }
  bool on_device() const override { return true; }
  std::unique_ptr<SequenceDrafter> Begin(int64_t total) override {
    return std::make_unique<Sequence>(this, offers_->Begin(total));
  }

 private:
  struct Sequence : SequenceDrafter {
    Sequence(const CheckingDrafter* all, std::unique_ptr<SequenceDrafter> offers)
        : of(all), inner(std::move(offers)) {}
    void Follow(absl::Span<const int32_t> tokens) override { inner->Follow(tokens); }
    bool Expects() const override { return inner->Expects(); }
    void Propose(int most, std::vector<int32_t>* drafts) const override {
      inner->Propose(most, drafts);
    }
    void Learn(absl::Span<const int32_t> tokens, absl::Span<const int32_t> drafts) override {
      SLUICE_CHECK(std::vector<int32_t>(drafts.begin(), drafts.end()) == of->Expected(tokens),
                   "a draft of the device is not the one behind its sequence's ", tokens.size(),
                   " tokens");
    }
    const CheckingDrafter* const of;
    const std::unique_ptr<SequenceDrafter> inner;
  };

  // A context has no room for drafts at its end, and one whose logits are not finite is the last.
  std::vector<int32_t> Expected(absl::Span<const int32_t> tokens) const {
    std::vector<int32_t> out;
    if (tokens.size() + drafts_ > context_) return out;
    int32_t token = tokens.back();
    while (out.size() < drafts_) {
      token = DraftBehind(token, static_cast<int64_t>(tokens.size() + out.size()) - 1);
      if (token < 0) break;
      out.push_back(token);
    }
    return out;
  }

  const std::unique_ptr<Drafter> offers_;
  const size_t drafts_, context_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Node>> Node::Create(const NodeSpec& spec, SimClock* clock) {
  std::unique_ptr<Node> node(new Node);
  SLUICE_RETURN_IF_ERROR(node->Build(spec, clock));
  return node;
}

absl::Status Node::Build(const NodeSpec& spec, SimClock* clock) {
  device_ = NewSimDevice(spec.device, clock);
  const auto slots = static_cast<int>(spec.engine.max_sequences);
  const int samples = slots * (1 + static_cast<int>(spec.engine.draft_tokens));
  const auto max_context = static_cast<int>(spec.engine.max_context);
  HashModelOptions model;
  model.max_context = max_context;
  model.block_tokens = spec.block_tokens;
  model.max_rows = static_cast<int>(spec.engine.chunk_tokens) + samples;
  model.max_logits = samples;
  model.top_k = spec.top_k;
  model.drafts = spec.device_drafts;
  SLUICE_ASSIGN_OR_RETURN(model_, NewHashModel(model, device_.get()));
  PolicyOptions policy = spec.policy;
  DescribeModel(*model_, &policy);
  policy.slots = slots;
  policy.rows_per_sequence = 1 + static_cast<int>(spec.engine.draft_tokens);
  policy.hbm_bytes = spec.hbm_pages * PageBytes(spec.block_tokens);
  policy.dram_bytes = spec.dram_pages * PageBytes(spec.block_tokens);
  const TierShapes shapes = TierShapesOf(policy, model_->cache_layout());
  SLUICE_ASSIGN_OR_RETURN(hbm_, MakePool("hbm", spec.hbm_pages, MemoryKind::kDevice, shapes.hbm,
                                         spec, spec.overcommit, device_.get()));
  SLUICE_ASSIGN_OR_RETURN(dram_, MakePool("dram", spec.dram_pages, MemoryKind::kPinned, shapes.dram,
                                          spec, 1.0, device_.get()));
  policy.device = device_.get();
  policy.hbm = hbm_.get();
  policy.dram = dram_.get();
  policy.host_kernels = &HashKernels();
  SLUICE_ASSIGN_OR_RETURN(policy_, NewPolicy(policy));
  TransferTable::Options transfers;
  transfers.model_fingerprint = model_->fingerprint();
  transfers.vocab_size = kVocab;
  transfers.max_context = spec.engine.max_context;
  transfers.max_lease = spec.lease;
  transfers.last_rows = [this](int64_t total) { return policy_->last_rows_wanted(total); };
  transfers.footprint = [this](int64_t context, int64_t total) {
    return policy_->FootprintOf(context, total);
  };
  transfers.hint_tokens = policy_->hint_tokens();
  transfers.hint_queries = policy_->hint_queries();
  finish_rate_ = std::make_unique<FinishRate>(clock);
  transfers.retry_after = [this] { return finish_rate_->RetryAfter(); };
  transfers_ = std::make_unique<TransferTable>(transfers, dram_.get(), hbm_.get(), clock);
  Engine::Parts parts;
  parts.device = device_.get();
  parts.model = model_.get();
  parts.policy = policy_.get();
  parts.transfers = transfers_.get();
  parts.metrics = &metrics_;
  parts.clock = clock;
  parts.finish_rate = finish_rate_.get();
  if (spec.engine.draft_tokens > 0) drafter_ = DrafterOf(spec);
  if (spec.device_drafts) {
    drafter_ = std::make_unique<CheckingDrafter>(std::move(drafter_), spec.engine);
  }
  parts.drafter = drafter_.get();
  SLUICE_ASSIGN_OR_RETURN(engine_, Engine::Create(spec.engine, parts));
  return absl::OkStatus();
}

Node::~Node() {
  engine_.reset();
  transfers_.reset();
  policy_.reset();
}

}  // namespace sluice::sim
