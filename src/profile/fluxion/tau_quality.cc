#include "src/profile/fluxion/tau_quality.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/attention/forwarding_policy.h"
#include "src/base/dtype.h"
#include "src/base/status_macros.h"
#include "src/bench/harness/policy_run.h"
#include "src/bench/workload/context.h"
#include "src/bench/workload/dictation.h"
#include "src/profile/query_capture.h"

namespace sluice {
namespace {

using bench::Context;
using bench::Dictation;

// The fewest tokens of a prompt whose last row has a cpu segment.
constexpr int64_t kFewestTokens = kernels::kFluxionLocalTokens + kernels::kFluxionLargestBlock;

// Returns the keys and values of a context's first `tokens` tokens, with room for `more`.
CapturedQueries CachesOf(const Context& context, const CacheLayout& layout, int64_t tokens,
                         int64_t more, bench::ContextReader* reader) {
  const CacheKind& kind = layout.kinds[0];
  const auto width = SizeOf(kind.element_type);
  CapturedQueries out;
  out.layers = layout.layers;
  out.kv_heads = kind.heads;
  out.head_dim = kind.part_bytes[0] / static_cast<int64_t>(width);
  out.heads.resize(static_cast<size_t>(out.layers * out.kv_heads));
  const auto all = std::ssize(context.tokens);
  for (int layer = 0; layer < layout.layers; ++layer) {
    std::vector<uint8_t> payload;
    reader->Read(context, layer, 0, [&](absl::Span<const uint8_t> piece) {
      payload.insert(payload.end(), piece.begin(), piece.end());
    });
    const uint8_t* at = payload.data();
    for (int64_t begin = 0; begin < all; begin += kind.block_tokens) {
      const int64_t count = std::min<int64_t>(kind.block_tokens, all - begin);
      for (int64_t head = 0; head < out.kv_heads; ++head) {
        HeadQueries& to = out.heads[static_cast<size_t>(layer * out.kv_heads + head)];
        for (std::vector<float>* part : {&to.k, &to.v}) {
          AppendFloats(at, count * out.head_dim, kind.element_type, part);
          at += count * out.head_dim * static_cast<int64_t>(width);
        }
      }
    }
  }
  for (HeadQueries& head : out.heads) {
    for (std::vector<float>* part : {&head.k, &head.v}) {
      part->reserve(static_cast<size_t>((all + more) * out.head_dim));
      part->resize(static_cast<size_t>(tokens * out.head_dim));
    }
  }
  return out;
}

// Attends, in place of policy `full`, to what a source of budgets tells of each row. It computes on
// the host while the step is enqueued, so steps have one row and cannot be recorded.
class SourceAttention : public ForwardingPolicy {
 public:
  SourceAttention(AttentionPolicy* full, Device* device, const CapturedQueries* prompt, DType type,
                  int threads)
      : ForwardingPolicy(full),
        prompt_(*prompt),
        type_(type),
        threads_(threads),
        done_(device->NewEvent()) {
    for (const HeadQueries& head : prompt->heads) {
      const HeadCache cache = {head.k.data(), head.v.data(), prompt->head_dim};
      digests_.push_back(std::make_unique<UnitDigests>(cache, Tokens(*prompt), true));
    }
  }

  absl::Status Allocate(Device* device, int64_t heads) {
    const int64_t dim = prompt_.head_dim;
    const auto bytes = static_cast<size_t>(2 * prompt_.kv_heads * dim * 4);
    SLUICE_ASSIGN_OR_RETURN(written_, device->Allocate(MemoryKind::kDevice, bytes, "keys"));
    SLUICE_ASSIGN_OR_RETURN(row_, device->Allocate(MemoryKind::kPinned, bytes, "keys"));
    const auto row = static_cast<size_t>(heads * dim * 4);
    SLUICE_ASSIGN_OR_RETURN(q_, device->Allocate(MemoryKind::kPinned, row, "queries"));
    SLUICE_ASSIGN_OR_RETURN(o_, device->Allocate(MemoryKind::kPinned, row, "outputs"));
    return absl::OkStatus();
  }

  // Begins again with the prompt, under another source; both outlive the steps.
  void Begin(const BudgetSource* source, SourceQuality* out) {
    caches_ = prompt_;
    for (size_t i = 0; i < caches_.heads.size(); ++i) {
      caches_.heads[i].k.reserve(prompt_.heads[i].k.capacity());
      caches_.heads[i].v.reserve(prompt_.heads[i].v.capacity());
    }
    source_ = source;
    out_ = out;
  }

  void Append(Stream& stream, int layer, kernels::RopeAppendParams params) override {
    params.written = written_.data();
    ForwardingPolicy::Append(stream, layer, params);
    stream.Copy(row_.data(), written_.data(),
                static_cast<size_t>(2 * caches_.kv_heads * caches_.head_dim) * SizeOf(type_));
  }

  void Attend(Stream& stream, int layer, kernels::AttentionParams params) override {
    SLUICE_CHECK(params.rows == 1 && params.decode_rows == 1);
    const int64_t size = params.heads * caches_.head_dim;
    stream.Copy(q_.data(), params.q, static_cast<size_t>(size) * 4);
    stream.Record(*done_);
    done_->Wait();
    for (int64_t kv = 0; kv < caches_.kv_heads; ++kv) {
      HeadQueries& head = caches_.heads[static_cast<size_t>(layer * caches_.kv_heads + kv)];
      const int64_t bytes = caches_.head_dim * static_cast<int64_t>(SizeOf(type_));
      const uint8_t* const at = row_.as<uint8_t>() + 2 * kv * bytes;
      AppendFloats(at, caches_.head_dim, type_, &head.k);
      AppendFloats(at + bytes, caches_.head_dim, type_, &head.v);
    }
    const std::vector<double> outputs = Outputs(RowOf(layer, params.heads));
    for (int64_t i = 0; i < size; ++i) {
      const auto o = static_cast<float>(outputs[static_cast<size_t>(i)]);
      if (params.out_type == kernels::DType::kFloat32) {
        o_.as<float>()[i] = o;
      } else {
        o_.as<uint16_t>()[i] = FloatToBFloat16(o);
      }
    }
    const size_t width = params.out_type == kernels::DType::kFloat32 ? 4 : 2;
    stream.Copy(params.out, o_.data(), static_cast<size_t>(size) * width);
  }

 private:
  static int64_t Tokens(const CapturedQueries& of, int layer = 0) {
    return std::ssize(of.of(layer, 0).k) / of.head_dim;
  }

  // Returns the newest row of a layer, computed on several threads.
  LayerRow RowOf(int layer, int64_t heads) const {
    LayerRow row;
    row.layer = layer;
    row.position = Tokens(caches_, layer) - 1;
    row.heads.resize(static_cast<size_t>(heads));
    const int64_t group = heads / caches_.kv_heads;
    const kernels::FluxionSegments segments =
        kernels::SegmentsOf(static_cast<int32_t>(row.position));
    std::vector<std::optional<GroupAttention>> groups(static_cast<size_t>(caches_.kv_heads));
    std::atomic<int64_t> next{0};
    {
      std::vector<std::jthread> team;
      for (int i = 0; i < std::clamp<int>(threads_, 1, static_cast<int>(groups.size())); ++i) {
        team.emplace_back([&] {
          for (int64_t kv = next++; kv < caches_.kv_heads; kv = next++) {
            const HeadQueries& of = caches_.of(layer, kv);
            groups[static_cast<size_t>(kv)].emplace(
                HeadCache{of.k.data(), of.v.data(), caches_.head_dim},
                *digests_[static_cast<size_t>(layer * caches_.kv_heads + kv)],
                q_.as<float>() + kv * group * caches_.head_dim, group, segments);
          }
        });
      }
    }
    for (std::optional<GroupAttention>& of : groups) {
      for (int64_t g = 0; g < group; ++g) {
        row.largest = std::max(row.largest, of->whole(g).Length());
      }
      row.groups.push_back(*std::move(of));
    }
    return row;
  }

  std::vector<double> Outputs(const LayerRow& row) {
    std::vector<double> outputs;
    out_->sums.Add(MeasureSource(*source_, row, &outputs));
    for (const GroupAttention& of : row.groups) {
      out_->cpu_tokens += kernels::CpuTokens(of.segments());
    }
    return outputs;
  }

  const CapturedQueries& prompt_;
  const DType type_;  // of the caches
  const int threads_;
  const std::unique_ptr<Event> done_;
  std::vector<std::unique_ptr<UnitDigests>> digests_;  // [layers * kv_heads]
  Buffer written_, row_, q_, o_;                       // of one row
  CapturedQueries caches_;                             // of the prompt and the rows so far
  const BudgetSource* source_ = nullptr;
  SourceQuality* out_ = nullptr;
};

// Runs the rows of one document after the other.
class QualityRun {
 public:
  QualityRun(int64_t steps, Device* device, Model* model, int threads)
      : steps_(steps), device_(device), model_(model), threads_(threads) {}

  absl::Status Start(int64_t longest) {
    const auto tokens = static_cast<int>(longest + 1);
    const int64_t bytes = bench::ArenaBytes(model_->cache_layout(), tokens) + (1 << 20);
    SLUICE_ASSIGN_OR_RETURN(tiers_, bench::BenchTiers::Create(*device_, bytes, bytes));
    world_.device = device_;
    world_.model = model_;
    world_.max_context = tokens;
    SLUICE_RETURN_IF_ERROR(tiers_->Cut(&world_, "full"));
    SLUICE_ASSIGN_OR_RETURN(contexts_, bench::ContextMaker::Create(tokens, device_, model_));
    SLUICE_ASSIGN_OR_RETURN(reader_, bench::ContextReader::Create(device_));
    return absl::OkStatus();
  }

  // `row` is called after each row.
  absl::Status Document(absl::Span<const BudgetSource> sources, const Prompt& document,
                        const std::function<void()>& row, std::vector<SourceQuality>* out) {
    const auto prompt = std::ssize(document) - steps_;
    SLUICE_ASSIGN_OR_RETURN(const Context context,
                            contexts_->Compute({document.begin(), document.begin() + prompt}));
    const absl::Span<const int32_t> next =
        absl::MakeConstSpan(document).last(static_cast<size_t>(steps_));
    SLUICE_ASSIGN_OR_RETURN(const auto full, bench::SetUpPolicy(world_, "full"));
    SLUICE_ASSIGN_OR_RETURN(const std::vector<bench::StepLogits> reference,
                            Dictate(full.get(), context, next, row));
    // The first row computes the prompt's last token again.
    const CacheLayout& layout = model_->cache_layout();
    const CapturedQueries caches = CachesOf(context, layout, prompt - 1, steps_, reader_.get());
    SourceAttention attention(full.get(), device_, &caches, layout.kinds[0].element_type, threads_);
    SLUICE_RETURN_IF_ERROR(attention.Allocate(device_, model_->config().heads));
    for (size_t i = 0; i < sources.size(); ++i) {
      attention.Begin(&sources[i], &(*out)[i]);
      SLUICE_ASSIGN_OR_RETURN(const std::vector<bench::StepLogits> found,
                              Dictate(&attention, context, next, row));
      for (size_t step = 0; step < found.size(); ++step) {
        (*out)[i].distance.Add(reference[step], found[step], next[step]);
      }
    }
    return absl::OkStatus();
  }

 private:
  absl::StatusOr<std::vector<bench::StepLogits>> Dictate(AttentionPolicy* policy,
                                                         const Context& context,
                                                         absl::Span<const int32_t> next,
                                                         const std::function<void()>& row) {
    SLUICE_ASSIGN_OR_RETURN(
        const auto dictation,
        Dictation::Create({device_, model_, policy, world_.dram, world_.max_context}));
    SLUICE_RETURN_IF_ERROR(dictation->Begin(context, world_.max_context));
    std::vector<bench::StepLogits> out;
    for (const int32_t token : next) {
      SLUICE_ASSIGN_OR_RETURN(const auto logits, dictation->Step());
      out.push_back(bench::NormalizeLogits(logits));
      dictation->Append(token);
      row();
    }
    return out;
  }

  const int64_t steps_;
  Device* const device_;
  Model* const model_;
  const int threads_;
  bench::PolicyWorld world_;
  std::unique_ptr<bench::BenchTiers> tiers_;
  std::unique_ptr<bench::ContextMaker> contexts_;
  std::unique_ptr<bench::ContextReader> reader_;
};

}  // namespace

absl::Status MeasureSourceQuality(absl::Span<const BudgetSource> sources, int64_t steps,
                                  Device* device, Model* model, absl::Span<const Prompt> documents,
                                  int threads,
                                  const std::function<void(int64_t, int64_t)>& progress,
                                  std::vector<SourceQuality>* out) {
  SLUICE_CHECK(steps >= 1 && steps <= kMostTauSteps);
  std::vector<const Prompt*> used;
  int64_t longest = 0;
  for (const Prompt& document : documents) {
    if (std::ssize(document) < kFewestTokens + steps) continue;
    used.push_back(&document);
    longest = std::max(longest, static_cast<int64_t>(document.size()));
  }
  if (used.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("no document has ", kFewestTokens + steps,
                     " tokens, so no row has a choice: take longer ones, or fewer --steps"));
  }
  out->resize(sources.size());
  QualityRun run(steps, device, model, threads);
  SLUICE_RETURN_IF_ERROR(run.Start(longest));
  int64_t done = 0;
  const int64_t all = std::ssize(used) * steps * (std::ssize(sources) + 1);
  for (const Prompt* document : used) {
    SLUICE_RETURN_IF_ERROR(run.Document(
        sources, *document, [&] { progress(++done, all); }, out));
  }
  return absl::OkStatus();
}

}  // namespace sluice
