// Times caches on their way from one process to another, over a link between their devices
// (src/device/peer_link.h), beside the bare sends and receives of a group of ranks, and a whole
// pull and a whole push over that link beside those over gRPC:
//
//   sluice-link-bench [--device cpu|cuda] [--tokens N] [--message-mib N] [--devices A,B]
//                     [--rounds N] [--part link|pull|push] [--ranks N]
//
// The caches are those of N tokens of Llama-3-8B in bf16: 128 KiB a token. With --devices the
// sender has GPU A and the receiver GPU B (CUDA_VISIBLE_DEVICES); where both are one, or none are
// given, two processes share a GPU, NCCL goes by sockets, and the figures say nothing but that it
// works. With --ranks the reader's DRAM is that of N ranks, which divide the heads, as on a decode
// node whose rank 0 has the link's end; the ranks' memory is all of one process here.
#include <grpcpp/grpcpp.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "sluice/v1/ingest.grpc.pb.h"
#include "src/base/clock.h"
#include "src/base/readiness.h"
#include "src/base/status_macros.h"
#include "src/device/device.h"
#include "src/device/peer_link.h"
#include "src/device/rank_group.h"
#include "src/kv/page_pool.h"
#include "src/kv/transfer_table.h"
#include "src/metrics/metrics.h"
#include "src/prefill/held_prompts.h"
#include "src/service/grpc/channels.h"
#include "src/service/grpc/grpc_server.h"
#include "src/service/ingest/ingest_service.h"
#include "src/service/ingest/kv_pusher.h"
#include "src/service/links/link_peers.h"
#include "src/service/links/link_server.h"
#include "src/service/pull/link_reader.h"
#include "src/service/pull/puller.h"
#include "src/service/pull/source_service.h"
#include "src/service/wire/status_mapping.h"
#include "tests/support/device.h"
#include "tests/support/links.h"
#include "tests/support/ranks.h"

namespace sluice {
namespace {

constexpr int kReader = 0, kSource = 1;
constexpr size_t kChunkBytes = size_t{8} << 20;
const std::string kFingerprint(64, 'a');

struct Flags {
  std::string device = "cpu";
  int tokens = 2048;
  int message_mib = 8;
  std::vector<std::string> devices;
  int rounds = 3;
  std::string part;  // empty: all
  int ranks = 1;     // that divide the reader's caches
};

// The processes tell each other this.
struct Box {
  std::atomic<int> step[2];
  char text[2048];
};

constexpr int kHeads = 8;
CacheLayout Layout(int ranks = 1) {
  CacheKind kind;
  kind.name = "kv";
  kind.heads = kHeads / ranks;
  kind.block_tokens = 32;
  kind.SetEqualParts(2, 512);  // keys and values of 128 elements in bf16
  return {32, {kind}};
}

double GbPerS(size_t bytes, absl::Duration time) {
  return static_cast<double>(bytes) / 1e9 / absl::ToDoubleSeconds(time);
}

// Prints the median and the spread of a transfer of `bytes` bytes.
void Print(const char* what, size_t bytes, std::vector<absl::Duration> times) {
  std::sort(times.begin(), times.end());
  std::printf("%-46s %8.2f GB/s  (%.2f to %.2f)  %7.1f ms\n", what,
              GbPerS(bytes, times[times.size() / 2]), GbPerS(bytes, times.back()),
              GbPerS(bytes, times.front()), absl::ToDoubleMilliseconds(times[times.size() / 2]));
  std::fflush(stdout);
}

class Process {
 public:
  Process(const Flags& flags, const RankGroupOptions& options, Box* box)
      : flags_(flags), options_(options), box_(box) {}

  std::string Run() {
    if (!flags_.devices.empty()) {
      setenv("CUDA_VISIBLE_DEVICES", flags_.devices[options_.rank == kSource ? 0 : 1].c_str(), 1);
    }
    auto device = testing::TestDevice(flags_.device == "cpu" ? "auto" : flags_.device);
    if (!device.ok()) return std::string(device.status().message());
    device_ = *std::move(device);
    absl::Status status;
    const auto wants = [&](const char* part) {
      return status.ok() && (flags_.part.empty() || flags_.part == part);
    };
    if (wants("link")) status = Links();
    if (wants("pull")) status = sends() ? Hold() : Pull();
    if (wants("push")) status = sends() ? Push() : Take();
    return status.ok() ? "" : status.ToString();
  }

 private:
  bool sends() const { return options_.rank == kSource; }
  // Both processes come here.
  void Meet() {
    const int own = box_->step[options_.rank].fetch_add(1) + 1;
    while (box_->step[1 - options_.rank].load() < own) absl::SleepFor(absl::Microseconds(20));
  }
  // Times `once` between two meetings, in the process that receives.
  absl::Status Time(const char* what, size_t bytes, const std::function<absl::Status()>& once) {
    std::vector<absl::Duration> times;
    for (int round = 0; round <= flags_.rounds; ++round) {  // the first warms up
      Meet();
      const absl::Time begin = absl::Now();
      SLUICE_RETURN_IF_ERROR(once());
      if (round > 0) times.push_back(absl::Now() - begin);
      Meet();
    }
    if (!sends()) Print(what, bytes, times);
    return absl::OkStatus();
  }

  absl::Status Links() {
    const size_t message = static_cast<size_t>(flags_.message_mib) << 20;
    const size_t bytes =
        std::max<size_t>(static_cast<size_t>(Layout().BytesFor(flags_.tokens)) / message, 1) *
        message;
    SLUICE_ASSIGN_OR_RETURN(const Buffer hbm,
                            device_->Allocate(MemoryKind::kDevice, bytes, "the caches"));
    SLUICE_ASSIGN_OR_RETURN(const Buffer pinned,
                            device_->Allocate(MemoryKind::kPinned, bytes, "the caches"));
    std::memset(pinned.data(), 1, bytes);
    const auto stream = device_->NewStream(Device::StreamKind::kCompute);
    const auto done = device_->NewEvent();
    const auto wait = [&] {
      stream->Record(*done);
      done->Wait();
      return device_->Health();
    };
    SLUICE_RETURN_IF_ERROR(Bare(hbm, bytes, message, *stream, wait));
    SLUICE_RETURN_IF_ERROR(Time("copy of own HBM to pinned DRAM, no link", bytes, [&] {
      stream->Copy(pinned.data(), hbm.data(), bytes);
      return wait();
    }));

    SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<PeerLinks> links,
                            testing::TestPeerLinks(device_.get()));
    if (!sends()) {
      SLUICE_ASSIGN_OR_RETURN(const std::string id, links->NewId());
      std::strcpy(box_->text, id.c_str());
    }
    Meet();
    PeerLinkOptions options;
    options.id = box_->text;
    options.sends = sends();
    options.message_bytes = message;
    const absl::Time begin = absl::Now();
    SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<PeerLink> link, links->Join(options));
    if (!sends()) {
      std::printf("%-46s %8.1f ms  (%s)\n", "a link is made in",
                  absl::ToDoubleMilliseconds(absl::Now() - begin), links->transport());
    }
    const auto move = [&](const Buffer& from, const Buffer& to) {
      return sends() ? SendAll(*link, from, message) : ReceiveAll(*link, to, message);
    };
    SLUICE_RETURN_IF_ERROR(
        Time("link, HBM to HBM, checksums", bytes, [&] { return move(hbm, hbm); }));
    SLUICE_RETURN_IF_ERROR(
        Time("link, HBM to pinned DRAM, checksums", bytes, [&] { return move(hbm, pinned); }));
    return Time("link, pinned to pinned DRAM, checksums", bytes,
                [&] { return move(pinned, pinned); });
  }

  // ncclSend and ncclRecv of the same messages on CUDA; shared memory on a CPU.
  absl::Status Bare(const Buffer& hbm, size_t bytes, size_t message, Stream& stream,
                    const std::function<absl::Status()>& wait) {
    SLUICE_ASSIGN_OR_RETURN(const std::unique_ptr<RankGroup> group, device_->JoinRanks(options_));
    SLUICE_RETURN_IF_ERROR(Time("bare send and receive, HBM to HBM", bytes, [&] {
      for (size_t at = 0; at < bytes; at += message) {
        uint8_t* const data = hbm.as<uint8_t>() + at;
        if (sends()) {
          group->Send(stream, data, message, kReader);
        } else {
          group->Receive(stream, data, message, kSource);
        }
      }
      return wait();
    }));
    return absl::OkStatus();
  }

  static absl::Status SendAll(PeerLink& link, const Buffer& from, size_t message) {
    for (size_t at = 0; at < from.bytes(); at += message) {
      const PeerLink::Piece piece = {from.as<uint8_t>() + at, message};
      SLUICE_RETURN_IF_ERROR(link.Send({&piece, 1}));
    }
    return link.Flush();
  }
  static absl::Status ReceiveAll(PeerLink& link, const Buffer& to, size_t message) {
    const size_t count = to.bytes() / message;
    for (size_t n = 0, awaited = 0; awaited < count;) {
      if (n < count && n - awaited < static_cast<size_t>(link.depth())) {
        const PeerLink::Piece piece = {to.as<uint8_t>() + n * message, message};
        SLUICE_RETURN_IF_ERROR(link.Receive({&piece, 1}));
        ++n;
        continue;
      }
      SLUICE_RETURN_IF_ERROR(link.Await().status());
      ++awaited;
    }
    return absl::OkStatus();
  }

  // Gives layers of made-up caches.
  class Caches : public Prefiller {
   public:
    absl::StatusOr<PrefillResult> Run(const std::vector<int32_t>& prompt, const SamplingParams&,
                                      bool, LayerSink& sink,
                                      const std::function<bool()>&) override {
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

  absl::Status Hold() {
    Caches caches;
    HeldPrompts::Options hold;
    hold.layout = Layout();
    // Room for two: the next prompt may be held before the last reader of the one before lets go.
    hold.max_bytes = 2 * static_cast<uint64_t>(Layout().BytesFor(flags_.tokens));
    SLUICE_ASSIGN_OR_RETURN(Buffer arena,
                            device_->Allocate(MemoryKind::kPinned, hold.max_bytes, "held prompts"));
    HeldPrompts held(hold, &caches, std::move(arena));
    LinkServer::Options options;
    options.sends = true;
    SLUICE_ASSIGN_OR_RETURN(options.links, testing::TestPeerLinks(device_.get()));
    LinkServer links(std::move(options));
    SourceServiceOptions service;
    service.model_fingerprint = kFingerprint;
    service.layout = Layout();
    service.held = &held;
    service.links = &links;
    GrpcServer::Options listen;
    listen.listen = "127.0.0.1:0";
    SLUICE_ASSIGN_OR_RETURN(const auto server,
                            GrpcServer::Start(listen, {NewSourceService(service)}));
    for (int n = 0; n < 2 * (flags_.rounds + 1); ++n) {
      HeldPrompts::Wanted wanted;
      wanted.prompt.assign(static_cast<size_t>(flags_.tokens), 7);
      SLUICE_ASSIGN_OR_RETURN(const HeldPrompts::Held made,
                              held.Hold(wanted, [] { return false; }));
      std::strcpy(box_->text, absl::StrCat(server->address(), " ", made.prompt->source_id).c_str());
      Meet();  // it is held
      Meet();  // it was read
    }
    return absl::OkStatus();
  }

  // The host cache of the reader: a pool for each rank, with room for one prompt.
  using Home = std::vector<std::unique_ptr<PagePool>>;
  absl::StatusOr<Home> NewDram() {
    Home home;
    const CacheLayout layout = Layout(flags_.ranks);
    const auto bytes = static_cast<size_t>(layout.BytesFor(flags_.tokens));
    for (int rank = 0; rank < flags_.ranks; ++rank) {
      SLUICE_ASSIGN_OR_RETURN(
          Buffer memory,
          device_->Allocate(MemoryKind::kPinned, bytes + bytes / 8 + (64 << 20), "pool"));
      SLUICE_ASSIGN_OR_RETURN(home.emplace_back(),
                              PagePool::Create("dram", layout, std::move(memory)));
    }
    return home;
  }
  TransferTable::Options TableOptions(const Home& home) const {
    TransferTable::Options options;
    if (home.size() > 1) {
      HeadPlaces places;
      places.layout = Layout();
      places.places.emplace_back();
      const int own = kHeads / flags_.ranks;
      for (int head = 0; head < kHeads; ++head) {
        const auto rank = static_cast<size_t>(head / own);
        places.places[0].push_back({head % own, {home[rank]->base(0) - home[0]->base(0)}});
      }
      options.places.push_back(std::move(places));
      options.await_free_pages = [] { return absl::OkStatus(); };
    }
    options.model_fingerprint = kFingerprint;
    options.vocab_size = 1000;
    options.max_context = 1 << 20;
    options.footprint = [](int64_t context, int64_t) { return Footprint{context, 0}; };
    options.prefix_cache = false;
    return options;
  }

  absl::Status Pull() {
    Metrics metrics;
    const auto bytes = static_cast<size_t>(Layout().BytesFor(flags_.tokens));
    SLUICE_ASSIGN_OR_RETURN(const Home dram, NewDram());
    TransferTable table(TableOptions(dram), dram[0].get(), dram[0].get(), RealClock());
    table.SetWake([] {});
    Channels channels{nullptr, MaxChunkMessageBytes(kChunkBytes)};
    LinkReader::Options read;
    SLUICE_ASSIGN_OR_RETURN(read.peers.links, testing::TestPeerLinks(device_.get()));
    read.message_bytes = LinkMessageBytes(kChunkBytes, *read.peers.links);
    LinkReader reader(std::move(read));
    for (const bool by_link : {false, true}) {
      Puller::Options pull;
      pull.metrics = &metrics;
      pull.model_fingerprint = kFingerprint;
      pull.layout = Layout();
      pull.max_context = pull.max_tokens = 1 << 20;
      SLUICE_ASSIGN_OR_RETURN(pull.sources, AddressList::Parse("*"));
      pull.transfers = &table;
      pull.channels = &channels;
      pull.links = by_link ? &reader : nullptr;
      Puller puller(std::move(pull));
      std::vector<absl::Duration> times;
      for (int round = 0; round <= flags_.rounds; ++round) {
        Meet();
        const std::vector<std::string> at = absl::StrSplit(box_->text, ' ');
        Request request;
        request.prompt.assign(static_cast<size_t>(flags_.tokens), 7);
        request.sampling.max_tokens = 1;
        request.handoff.source = {at[0], at[1], PromptDigest(request.prompt), kFingerprint};
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
        Meet();
      }
      Print(by_link ? "pull over the link, pinned to pinned DRAM"
                    : "pull over gRPC, pinned to pinned DRAM",
            bytes, times);
    }
    return absl::OkStatus();
  }

  // Serves a decode node's side of pushes.
  absl::Status Take() {
    Metrics metrics;
    Readiness readiness;
    SLUICE_ASSIGN_OR_RETURN(const Home dram, NewDram());
    TransferTable::Options options = TableOptions(dram);
    options.max_chunk_bytes = kChunkBytes;
    TransferTable table(options, dram[0].get(), dram[0].get(), RealClock());
    table.SetWake([] {});
    LinkServer::Options ends;
    SLUICE_ASSIGN_OR_RETURN(ends.links, testing::TestPeerLinks(device_.get()));
    LinkServer links(std::move(ends));
    IngestServiceOptions service;
    service.vocab_size = options.vocab_size;
    service.transfers = &table;
    service.readiness = &readiness;
    service.metrics = &metrics;
    service.links = &links;
    service.link_message_bytes = LinkMessageBytes(kChunkBytes, links.links());
    GrpcServer::Options listen;
    listen.listen = "127.0.0.1:0";
    listen.max_receive_message_bytes = MaxChunkMessageBytes(kChunkBytes);
    SLUICE_ASSIGN_OR_RETURN(const auto server,
                            GrpcServer::Start(listen, {NewIngestService(service)}));
    std::strcpy(box_->text, server->address().c_str());
    Meet();  // it serves
    Meet();  // everything was pushed
    return absl::OkStatus();
  }

  // Returns a layer's part of a chunk as it lies in a prefill node's HBM: in pages, of which no two
  // neighbours follow one another.
  static std::vector<absl::Span<const uint8_t>> Pages(const Buffer& layer, int tokens) {
    const CacheKind kind = Layout().kinds[0];
    std::vector<absl::Span<const uint8_t>> pieces;
    const int64_t pages = kind.BlocksFor(tokens) * kind.heads;
    for (int64_t i = 0; i < pages; ++i) {
      const int64_t token = i % kind.BlocksFor(tokens) * kind.block_tokens;
      const int64_t count = std::min<int64_t>(kind.block_tokens, tokens - token);
      pieces.emplace_back(
          layer.as<uint8_t>() + (pages - 1 - i) * kind.bytes_per_token * kind.block_tokens,
          static_cast<size_t>(kind.bytes_per_token * count));
    }
    return pieces;
  }

  // Pushes as a prefill node that computes nothing: chunks of 512 tokens, layer by layer.
  absl::Status Push() {
    constexpr int kStep = 512;
    const CacheLayout layout = Layout();
    const CacheKind& kind = layout.kinds[0];
    const auto bytes = static_cast<size_t>(layout.BytesFor(flags_.tokens));
    const auto layer_bytes = static_cast<size_t>(layout.BytesFor(kStep) / layout.layers);
    // A link sends from where the layer was computed; for gRPC the node has copied it by then.
    SLUICE_ASSIGN_OR_RETURN(const Buffer hbm,
                            device_->Allocate(MemoryKind::kDevice, layer_bytes, "a layer"));
    SLUICE_ASSIGN_OR_RETURN(const Buffer staging,
                            device_->Allocate(MemoryKind::kPinned, layer_bytes, "a layer"));
    std::memset(staging.data(), 3, staging.bytes());
    LinkPeers::Options ends;
    SLUICE_ASSIGN_OR_RETURN(ends.links, testing::TestPeerLinks(device_.get()));
    ends.sends = true;
    LinkPeers peers(std::move(ends));
    Meet();
    Channels channels;
    const std::string address = box_->text;
    const auto stub = v1::KvIngest::NewStub(channels.Get(address));
    const auto context = [] { return std::make_unique<grpc::ClientContext>(); };
    for (const bool by_link : {false, true}) {
      std::vector<absl::Duration> times;
      for (int round = 0; round <= flags_.rounds; ++round) {  // the first one makes the link
        v1::ReserveRequest reserve;
        v1::ReserveResponse reserved;
        v1::Manifest& manifest = *reserve.mutable_manifest();
        manifest.set_model_fingerprint(kFingerprint);
        manifest.set_context_length(static_cast<uint32_t>(flags_.tokens));
        for (int i = 0; i < flags_.tokens; ++i) manifest.add_prompt_token_ids(7);
        manifest.set_max_new_tokens(1);
        SLUICE_RETURN_IF_ERROR(FromGrpcStatus(stub->Reserve(context().get(), reserve, &reserved)));
        KvPusher::Options options;
        options.transfer_id = reserved.transfer_id();
        options.max_chunk_bytes = reserved.max_chunk_bytes();
        options.stream_context = options.call_context = options.link_context = context;
        options.links = by_link ? &peers : nullptr;
        options.address = address;
        KvPusher pusher(stub.get(), std::move(options));
        const absl::Time begin = absl::Now();
        for (int token = 0; token < flags_.tokens; token += kStep) {
          const int end = std::min(token + kStep, flags_.tokens);
          const std::vector<absl::Span<const uint8_t>> pieces =
              by_link
                  ? Pages(hbm, end - token)
                  : std::vector{absl::Span<const uint8_t>(
                        staging.as<uint8_t>(),
                        static_cast<size_t>(kind.bytes_per_token * kind.heads * (end - token)))};
          for (int layer = 0; layer < layout.layers; ++layer) {
            if (pusher.OnDevice()) {
              SLUICE_RETURN_IF_ERROR(
                  pusher.LayerOnDevice(layer, kind, token, end, pieces).status());
            } else if (!by_link) {
              SLUICE_RETURN_IF_ERROR(pusher.Layer(layer, kind, token, end, pieces,
                                                  {0, static_cast<uint32_t>(kind.heads)}));
            }
          }
        }
        SLUICE_RETURN_IF_ERROR(pusher.FlushDevice().status());
        SLUICE_RETURN_IF_ERROR(pusher.Finish());
        if (round > 0) times.push_back(absl::Now() - begin);
        if (by_link && pusher.bytes_by_link() != bytes) {
          return absl::InternalError("not everything went over the link");
        }
        v1::AbortRequest abort;
        v1::AbortResponse aborted;
        abort.set_transfer_id(reserved.transfer_id());
        SLUICE_RETURN_IF_ERROR(FromGrpcStatus(stub->Abort(context().get(), abort, &aborted)));
      }
      Print(by_link ? "push over the link, HBM to pinned DRAM"
                    : "push over gRPC, pinned to pinned DRAM",
            bytes, times);
    }
    Meet();
    return absl::OkStatus();
  }

  const Flags& flags_;
  const RankGroupOptions options_;
  Box* const box_;
  std::unique_ptr<Device> device_;
};

bool Parse(int argc, char** argv, Flags* flags) {
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--device") {
      flags->device = value;
    } else if (name == "--tokens" && absl::SimpleAtoi(value, &flags->tokens)) {
      flags->tokens = std::max(flags->tokens / 32 * 32, 32);
    } else if (name == "--message-mib" && absl::SimpleAtoi(value, &flags->message_mib)) {
      flags->message_mib = std::clamp(flags->message_mib, 1, 256);
    } else if (name == "--devices") {
      flags->devices = absl::StrSplit(value, ',');
    } else if (name == "--rounds" && absl::SimpleAtoi(value, &flags->rounds)) {
      flags->rounds = std::max(flags->rounds, 1);
    } else if (name == "--part") {
      flags->part = value;
    } else if (name == "--ranks" && absl::SimpleAtoi(value, &flags->ranks)) {
      if (flags->ranks < 1 || kHeads % flags->ranks != 0) return false;
    } else {
      return false;
    }
  }
  return argc % 2 == 1 && (flags->devices.empty() || flags->devices.size() == 2);
}

int Main(int argc, char** argv) {
  Flags flags;
  if (!Parse(argc, argv, &flags)) {
    std::fprintf(stderr,
                 "sluice-link-bench [--device cpu|cuda] [--tokens N] [--message-mib N] "
                 "[--devices A,B] [--rounds N] [--part link|pull|push] [--ranks 1|2|4|8]\n");
    return 2;
  }
  const bool share =
      flags.device == "cuda" && (flags.devices.empty() || flags.devices[0] == flags.devices[1]);
  std::printf("%s, %d tokens of Llama-3-8B's caches (%.2f GB), messages of %d MiB, %d rounds%s%s\n",
              flags.device.c_str(), flags.tokens,
              static_cast<double>(Layout().BytesFor(flags.tokens)) / 1e9, flags.message_mib,
              flags.rounds,
              flags.ranks > 1 ? absl::StrCat(", to ", flags.ranks, " ranks").c_str() : "",
              share ? "; two processes share one GPU: a rehearsal" : "");
  std::fflush(stdout);
  void* const shared =
      mmap(nullptr, sizeof(Box), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  SLUICE_CHECK(shared != MAP_FAILED);
  auto* const box = new (shared) Box{};
  const auto wrong = testing::RunRankProcesses(
      testing::RankOptions(2),
      [&](const RankGroupOptions& options) { return Process(flags, options, box).Run(); }, share);
  const std::string said = testing::Joined(wrong);
  if (!said.empty()) std::fprintf(stderr, "%s\n", said.c_str());
  return said.empty() ? 0 : 1;
}

}  // namespace
}  // namespace sluice

int main(int argc, char** argv) { return sluice::Main(argc, argv); }
