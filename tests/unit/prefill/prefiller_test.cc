#include "src/prefill/prefiller.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "kernels/scalar.h"
#include "src/attention/forwarding_policy.h"
#include "src/base/crc32c.h"
#include "src/base/error.h"
#include "src/base/status_macros.h"
#include "src/device/cpu/cpu_device.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/node.h"

namespace sluice {
namespace {

using testing::GreedyRequest;
using testing::Node;
using testing::NodeOptions;

// Lands the caches that it is given in a node, as a push over the wire would.
class LandingSink : public LayerSink {
 public:
  LandingSink(Node* node, std::string transfer_id)
      : node_(node), transfer_id_(std::move(transfer_id)) {}

  absl::Status Begin() override { return absl::OkStatus(); }
  absl::Status Layer(int layer, const CacheKind& kind, int token_begin, int token_end,
                     absl::Span<const absl::Span<const uint8_t>> pieces) override {
    calls.emplace_back(layer, token_begin, token_end);
    if (calls.size() == fail_at) return absl::UnavailableError("the sink broke");
    std::vector<uint8_t> payload;
    for (const auto& piece : pieces) payload.insert(payload.end(), piece.begin(), piece.end());
    ChunkHeader header;
    header.transfer_id = transfer_id_;
    header.layer = static_cast<uint32_t>(layer);
    header.kind = kind.name;
    header.head_end = static_cast<uint32_t>(kind.heads);
    header.token_begin = static_cast<uint32_t>(token_begin);
    header.token_end = static_cast<uint32_t>(token_end);
    header.crc32c = Crc32c(payload);
    return node_->Land(header, payload).status();
  }

  int64_t hint_tokens() const override { return hints_wanted; }
  bool wants_queries() const override { return queries_wanted; }

  std::vector<std::tuple<int, int, int>> calls;
  int64_t hints_wanted = 0;
  bool queries_wanted = false;
  size_t fail_at = 0;

 private:
  Node* const node_;
  const std::string transfer_id_;
};

struct PrefillNode {
  explicit PrefillNode(const std::string& model_dir, uint32_t chunk_tokens = 64,
                       int64_t hbm_bytes = 8 << 20, int block_tokens = 0,
                       const std::string& kernels = "auto", DType kv_dtype = DType::kBFloat16) {
    device = *NewCpuDevice({kernels, 2});
    Model::Options options;
    options.directory = model_dir;
    options.kv_dtype = kv_dtype;
    options.max_context = 1024;
    options.max_rows = static_cast<int>(std::max(chunk_tokens, 32u));
    options.max_logits = 1;
    if (block_tokens > 0) options.block_tokens = block_tokens;
    auto loaded = Model::Load(options, device.get());
    REQUIRE(loaded.ok());
    model = *std::move(loaded);
    auto made = Prefiller::Create({1024, chunk_tokens, 1, hbm_bytes, /*hints=*/true}, device.get(),
                                  model.get(), RealClock());
    REQUIRE(made.ok());
    prefiller = *std::move(made);
  }
  std::unique_ptr<Device> device;
  std::unique_ptr<Model> model;
  std::unique_ptr<Prefiller> prefiller;
};

SamplingParams Greedy() {
  SamplingParams params;
  params.temperature = 0;
  params.ignore_eos = true;
  return params;
}

bool Never() { return false; }

TEST_CASE("what a prefill node pushes decodes as if the node had computed it itself") {
  for (const std::string& name : fixtures::TinyModels()) {
    NodeOptions options;
    options.model_dir = fixtures::ModelDir(name);
    options.max_context = 1024;
    Node node(options);
    const auto golden = fixtures::LoadGolden(name);
    REQUIRE(golden.ok());
    for (const uint32_t chunk : {32u, 100u, 512u}) {
      PrefillNode prefill(options.model_dir, chunk);
      CHECK(prefill.model->fingerprint() == node.model().fingerprint());
      for (const fixtures::GoldenCase& g : *golden) {
        INFO(name << ", chunk " << chunk << ", prompt " << g.prompt.size());
        const auto context = static_cast<uint32_t>(g.prompt.size());
        const auto reserved = node.transfers().Reserve(node.MakeManifest(g.prompt, context, 16));
        REQUIRE(reserved.ok());
        LandingSink sink(&node, reserved->transfer_id);
        const auto result = prefill.prefiller->Run(g.prompt, Greedy(), true, sink, Never);
        INFO(std::string(result.status().ToString()));
        REQUIRE(result.ok());
        REQUIRE(result->first_token.has_value());
        REQUIRE(
            node.transfers().Commit(reserved->transfer_id, {*result->first_token}, nullptr).ok());
        Request request = GreedyRequest({}, 16);
        request.handoff.transfer_id = reserved->transfer_id;
        // The results must be equal to the bit: chunks and nodes do not show in a row.
        CHECK(node.Generate(std::move(request)).ids ==
              node.Generate(GreedyRequest(g.prompt, 16)).ids);
      }
    }
  }
}

// Keeps the float32 caches that it is given, by layer and kind, and wants hints.
class KeepingSink : public LayerSink {
 public:
  absl::Status Begin() override { return absl::OkStatus(); }
  absl::Status Layer(int layer, const CacheKind& kind, int, int,
                     absl::Span<const absl::Span<const uint8_t>> pieces) override {
    std::vector<float>& values = caches[{layer, kind.name}];
    for (const auto& piece : pieces) {
      const auto* floats = reinterpret_cast<const float*>(piece.data());
      values.insert(values.end(), floats, floats + piece.size() / sizeof(float));
    }
    return absl::OkStatus();
  }
  int64_t hint_tokens() const override { return 100000; }
  std::map<std::pair<int, std::string>, std::vector<float>> caches;
};

// Keeps what a decode node that has `cached` tokens is sent, and asks for a tenant's blocks.
class ReusingSink : public KeepingSink {
 public:
  explicit ReusingSink(std::string of, int64_t cached = 0)
      : tenant_(std::move(of)), cached_(cached) {}
  std::string tenant() const override { return tenant_; }
  int64_t cached_tokens() const override { return cached_; }
  absl::Status Layer(int layer, const CacheKind& kind, int begin, int end,
                     absl::Span<const absl::Span<const uint8_t>> pieces) override {
    if (layer == 0) first = std::min(first, begin);
    return KeepingSink::Layer(layer, kind, begin, end, pieces);
  }
  int first = 1 << 20;

 private:
  const std::string tenant_;
  const int64_t cached_;
};

TEST_CASE("a prompt that begins as an earlier one gives the same caches, tokens and hints") {
  for (const std::string name : {"tiny-llama", "tiny-deepseek-v32"}) {
    INFO(name);
    PrefillNode prefill(fixtures::ModelDir(name), 64, 32 << 20, 0, "auto", DType::kFloat32);
    PrefillNode other(fixtures::ModelDir(name), 64, 32 << 20, 0, "auto", DType::kFloat32);
    std::vector<int32_t> prompt;
    for (int i = 0; i < 300; ++i) prompt.push_back((i * i + i * 7) % 90 + 3);
    const auto run = [&](PrefillNode& node, ReusingSink&& sink) {
      const auto result = node.prefiller->Run(prompt, Greedy(), true, sink, Never);
      REQUIRE(result.ok());
      return std::make_tuple(sink.caches, result->first_token->id, result->hints.entries.size(),
                             sink.first);
    };
    const auto first = run(prefill, ReusingSink("a"));
    const std::vector<int32_t> between = std::exchange(prompt, std::vector<int32_t>(280, 9));
    run(prefill, ReusingSink("a"));  // the slot's tables name other pages now
    prompt = between;
    CHECK(run(prefill, ReusingSink("a")) == first);
    prompt.resize(250);
    for (int i = 210; i < 250; ++i) prompt[static_cast<size_t>(i)] = i % 50 + 5;
    CHECK(run(prefill, ReusingSink("a")) == run(other, ReusingSink("a")));
    CHECK(run(prefill, ReusingSink("b")) == run(other, ReusingSink("b")));
    // Nothing is sent of what the decode node has, in whole blocks; what it lacks is.
    const auto [rest, token, hints, from] = run(prefill, ReusingSink("a", 96));
    CHECK(from == 96);
    const auto whole = run(other, ReusingSink("a", 0));
    CHECK(token == std::get<1>(whole));
    for (const auto& [key, values] : rest) {
      const std::vector<float>& all = std::get<0>(whole).at(key);
      REQUIRE(values.size() * 250 == all.size() * (250 - 96));
    }
  }
}

// Returns the relative L2 error of `columns` columns from `first` on, in rows of `stride`.
double Error(const std::vector<float>& got, size_t stride, size_t first,
             const std::vector<uint16_t>& want, size_t columns) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    const double w = kernels::Bf16ToFloat(want[i]);
    const double d = got[i / columns * stride + first + i % columns] - w;
    error += d * d;
    norm += w * w;
  }
  return std::sqrt(error / norm);
}

TEST_CASE("a latent prompt leaves the caches and the selections of transformers") {
  for (const std::string name : {"tiny-deepseek-v32", "tiny-deepseek-v32-fp8"}) {
    const auto golden = fixtures::LoadGolden(name);
    REQUIRE(golden.ok());
    PrefillNode prefill(fixtures::ModelDir(name), 64, 32 << 20, 0, "reference", DType::kFloat32);
    for (const fixtures::GoldenCase& g : *golden) {
      INFO(name << ", prompt " << g.prompt.size());
      const size_t tokens = g.prompt.size();
      KeepingSink sink;
      const auto result = prefill.prefiller->Run(g.prompt, Greedy(), true, sink, Never);
      INFO(std::string(result.status().ToString()));
      REQUIRE(result.ok());
      CHECK(result->first_token->id == g.tokens[0]);
      CHECK(CheckHints(result->hints, {3, 1, 32, static_cast<uint32_t>(tokens), 0}).ok());
      for (size_t layer = 0; layer < g.latent.size(); ++layer) {
        INFO("layer " << layer);
        const auto of_layer = static_cast<int>(layer);
        const std::vector<float>& entries = sink.caches[{of_layer, "latent"}];
        const std::vector<float>& keys = sink.caches[{of_layer, "index"}];
        REQUIRE(entries.size() == tokens * 576);
        REQUIRE(keys.size() == tokens * 128);
        // Half a bit of bf16 is 0.2 %.
        CHECK(Error(entries, 576, 0, g.latent[layer], 512) < 3e-3);
        CHECK(Error(entries, 576, 512, g.rope[layer], 64) < 3e-3);
        CHECK(Error(keys, 128, 0, g.index[layer], 128) < 3e-3);
        const auto first =
            std::find_if(result->hints.entries.begin(), result->hints.entries.end(),
                         [&](const SelectionHints::Entry& entry) { return entry.layer == layer; });
        REQUIRE(first != result->hints.entries.end());
        CHECK(first->position == tokens - 1);
        const std::vector<int32_t>& all = g.selected[layer];
        std::vector<uint32_t> want;
        for (size_t i = 0; i < all.size() / g.tokens.size(); ++i) {
          if (all[i] >= 0) want.push_back(static_cast<uint32_t>(all[i]));
        }
        CHECK(first->units == want);
      }
    }
  }
}

// Keeps the hints that a sequence's prompt ended with.
class HintWatch : public ForwardingPolicy {
 public:
  using ForwardingPolicy::ForwardingPolicy;
  void EndPrompt(int slot, int64_t tokens, SelectionHints hints) override {
    seen = hints;
    ForwardingPolicy::EndPrompt(slot, tokens, std::move(hints));
  }
  void BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                 absl::Span<const int32_t> rows) override {
    positions.insert(positions.end(), rows.begin(), rows.end());
    ForwardingPolicy::BeginStep(stream, slots, rows);
  }
  std::vector<int32_t> positions;
  SelectionHints seen;
};

// Returns a node whose policy is watched. `watch` lives as long as the policy.
NodeOptions WatchedNode(HintWatch** watch) {
  NodeOptions options;
  options.model_dir = fixtures::ModelDir("tiny-llama");
  options.max_context = 1024;
  options.block_tokens = 16;
  options.policy.dense_layers = 0;
  options.watch = [watch](AttentionPolicy* policy) {
    auto made = std::make_unique<HintWatch>(policy);
    *watch = made.get();
    return made;
  };
  return options;
}

TEST_CASE("hints are what the decode node's policy takes, and come to it with the sequence") {
  HintWatch* watch = nullptr;
  NodeOptions options = WatchedNode(&watch);
  PrefillNode prefill(options.model_dir, 64, 8 << 20, 16);
  std::vector<int32_t> prompt;
  for (int i = 0; i < 700; ++i) prompt.push_back(i * i % 97);
  for (const int budget_blocks : {8, 64}) {
    for (const char* policy : {"scout", "recall", "clo", "full"}) {
      INFO(policy << " " << budget_blocks);
      options.policy.name = policy;
      options.policy.budget_tokens = budget_blocks * 16;
      Node node(options);
      CHECK((node.policy().hint_tokens() > 0) == (options.policy.name != "full"));
      const auto reserved = node.transfers().Reserve(node.MakeManifest(prompt, 700, 2));
      REQUIRE(reserved.ok());
      CHECK(reserved->hint_tokens == node.policy().hint_tokens());
      LandingSink sink(&node, reserved->transfer_id);
      sink.hints_wanted = reserved->hint_tokens;
      sink.queries_wanted = reserved->hint_queries > 0;
      auto result = prefill.prefiller->Run(prompt, Greedy(), true, sink, Never);
      REQUIRE(result.ok());
      const SelectionHints sent = result->hints;
      const ModelConfig& model = node.model().config();
      const int64_t queries = int64_t{model.layers} * model.heads * model.head_dim;
      CHECK(reserved->hint_queries == (options.policy.name == "clo" ? queries : 0));
      CHECK(std::ssize(sent.queries) == reserved->hint_queries);
      const absl::Status committed =
          node.transfers()
              .Commit(reserved->transfer_id, {*result->first_token}, nullptr, sent)
              .status();
      INFO(std::string(committed.ToString()));
      REQUIRE(committed.ok());
      Request request = GreedyRequest({}, 2);
      request.handoff.transfer_id = reserved->transfer_id;
      CHECK(node.Generate(std::move(request)).ids.size() == 2);
      REQUIRE(node.Quiescent());
      const CacheKind& kind = node.model().cache_layout().kinds[0];
      const size_t lists = static_cast<size_t>(node.model().cache_layout().layers * kind.heads);
      CHECK(sent.entries.size() == (reserved->hint_tokens > 0 ? lists : 0));
      if (options.policy.name == "full") continue;
      REQUIRE(watch->seen.entries.size() == lists);
      CHECK(watch->seen.queries == sent.queries);
      for (size_t i = 0; i < lists; ++i) {
        CHECK(sent.entries[i].units.size() ==
              static_cast<size_t>(std::min<int64_t>(reserved->hint_tokens / 16, 44)));
        CHECK(watch->seen.entries[i].units == sent.entries[i].units);
      }
    }
  }
}

TEST_CASE("the last token of a prompt that was handed over whole can be computed again") {
  HintWatch* watch = nullptr;
  NodeOptions options = WatchedNode(&watch);
  options.policy.budget_tokens = 1024;  // the budget makes it exact
  options.policy.scout.layer_ahead = false;
  options.policy.hgca.window_tokens = 48;
  options.policy.hgca.beta = 0;
  PrefillNode prefill(options.model_dir, 64, 8 << 20, 16);
  std::vector<int32_t> prompt;
  for (int i = 0; i < 500; ++i) prompt.push_back(i * i % 97);
  for (const char* policy : {"scout", "hgca", "full"}) {
    INFO(policy);
    options.policy.name = policy;
    std::vector<std::vector<int32_t>> ids;
    for (const bool again : {false, true}) {
      options.policy.recompute_last =
          again ? PolicyOptions::RecomputeLast::kOn : PolicyOptions::RecomputeLast::kAuto;
      Node node(options);
      const auto reserved = node.transfers().Reserve(node.MakeManifest(prompt, 500, 8));
      REQUIRE(reserved.ok());
      LandingSink sink(&node, reserved->transfer_id);
      const auto result = prefill.prefiller->Run(prompt, Greedy(), true, sink, Never);
      REQUIRE(result.ok());
      REQUIRE(node.transfers().Commit(reserved->transfer_id, {*result->first_token}, nullptr).ok());
      Request request = GreedyRequest({}, 8);
      request.handoff.transfer_id = reserved->transfer_id;
      ids.push_back(node.Generate(std::move(request)).ids);
      REQUIRE(node.Quiescent());
      CHECK(watch->positions.at(0) == (again && options.policy.name != "full" ? 499 : 500));
    }
    CHECK(ids[0].size() == 8);
    CHECK(ids[0] == ids[1]);
  }
}

TEST_CASE("layers are pushed in order, chunk by chunk, on block boundaries") {
  NodeOptions options;
  options.model_dir = fixtures::ModelDir("tiny-llama");
  options.max_context = 1024;
  Node node(options);
  PrefillNode prefill(options.model_dir, 70);  // rounds down to 64
  const std::vector<int32_t> prompt(150, 7);
  const auto reserved = node.transfers().Reserve(node.MakeManifest(prompt, 150, 1));
  REQUIRE(reserved.ok());
  LandingSink sink(&node, reserved->transfer_id);
  const auto result = prefill.prefiller->Run(prompt, Greedy(), false, sink, Never);
  REQUIRE(result.ok());
  CHECK_FALSE(result->first_token.has_value());
  std::vector<std::tuple<int, int, int>> want;
  for (const auto& [begin, end] : {std::pair{0, 64}, {64, 128}, {128, 150}}) {
    for (int layer = 0; layer < 3; ++layer) want.emplace_back(layer, begin, end);
  }
  CHECK(sink.calls == want);
  REQUIRE(node.transfers().Abort(reserved->transfer_id, "").ok());
}

// Takes caches where they are, and looks at them when they must have arrived. Call `lose_at` is
// that at which it has lost everything, and call `fail_at` ends the run; flushing is a call too.
class DeviceSink : public KeepingSink {
 public:
  explicit DeviceSink(size_t lose_at = 0, size_t fail_at = 0)
      : lose_at_(lose_at), fail_at_(fail_at) {}
  bool OnDevice() override { return true; }
  absl::StatusOr<bool> LayerOnDevice(int layer, const CacheKind& kind, int begin, int end,
                                     absl::Span<const absl::Span<const uint8_t>> pieces) override {
    CHECK_FALSE(lost_);
    SLUICE_ASSIGN_OR_RETURN(const bool taken, Call());
    taken_.push_back({layer, kind, begin, end, {pieces.begin(), pieces.end()}});
    return taken;
  }
  absl::StatusOr<bool> FlushDevice() override {
    ++flushes;
    SLUICE_ASSIGN_OR_RETURN(const bool arrived, Call());
    if (!arrived) return false;
    for (const Taken& t : taken_) {
      SLUICE_RETURN_IF_ERROR(KeepingSink::Layer(t.layer, t.kind, t.begin, t.end, t.pieces));
    }
    return true;
  }
  absl::Status Layer(int layer, const CacheKind& kind, int begin, int end,
                     absl::Span<const absl::Span<const uint8_t>> pieces) override {
    CHECK(lost_);
    return KeepingSink::Layer(layer, kind, begin, end, pieces);
  }
  size_t calls = 0;
  int flushes = 0;

 private:
  struct Taken {
    int layer;
    CacheKind kind;
    int begin, end;
    std::vector<absl::Span<const uint8_t>> pieces;
  };
  absl::StatusOr<bool> Call() {
    if (++calls == fail_at_) return absl::InternalError("a test");
    lost_ = lost_ || calls == lose_at_;
    return !lost_;
  }
  const size_t lose_at_, fail_at_;
  bool lost_ = false;
  std::vector<Taken> taken_;
};

TEST_CASE("a sink may take caches where they are, and gets all again if it loses them") {
  for (const std::string name : {"tiny-llama", "tiny-deepseek-v32"}) {
    INFO(name);
    PrefillNode prefill(fixtures::ModelDir(name), 64, 32 << 20, 0, "auto", DType::kFloat32);
    std::vector<int32_t> prompt;
    for (int i = 0; i < 200; ++i) prompt.push_back((i * i + i * 7) % 90 + 3);
    const auto run = [&](KeepingSink& sink) {
      return prefill.prefiller->Run(prompt, Greedy(), true, sink, Never).status();
    };
    KeepingSink staged;
    REQUIRE(run(staged).ok());
    DeviceSink whole;
    REQUIRE(run(whole).ok());
    CHECK(whole.caches == staged.caches);
    // It loses them at its first call, at later chunks, and when it is flushed.
    for (const size_t call : {size_t{1}, size_t{7}, whole.calls - 2, whole.calls}) {
      INFO("call " << call);
      DeviceSink losing(call);
      REQUIRE(run(losing).ok());
      CHECK(losing.caches == staged.caches);
    }
    // An error ends the run, after a flush, so that nothing reads pages that are given back.
    for (const size_t call : {size_t{1}, size_t{7}, whole.calls}) {
      DeviceSink failing(0, call);
      CHECK(absl::IsInternal(run(failing)));
      CHECK(failing.flushes == 1);
    }
    DeviceSink left;
    CHECK(absl::IsCancelled(
        prefill.prefiller->Run(prompt, Greedy(), true, left, [&] { return left.calls > 4; })
            .status()));
    CHECK(left.flushes == 1);
  }
}

TEST_CASE("a failing sink, a caller who left and a bad prompt end a run, and the next one works") {
  NodeOptions options;
  options.model_dir = fixtures::ModelDir("tiny-llama");
  options.max_context = 1024;
  Node node(options);
  PrefillNode prefill(options.model_dir, 64, 3 * 2 * (2 * 64 * 2 * 2) * 256 + 8192);
  const std::vector<int32_t> prompt(200, 7);
  const auto reserved = node.transfers().Reserve(node.MakeManifest(prompt, 200, 1));
  REQUIRE(reserved.ok());
  const auto run = [&](const std::vector<int32_t>& tokens, LandingSink& sink,
                       const std::function<bool()>& cancelled) {
    return prefill.prefiller->Run(tokens, Greedy(), true, sink, cancelled).status();
  };
  LandingSink broken(&node, reserved->transfer_id);
  broken.fail_at = 5;
  CHECK(absl::IsUnavailable(run(prompt, broken, Never)));
  LandingSink sink(&node, reserved->transfer_id);
  int asked = 0;
  CHECK(absl::IsCancelled(run(prompt, sink, [&] { return ++asked > 4; })));
  CHECK(FieldOf(run({}, sink, Never)) == "prompt_token_ids");
  CHECK(FieldOf(run({512}, sink, Never)) == "prompt_token_ids");
  CHECK(FieldOf(run(std::vector<int32_t>(1024, 1), sink, Never)) == "prompt_token_ids");
  CHECK(FieldOf(run(std::vector<int32_t>(700, 1), sink, Never)) == "prompt_token_ids");
  SamplingParams hot = Greedy();
  hot.temperature = -1;
  CHECK(FieldOf(prefill.prefiller->Run(prompt, hot, true, sink, Never).status()) ==
        "sampling.temperature");
  CHECK(run(prompt, sink, Never).ok());
  REQUIRE(node.transfers().Abort(reserved->transfer_id, "").ok());
  CHECK(node.Quiescent());
}

}  // namespace
}  // namespace sluice
