#include "src/bench/ranks/rank_run.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "kernels/exchange_params.h"
#include "src/attention/forwarding_policy.h"
#include "src/attention/latent/latent_views.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"
#include "src/bench/harness/bench_device.h"
#include "src/bench/harness/policy_run.h"
#include "src/bench/harness/step_device.h"
#include "src/bench/overlap/forced_misses.h"
#include "src/bench/ranks/quiet_ranks.h"
#include "src/bench/workload/random_caches.h"
#include "src/device/cpu/cpu_device.h"
#include "src/device/planning_device.h"
#include "src/device/rank_channel.h"
#include "src/engine/batch_state.h"
#include "src/engine/rank_follower.h"
#include "src/engine/rank_heads.h"
#include "src/engine/rank_leader.h"
#include "src/model/shard.h"

namespace sluice::bench {
namespace {

constexpr absl::Duration kJoinTime = absl::Minutes(1);
constexpr absl::Duration kLoadTime = absl::Minutes(10);
constexpr int kRounds = 4;  // of steps with and without the ranks' operations, in turn
constexpr int kWarmUp = 2;  // steps of a round that do not count
constexpr int64_t kLeastDram = int64_t{64} << 20;

// Prepares what each step needs beside the policy: whether it is quiet, and which entries its rows
// select.
class StepWatch : public ForwardingPolicy {
 public:
  // `lists` may be null. Position `first` is that of a sequence's first step.
  StepWatch(AttentionPolicy* policy, const RankSwitch* shared, bool* quiet, ForcedMisses* lists,
            int first)
      : ForwardingPolicy(policy), shared_(shared), quiet_(quiet), lists_(lists), first_(first) {}

  void BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                 absl::Span<const int32_t> positions) override {
    *quiet_ = shared_->on();
    ForwardingPolicy::BeginStep(stream, slots, positions);
    if (lists_ == nullptr || positions.empty()) return;
    steps_.clear();
    for (const int32_t position : positions) steps_.push_back(position - first_);
    lists_->BeginStep(stream, steps_);
  }

 private:
  const RankSwitch* const shared_;
  bool* const quiet_;
  ForcedMisses* const lists_;
  const int first_;
  std::vector<int64_t> steps_;
};

// A run over all batches, for which every rank makes its caches and records its steps.
struct Phase {
  std::string policy;
  int overlap = 0;
  bool traced = false;
};

class Rank {
 public:
  Rank(const RanksOptions& options, const RankGroupOptions& group, RankSwitch* quiet,
       const RankSays& say)
      : options_(options), group_options_(group), switch_(quiet), say_(say) {}

  absl::Status Run() {
    SLUICE_RETURN_IF_ERROR(Join());
    SLUICE_RETURN_IF_ERROR(Load());
    for (const Phase& phase : Phases()) SLUICE_RETURN_IF_ERROR(Run(phase));
    return Meet();
  }

 private:
  int ranks() const { return group_options_.size; }
  bool leads() const { return group_options_.rank == 0; }
  int most_sequences() const {
    return options_.SequencesOf(*std::max_element(options_.batches.begin(), options_.batches.end()),
                                ranks());
  }
  // Steps of one batch, those that do not count included.
  int64_t all_steps(bool traced) const {
    if (traced) return kWarmUp + options_.trace_steps;
    return (ranks() > 1 ? 2 : 1) * kRounds * (kWarmUp + steps_each());
  }
  int64_t steps_each() const { return std::max<int64_t>(options_.steps / kRounds, 1); }

  std::vector<Phase> Phases() const {
    std::vector<Phase> phases;
    for (const std::string& policy : options_.policies) {
      for (const int64_t overlap : options_.overlaps) {
        phases.push_back({policy, static_cast<int>(overlap), false});
        if (ranks() > 1 && options_.trace_steps > 0) {
          phases.push_back({policy, static_cast<int>(overlap), true});
        }
      }
    }
    return phases;
  }

  absl::Status Join() {
    const int threads = options_.threads > 0 ? static_cast<int>(options_.threads)
                                             : std::max(DefaultThreads() / ranks(), 1);
    SLUICE_ASSIGN_OR_RETURN(bench_device_,
                            BenchDevice::Create({options_.device, options_.kernels, threads}));
    device_ = &bench_device_->device();
    if (ranks() == 1) return absl::OkStatus();
    HostChannelOptions channel;
    channel.name = absl::StrCat(group_options_.name, "-plans");
    channel.rank = group_options_.rank;
    channel.size = ranks();
    channel.join_timeout = kJoinTime;
    SLUICE_ASSIGN_OR_RETURN(channel_, JoinHostChannel(channel));
    RankGroupOptions group = group_options_;
    group.join_timeout = kJoinTime;
    SLUICE_ASSIGN_OR_RETURN(joined_, device_->JoinRanks(group));
    channel_->EndWith(joined_.get());
    group_ = QuietRanks(joined_.get(), &quiet_);
    return absl::OkStatus();
  }

  absl::Status Meet() { return channel_ == nullptr ? absl::OkStatus() : channel_->Meet(kLoadTime); }

  absl::Status Load() {
    Model::Options model;
    model.directory = options_.model;
    model.load_format = options_.dummy ? "dummy" : "auto";
    const int64_t more = std::max(all_steps(false), all_steps(true));
    model.max_context = static_cast<int>(options_.context + more);
    model.max_rows = model.max_logits = most_sequences();
    model.look_ahead = false;
    (options_.experts() ? model.expert_parallel : model.tensor_parallel) = ranks();
    model.rank = group_options_.rank;
    model.ranks = group_.get();
    model.fp8_dispatch = options_.dispatch == "fp8";
    model.halves =
        ranks() > 1 && *std::max_element(options_.overlaps.begin(), options_.overlaps.end()) > 0;
    SLUICE_ASSIGN_OR_RETURN(const ModelConfig config, LoadModelConfig(options_.model));
    latent_ = config.latent.has_value();
    if (latent_) model.kv_dtype = DType::kFloat8E4M3;
    SLUICE_ASSIGN_OR_RETURN(model_, Model::Load(model, device_));
    const CacheLayout& layout = model_->cache_layout();
    // Ranks of experts have their own sequences, and the others a part of each.
    const int64_t sequences = options_.experts() ? most_sequences() / ranks() : most_sequences();
    const int64_t bytes = (layout.BytesFor(model_->max_context()) + 4096) * sequences + 8192;
    const bool homes = options_.policies != std::vector<std::string>{"full"};
    tier_bytes_ = bytes;
    home_bytes_ = std::max(homes ? bytes : 0, kLeastDram);
    SLUICE_ASSIGN_OR_RETURN(tiers_, BenchTiers::Create(*device_, tier_bytes_, home_bytes_));
    world_.device = device_;
    world_.model = model_.get();
    world_.max_context = model_->max_context();
    world_.slots = most_sequences();
    world_.options.workers = 1;
    // A pool begins with its sequence's newest tokens, which no forced list has.
    world_.options.recompute_last = PolicyOptions::RecomputeLast::kOff;
    if (!leads()) return Meet();
    std::vector<std::pair<std::string, std::string>> shape = {{"model", config.name},
                                                              {"device", device_->name()}};
    for (auto& entry : bench_device_->Shape()) shape.push_back(std::move(entry));
    shape.emplace_back("weight_bytes_of_a_rank", absl::StrCat(model_->weight_bytes()));
    SLUICE_ASSIGN_OR_RETURN(const DeviceRates rates, bench_device_->MeasureRates(DefaultThreads()));
    shape.emplace_back("dram_bytes_per_second", absl::StrCat(rates.memory.dram));
    say_.shape(shape);
    return Meet();
  }

  // Fills the caches that nobody owns: keys and values with random numbers, others with zeros.
  absl::Status FillCaches() {
    if (!latent_) return FillWithRandomValues(*device_, *world_.hbm);
    const std::unique_ptr<Stream> stream = device_->NewStream(Device::StreamKind::kCompute);
    for (const PagePool* pool : {world_.hbm, world_.dram}) {
      for (const absl::Span<uint8_t> free : pool->FreeMemory()) {
        stream->Fill(free.data(), 0, free.size());
      }
    }
    const std::unique_ptr<Event> done = device_->NewEvent();
    stream->Record(*done);
    done->Wait();
    return device_->Health();
  }

  // Makes the lists by which rows of ess miss, and has the next policy select by them.
  absl::Status ForceMisses(const Phase& phase, PolicyWorld* world) {
    lists_.reset();
    if (options_.misses == 0 || !absl::StartsWith(phase.policy, "ess")) return absl::OkStatus();
    ForcedMisses::Options set;
    {
      SLUICE_ASSIGN_OR_RETURN(const auto policy, SetUpPolicy(*world, phase.policy));
      set.places = policy->FootprintOf(0, world->max_context).hbm_tokens[kLatentKind];
    }
    set.device = device_;
    set.rows = std::max(world->slots, device_->RowBucket(world->slots));
    set.top_k = model_->config().latent->indexer->top_k;
    set.tokens = options_.context - 1 - set.places;
    set.misses.assign(static_cast<size_t>(all_steps(phase.traced)),
                      static_cast<int32_t>(options_.misses));
    absl::StatusOr<std::unique_ptr<ForcedMisses>> lists = ForcedMisses::Create(set);
    if (!lists.ok()) {
      return absl::Status(lists.status().code(),
                          absl::StrCat("--misses: ", lists.status().message()));
    }
    lists_ = *std::move(lists);
    world->options.ess.probe.on_selection = lists_->Observer();
    return absl::OkStatus();
  }

  absl::Status Run(const Phase& phase) {
    SLUICE_RETURN_IF_ERROR(tiers_->Cut(&world_, phase.policy));
    SLUICE_RETURN_IF_ERROR(FillCaches());
    if (!leads() && options_.experts()) world_.dram->FollowRankZero();
    PolicyWorld world = world_;
    SLUICE_RETURN_IF_ERROR(ForceMisses(phase, &world));
    SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<AttentionPolicy> policy,
                            SetUpPolicy(world, phase.policy));
    StepWatch watch(policy.get(), switch_, &quiet_, lists_.get(),
                    static_cast<int>(options_.context) - 1);
    // Steps are recorded with the ranks' operations and without, unless they are traced.
    quiet_ = false;
    const bool both = ranks() > 1 && !phase.traced;
    const std::unique_ptr<Device> device =
        NewStepDevice(device_, {.version = both ? &quiet_ : nullptr});
    std::unique_ptr<RankRows> rows;
    if (ranks() > 1 && options_.experts()) {
      rows = std::make_unique<RankRows>(group_.get(), world.slots);
    }
    return leads() ? Lead(phase, device.get(), &watch, rows.get())
                   : Follow(phase, device.get(), &watch, rows.get());
  }

  absl::Status Follow(const Phase& phase, Device* device, AttentionPolicy* policy, RankRows* rows) {
    RankFollower::Options options;
    SLUICE_ASSIGN_OR_RETURN(options.part,
                            HintPartOf(model_->whole_config(), group_options_.rank, ranks()));
    options.slots = world_.slots;
    options.max_context = world_.max_context;
    options.halves_from = phase.overlap;
    SLUICE_ASSIGN_OR_RETURN(
        const std::unique_ptr<RankFollower> follower,
        RankFollower::Create(options, {device, model_.get(), policy, channel_.get(), group_.get(),
                                       world_.dram, rows}));
    SLUICE_RETURN_IF_ERROR(Meet());
    SLUICE_RETURN_IF_ERROR(follower->Run());
    return Meet();
  }

  // Makes what stands on rank 0 for the pools and policies of the other ranks, as a server does.
  absl::Status MakeOthers(const Phase& phase) {
    others_.clear();
    if (planning_ == nullptr) planning_ = NewPlanningDevice(device_);
    for (int rank = 1; rank < ranks(); ++rank) {
      Other other;
      SLUICE_ASSIGN_OR_RETURN(other.tiers,
                              BenchTiers::Create(*planning_, tier_bytes_, home_bytes_));
      PolicyWorld world = world_;
      world.device = planning_.get();
      world.options.ess.mover = PolicyOptions::Mover::kUva;  // nothing moves, so none is measured
      SLUICE_RETURN_IF_ERROR(other.tiers->Cut(&world, phase.policy));
      world.dram->SetRank(rank);
      SLUICE_ASSIGN_OR_RETURN(other.policy, SetUpPolicy(world, phase.policy));
      others_.push_back(std::move(other));
    }
    return absl::OkStatus();
  }

  absl::Status Lead(const Phase& phase, Device* device, AttentionPolicy* watched, RankRows* rows) {
    std::unique_ptr<DeviceTrace> trace;
    if (phase.traced) {
      // The trace starts before the steps are recorded, so that it has the kernels inside them.
      SLUICE_ASSIGN_OR_RETURN(trace, device->StartTrace());
    }
    traces_.clear();
    {
      std::unique_ptr<RankLedger> ledger;
      std::unique_ptr<RankLeader> leader;
      if (ranks() > 1) {
        RankDivision division;
        SLUICE_ASSIGN_OR_RETURN(division.part, HintPartOf(model_->whole_config(), 0, ranks()));
        division.rows = rows;
        if (rows != nullptr) {
          SLUICE_RETURN_IF_ERROR(MakeOthers(phase));
          ledger = std::make_unique<RankLedger>(world_.hbm, ranks());
          division.ledger = ledger.get();
          for (const Other& other : others_) division.others.push_back(other.policy.get());
        }
        leader = std::make_unique<RankLeader>(watched, channel_.get(), group_.get(), world_.slots,
                                              std::move(division));
      }
      policy_ = leader != nullptr ? leader.get() : watched;
      BatchState::Options batch;
      batch.slots = world_.slots;
      batch.max_context = world_.max_context;
      batch.log = leader.get();
      batch.ranks = rows;
      batch.halves_from = phase.overlap;
      SLUICE_ASSIGN_OR_RETURN(batch_, BatchState::Create(batch, device, *model_));
      stream_ = device->NewStream(Device::StreamKind::kCompute);
      SLUICE_RETURN_IF_ERROR(batch_->RecordPrograms(*stream_, *model_, *policy_));
      SLUICE_RETURN_IF_ERROR(Meet());
      for (const int64_t each : options_.batches) SLUICE_RETURN_IF_ERROR(RunBatch(phase, each));
      // The leader ends first, and tells the others so.
    }
    SLUICE_RETURN_IF_ERROR(Meet());
    batch_.reset();
    stream_.reset();
    return trace == nullptr ? absl::OkStatus() : ReadTrace(*trace);
  }

  absl::Status JoinSequence(int slot) {
    const auto tokens = static_cast<int>(options_.context);
    std::unique_ptr<SequenceCache> none;
    policy_->UseRank(options_.experts() ? slot % ranks() : 0);
    if (!policy_->Admit(slot, 0, world_.max_context, Promise::kFirm, none)) {
      return absl::ResourceExhaustedError(
          absl::StrCat("--batches: the caches of ", slot, " sequences fill a rank's memory"));
    }
    SLUICE_RETURN_IF_ERROR(AwaitWarm(slot));
    // The last token of the context is the first row.
    policy_->BeginPrompt(slot, tokens - 1, 0);
    if (!policy_->Grow(slot, world_.max_context)) {
      return absl::InternalError("a sequence that was admitted does not grow");
    }
    SamplingParams greedy;
    greedy.temperature = 0;
    std::vector<int32_t> ids(static_cast<size_t>(tokens), 1);
    // Sequences differ, so that their rows go to different experts.
    ids.back() = static_cast<int32_t>(SplitMix64(static_cast<uint64_t>(slot))() %
                                      static_cast<uint64_t>(model_->config().vocab_size));
    batch_->Join(*stream_, slot, ids, greedy, 1, tokens, {});
    if (!policy_->NeedsEndPrompt()) return absl::OkStatus();
    policy_->EndPrompt(slot, tokens - 1, {});
    return AwaitWarm(slot);
  }

  absl::Status AwaitWarm(int slot) {
    while (!policy_->Warm(slot)) {
      policy_->WarmEvent(slot).Wait();
      SLUICE_RETURN_IF_ERROR(device_->Health());
    }
    return absl::OkStatus();
  }

  // Has all ranks leave their operations out from the next step on, or not.
  absl::Status SetQuiet(bool quiet) {
    // A step that is not launched yet would be of the other kind.
    if (channel_ != nullptr) SLUICE_RETURN_IF_ERROR(channel_->AwaitDone(channel_->sent()));
    switch_->Set(quiet);
    return absl::OkStatus();
  }

  // Launches steps as the engine does, one ahead of the results, and appends the times between
  // their ends to `seconds`, without those of the first kWarmUp.
  absl::Status Steps(StepPlan& plan, int64_t steps, std::vector<double>* seconds) {
    absl::Time last = absl::Now();
    for (int64_t step = 0; step < steps + kWarmUp; ++step) {
      batch_->Launch(*stream_, static_cast<int>(step % 2), plan, *model_, *policy_);
      for (PlanRow& row : plan.rows) {
        ++row.first_position;
        ++row.decoded;
      }
      if (step == 0) continue;
      batch_->event(static_cast<int>((step - 1) % 2)).Wait();
      const absl::Time now = absl::Now();
      if (step > kWarmUp) seconds->push_back(absl::ToDoubleSeconds(now - last));
      if (step == kWarmUp) counted_from_ = now;
      last = now;
    }
    for (int b = 0; b < 2; ++b) batch_->event(b).Wait();
    seconds->push_back(absl::ToDoubleSeconds(absl::Now() - last));
    return device_->Health();
  }

  absl::Status RunBatch(const Phase& phase, int64_t each) {
    RankStep result;
    result.policy = phase.policy;
    result.overlap = phase.overlap;
    result.sequences = options_.SequencesOf(each, ranks());
    StepPlan plan;
    for (int slot = 0; slot < result.sequences; ++slot) {
      SLUICE_RETURN_IF_ERROR(JoinSequence(slot));
      plan.rows.push_back({slot, options_.context - 1, 1, true});
    }
    plan.row_count = plan.decode_rows = plan.sample_count = result.sequences;
    if (phase.traced) {
      std::vector<double> ignored;
      SLUICE_RETURN_IF_ERROR(Steps(plan, options_.trace_steps, &ignored));
      traces_.push_back({result, counted_from_, absl::Now(), each});
    } else {
      std::vector<double> seconds[2];
      for (int round = 0; round < kRounds; ++round) {
        for (const bool quiet : {false, true}) {
          if (quiet && ranks() == 1) continue;
          SLUICE_RETURN_IF_ERROR(SetQuiet(quiet));
          SLUICE_RETURN_IF_ERROR(Steps(plan, steps_each(), &seconds[quiet ? 1 : 0]));
        }
      }
      SLUICE_RETURN_IF_ERROR(SetQuiet(false));
      result.step = TimingOf(seconds[0]);
      if (ranks() > 1) result.quiet = TimingOf(seconds[1]);
      say_.step(result);
    }
    for (int slot = 0; slot < result.sequences; ++slot) policy_->Release(slot);
    return absl::OkStatus();
  }

  // Returns the bytes that a rank sends to the others in the exchanges of a step.
  absl::StatusOr<double> ExchangeBytes(int64_t each) const {
    const ModelConfig& whole = model_->whole_config();
    const DType type = options_.dispatch == "fp8"  ? DType::kFloat8E4M3
                       : options_.device == "cuda" ? DType::kBFloat16
                                                   : DType::kFloat32;
    const int64_t unit =
        kernels::RowUnitOf(whole.hidden_size, whole.latent->experts.per_token, type).bytes;
    SLUICE_ASSIGN_OR_RETURN(const ExpertShard shard, ExpertShardOf(whole, 0, ranks()));
    const int64_t rows = std::max<int64_t>(device_->RowBucket(static_cast<int>(each)), each);
    const ExpertExchange step = ExpertExchangeOf(whole, shard, rows, unit);
    const double all = static_cast<double>(step.layers) *
                       static_cast<double>(step.dispatch_bytes + step.combine_bytes);
    return all * (ranks() - 1) / ranks();  // A rank's own block stays.
  }

  absl::Status ReadTrace(DeviceTrace& trace) {
    SLUICE_ASSIGN_OR_RETURN(const std::vector<TraceSlice> slices, trace.Stop());
    for (const Traced& traced : traces_) {
      RankTrace sum = SumOf(slices, traced.begin, traced.end, options_.trace_steps);
      if (options_.experts()) {
        SLUICE_ASSIGN_OR_RETURN(sum.exchange_bytes, ExchangeBytes(traced.each));
      }
      say_.trace(traced.step, sum);
    }
    return absl::OkStatus();
  }

  struct Other {
    std::unique_ptr<BenchTiers> tiers;
    std::unique_ptr<AttentionPolicy> policy;
  };
  struct Traced {
    RankStep step;
    absl::Time begin, end;
    int64_t each = 0;
  };

  const RanksOptions options_;
  const RankGroupOptions group_options_;
  RankSwitch* const switch_;
  const RankSays say_;
  bool latent_ = false;
  bool quiet_ = false;  // of the step that is being enqueued
  std::unique_ptr<BenchDevice> bench_device_;
  Device* device_ = nullptr;              // bench_device_'s
  std::unique_ptr<RankChannel> channel_;  // null with one rank, and so are the groups
  std::unique_ptr<RankGroup> joined_, group_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<BenchTiers> tiers_;
  int64_t tier_bytes_ = 0, home_bytes_ = 0;   // of HBM and DRAM of a rank
  std::unique_ptr<PlanningDevice> planning_;  // of others_; null until it is needed
  std::vector<Other> others_;                 // on rank 0: the ranks of experts from 1 on
  PolicyWorld world_;
  std::unique_ptr<ForcedMisses> lists_;  // null: rows select by themselves
  AttentionPolicy* policy_ = nullptr;    // the phase's, on rank 0
  std::unique_ptr<BatchState> batch_;
  std::unique_ptr<Stream> stream_;
  absl::Time counted_from_;  // when the steps of the newest Steps began that count
  std::vector<Traced> traces_;
};

}  // namespace

absl::Status RunRank(const RanksOptions& options, const RankGroupOptions& group, RankSwitch* quiet,
                     const RankSays& say) {
  return Rank(options, group, quiet, say).Run();
}

}  // namespace sluice::bench
