#include "tests/sim/scenario.h"

#include <algorithm>
#include <iterator>
#include <limits>

#include "tests/sim/alone.h"
#include "tests/sim/draw_fluxion.h"
#include "tests/sim/hash_model.h"

namespace sluice::sim {

absl::Duration DrawDuration(SplitMix64& random, absl::Duration most) {
  return random.Uniform() * most;
}

bool OneIn(SplitMix64& random, uint64_t n) { return random.Below(n) == 0; }

int64_t Between(SplitMix64& random, int64_t low, int64_t high) {
  return low + static_cast<int64_t>(random.Below(static_cast<uint64_t>(high - low + 1)));
}

namespace {

// Longest context in most seeds. Preemption needs sequences that grow by far more than the
// scheduler keeps free for those that run.
constexpr int64_t kShortContext = 64;
constexpr int64_t kLongContext = 256;
// The span over which requests arrive.
constexpr absl::Duration kArrivals = absl::Milliseconds(120);

// Policies over the offload tiers. Some nodes have fluxion in the place of one of these.
constexpr const char* kSparse[] = {"oracle", "scout", "recall", "hgca", "clo"};
// Policies over latent caches.
constexpr const char* kOffloading[] = {"ess", "offload-naive"};

void DrawWorkerFaults(SplitMix64& random, SimDeviceOptions* device) {
  if (!OneIn(random, 3)) return;
  device->worker_failures = 0.002;
  device->late_workers = 0.001;
  if (OneIn(random, 3)) device->leaving_workers = 0.0005;
}

// Draws a policy with a budget of a few blocks, and pools that hold at least one sequence of it.
void DrawSparse(SplitMix64& random, int64_t longest, NodeSpec* node) {
  PolicyOptions& policy = node->policy;
  policy.name = kSparse[random.Below(std::size(kSparse))];
  policy.budget_tokens = static_cast<int>(Between(random, 4, 8)) * kBlockTokens;
  policy.dense_layers = static_cast<int>(random.Below(2));
  policy.reduction = static_cast<kernels::GroupReduction>(random.Below(3));
  policy.workers = static_cast<int>(Between(random, 1, 3));
  policy.worker_deadline = absl::Milliseconds(Between(random, 2, 20));
  node->selects_all = OneIn(random, 3);
  if (node->selects_all) policy.budget_tokens = static_cast<int>(longest) + kBlockTokens;
  policy.scout.layer_ahead = !OneIn(random, 3);
  policy.scout.recall = !OneIn(random, 4);
  policy.scout.attend_whole = !OneIn(random, 4);
  policy.scout.resident_tokens = static_cast<int>(Between(random, 2, 6)) * kBlockTokens;
  if (OneIn(random, 2)) {
    policy.scout.intervals.assign(kLayers, static_cast<int32_t>(Between(random, 1, 6)));
  }
  policy.recall.margin = node->selects_all ? std::numeric_limits<float>::infinity() : 2.0f;
  policy.recall.fetch_all = OneIn(random, 3);
  policy.recall.rank = 2;
  policy.hgca.window_tokens = static_cast<int>(Between(random, 2, 4)) * kBlockTokens;
  policy.hgca.beta = node->selects_all ? 0.0f : static_cast<float>(random.Uniform());
  policy.oracle.selector = static_cast<PolicyOptions::Oracle::Selector>(random.Below(4));
  policy.oracle.seed = 1 + random();
  node->overcommit = 1;
  const int64_t pages = longest / kBlockTokens * kLayers;
  // space for tables, digests and rings too, for at least one sequence
  node->hbm_pages = pages * 4;
  node->dram_pages = Between(random, pages, pages * 4);
  DrawWorkerFaults(random, &node->device);
}

// Draws the forms of clo. These draws are separate, so that a seed stays the same otherwise. The
// budget covers the ring and the first tokens.
void DrawClo(uint64_t seed, PolicyOptions* policy) {
  if (policy->name != "clo") return;
  SplitMix64 random(seed);
  PolicyOptions::Clo& clo = policy->clo;
  policy->budget_tokens += 64;
  clo.budget_divisor = static_cast<int>(random.Below(5));
  clo.similarity = static_cast<float>(2 * random.Uniform() - 1);
  clo.refresh = !OneIn(random, 4);
  clo.hash_bits = 32;
  clo.reuse = !OneIn(random, 4);
  clo.refill = static_cast<PolicyOptions::Clo::Refill>(random.Below(2));
  if (OneIn(random, 2)) clo.persistent_share = random.Uniform();
  if (OneIn(random, 3)) clo.resident_share = random.Uniform();
  clo.early = OneIn(random, 2);
  clo.persistent_ahead = OneIn(random, 2);
  clo.centred = !OneIn(random, 3);
  clo.hash_levels = OneIn(random, 3) ? 1 : kernels::kMostHashLevels;
  if (policy->reduction == kernels::GroupReduction::kSoftmaxSum) {
    policy->reduction = kernels::GroupReduction::kMean;
  }
}

// Draws a policy that keeps latent entries in DRAM, with pools of a few KV slots or as large as HBM
// allows.
void DrawOffloaded(SplitMix64& random, int64_t longest, NodeSpec* node) {
  using Overlap = PolicyOptions::Ess::Overlap;
  PolicyOptions& policy = node->policy;
  policy.name = OneIn(random, 4) ? "offload-naive" : "ess";
  policy.recompute_last = static_cast<PolicyOptions::RecomputeLast>(random.Below(3));
  policy.ess.sparse_memory_ratio = OneIn(random, 3) ? 0 : 0.1 + 0.9 * random.Uniform();
  policy.ess.least_places = static_cast<int>(random.Below(12));
  policy.ess.warm_up = !OneIn(random, 4);
  policy.ess.lru = !OneIn(random, 5);
  policy.ess.overlap = static_cast<Overlap>(random.Below(4));
  node->overcommit = 1;
  const int64_t pages = longest / kBlockTokens * kLayers;
  const int64_t tables = kLayers * int64_t{3} * 4096 / PageBytes(kBlockTokens);
  node->hbm_pages = (pages * 2 + tables) * Between(random, 1, 4) + tables;
  node->dram_pages = Between(random, pages, pages * 4);
}

// Draws what ess has beyond its paper: entries fetched for the next step, KV slots divided among
// layers. These draws are separate, so that a seed stays the same otherwise.
void DrawBeyondPaper(int64_t longest, NodeSpec* node) {
  PolicyOptions::Ess& ess = node->policy.ess;
  SplitMix64 random(node->engine.seed);
  if (node->policy.name != "ess" || !ess.lru) return;
  if (OneIn(random, 2)) ess.prefetch = static_cast<int>(Between(random, 1, node->top_k));
  if (ess.sparse_memory_ratio == 0 || OneIn(random, 2)) return;
  ess.divide_places = true;
  for (const double ratio : {0.02, 0.9}) {
    MissProfile::Point& point = ess.profile.points.emplace_back();
    point.context = longest;
    point.ratio = ratio;
    point.batch = 1;
    for (int layer = 0; layer < kLayers; ++layer) {
      point.by_layer.push_back(10000 * random.Uniform() * (1 - ratio));
    }
  }
}

// Draws whether a node of such a policy speculates. A step's rows have places in its pools then.
// The draws are separate, as those above.
void DrawOffloadedDrafts(NodeSpec* node) {
  SplitMix64 random(node->engine.seed + 2);
  if (OneIn(random, 2)) return;
  const bool stays = node->policy.name == "ess" && node->policy.ess.lru;
  node->engine.draft_tokens = static_cast<uint32_t>(Between(random, 1, stays ? 4 : 3));
  node->engine.limit_drafts = true;
  node->ngram = OneIn(random, 3);
  node->policy.ess.prefetch = 0;  // is refused
}

// Draws who brings ess's misses over the link. These draws are separate, so that a seed stays the
// same otherwise.
void DrawMover(NodeSpec* node) {
  using Mover = PolicyOptions::Mover;
  SplitMix64 random(node->engine.seed + 3);
  node->policy.ess.mover = OneIn(random, 3)   ? Mover::kUva
                           : OneIn(random, 4) ? Mover::kAuto
                                              : Mover::kCpu;
  if (node->policy.ess.mover == Mover::kUva) return;
  node->policy.workers = static_cast<int>(Between(random, 1, 4));
  node->policy.worker_deadline = absl::Milliseconds(Between(random, 2, 20));
  DrawWorkerFaults(random, &node->device);
}

// Draws whether a node of policy full speculates. These draws are separate, so that a seed stays
// the same otherwise.
void DrawSpeculation(NodeSpec* node) {
  if (node->policy.name != "full") return;
  SplitMix64 random(node->engine.seed + 1);
  if (OneIn(random, 3)) return;
  node->engine.draft_tokens =
      static_cast<uint32_t>(OneIn(random, 6) ? kernels::kMaxNewTokens - 1 : Between(random, 1, 4));
  node->engine.limit_drafts = true;
  node->ngram = OneIn(random, 3);
  node->device_drafts = node->top_k > 0 && node->engine.draft_tokens <= kernels::kMaxDeviceDrafts &&
                        !OneIn(random, 4);
}

// Draws a node. `wanted` is its policy; empty: any.
NodeSpec DrawNode(SplitMix64& random, Plant plant, const std::string& wanted) {
  NodeSpec node;
  node.engine.max_sequences = static_cast<uint32_t>(Between(random, 1, 5));
  node.engine.max_waiting = static_cast<uint32_t>(Between(random, 2, 12));
  const int64_t longest = OneIn(random, 6) ? kLongContext : kShortContext;
  node.engine.max_context = static_cast<uint32_t>(longest);
  node.engine.chunk_tokens = static_cast<uint32_t>(Between(random, 1, 16));
  node.engine.local_prefill = LocalPrefill::kAlways;
  node.engine.seed = 1 + random();
  node.engine.transfer_wait = absl::Milliseconds(Between(random, 20, 400));
  node.engine.slow_reader_timeout = absl::Milliseconds(Between(random, 10, 100));
  const int64_t pages = longest / kBlockTokens * kLayers;  // pages of the longest sequence
  node.hbm_pages = Between(random, pages * 5 / 8, pages * 3);
  node.dram_pages = Between(random, pages * 5 / 8, pages * 3);
  if (longest == kLongContext) {
    // Enough DRAM for evictions out of HBM, and enough slots to fill it.
    node.dram_pages = pages * 6;
    node.engine.max_sequences = static_cast<uint32_t>(Between(random, 3, 8));
  }
  if (longest == kLongContext || OneIn(random, 2)) node.overcommit = 1 + 3 * random.Uniform();
  node.lease = absl::Milliseconds(Between(random, 10, 200));
  node.device.kernels = &HashKernels();
  node.device.seed = random();
  node.device.kernel_time = absl::Microseconds(Between(random, 1, 60));
  node.device.copy_time = absl::Microseconds(Between(random, 1, 200));
  if (OneIn(random, 3)) {
    node.device.stall_share = 0.004;
    node.device.stall = absl::Milliseconds(Between(random, 1, 60));
  }
  if (OneIn(random, 12)) node.device.refused_allocation = static_cast<int>(random.Below(40));
  if (plant == Plant::kEarlyEvents) node.device.early_events = 0.05;
  if (plant == Plant::kLostCopies) node.device.lost_copies = 0.01;
  node.host_time = absl::Microseconds(OneIn(random, 4) ? 1000 : 20);
  node.longest =
      std::min<int64_t>(node.engine.max_context, node.hbm_pages / kLayers * kBlockTokens);
  const auto is_wanted = [&](const auto& names) {
    return std::find(std::begin(names), std::end(names), wanted) != std::end(names);
  };
  const bool offloads = is_wanted(kOffloading);
  if (wanted.empty() ? OneIn(random, 2) : is_wanted(kSparse) || wanted == "fluxion") {
    DrawSparse(random, longest, &node);
    if (!wanted.empty()) node.policy.name = wanted;
    DrawClo(node.engine.seed, &node.policy);
    if (wanted == "fluxion" || (wanted.empty() && IsFluxion(node))) DrawFluxion(&node);
    Measure(&node);
  } else if (offloads || OneIn(random, 2)) {
    node.top_k = static_cast<int>(Between(random, 1, OneIn(random, 3) ? longest : 16));
    if (offloads || (wanted.empty() && OneIn(random, 2))) {
      DrawOffloaded(random, longest, &node);
      if (offloads) node.policy.name = wanted;
      DrawBeyondPaper(longest, &node);
      DrawOffloadedDrafts(&node);
      DrawMover(&node);
      Measure(&node);
      if (node.longest == 0) {  // drafts may take more places than such a node has
        node.engine.draft_tokens = 0;
        Measure(&node);
      }
    }
  }
  DrawSpeculation(&node);
  return node;
}

SamplingParams DrawSampling(SplitMix64& random, uint32_t max_new_tokens) {
  SamplingParams sampling;
  sampling.temperature = 0;
  if (OneIn(random, 2)) {
    sampling.temperature = static_cast<float>(0.3 + random.Uniform());
    sampling.seed = random();
    if (OneIn(random, 3)) sampling.top_k = static_cast<uint32_t>(Between(random, 1, 20));
    if (OneIn(random, 3)) sampling.top_p = static_cast<float>(0.3 + 0.7 * random.Uniform());
    if (OneIn(random, 4)) sampling.min_p = static_cast<float>(0.2 * random.Uniform());
  }
  if (OneIn(random, 4)) sampling.repetition_penalty = 1.3f;
  if (OneIn(random, 4)) sampling.frequency_penalty = 0.5f;
  if (OneIn(random, 4)) sampling.presence_penalty = 0.7f;
  if (OneIn(random, 6)) sampling.logit_bias = {{5, 1.5f}, {9, -3.0f}};
  if (OneIn(random, 3)) sampling.logprobs = static_cast<uint32_t>(random.Below(4));
  sampling.ignore_eos = OneIn(random, 3);
  if (OneIn(random, 3)) {
    sampling.stop_token_ids = {static_cast<uint32_t>(random.Below(kVocab)),
                               static_cast<uint32_t>(random.Below(kVocab))};
  }
  if (!OneIn(random, 4)) {
    sampling.max_tokens = static_cast<uint32_t>(Between(random, 1, max_new_tokens));
  }
  const uint32_t most = sampling.max_tokens.value_or(max_new_tokens);
  if (OneIn(random, 4)) sampling.min_tokens = static_cast<uint32_t>(random.Below(most + 1));
  return sampling;
}

// Lets some prompts begin as an earlier request's prompt and answer do.
void BeginAsAnother(SplitMix64& random, const NodeSpec& node, std::vector<int32_t>* prompt) {
  if (node.known.empty() || OneIn(random, 2)) return;
  const std::vector<int32_t>& other = node.known[random.Below(node.known.size())];
  const auto most = static_cast<int64_t>(std::min(prompt->size(), other.size()));
  const auto same = static_cast<size_t>(Between(random, 1, most));
  for (size_t i = 0; i < same && other[i] < kVocab - 1; ++i) (*prompt)[i] = other[i];
}

RequestSpec DrawRequest(SplitMix64& random, const NodeSpec& node, int index) {
  RequestSpec r;
  r.index = index;
  r.seed = random();
  // A request may ask for at most what an empty pool holds.
  const bool is_fluxion = node.policy.name == "fluxion";
  const int64_t room = std::min(node.longest, node.dram_pages / kLayers * node.block_tokens);
  const bool grows = room > kShortContext && !is_fluxion;
  const int64_t prompt = is_fluxion ? DrawFluxionPrompt(random, node)
                         : grows    ? Between(random, 1, 24)
                                    : Between(random, 1, room - 2);
  const int64_t most_new = is_fluxion ? std::min(kMostFluxionTokens, room - prompt) : room - prompt;
  r.max_new_tokens = static_cast<uint32_t>(Between(random, grows ? room / 2 : 1, most_new));
  for (int64_t i = 0; i < prompt; ++i) {
    r.prompt.push_back(static_cast<int32_t>(random.Below(kVocab - 1)));
  }
  BeginAsAnother(random, node, &r.prompt);
  r.sampling = DrawSampling(random, r.max_new_tokens);
  if ((grows || is_fluxion) && !OneIn(random, 3)) {
    r.sampling.ignore_eos = true;
    r.sampling.stop_token_ids.clear();
    r.sampling.max_tokens.reset();
  }
  switch (random.Below(6)) {
    case 0:
      r.meeting = Meeting::kLocal;
      break;
    case 1:
    case 2:
      r.meeting = Meeting::kByKey;
      break;
    default:
      r.meeting = Meeting::kById;
      break;
  }
  if (is_fluxion && !r.sampling.max_tokens.has_value()) r.sampling.max_tokens = r.max_new_tokens;
  int64_t max_tokens = r.sampling.max_tokens.value_or(r.max_new_tokens);
  if (r.meeting == Meeting::kLocal) {
    if (!r.sampling.max_tokens.has_value()) {
      max_tokens = node.longest - prompt;
    }
  } else {
    r.context = OneIn(random, 2) ? static_cast<uint32_t>(prompt)
                                 : static_cast<uint32_t>(Between(random, 1, prompt));
    if (OneIn(random, 3)) {
      const int64_t most = std::min<int64_t>(4, max_tokens);
      for (int64_t i = Between(random, 1, most); i > 0; --i) {
        OutputToken token;
        token.id = static_cast<int32_t>(random.Below(kVocab - 1));
        token.logprob = -0.5f;
        r.first.push_back(token);
      }
    }
  }
  if (is_fluxion && r.meeting != Meeting::kLocal)
    r.hints = DrawFluxionHints(r.context, node, random);
  r.expected = Expect(r.prompt, r.first, r.sampling, max_tokens, node.top_k);
  r.exact = r.expected.tokens;
  if (!node.selects_all) r.expected = ExpectAlone(node, r);

  r.reserve_at = DrawDuration(random, kArrivals);
  if (r.meeting == Meeting::kById) {
    r.generate_after_commit = OneIn(random, 2);
    r.generate_at = DrawDuration(random, absl::Milliseconds(OneIn(random, 4) ? 100 : 10));
    r.never_generates = OneIn(random, 10);
  } else {
    r.generate_at = DrawDuration(random, kArrivals);
  }
  r.generates_twice = OneIn(random, 6);
  if (OneIn(random, 6)) r.deadline = DrawDuration(random, absl::Milliseconds(150));
  if (OneIn(random, 6)) r.cancel = DrawDuration(random, absl::Milliseconds(100));
  switch (random.Below(8)) {
    case 0:
      r.reading = Reading::kNever;
      break;
    case 1:
      r.reading = Reading::kNowAndThen;
      break;
    case 2:
    case 3:
      r.reading = Reading::kPausing;
      break;
    default:
      r.reading = Reading::kAtOnce;
      break;
  }
  r.pause = DrawDuration(random, 1.5 * node.engine.slow_reader_timeout);
  // A stream holds the tokens handed over and those of the steps in flight.
  r.stream_capacity = r.first.size() + static_cast<size_t>(Between(random, 3, 10));
  return r;
}

}  // namespace

Scenario DrawScenario(uint64_t seed, Plant plant, const std::string& policy) {
  SplitMix64 random(seed);
  Scenario scenario;
  scenario.seed = seed;
  scenario.plant = plant;
  scenario.node = DrawNode(random, plant, policy);
  int64_t requests = Between(random, 1, OneIn(random, 12) ? 80 : 24);
  if (scenario.node.policy.name == "fluxion") requests = std::min(requests, kMostFluxionRequests);
  for (int i = 0; i < requests; ++i) {
    scenario.requests.push_back(DrawRequest(random, scenario.node, i));
    const RequestSpec& request = scenario.requests.back();
    std::vector<int32_t>& known = scenario.node.known.emplace_back(request.prompt);
    for (const OutputToken& token : request.expected.tokens) known.push_back(token.id);
  }
  if (OneIn(random, 6)) scenario.leaps_at.push_back(DrawDuration(random, 2 * kArrivals));
  if (OneIn(random, 4)) {
    for (int64_t drains = Between(random, 1, 2); drains > 0; --drains) {
      Scenario::DrainSpec& drain = scenario.drains.emplace_back();
      drain.at = DrawDuration(random, 2 * kArrivals);
      drain.time = DrawDuration(random, absl::Milliseconds(60));
      if (OneIn(random, 2)) drain.resume_at = drain.at + DrawDuration(random, 1.5 * drain.time);
    }
  }
  if (OneIn(random, 12)) scenario.cancel_all_at = DrawDuration(random, 2 * kArrivals);
  // Most devices run a step of decode rows as a recorded, padded program.
  if (!OneIn(random, 4)) scenario.node.device.row_bucket = static_cast<int>(Between(random, 1, 8));
  return scenario;
}

}  // namespace sluice::sim
