// sluice-bench ingest: measures the bytes per second that a node receives, beside raw gRPC with the
// same messages in the same run, and the loss of a decode that runs meanwhile.
#include "src/bench/ingest/ingest_bench.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "src/base/clock.h"
#include "src/base/logging.h"
#include "src/base/status_macros.h"
#include "src/bench/ingest/bench_certificate.h"
#include "src/bench/ingest/ingest_peers.h"
#include "src/bench/ingest/ingest_sender.h"
#include "src/bench/report/subcommand.h"
#include "src/device/cpu/cpu_device.h"
#include "src/kv/transfer_table.h"
#include "src/metrics/metrics.h"
#include "src/model/model.h"
#include "src/model/model_config.h"
#include "src/service/access/access.h"
#include "src/service/access/credentials.h"
#include "src/service/grpc/channels.h"
#include "src/service/grpc/grpc_server.h"
#include "src/service/ingest/ingest_service.h"
#include "src/service/pull/puller.h"

namespace sluice::bench {
namespace {

constexpr char kAbout[] =
    R"(Times the transfer of KV caches into a node: pushed by Reserve, Write with checksums and Commit, over a real
connection from a separate process (ingest), and read from that process by KvSource (pull). In turn with these
run two peers with the same messages: gRPC that throws each message away (discard), and gRPC that copies each
once into as much memory (copy). Rates are of payload bytes; CPU seconds are per 10^9 payload bytes.
With --model, also measures how much a decode loses beside ingest at --rate, compared with a load that spins
away the same CPU time.
)";
constexpr char kExamples[] =
    R"(  sluice-bench ingest
  sluice-bench ingest --chunks 1024 --streams 2 --json ingest.json
  sluice-bench ingest --rounds 3 --model models/smollm2-135m-instruct
)";

constexpr char kFingerprint[] = "0000000000000000000000000000000000000000000000000000000000000000";

// The caches of a model with 32 layers and 8 KV heads of 128 in bf16: 4 KiB per token and layer.
CacheLayout BenchLayout() {
  CacheKind kind;
  kind.name = "kv";
  kind.heads = 8;
  kind.block_tokens = 32;
  kind.SetEqualParts(2, 512);
  return {32, {kind}};
}

// The ingest side of a node, without the rest of the node.
struct IngestSide {
  absl::Status Start(Device* device, uint64_t bytes) {
    const CacheLayout layout = BenchLayout();
    for (auto [pool, name] : {std::pair(&dram, "dram"), std::pair(&hbm, "hbm")}) {
      SLUICE_ASSIGN_OR_RETURN(Buffer arena, device->Allocate(MemoryKind::kPinned, bytes, name));
      // Touches all pages, as a node that has served for a while has.
      if (pool == &dram) std::memset(arena.data(), 1, arena.bytes());
      SLUICE_ASSIGN_OR_RETURN(*pool, PagePool::Create(name, layout, std::move(arena)));
    }
    TransferTable::Options options;
    options.model_fingerprint = kFingerprint;
    options.vocab_size = 2;
    options.max_context = 1 << 30;
    options.prefix_cache = false;
    options.footprint = [](int64_t context, int64_t) { return Footprint{context, 0}; };
    table = std::make_unique<TransferTable>(options, dram.get(), hbm.get(), RealClock());
    table->SetWake([this] {
      absl::MutexLock lock(&mutex);
      changed = true;
    });
    return absl::OkStatus();
  }
  // Acts like a Generate and its engine: reads the caches of `prompt` tokens, each of them 1, and
  // drops them. Returns the seconds until they are ready.
  absl::StatusOr<double> Pull(Puller* puller, const SendResult& held, size_t prompt) {
    Request request;
    request.handoff.source.address = held.address;
    request.handoff.source.source_id = held.source_id;
    request.prompt.assign(prompt, 1);
    request.sampling.max_tokens = 1;
    const absl::Time start = absl::Now();
    SLUICE_ASSIGN_OR_RETURN(const std::function<void()> begin, puller->Begin(&request));
    SLUICE_ASSIGN_OR_RETURN(const TransferTable::AttachId id, table->Attach(request.handoff));
    begin();
    while (true) {
      {
        absl::MutexLock lock(&mutex);
        mutex.Await(absl::Condition(&changed));
        changed = false;
      }
      SLUICE_ASSIGN_OR_RETURN(const std::optional<ReadySequence> ready, table->TakeReady(id));
      if (ready.has_value()) return absl::ToDoubleSeconds(absl::Now() - start);
    }
  }
  GrpcService NewService() {
    IngestServiceOptions options;
    options.vocab_size = 2;
    options.transfers = table.get();
    options.readiness = &readiness;
    options.metrics = &metrics;
    options.access = access;
    return NewIngestService(options);
  }

  const Access* access = nullptr;
  Metrics metrics;
  Readiness readiness;
  std::unique_ptr<PagePool> dram, hbm;
  std::unique_ptr<TransferTable> table;
  absl::Mutex mutex;
  bool changed ABSL_GUARDED_BY(mutex) = false;  // The table has changed since the last look.
};

constexpr std::array<const char*, 4> kPeers = {"discard", "copy", "ingest", "pull"};
enum : size_t { kDiscard, kCopy, kIngest, kPull };

class IngestBench {
 public:
  IngestBench(const IngestBenchOptions& o, Report report)
      : options_(o), out_(o.json), report_(std::move(report)) {}
  ~IngestBench() {
    puller_.reset();
    servers_ = {};  // The servers read the files now and then.
    if (!tls_folder_.empty()) std::filesystem::remove_all(tls_folder_);
  }

  absl::StatusOr<int> Run() {
    SLUICE_ASSIGN_OR_RETURN(sender_, IngestSender::Start());
    SLUICE_RETURN_IF_ERROR(StartPeers());
    out_.Print(Preamble(report_));
    out_.Print(absl::StrFormat("\n%-8s %8s %8s %15s %14s %14s %10s %10s %10s\n", "to", "chunk",
                               "GB/s", "10th-90th", "server CPU s/GB", "sender CPU s/GB",
                               "of discard", "of copy", "of ingest"));
    for (const int64_t chunk : options_.chunks_kib) SLUICE_RETURN_IF_ERROR(RunSize(chunk));
    puller_.reset();
    servers_ = {};
    if (!options_.model.empty()) {
      SLUICE_RETURN_IF_ERROR(MeasureInterference(options_, sender_.get(), out_, &report_));
    }
    return out_.Finish(report_);
  }

 private:
  absl::Status StartPeers() {
    const CacheLayout layout = BenchLayout();
    context_ = std::max<int64_t>(32, (options_.transfer_mib << 20) / layout.BytesFor(32) * 32);
    transfer_bytes_ = layout.BytesFor(context_);
    SLUICE_ASSIGN_OR_RETURN(device_, NewCpuDevice({"auto", 1}));
    // Both have room for two transfers: a transfer may begin before the previous one's pages are
    // free.
    const auto bytes = static_cast<uint64_t>(2 * transfer_bytes_ + (1 << 20));
    SLUICE_RETURN_IF_ERROR(ingest_.Start(device_.get(), bytes));
    SLUICE_ASSIGN_OR_RETURN(copies_, device_->Allocate(MemoryKind::kPinned, bytes, "copies"));
    std::memset(copies_.data(), 1, copies_.bytes());
    if (options_.tls) {
      SLUICE_ASSIGN_OR_RETURN(tls_folder_, MakeBenchCertificate());
      SLUICE_ASSIGN_OR_RETURN(access_, Access::Open(BenchAccessFile(tls_folder_), absl::Hours(1)));
      ingest_.access = access_.get();
    }
    channels_ = std::make_unique<Channels>(
        NewChannelCredentials(options_.tls ? BenchTlsFiles(tls_folder_) : TlsFiles()),
        MaxChunkMessageBytes(64 << 20));
    const std::array<GrpcService, 3> services = {
        NewDiscardPeer(), NewCopyPeer({copies_.as<uint8_t>(), copies_.bytes()}),
        ingest_.NewService()};
    for (size_t peer = 0; peer < services.size(); ++peer) {
      GrpcServer::Options options;
      options.listen = "127.0.0.1:0";
      options.max_receive_message_bytes = MaxChunkMessageBytes(64 << 20);
      if (options_.tls) {
        options.tls = BenchTlsFiles(tls_folder_);
        options.access = access_.get();
      }
      SLUICE_ASSIGN_OR_RETURN(servers_[peer], GrpcServer::Start(options, {services[peer]}));
    }
    return absl::OkStatus();
  }

  struct Sample {
    double rate = 0, server_cpu = 0, sender_cpu = 0;
  };
  absl::StatusOr<Sample> Send(size_t peer, int64_t chunk_kib) {
    const CacheLayout layout = BenchLayout();
    SendJob job;
    if (peer != kPull) SetText(servers_[peer]->address(), &job.address);
    job.transfers = peer == kIngest;
    job.hold = peer == kPull;
    SetText(tls_folder_, &job.tls);
    SetText(kFingerprint, &job.fingerprint);
    SetLayout(layout, &job);
    job.context = static_cast<int32_t>(context_);
    job.chunk_bytes = chunk_kib << 10;
    job.streams = static_cast<int32_t>(options_.streams);
    double cpu = ProcessCpuSeconds();
    SLUICE_ASSIGN_OR_RETURN(SendResult sent, sender_->Send(job));
    const double gb = static_cast<double>(sent.payload_bytes) * 1e-9;
    if (peer == kPull) {
      cpu = ProcessCpuSeconds();
      const double sender = sender_->CpuSeconds();
      SLUICE_ASSIGN_OR_RETURN(sent.seconds,
                              ingest_.Pull(puller_.get(), sent, static_cast<size_t>(context_)));
      sent.cpu_seconds = sender_->CpuSeconds() - sender;
    }
    return Sample{gb / sent.seconds, (ProcessCpuSeconds() - cpu) / gb, sent.cpu_seconds / gb};
  }

  absl::Status RunSize(int64_t chunk_kib) {
    Puller::Options pull;
    pull.metrics = &ingest_.metrics;
    pull.model_fingerprint = kFingerprint;
    pull.layout = BenchLayout();
    pull.max_context = pull.max_tokens = 1 << 30;
    pull.max_chunk_bytes = static_cast<uint64_t>(chunk_kib) << 10;
    pull.threads = 1;
    pull.streams = static_cast<int>(options_.streams);
    SLUICE_ASSIGN_OR_RETURN(pull.sources, AddressList::Parse("127.0.0.1"));
    pull.transfers = ingest_.table.get();
    pull.channels = channels_.get();
    puller_ = std::make_unique<Puller>(std::move(pull));
    // Warms up connections, caches and page tables.
    for (size_t peer = 0; peer < kPeers.size(); ++peer) {
      SLUICE_RETURN_IF_ERROR(Send(peer, chunk_kib).status());
    }
    std::array<std::vector<Sample>, kPeers.size()> samples;
    for (int64_t round = 0; round < options_.rounds; ++round) {
      for (size_t i = 0; i < kPeers.size(); ++i) {
        const size_t peer = (i + static_cast<size_t>(round)) % kPeers.size();
        SLUICE_ASSIGN_OR_RETURN(const Sample sample, Send(peer, chunk_kib));
        samples[peer].push_back(sample);
      }
    }
    const auto timing = [&](size_t peer, auto value) {
      std::vector<double> values;
      for (size_t i = 0; i < samples[peer].size(); ++i)
        values.push_back(value(samples[peer][i], i));
      return TimingOf(std::move(values));
    };
    for (size_t peer = 0; peer < kPeers.size(); ++peer) {
      const Timing rate = timing(peer, [](const Sample& s, size_t) { return s.rate; });
      // Compares samples of the same round.
      const auto over = [&](size_t other) {
        return timing(peer,
                      [&](const Sample& s, size_t i) { return s.rate / samples[other][i].rate; });
      };
      const Timing of_discard = over(kDiscard), of_copy = over(kCopy), of_ingest = over(kIngest);
      const double server =
          timing(peer, [](const Sample& s, size_t) { return s.server_cpu; }).median;
      const double sender =
          timing(peer, [](const Sample& s, size_t) { return s.sender_cpu; }).median;
      out_.Print(
          absl::StrFormat("%-8s %4d KiB %8.2f %8.2f-%-6.2f %14.2f %15.2f %9.0f%% %9.0f%% %9.0f%%\n",
                          kPeers[peer], chunk_kib, rate.median, rate.low, rate.high, server, sender,
                          100 * of_discard.median, 100 * of_copy.median, 100 * of_ingest.median));
      Figure f;
      f.name = absl::StrCat(kPeers[peer], ", chunks of ", chunk_kib, " KiB");
      f.unit = "B/s";
      f.median = rate.median * 1e9;
      f.low = rate.low * 1e9;
      f.high = rate.high * 1e9;
      f.samples = rate.samples;
      f.more = {{"server_cpu_seconds_per_gb", server}, {"sender_cpu_seconds_per_gb", sender},
                {"of_discard", of_discard.median},     {"of_discard_p10", of_discard.low},
                {"of_discard_p90", of_discard.high},   {"of_copy", of_copy.median},
                {"of_copy_p10", of_copy.low},          {"of_copy_p90", of_copy.high},
                {"of_ingest", of_ingest.median},       {"of_ingest_p10", of_ingest.low},
                {"of_ingest_p90", of_ingest.high}};
      report_.figures.push_back(std::move(f));
    }
    return absl::OkStatus();
  }

  const IngestBenchOptions options_;
  const Output out_;
  Report report_;
  std::unique_ptr<IngestSender> sender_;
  std::unique_ptr<Device> device_;
  Buffer copies_;
  std::string tls_folder_;  // Empty: without TLS.
  std::unique_ptr<Access> access_;
  IngestSide ingest_;
  std::unique_ptr<Channels> channels_;
  std::array<std::unique_ptr<GrpcServer>, 3> servers_;
  std::unique_ptr<Puller> puller_;
  int64_t context_ = 0, transfer_bytes_ = 0;
};

}  // namespace

void SetLayout(const CacheLayout& layout, SendJob* job) {
  const CacheKind& kind = layout.kinds[0];
  SetText(kind.name, &job->kind);
  job->layers = layout.layers;
  job->heads = kind.heads;
  job->block_tokens = kind.block_tokens;
  job->bytes_per_token = kind.bytes_per_token;
}

int RunIngestBench(const Invocation& invocation) {
  IngestBenchOptions o;
  Flags flags("sluice-bench ingest", kAbout, kExamples);
  flags.Integers("chunks", "payloads of a message, in KiB", 128, 16384, &o.chunks_kib);
  flags.Integer("transfer-mib", "size of a transfer in MiB", 4, 16384, &o.transfer_mib);
  flags.Integer("rounds", "measured transfers of each kind", 1, 10000, &o.rounds);
  flags.Integer("streams", "concurrent Write streams, each on its own connection", 1, 64,
                &o.streams);
  flags.Switch("tls", "use mTLS for ingest and for everything that it is compared with", &o.tls);
  flags.Text("model", "DIR", "Hugging Face directory of a model that decodes meanwhile", &o.model);
  flags.Switch("dummy", "use formula weights: only config.json is read", &o.dummy);
  flags.Integer("threads", "decode threads; 0: the server's choice", 0, 1024, &o.threads);
  flags.Number("rate", "bytes per second of ingest beside the decode", 1e6, 1e11, &o.rate);
  flags.Seconds("window", "length of each measurement beside the decode", 60, &o.window_seconds);
  flags.File("json", "write the report as JSON; without FILE, to standard output", &o.json);
  if (const auto status = ReadFlags(flags, invocation)) return *status;
  if (o.tls && !o.model.empty()) {
    return Fail(absl::InvalidArgumentError("--tls measures no decode: leave out --model"));
  }
  if (!o.model.empty()) {
    const absl::StatusOr<ModelConfig> config = LoadModelConfig(o.model);
    if (!config.ok()) return Fail(config.status());
    const absl::Status fits = CheckKeysAndValues(*config, "the bench of ingest");
    if (!fits.ok()) return Fail(fits);
  }
  Report report = NewReport("ingest", invocation);
  report.shape = {{"chunks_kib", absl::StrJoin(o.chunks_kib, ",")},
                  {"transfer_mib", absl::StrCat(o.transfer_mib)},
                  {"rounds", absl::StrCat(o.rounds)},
                  {"streams", absl::StrCat(o.streams)},
                  {"tls", o.tls ? "mTLS" : "none"}};
  if (!o.model.empty()) {
    report.shape.emplace_back("model", o.model);
    report.shape.emplace_back("rate", absl::StrCat(o.rate));
  }
  // The report does not contain the node's log lines about transfers.
  SetUpLogging(LogLevel::kWarn, LogFormat::kText);
  const absl::StatusOr<int> status = IngestBench(o, std::move(report)).Run();
  return status.ok() ? *status : Fail(status.status());
}

}  // namespace sluice::bench
