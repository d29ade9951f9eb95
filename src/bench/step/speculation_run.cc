#include "src/bench/step/speculation_run.h"

#include <algorithm>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/bench/step/known_drafter.h"

namespace sluice::bench {
namespace {

// Sequences that DRAM holds on their way to HBM: long contexts of a large batch are more than a
// host's memory.
constexpr int kSequencesInDram = 4;
constexpr int64_t kAlignment = 4096;

absl::StatusOr<SpeculationSide> RunSide(EngineRunOptions run, int slots, Device* device,
                                        Model* model, PagePool* hbm, AttentionPolicy* policy) {
  SpeculationSide side;
  side.outputs.resize(static_cast<size_t>(run.batch));
  int64_t tokens = 0;  // Owned by the engine's thread, as are the marks.
  std::vector<int64_t> marks(static_cast<size_t>(run.windows) + 1);
  run.distinct_prompts = true;
  run.to_the_end = true;
  run.on_token = [&](size_t sequence, const OutputToken& token) {
    side.outputs[sequence].push_back(token.id);
    ++tokens;
  };
  run.on_mark = [&](size_t mark) { marks[mark] = tokens; };
  SLUICE_ASSIGN_OR_RETURN(const std::vector<EngineWindow> windows,
                          RunEngine(run, slots, device, model, hbm, policy));
  std::vector<double> rates;
  for (size_t w = 0; w < windows.size(); ++w) {
    const double seconds = absl::ToDoubleSeconds(windows[w].end - windows[w].begin);
    rates.push_back(static_cast<double>(marks[w + 1] - marks[w]) / seconds);
    side.seconds += seconds;
    side.steps += static_cast<int64_t>(windows[w].steps);
  }
  side.tokens = marks.back() - marks.front();
  side.tokens_per_second = TimingOf(rates);
  side.tokens_per_step =
      static_cast<double>(side.tokens) / static_cast<double>(side.steps * run.batch);
  return side;
}

}  // namespace

absl::StatusOr<SpeculationResult> RunSpeculation(const SpeculationOptions& options, int slots,
                                                 Device* device, Model* model, PagePool* hbm,
                                                 AttentionPolicy* policy) {
  EngineRunOptions run = options.run;
  SLUICE_CHECK(run.steps > options.draft_tokens);
  const CacheLayout& layout = model->cache_layout();
  // A pool loses up to kAlignment to each kind of cache.
  const int64_t bytes = layout.BytesFor(run.context) * std::min(run.batch, kSequencesInDram) +
                        kAlignment * std::ssize(layout.kinds);
  SLUICE_ASSIGN_OR_RETURN(
      Buffer memory, device->Allocate(MemoryKind::kPinned, static_cast<size_t>(bytes), "dram"));
  SLUICE_ASSIGN_OR_RETURN(const auto dram, PagePool::Create("dram", layout, std::move(memory)));
  run.dram = dram.get();
  run.drafter = nullptr;
  run.draft_tokens = 0;
  SpeculationResult result;
  SLUICE_ASSIGN_OR_RETURN(result.plain, RunSide(run, slots, device, model, hbm, policy));
  KnownDrafter::Options known;
  known.vocab = static_cast<int32_t>(model->config().vocab_size);
  known.probability = options.probability;
  known.context = run.context;
  known.on_device = options.draft_layer;
  known.known = result.plain.outputs;
  KnownDrafter drafter(std::move(known));
  run.drafter = &drafter;
  run.draft_tokens = options.draft_tokens;
  SLUICE_ASSIGN_OR_RETURN(result.drafted, RunSide(run, slots, device, model, hbm, policy));
  SLUICE_RETURN_IF_ERROR(CheckSameTokens(result.plain.outputs, result.drafted.outputs));
  result.judged = drafter.counts().judged;
  result.acceptance = static_cast<double>(drafter.counts().right) /
                      static_cast<double>(std::max<int64_t>(result.judged, 1));
  return result;
}

absl::Status CheckSameTokens(const std::vector<std::vector<int32_t>>& plain,
                             const std::vector<std::vector<int32_t>>& drafted) {
  SLUICE_CHECK(plain.size() == drafted.size());
  for (size_t s = 0; s < plain.size(); ++s) {
    const auto [a, b] =
        std::mismatch(plain[s].begin(), plain[s].end(), drafted[s].begin(), drafted[s].end());
    if (a == plain[s].end() && b == drafted[s].end()) continue;
    const auto token = [](const auto& it, const auto& of) {
      return it == of.end() ? std::string("no token") : absl::StrCat("token ", *it);
    };
    return absl::InternalError(absl::StrCat("sequence ", s, ", output ", a - plain[s].begin(), ": ",
                                            token(a, plain[s]), " without drafts, ",
                                            token(b, drafted[s]), " with drafts"));
  }
  return absl::OkStatus();
}

double ExpectedTokensPerStep(int draft_tokens, double probability) {
  double sum = 1, all = 1;
  for (int i = 0; i < draft_tokens; ++i) sum += all *= probability;
  return sum;
}

}  // namespace sluice::bench
