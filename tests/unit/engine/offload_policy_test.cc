// Tests what the engine owes a policy that offloads, and what such a policy does to others.
#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <map>
#include <set>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "src/attention/forwarding_policy.h"
#include "src/base/crc32c.h"
#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/device.h"
#include "tests/support/eventually.h"
#include "tests/support/node.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

using testing::Generated;
using testing::GreedyRequest;
using testing::Node;
using testing::NodeOptions;
using Reason = FinishInfo::Reason;

constexpr char kModel[] = "tiny-llama";

// Checks that the engine calls a policy as its interfaces require. Only the engine's thread uses
// it, except for what is atomic.
class Watch : public ForwardingPolicy {
 public:
  using ForwardingPolicy::ForwardingPolicy;

  bool Admit(int slot, int64_t context, int64_t total, Promise promise,
             std::unique_ptr<SequenceCache>& home) override {
    if (!ForwardingPolicy::Admit(slot, context, total, promise, home)) return false;
    slots_[slot] = {};
    if (++admitted == sick_sequence) sick_slot = slot;
    return true;
  }
  void EndPrompt(int slot, int64_t tokens, SelectionHints hints) override {
    Slot& s = slots_.at(slot);
    if (s.prompt >= 0 || s.newest >= tokens) ++wrong;  // twice, or too late
    s.prompt = tokens;
    ++ended;
    ForwardingPolicy::EndPrompt(slot, tokens, std::move(hints));
  }
  void BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                 absl::Span<const int32_t> positions) override {
    std::set<int32_t> decoding;
    for (size_t i = 0; i < slots.size(); ++i) {
      Slot& s = slots_.at(slots[i]);
      s.newest = std::max<int64_t>(s.newest, positions[i]);
      if (s.prompt < 0) continue;  // EndPrompt checks what came before it
      if (positions[i] < s.prompt || !Warm(slots[i])) ++wrong;
      if (!decoding.insert(slots[i]).second) ++wrong;
      if (positions[i] == s.decoded) ++repeated;
      if (positions[i] < s.decoded || positions[i] > std::max(s.decoded + 1, s.prompt)) ++wrong;
      s.decoded = positions[i];
      ++decode_rows;
    }
    ForwardingPolicy::BeginStep(stream, slots, positions);
  }
  absl::Status SlotHealth(int slot) const override {
    if (slot != sick_slot || ++looked < 4) return absl::OkStatus();
    return WithReason(absl::InternalError("a worker died"), "WORKER_FAILED");
  }

  int rehearsals() const override { return wanted_rehearsals; }

  int wanted_rehearsals = 0;
  int sick_sequence = 0;  // by the order of admission, from 1; 0: none
  std::atomic<int> admitted{0}, ended{0}, decode_rows{0}, repeated{0}, wrong{0};
  std::atomic<int> sick_slot{-1};
  mutable std::atomic<int> looked{0};

 private:
  struct Slot {
    int64_t prompt = -1;  // since EndPrompt
    int64_t newest = -1;
    int64_t decoded = -1;  // position of the newest decode row
  };
  std::map<int, Slot> slots_;
};

NodeOptions Options(const std::string& kernels, Watch** watch, int sick_sequence = 0) {
  NodeOptions options;
  options.kernels = kernels;
  options.model_dir = fixtures::ModelDir(kModel);
  options.max_context = 1024;
  options.chunk_tokens = 48;
  options.max_sequences = 6;
  options.policy.name = "oracle";
  options.policy.budget_tokens = 64;
  options.policy.dense_layers = 1;
  options.watch = [watch, sick_sequence](AttentionPolicy* policy) {
    auto made = std::make_unique<Watch>(policy);
    made->sick_sequence = sick_sequence;
    *watch = made.get();
    return made;
  };
  return options;
}

// Runs a test on the CPU device and on a GPU.
void OnDevice(const std::string& kernels, void (*test)(const std::string& kernels)) {
  const absl::Status status = testing::TestDevice(kernels).status();
  if (absl::IsNotFound(status)) return SkipTest(std::string(status.message()));
  test(kernels);
}
#define SLUICE_TEST_ON_CPU_AND_GPU(claim, test) \
  TEST_CASE(claim) { OnDevice("auto", test); }  \
  TEST_CASE(claim " (cuda)", "[cuda]") { OnDevice("cuda", test); }

void EndOfPrompts(const std::string& kernels) {
  const auto golden = *fixtures::LoadGolden(kModel);
  Watch* watch = nullptr;
  Node node(Options(kernels, &watch));
  std::vector<std::shared_ptr<TokenStream>> streams;
  int count = 0;
  for (const fixtures::GoldenCase& g : golden) {
    const auto prompt = static_cast<uint32_t>(g.prompt.size());
    // Prompts that are computed here, and prompts handed over in part, without and with first
    // tokens, several of which are decode rows that only the policy holds back.
    streams.push_back(node.Start(GreedyRequest(g.prompt, 9)));
    for (const uint32_t context : {prompt, prompt / 2}) {
      for (const size_t first : {0, 1, 4}) {
        if (context == 0 || (first > 0 && context < prompt)) continue;
        std::vector<OutputToken> tokens(first);
        for (size_t i = 0; i < first; ++i) tokens[i].id = g.tokens[i];
        Request request = GreedyRequest({}, 9);
        request.handoff.transfer_id = node.Push(g.prompt, context, 9, g.k, g.v, tokens);
        streams.push_back(node.Start(std::move(request)));
      }
    }
  }
  for (const auto& stream : streams) {
    const Generated generated = Node::Collect(*stream);
    CHECK(generated.finish.reason == Reason::kLength);
    CHECK(generated.ids.size() == 9);
    ++count;
  }
  CHECK(node.Quiescent());
  CHECK(watch->wrong == 0);
  CHECK(watch->admitted == count);
  CHECK(watch->ended == count);
  CHECK(watch->decode_rows >= count * 8);  // surplus ones too
}
SLUICE_TEST_ON_CPU_AND_GPU(
    "a policy that offloads gets each prompt's end once, before single decode rows", EndOfPrompts)

// Returns requests with prompts of 20, 53, 86 and 119 tokens.
std::vector<Request> FourRequests() {
  std::vector<Request> requests;
  for (int i = 0; i < 4; ++i) {
    std::vector<int32_t> prompt;
    for (int t = 0; t < 20 + i * 33; ++t) prompt.push_back(3 + (t * 7919 + i * 104729) % 500);
    requests.push_back(GreedyRequest(prompt, 24));
  }
  return requests;
}

// Returns what each of the requests gives on a node that nothing else uses, where no row is
// computed twice.
std::vector<Generated> Alone(const std::string& kernels, const std::vector<Request>& requests) {
  Watch* watch = nullptr;
  std::vector<Generated> alone;
  Node node(Options(kernels, &watch));
  for (const Request& request : requests) alone.push_back(node.Generate(request));
  CHECK(watch->repeated == 0);
  CHECK(node.metrics().rehearsed_rows.Value() == 0);
  return alone;
}

// Policy oracle computes the same in every rehearsal, so they must change nothing.
void Rehearsals(const std::string& kernels) {
  const std::vector<Request> requests = FourRequests();
  const std::vector<Generated> want = Alone(kernels, requests);
  Watch* watch = nullptr;
  Node node(Options(kernels, &watch));
  watch->wanted_rehearsals = 2;
  int approximate = 0;
  std::vector<std::shared_ptr<TokenStream>> streams;
  for (const Request& request : requests) {
    const auto attended = static_cast<int64_t>(request.prompt.size()) + 1;
    approximate += attended > node.policy().exact_tokens() ? 1 : 0;
    streams.push_back(node.Start(request));
  }
  for (size_t i = 0; i < streams.size(); ++i) {
    const Generated got = Node::Collect(*streams[i]);
    CHECK(got.ids == want[i].ids);
    CHECK(got.finish.exact_tokens == want[i].finish.exact_tokens);
  }
  // Handed-over first tokens are decode rows as well, and only the first of them is rehearsed.
  const fixtures::GoldenCase g = (*fixtures::LoadGolden(kModel))[1];
  const auto prompt = static_cast<uint32_t>(g.prompt.size());
  std::vector<OutputToken> tokens(4);
  for (size_t i = 0; i < tokens.size(); ++i) tokens[i].id = g.tokens[i];
  Request request = GreedyRequest({}, 9);
  request.handoff.transfer_id = node.Push(g.prompt, prompt, 9, g.k, g.v, tokens);
  approximate += prompt + 1 > node.policy().exact_tokens() ? 1 : 0;
  CHECK(node.Generate(std::move(request)).ids.size() == 9);

  CHECK(node.Quiescent());
  CHECK(watch->wrong == 0);
  REQUIRE((approximate > 0 && approximate < 5));
  CHECK(watch->repeated == 2 * approximate);
  CHECK(node.metrics().rehearsed_rows.Value() == 2 * approximate);
  // Nothing of it counts as a prompt's token or as an output token.
  size_t computed = 0;
  for (const Request& one : requests) computed += one.prompt.size();
  CHECK(node.metrics().tokens(TokenKind::kPrompt).Value() == computed - requests.size() + 3);
  CHECK(node.metrics().tokens(TokenKind::kOutput).Value() == 4 * 24 + 9);
}
SLUICE_TEST_ON_CPU_AND_GPU(
    "the first decode row of an approximate sequence is rehearsed, and no exact one is", Rehearsals)

void SickSlot(const std::string& kernels) {
  const std::vector<Request> requests = FourRequests();
  const std::vector<Generated> alone = Alone(kernels, requests);
  Watch* watch = nullptr;
  Node node(Options(kernels, &watch, /*sick_sequence=*/2));
  std::vector<std::shared_ptr<TokenStream>> streams;
  for (const Request& request : requests) streams.push_back(node.Start(request));
  for (size_t i = 0; i < streams.size(); ++i) {
    INFO("sequence " << i);
    const Generated got = Node::Collect(*streams[i]);
    if (i != 1) {
      CHECK(got.ids == alone[i].ids);
      CHECK(got.finish.reason == Reason::kLength);
      continue;
    }
    CHECK(got.finish.reason == Reason::kError);
    CHECK(got.finish.status.code() == absl::StatusCode::kInternal);
    CHECK(ReasonOf(got.finish.status) == "WORKER_FAILED");
    // The token after the third check is not emitted.
    REQUIRE(got.ids.size() == 3);
    CHECK(std::equal(got.ids.begin(), got.ids.end(), alone[i].ids.begin()));
  }
  CHECK(node.Quiescent());
}
SLUICE_TEST_ON_CPU_AND_GPU(
    "a slot that is not well ends its own sequence, the others give what they give alone", SickSlot)

void HomesStay(const std::string& kernels) {
  const auto golden = *fixtures::LoadGolden(kModel);
  const fixtures::GoldenCase& g = golden[1];
  Watch* watch = nullptr;
  NodeOptions options = Options(kernels, &watch);
  Node node(options);
  const auto prompt = static_cast<uint32_t>(g.prompt.size());
  const std::string transfer = node.Push(g.prompt, prompt, 9, g.k, g.v);
  const int64_t reserved = node.dram().UsageOf(0).reserved_bytes;
  CHECK(reserved == node.model().cache_layout().BytesFor(prompt + 9));
  // The rest of DRAM is taken: a prompt to compute here finds no DRAM for its host cache.
  Reservation rest = node.dram().TryReserve(node.dram().HeadroomNow().firm_tokens);
  const std::shared_ptr<TokenStream> local = node.Start(GreedyRequest(g.prompt, 200));
  // A handed-over request comes later and goes first.
  Request request = GreedyRequest({}, 9);
  request.handoff.transfer_id = transfer;
  CHECK(node.Generate(std::move(request)).ids.size() == 9);
  CHECK(local->Read().tokens.empty());
  rest.Reset();
  node.engine().Wake();
  CHECK(Node::Collect(*local).ids.size() == 200);
  CHECK(node.Quiescent());
}
SLUICE_TEST_ON_CPU_AND_GPU("homes stay until their sequences end, and who lacks one waits for that",
                           HomesStay)

// Commits caches of zeros. RESOURCE_EXHAUSTED: there is no DRAM for them.
absl::StatusOr<std::string> PushZeros(Node& node, uint32_t context, uint32_t max_new_tokens) {
  const auto reserved = node.transfers().Reserve(
      node.MakeManifest(std::vector<int32_t>(context, 1), context, max_new_tokens));
  if (!reserved.ok()) return reserved.status();
  const CacheLayout& layout = node.model().cache_layout();
  for (const CacheKind& kind : layout.kinds) {
    const std::vector<uint8_t> payload(static_cast<size_t>(kind.bytes_per_token * context));
    ChunkHeader header;
    header.transfer_id = reserved->transfer_id;
    header.kind = kind.name;
    header.head_end = 1;
    header.token_end = context;
    header.crc32c = Crc32c(payload);
    for (int layer = 0; layer < layout.layers; ++layer) {
      header.layer = static_cast<uint32_t>(layer);
      REQUIRE(node.Land(header, payload).ok());
    }
  }
  REQUIRE(node.transfers().Commit(reserved->transfer_id, {}, nullptr).ok());
  return reserved->transfer_id;
}

// Everything that fits according to the planner and the bench must come to run, whichever clients
// read: index keys leave DRAM once they are in HBM, also those of a sequence whose client does not
// read yet.
void ParkedGiveBack(const std::string& kernels) {
  constexpr uint32_t kContext = 1024, kNew = 16;
  constexpr int kSequences = 6, kSlabs = 20;
  NodeOptions options;
  options.kernels = kernels;
  options.model_dir = fixtures::ModelDir("tiny-deepseek-v32");
  options.kv_dtype = DType::kFloat8E4M3;
  options.max_context = 2048;
  options.max_sequences = kSequences;
  options.policy.name = "ess";
  options.dram_bytes = kSlabs * int64_t{692'736} + 4096;  // PageSlabs::SlabBytes
  Node node(options);
  const auto fit = [&](int64_t index_tokens) {
    return node.dram().SequencesThatFit({kContext + kNew, index_tokens}, {0, kContext});
  };
  REQUIRE(fit(0) == kSequences);
  REQUIRE(fit(kContext) < kSequences);
  std::vector<std::shared_ptr<TokenStream>> streams;
  for (int i = 0; i < kSequences; ++i) {
    INFO("sequence " << i);
    absl::StatusOr<std::string> transfer;
    REQUIRE(testing::Eventually(absl::Seconds(10), [&] {
      transfer = PushZeros(node, kContext, kNew);
      REQUIRE((transfer.ok() || absl::IsResourceExhausted(transfer.status())));
      return transfer.ok();
    }));
    Request request = GreedyRequest({}, kNew);
    request.handoff.transfer_id = *transfer;
    streams.push_back(node.Start(std::move(request), /*capacity=*/0));
  }
  CHECK(testing::Eventually(absl::Seconds(10), [&] {
    std::atomic<uint32_t> running{0};
    absl::Notification asked;
    node.engine().Snapshot([&](const EngineSnapshot& snapshot) {
      running = snapshot.running;
      asked.Notify();
    });
    asked.WaitForNotification();
    return running == kSequences;
  }));
  node.engine().CancelAll(absl::CancelledError("seen"));
  for (const auto& stream : streams) Node::Collect(*stream);
  CHECK(node.Quiescent());
}
SLUICE_TEST_ON_CPU_AND_GPU(
    "sequences that nobody reads give back what their policy does not keep in DRAM", ParkedGiveBack)

// Returns a node whose sequences fetch tokens by way of CPU workers, and requests with prompts that
// do not fit HBM.
NodeOptions GatherOptions(const std::string& kernels) {
  NodeOptions options;
  options.kernels = kernels;
  options.model_dir = fixtures::ModelDir(kModel);
  options.max_context = 1024;
  options.max_sequences = 4;
  options.policy.name = "clo";
  options.policy.budget_tokens = 80;
  options.policy.dense_layers = 1;
  options.policy.worker_deadline = absl::Seconds(60);
  options.policy.clo.similarity = 1;  // every head misses, so every step fetches
  options.policy.clo.mover = PolicyOptions::Mover::kCpu;
  return options;
}
std::vector<Request> LongRequests() {
  std::vector<Request> requests;
  for (int i = 0; i < 4; ++i) {
    std::vector<int32_t> prompt;
    for (int t = 0; t < 250 + i * 33; ++t) prompt.push_back(3 + (t * 7919 + i * 104729) % 500);
    requests.push_back(GreedyRequest(prompt, 24));
    requests.back().request_id = absl::StrCat("s", i);
  }
  return requests;
}

void CancelledGather(const std::string& kernels) {
  if (!kFailpointsCompiledIn) return SkipTest("this build has no failpoints");
  Node node(GatherOptions(kernels));
  const std::vector<Request> requests = LongRequests();
  std::vector<Generated> want;
  for (const Request& request : requests) want.push_back(node.Generate(request));
  const ScopedFailpoints armed("attention.worker=delay(500ms)*1@40");
  std::vector<std::shared_ptr<TokenStream>> streams;
  for (const Request& request : requests) streams.push_back(node.Start(request));
  REQUIRE(testing::Eventually(absl::Seconds(10),
                              [] { return StateOf(Failpoint::kAttentionWorker).fired == 1; }));
  node.engine().CancelRequest("s0", absl::CancelledError("test"), [](bool) {});
  CHECK(absl::IsCancelled(Node::Collect(*streams[0]).finish.status));
  for (size_t i = 1; i < streams.size(); ++i) CHECK(Node::Collect(*streams[i]).ids == want[i].ids);
  CHECK(node.Quiescent());
}
SLUICE_TEST_ON_CPU_AND_GPU(
    "a sequence that is cancelled while workers gather for it ends, and others keep their tokens",
    CancelledGather)

void FailedGather(const std::string& kernels) {
  if (!kFailpointsCompiledIn) return SkipTest("this build has no failpoints");
  Node node(GatherOptions(kernels));
  const std::vector<Request> requests = LongRequests();
  std::vector<Generated> want;
  for (const Request& request : requests) want.push_back(node.Generate(request));
  const ScopedFailpoints armed("attention.worker_exit=error*1@100");
  std::vector<std::shared_ptr<TokenStream>> streams;
  for (const Request& request : requests) streams.push_back(node.Start(request));
  int failed = 0;
  for (size_t i = 0; i < streams.size(); ++i) {
    const Generated got = Node::Collect(*streams[i]);
    if (got.finish.reason == Reason::kError) {
      ++failed;
      CHECK(absl::IsInternal(got.finish.status));
      CHECK(ReasonOf(got.finish.status) == "WORKER_FAILED");
    } else {
      CHECK(got.ids == want[i].ids);
    }
  }
  CHECK(failed > 0);
  CHECK(failed < 4);
  // The next sequences are served by the workers that are left.
  for (size_t i = 0; i < requests.size(); ++i) {
    CHECK(node.Generate(requests[i]).ids == want[i].ids);
  }
  CHECK(node.Quiescent());
}
SLUICE_TEST_ON_CPU_AND_GPU(
    "a worker that dies in a gather ends its sequences alone, and later ones are served",
    FailedGather)

}  // namespace
}  // namespace sluice
