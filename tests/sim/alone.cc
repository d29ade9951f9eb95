#include "tests/sim/alone.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "src/base/crc32c.h"
#include "src/base/error.h"
#include "src/base/status_macros.h"
#include "src/device/sim/sim_clock.h"
#include "tests/sim/node.h"

namespace sluice::sim {
namespace {

class Listener : public TokenSink {
 public:
  bool HasRoom(size_t) const override { return true; }
  void Emit(OutputToken token) override { expected.tokens.push_back(std::move(token)); }
  void Finish(FinishInfo info) override { end = std::move(info); }

  Expected expected;
  std::optional<FinishInfo> end;
};

// Returns the same node without faults and delays.
NodeSpec Quiet(NodeSpec node) {
  node.device.stall_share = node.device.early_events = node.device.lost_copies = 0;
  node.device.worker_failures = node.device.late_workers = node.device.leaving_workers = 0;
  node.device.refused_allocation = -1;
  node.engine.transfer_wait = node.engine.slow_reader_timeout = absl::Hours(1);
  node.lease = absl::Hours(1);
  return node;
}

std::string HandOver(Node& node, int block_tokens, const RequestSpec& request) {
  TransferTable& transfers = node.transfers();
  Manifest manifest;
  manifest.model_fingerprint = node.model().fingerprint();
  manifest.context_length = request.context;
  manifest.prompt_token_ids.assign(request.prompt.begin(), request.prompt.end());
  manifest.max_new_tokens = request.max_new_tokens;
  const auto reserved = transfers.Reserve(manifest);
  SLUICE_CHECK(reserved.ok(), reserved.status().ToString());
  History history;
  for (const int32_t token : request.prompt) history.Append(token);
  for (int layer = 0; layer < kLayers; ++layer) {
    const std::vector<uint8_t> payload =
        history.Payload(layer, 0, kKvHeads, 0, static_cast<size_t>(request.context), block_tokens);
    ChunkHeader header;
    header.transfer_id = reserved->transfer_id;
    header.kind = "kv";
    header.layer = static_cast<uint32_t>(layer);
    header.head_end = kKvHeads;
    header.token_end = request.context;
    header.crc32c = Crc32c(payload);
    auto landing = transfers.BeginChunk(header, payload.size());
    SLUICE_CHECK(landing.ok(), landing.status().ToString());
    (*landing)->Append(payload);
    SLUICE_CHECK((*landing)->Finish().ok());
  }
  const auto committed = transfers.Commit(reserved->transfer_id, request.first, nullptr,
                                          request.hints.value_or(SelectionHints()));
  SLUICE_CHECK(committed.ok(), committed.status().ToString());
  return reserved->transfer_id;
}

}  // namespace

Expected ExpectAlone(const NodeSpec& spec, const RequestSpec& request) {
  SLUICE_CHECK(spec.top_k == 0, "what latent caches give is known without a node");
  SimClock clock;
  auto node = Node::Create(Quiet(spec), &clock);
  SLUICE_CHECK(node.ok(), node.status().ToString());
  Engine& engine = (*node)->engine();
  Request alone;
  alone.request_id = "alone";
  alone.sampling = request.sampling;
  const auto sink = std::make_shared<Listener>();
  alone.sink = sink;
  if (request.meeting == Meeting::kLocal) {
    alone.prompt = request.prompt;
  } else {
    alone.handoff.transfer_id = HandOver(**node, spec.block_tokens, request);
  }
  const auto id = engine.Submit(std::move(alone));
  SLUICE_CHECK(id.ok(), id.status().ToString());
  while (!sink->end.has_value()) {
    const Engine::Next next = engine.Turn();
    if (next.kind == Engine::Next::Kind::kEvent) {
      clock.RunUntil([&] { return next.event->Ready(); });
    } else if (next.kind == Engine::Next::Kind::kInbox && !sink->end.has_value()) {
      SLUICE_CHECK(clock.RunNext(), "alone it waits for nothing");
    }
  }
  // Turns until no step under way has its slot.
  for (Engine::Next next = engine.Turn(); next.kind != Engine::Next::Kind::kInbox;
       next = engine.Turn()) {
    if (next.kind == Engine::Next::Kind::kEvent) {
      clock.RunUntil([&] { return next.event->Ready(); });
    }
  }
  Expected expected = std::move(sink->expected);
  switch (sink->end->reason) {
    case FinishInfo::Reason::kStop:
      expected.end = Expected::End::kStop;
      expected.stop_token = sink->end->stop_token_id;
      break;
    case FinishInfo::Reason::kLength:
      expected.end = Expected::End::kLength;
      break;
    case FinishInfo::Reason::kError:
      SLUICE_CHECK(ReasonOf(sink->end->status).value_or("") == "BAD_LOGITS",
                   sink->end->status.ToString());
      expected.end = Expected::End::kBadLogits;
      break;
  }
  return expected;
}

void Measure(NodeSpec* spec) {
  SimClock clock;
  const auto node = Node::Create(Quiet(*spec), &clock);
  spec->longest = 0;
  if (!node.ok()) return;
  const AttentionPolicy& policy = (*node)->policy();
  const int64_t dram = (*node)->dram().capacity_tokens();
  spec->longest = std::min<int64_t>({spec->engine.max_context, policy.max_tokens(), dram});
  spec->exact = policy.exact_tokens();
  spec->hint_tokens = policy.hint_tokens();
  spec->hint_queries = policy.hint_queries();
}

}  // namespace sluice::sim
