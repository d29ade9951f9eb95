// Whole pulls: one process holds prompts as a prefill node does, and the other reads them.
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "src/base/clock.h"
#include "src/base/status_macros.h"
#include "src/metrics/metrics.h"
#include "src/prefill/held_prompts.h"
#include "src/service/grpc/channels.h"
#include "src/service/grpc/grpc_server.h"
#include "src/service/ingest/ingest_service.h"
#include "src/service/links/link_server.h"
#include "src/service/pull/link_reader.h"
#include "src/service/pull/puller.h"
#include "src/service/pull/source_service.h"
#include "tests/bench/links/link_bench.h"
#include "tests/support/links.h"

namespace sluice::bench {
namespace {

// Gives layers of made-up caches.
class Caches : public Prefiller {
 public:
  absl::StatusOr<PrefillResult> Run(const std::vector<int32_t>& prompt, const SamplingParams&, bool,
                                    LayerSink& sink, const std::function<bool()>&) override {
    const CacheLayout layout = Layout();
    const auto tokens = static_cast<int>(prompt.size());
    std::vector<uint8_t> bytes(static_cast<size_t>(layout.BytesFor(tokens) / layout.layers), 3);
    for (int layer = 0; layer < layout.layers; ++layer) {
      const absl::Span<const uint8_t> pieces[] = {bytes};
      SLUICE_RETURN_IF_ERROR(sink.Layer(layer, layout.kinds[0], 0, tokens, pieces));
    }
    return PrefillResult();
  }
};

absl::Status Hold(Process& process) {
  const Flags& flags = process.flags();
  Device& device = process.device();
  Caches caches;
  HeldPrompts::Options hold;
  hold.layout = Layout();
  // Room for two: the next prompt may be held before the last reader of the one before lets go.
  hold.max_bytes = 2 * static_cast<uint64_t>(Layout().BytesFor(flags.tokens));
  SLUICE_ASSIGN_OR_RETURN(Buffer arena,
                          device.Allocate(MemoryKind::kPinned, hold.max_bytes, "held prompts"));
  HeldPrompts held(hold, &caches, std::move(arena));
  LinkServer::Options options;
  options.sends = true;
  SLUICE_ASSIGN_OR_RETURN(options.links, testing::TestPeerLinks(&device));
  LinkServer links(std::move(options));
  SourceServiceOptions service;
  service.model_fingerprint = Fingerprint();
  service.layout = Layout();
  service.held = &held;
  service.links = &links;
  GrpcServer::Options listen;
  listen.listen = "127.0.0.1:0";
  SLUICE_ASSIGN_OR_RETURN(const auto server,
                          GrpcServer::Start(listen, {NewSourceService(service)}));
  for (int n = 0; n < 2 * (flags.rounds + 1); ++n) {
    HeldPrompts::Wanted wanted;
    wanted.prompt.assign(static_cast<size_t>(flags.tokens), 7);
    SLUICE_ASSIGN_OR_RETURN(const HeldPrompts::Held made, held.Hold(wanted, [] { return false; }));
    process.Leave(absl::StrCat(server->address(), " ", made.prompt->source_id));
    process.Meet();  // it is held
    process.Meet();  // it was read
  }
  return absl::OkStatus();
}

absl::Status Pull(Process& process) {
  const Flags& flags = process.flags();
  Metrics metrics;
  const auto bytes = static_cast<size_t>(Layout().BytesFor(flags.tokens));
  SLUICE_ASSIGN_OR_RETURN(const Home dram, NewHome(flags, process.device()));
  TransferTable table(TableOptions(flags, dram), dram[0].get(), dram[0].get(), RealClock());
  table.SetWake([] {});
  Channels channels{nullptr, MaxChunkMessageBytes(kChunkBytes)};
  LinkReader::Options read;
  SLUICE_ASSIGN_OR_RETURN(read.peers.links, testing::TestPeerLinks(&process.device()));
  read.message_bytes = LinkMessageBytes(kChunkBytes, *read.peers.links);
  LinkReader reader(std::move(read));
  for (const bool by_link : {false, true}) {
    Puller::Options pull;
    pull.metrics = &metrics;
    pull.model_fingerprint = Fingerprint();
    pull.layout = Layout();
    pull.max_context = pull.max_tokens = 1 << 20;
    SLUICE_ASSIGN_OR_RETURN(pull.sources, AddressList::Parse("*"));
    pull.transfers = &table;
    pull.channels = &channels;
    pull.links = by_link ? &reader : nullptr;
    Puller puller(std::move(pull));
    std::vector<absl::Duration> times;
    for (int round = 0; round <= flags.rounds; ++round) {
      process.Meet();
      const std::vector<std::string> at = absl::StrSplit(process.Left(), ' ');
      Request request;
      request.prompt.assign(static_cast<size_t>(flags.tokens), 7);
      request.sampling.max_tokens = 1;
      request.handoff.source = {at[0], at[1], PromptDigest(request.prompt), Fingerprint()};
      const absl::Time begin = absl::Now();
      SLUICE_ASSIGN_OR_RETURN(const auto start, puller.Begin(&request));
      SLUICE_ASSIGN_OR_RETURN(const auto id, table.Attach(request.handoff));
      start();
      for (;;) {
        SLUICE_ASSIGN_OR_RETURN(const auto ready, table.TakeReady(id));
        if (ready.has_value()) break;
        absl::SleepFor(absl::Microseconds(100));
      }
      if (round > 0) times.push_back(absl::Now() - begin);  // the first one makes the link
      process.Meet();
    }
    Print(by_link ? "pull over the link, pinned to pinned DRAM"
                  : "pull over gRPC, pinned to pinned DRAM",
          bytes, times);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status TimePulls(Process& process) { return process.sends() ? Hold(process) : Pull(process); }

}  // namespace sluice::bench
