#include "src/prefill/prefiller.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/synchronization/mutex.h"
#include "src/attention/latent/prompt_selections.h"
#include "src/attention/policies/full/full_policy.h"
#include "src/base/error.h"
#include "src/base/reasons.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"
#include "src/engine/batch_state.h"
#include "src/kv/page_pool.h"
#include "src/kv/prefix_cache.h"
#include "src/kv/selection_hints.h"
#include "src/metrics/metrics.h"
#include "src/model/model.h"
#include "src/model/policy_model.h"
#include "src/prefill/important_blocks.h"
#include "src/prefill/marking_policy.h"
#include "src/prefill/prompt_hints.h"

namespace sluice {
namespace {

constexpr int kSlot = 0;  // one prompt at a time

// Returns the bytes of tokens [begin, end) of one layer and cache kind, all heads, in the order of
// a chunk's payload. Neighbours in memory are joined.
std::vector<absl::Span<const uint8_t>> ChunkPieces(const SequenceCache& cache, int layer,
                                                   size_t kind, int begin, int end) {
  std::vector<absl::Span<const uint8_t>> pieces;
  const int heads = cache.pool()->layout().kinds[kind].heads;
  cache.ForEachPiece({layer, kind, 0, heads, begin, end}, [&](const HomePiece& piece) {
    if (!pieces.empty() && pieces.back().data() + pieces.back().size() == piece.data) {
      pieces.back() = {pieces.back().data(), pieces.back().size() + piece.bytes};
    } else {
      pieces.emplace_back(piece.data, piece.bytes);
    }
  });
  return pieces;
}

// One layer's part of a chunk on its way from the caches to the wire.
struct Staging {
  Buffer memory;  // pinned
  std::vector<Stream::CopyOp> copies;
  std::unique_ptr<Event> copied;
};

class PrefillerImpl : public Prefiller {
 public:
  PrefillerImpl(const Options& options, Device* device, Model* model, Clock* clock,
                std::unique_ptr<PagePool> pool, std::unique_ptr<FullPolicy> policy,
                HintFinders finders, std::unique_ptr<BatchState> batch,
                std::array<Staging, 2> staging)
      : options_(options),
        device_(device),
        model_(model),
        clock_(clock),
        pool_(std::move(pool)),
        policy_(std::move(policy)),
        prefixes_(options.prefix_cache ? PrefixCache::Create(pool_.get()) : nullptr),
        finders_(std::move(finders)),
        marking_(policy_.get(), &finders_, device, model->cache_layout()),
        batch_(std::move(batch)),
        stream_(device->NewStream(Device::StreamKind::kCompute)),
        staging_(std::move(staging)),
        copy_stream_(device->NewStream(Device::StreamKind::kCopy)),
        seeds_(options.seed != 0 ? options.seed : RandomU64()) {
    // Chunks end on block boundaries, as the wire wants them.
    int block = 1;
    for (const CacheKind& kind : model->cache_layout().kinds)
      block = std::max(block, kind.block_tokens);
    chunk_tokens_ = std::max(block, static_cast<int>(options.chunk_tokens) / block * block);
    chunk_tokens_ = std::min(chunk_tokens_, model->max_rows() / block * block);
    for (Staging& s : staging_) s.copied = device->NewEvent();
  }

  absl::StatusOr<PrefillResult> Run(const std::vector<int32_t>& prompt,
                                    const SamplingParams& sampling, bool want_first_token,
                                    LayerSink& sink,
                                    const std::function<bool()>& cancelled) override {
    SLUICE_RETURN_IF_ERROR(Check(prompt, sampling));
    const absl::Time arrived = clock_->Now();
    absl::MutexLock lock(&mutex_);
    if (cancelled()) return absl::CancelledError("the caller has gone");
    SLUICE_RETURN_IF_ERROR(sink.Begin());
    const absl::Time started = clock_->Now();
    const auto tokens = static_cast<int64_t>(prompt.size());
    std::unique_ptr<SequenceCache> known = Known(prompt, sink.tenant());
    const int64_t reused = known == nullptr ? 0 : known->shared_tokens();
    SLUICE_CHECK(policy_->Admit(kSlot, reused, tokens, Promise::kFirm, known));
    policy_->WarmEvent(kSlot).Wait();
    on_device_ = false;
    batch_->Join(*stream_, kSlot, prompt, sampling, seeds_(), static_cast<int32_t>(prompt.size()),
                 StopIds(sampling, model_->config().eos_token_ids));
    absl::StatusOr<PrefillResult> result =
        Compute(static_cast<int>(reused), static_cast<int>(tokens), sampling, want_first_token,
                sink, cancelled);
    // These are needed after an error too, because what was launched still writes to the pages, and
    // what was taken is still read.
    if (on_device_) {
      absl::Status flushed = Flush(static_cast<int>(tokens), result.ok(), sink, cancelled);
      if (result.ok() && !flushed.ok()) result = std::move(flushed);
    }
    batch_->joined(kSlot).Wait();
    for (int buffer = 0; buffer < BatchState::kDepth; ++buffer) batch_->event(buffer).Wait();
    if (result.ok() && prefixes_ != nullptr && device_->Health().ok()) {
      prefixes_->Publish(sink.tenant(), Shareable(prompt), PrefixCache::Readers::kNone,
                         policy_->MutableResident(kSlot));
    }
    policy_->Release(kSlot);
    if (finders_.selections != nullptr) finders_.selections->End(kSlot);
    if (!result.ok()) return result.status();
    result->queued = started - arrived;
    result->compute = clock_->Now() - started;
    return result;
  }

 private:
  absl::Status Check(const std::vector<int32_t>& prompt, const SamplingParams& sampling) const {
    const auto vocab = static_cast<uint32_t>(model_->config().vocab_size);
    // The decode node handles stop strings: they end a stream and do not affect the choice of a
    // token.
    SLUICE_RETURN_IF_ERROR(
        ValidateSamplingParams(sampling, vocab, /*stop_strings_supported=*/true));
    if (prompt.empty()) return InvalidField("prompt_token_ids", "must not be empty");
    if (prompt.size() >= options_.max_context) {
      return InvalidField(
          "prompt_token_ids",
          absl::StrCat("this node's context is ", options_.max_context,
                       " tokens and must hold one more, found a prompt of ", prompt.size()));
    }
    for (size_t i = 0; i < prompt.size(); ++i) {
      if (static_cast<uint32_t>(prompt[i]) >= vocab) {
        return InvalidField("prompt_token_ids",
                            absl::StrCat("token ", i, " is ", static_cast<uint32_t>(prompt[i]),
                                         ", outside the vocabulary of ", vocab));
      }
    }
    if (!pool_->CouldEverFit(static_cast<int64_t>(prompt.size()))) {
      return InvalidField(
          "prompt_token_ids",
          absl::StrCat("this node's caches hold ", pool_->capacity_tokens(),
                       " tokens, found a prompt of ", prompt.size(), "; raise --hbm-bytes"));
    }
    return absl::OkStatus();
  }

  // Returns the tokens of a prompt that may be shared: its last rows are computed each time, for
  // the first token and for hints.
  absl::Span<const int32_t> Shareable(const std::vector<int32_t>& prompt) const {
    const size_t rows = finders_.selections != nullptr ? PromptSelections::kPositions : 1;
    return absl::MakeConstSpan(prompt).subspan(0, prompt.size() - std::min(prompt.size(), rows));
  }

  // Returns a cache that begins with what is known of the prompt; null if nothing is. It has whole
  // chunks, so that the rest is computed in the same steps as without it: on some kernels the
  // number of a step's rows shows in the last bits of its results.
  std::unique_ptr<SequenceCache> Known(const std::vector<int32_t>& prompt,
                                       const std::string& tenant) {
    if (prefixes_ == nullptr) return nullptr;
    const auto chunk =
        static_cast<size_t>(std::lcm<int64_t>(chunk_tokens_, prefixes_->unit_tokens()));
    const absl::Span<const int32_t> wanted = Shareable(prompt);
    SharedPrefix prefix = prefixes_->Find(tenant, wanted);
    if (const auto known = static_cast<size_t>(prefix.tokens()); known % chunk != 0) {
      prefix = prefixes_->Find(tenant, wanted.subspan(0, known / chunk * chunk));
    }
    if (options_.metrics != nullptr) {
      options_.metrics->prefix_queries.Add(static_cast<double>(prompt.size()));
      options_.metrics->prefix_hits.Add(static_cast<double>(prefix.tokens()));
      options_.metrics->tokens(TokenKind::kReused).Add(static_cast<double>(prefix.tokens()));
    }
    return prefix.empty() ? nullptr : prefixes_->NewSequence(std::move(prefix));
  }

  // Computes tokens [first, tokens) and sends all that the sink wants.
  absl::StatusOr<PrefillResult> Compute(int first, int tokens, const SamplingParams& sampling,
                                        bool want_first_token, LayerSink& sink,
                                        const std::function<bool()>& cancelled)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const int chunks = (tokens - first + chunk_tokens_ - 1) / chunk_tokens_;
    const int64_t hint_tokens = finders_.any() ? sink.hint_tokens() : 0;
    const int32_t blocks = finders_.blocks == nullptr ? 0 : HintedBlocks(hint_tokens, tokens);
    const bool keeps_selections = finders_.selections != nullptr && hint_tokens > 0;
    if (keeps_selections) SLUICE_CHECK(finders_.selections->Begin(kSlot));
    const auto launch = [&](int chunk) {
      const int from = first + chunk * chunk_tokens_;
      const int count = std::min(chunk_tokens_, tokens - from);
      const bool sample = want_first_token && from + count == tokens;
      plan_.rows.assign(1, PlanRow{kSlot, from, count, sample});
      plan_.row_count = count;
      plan_.decode_rows = 0;
      plan_.sample_count = sample ? 1 : 0;
      const int buffer = chunk % BatchState::kDepth;
      batch_->event(buffer).Wait();
      policy_->Grow(kSlot, from + count);
      marking_.SetBuffer(buffer);
      marking_.SetImportantBlocks(from + count == tokens ? blocks : 0);
      batch_->Launch(*stream_, buffer, plan_, *model_, marking_);
    };
    launch(0);
    // Caches that are there already are sent while the first chunk is computed.
    int begin = first;
    if (prefixes_ != nullptr) {
      const int64_t unit = prefixes_->unit_tokens();
      begin = static_cast<int>(std::min<int64_t>(sink.cached_tokens() / unit * unit, first));
    }
    sent_from_ = begin;
    on_device_ = sink.OnDevice();
    SLUICE_RETURN_IF_ERROR(PushAll(begin, first, sink, cancelled));
    for (int chunk = 0; chunk < chunks; ++chunk) {
      // The device gets the next chunk before this one is sent.
      if (chunk + 1 < chunks) launch(chunk + 1);
      begin = first + chunk * chunk_tokens_;
      const int end = std::min(begin + chunk_tokens_, tokens);
      SLUICE_RETURN_IF_ERROR(Push(begin, end, chunk % BatchState::kDepth, sink, cancelled));
    }
    const int last = (chunks - 1) % BatchState::kDepth;
    batch_->event(last).Wait();
    SLUICE_RETURN_IF_ERROR(device_->Health());
    PrefillResult result;
    if (blocks > 0) {
      result.hints = finders_.blocks->Read(*copy_stream_, blocks, sink.wants_queries());
    }
    if (keeps_selections) {
      result.hints = HintsOf(finders_.selections->Read(*copy_stream_, kSlot),
                             model_->cache_layout().layers, hint_tokens);
    }
    if (!want_first_token) return result;
    result.first_token = batch_->Result(last, 0, sampling.logprobs);
    if (result.first_token->id < 0) {
      return WithReason(absl::InternalError("the model's logits are not finite"),
                        reasons::kBadLogits);
    }
    return result;
  }

  // Returns how many blocks of a layer and KV head hints name.
  int32_t HintedBlocks(int64_t hint_tokens, int64_t tokens) const {
    const CacheLayout& layout = model_->cache_layout();
    const CacheKind& kind = layout.kinds[0];
    return static_cast<int32_t>(std::min<int64_t>(
        {hint_tokens / kind.block_tokens, kind.BlocksFor(tokens),
         static_cast<int64_t>(kMaxHintUnits) / (int64_t{layout.layers} * kind.heads)}));
  }

  // Sends tokens [begin, end), which are in the cache, in chunks.
  absl::Status PushAll(int begin, int end, LayerSink& sink, const std::function<bool()>& cancelled)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    for (; begin < end; begin += chunk_tokens_) {
      SLUICE_RETURN_IF_ERROR(
          Push(begin, std::min(begin + chunk_tokens_, end), std::nullopt, sink, cancelled));
    }
    return absl::OkStatus();
  }

  // Sends tokens [begin, end) layer by layer. `buffer` is that of the step that computes them;
  // none: they are in the cache.
  absl::Status Push(int begin, int end, std::optional<int> buffer, LayerSink& sink,
                    const std::function<bool()>& cancelled) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (on_device_) {
      SLUICE_ASSIGN_OR_RETURN(on_device_, PushOnDevice(begin, end, buffer, sink, cancelled));
      if (on_device_) return absl::OkStatus();
      // The sink may have lost all that it took.
      SLUICE_RETURN_IF_ERROR(PushAll(sent_from_, begin, sink, cancelled));
    }
    return PushByStaging(begin, end, buffer, sink, cancelled);
  }

  // Gives the sink the caches where they are. Returns what LayerOnDevice does.
  absl::StatusOr<bool> PushOnDevice(int begin, int end, std::optional<int> buffer, LayerSink& sink,
                                    const std::function<bool()>& cancelled) {
    const CacheLayout& layout = model_->cache_layout();
    for (int layer = 0; layer < layout.layers; ++layer) {
      if (cancelled()) return absl::CancelledError("the caller has gone");
      if (buffer.has_value()) marking_.appended(*buffer, layer).Wait();
      SLUICE_RETURN_IF_ERROR(device_->Health());
      for (size_t kind = 0; kind < layout.kinds.size(); ++kind) {
        SLUICE_ASSIGN_OR_RETURN(
            const bool taken,
            sink.LayerOnDevice(layer, layout.kinds[kind], begin, end,
                               ChunkPieces(policy_->resident(kSlot), layer, kind, begin, end)));
        if (!taken) return false;
      }
    }
    return true;
  }

  // Waits until all that was taken on the device has arrived. If it is lost and still `wanted`,
  // sends it again.
  absl::Status Flush(int tokens, bool wanted, LayerSink& sink,
                     const std::function<bool()>& cancelled) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    SLUICE_ASSIGN_OR_RETURN(on_device_, sink.FlushDevice());
    if (on_device_ || !wanted) return absl::OkStatus();
    return PushAll(sent_from_, tokens, sink, cancelled);
  }

  // Sends the layers through pinned memory. The next one is copied while one is pushed.
  absl::Status PushByStaging(int begin, int end, std::optional<int> buffer, LayerSink& sink,
                             const std::function<bool()>& cancelled) {
    const CacheLayout& layout = model_->cache_layout();
    for (int layer = 0; layer <= layout.layers; ++layer) {
      if (layer < layout.layers) Stage(buffer, layer, begin, end);
      if (layer == 0) continue;
      absl::Status pushed = cancelled() ? absl::CancelledError("the caller has gone")
                                        : PushStaged(layer - 1, begin, end, sink);
      if (pushed.ok()) continue;
      // The staged copies still read the pages.
      for (Staging& staging : staging_) staging.copied->Wait();
      return pushed;
    }
    return absl::OkStatus();
  }

  // Enqueues the copy of a layer's part of the chunk, to run once the part is in the cache.
  void Stage(std::optional<int> buffer, int layer, int begin, int end) {
    Staging& staging = staging_[static_cast<size_t>(layer) % staging_.size()];
    staging.copies.clear();
    auto* target = staging.memory.as<uint8_t>();
    for (size_t kind = 0; kind < model_->cache_layout().kinds.size(); ++kind) {
      for (const auto piece : ChunkPieces(policy_->resident(kSlot), layer, kind, begin, end)) {
        staging.copies.push_back({target, piece.data(), piece.size()});
        target += piece.size();
      }
    }
    if (buffer.has_value()) copy_stream_->WaitFor(marking_.appended(*buffer, layer));
    copy_stream_->CopyBatch(staging.copies.data(), staging.copies.size());
    copy_stream_->Record(*staging.copied);
  }

  absl::Status PushStaged(int layer, int begin, int end, LayerSink& sink) {
    const Staging& staging = staging_[static_cast<size_t>(layer) % staging_.size()];
    staging.copied->Wait();
    SLUICE_RETURN_IF_ERROR(device_->Health());
    const auto* payload = staging.memory.as<uint8_t>();
    for (const CacheKind& kind : model_->cache_layout().kinds) {
      const auto bytes = static_cast<size_t>(kind.bytes_per_token * kind.heads * (end - begin));
      const absl::Span<const uint8_t> piece(payload, bytes);
      SLUICE_RETURN_IF_ERROR(sink.Layer(layer, kind, begin, end, {&piece, 1}));
      payload += bytes;
    }
    return absl::OkStatus();
  }

  const Options options_;
  Device* const device_;
  Model* const model_;
  Clock* const clock_;
  const std::unique_ptr<PagePool> pool_;
  const std::unique_ptr<FullPolicy> policy_;
  const std::shared_ptr<PrefixCache> prefixes_;  // null: prompts share nothing
  int chunk_tokens_ = 0;
  absl::Mutex mutex_;  // held for a whole prompt
  const HintFinders finders_;
  MarkingPolicy marking_;
  const std::unique_ptr<BatchState> batch_;
  const std::unique_ptr<Stream> stream_;
  std::array<Staging, 2> staging_;  // for even and odd layers
  const std::unique_ptr<Stream> copy_stream_;
  StepPlan plan_ ABSL_GUARDED_BY(mutex_);
  // The first token of the running prompt that is sent, and whether its caches are sent from where
  // they are.
  int sent_from_ ABSL_GUARDED_BY(mutex_) = 0;
  bool on_device_ ABSL_GUARDED_BY(mutex_) = false;
  SplitMix64 seeds_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace

absl::StatusOr<std::unique_ptr<Prefiller>> Prefiller::Create(const Options& options, Device* device,
                                                             Model* model, Clock* clock) {
  for (const CacheKind& kind : model->cache_layout().kinds) {
    SLUICE_CHECK(model->max_rows() >= kind.block_tokens, "a chunk is at least a block");
  }
  SLUICE_ASSIGN_OR_RETURN(
      Buffer arena, device->Allocate(MemoryKind::kDevice, static_cast<size_t>(options.hbm_bytes),
                                     "the caches (--hbm-bytes)"));
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<PagePool> pool,
                          PagePool::Create("hbm", model->cache_layout(), std::move(arena)));
  PolicyOptions of = PolicyOver(device, pool.get(), 1, 0);
  DescribeModel(*model, &of);
  of.max_context = static_cast<int>(options.max_context);
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<FullPolicy> policy, NewFullPolicy(of));
  SLUICE_ASSIGN_OR_RETURN(
      std::unique_ptr<BatchState> batch,
      BatchState::Create({1, static_cast<int>(options.max_context)}, device, *model));
  HintFinders finders;
  const std::optional<LatentConfig>& latent = model->config().latent;
  if (options.hints && !latent.has_value()) {
    SLUICE_ASSIGN_OR_RETURN(finders.blocks, ImportantBlocks::Create(device, model->cache_layout(),
                                                                    of.heads, options.max_context));
  } else if (options.hints && latent->indexer.has_value()) {
    PromptSelections::Options selections;
    selections.device = device;
    selections.layers = model->cache_layout().layers;
    selections.top_k = latent->indexer->top_k;
    selections.slots = 1;
    SLUICE_ASSIGN_OR_RETURN(finders.selections, PromptSelections::Create(selections));
  }
  std::array<Staging, 2> staging;
  for (Staging& s : staging) {
    int64_t bytes = 0;
    for (const CacheKind& kind : model->cache_layout().kinds) {
      bytes += kind.bytes_per_token * kind.heads * model->max_rows();
    }
    SLUICE_ASSIGN_OR_RETURN(
        s.memory,
        device->Allocate(MemoryKind::kPinned, static_cast<size_t>(bytes), "layers to push"));
  }
  return std::make_unique<PrefillerImpl>(options, device, model, clock, std::move(pool),
                                         std::move(policy), std::move(finders), std::move(batch),
                                         std::move(staging));
}

}  // namespace sluice
