// Measures how much a decode loses to ingest that runs beside it.
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "src/attention/policies/full/full_policy.h"
#include "src/base/clock.h"
#include "src/base/status_macros.h"
#include "src/bench/ingest/ingest_bench.h"
#include "src/device/cpu/cpu_device.h"
#include "src/engine/engine.h"
#include "src/kv/transfer_table.h"
#include "src/metrics/metrics.h"
#include "src/model/model.h"
#include "src/model/model_config.h"
#include "src/service/grpc/grpc_server.h"
#include "src/service/ingest/ingest_service.h"

namespace sluice::bench {
namespace {

constexpr int kMaxContext = 4096;
constexpr int kPromptTokens = 64;

std::set<std::string> Threads() {
  std::set<std::string> threads;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/task")) {
    threads.insert(entry.path().filename());
  }
  return threads;
}

// Returns the CPU seconds so far of the threads that are not among `others`.
double CpuSecondsWithout(const std::set<std::string>& others) {
  double seconds = 0;
  for (const std::string& thread : Threads()) {
    if (others.contains(thread)) continue;
    std::ifstream file("/proc/self/task/" + thread + "/schedstat");
    double nanoseconds = 0;
    if (file >> nanoseconds) seconds += nanoseconds * 1e-9;
  }
  return seconds;
}

double ThreadCpuSeconds() {
  timespec t{};
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

// Spins for `share` of the time until `end`, in portions that are due every `period`, like
// messages.
void Spin(double share, absl::Duration period, absl::Time end) {
  const absl::Time start = absl::Now();
  const double cpu = ThreadCpuSeconds();
  for (absl::Time due = start; due < end; due += period) {
    absl::SleepFor(due - absl::Now());
    const double owed = share * absl::ToDoubleSeconds(due + period - start);
    while (ThreadCpuSeconds() - cpu < owed && absl::Now() < end) {
      for (int i = 0; i < 200; ++i) asm volatile("" ::: "memory");
    }
  }
}

// A node with one model whose engine decodes sequences without end.
class BusyNode {
 public:
  absl::Status Start(const IngestBenchOptions& o, int64_t ingest_tokens) {
    const int threads = o.threads > 0 ? static_cast<int>(o.threads) : DefaultThreads();
    SLUICE_ASSIGN_OR_RETURN(device_, NewCpuDevice({"auto", threads}));
    Model::Options model;
    model.directory = o.model;
    model.load_format = o.dummy ? "dummy" : "auto";
    SLUICE_ASSIGN_OR_RETURN(model_, Model::Load(model, device_.get()));
    const CacheLayout& layout = model_->cache_layout();
    SLUICE_ASSIGN_OR_RETURN(hbm_, NewPool("hbm", layout.BytesFor(kMaxContext)));
    SLUICE_ASSIGN_OR_RETURN(dram_, NewPool("dram", 2 * layout.BytesFor(ingest_tokens)));
    SLUICE_ASSIGN_OR_RETURN(policy_,
                            NewFullPolicy(PolicyOver(device_.get(), hbm_.get(), 1, kMaxContext)));
    TransferTable::Options table;
    table.model_fingerprint = model_->fingerprint();
    table.vocab_size = static_cast<uint32_t>(model_->config().vocab_size);
    table.max_context = 1 << 30;
    // Transferred sequences are never decoded, so they need no room in HBM.
    table.prefix_cache = false;
    table.footprint = [](int64_t context, int64_t) { return Footprint{context, 0}; };
    transfers_ =
        std::make_unique<TransferTable>(std::move(table), dram_.get(), hbm_.get(), RealClock());
    Engine::Options engine;
    engine.max_sequences = 1;
    engine.max_context = static_cast<uint32_t>(std::min(kMaxContext, model_->max_context()));
    engine.local_prefill = LocalPrefill::kAlways;
    Engine::Parts parts;
    parts.device = device_.get();
    parts.model = model_.get();
    parts.policy = policy_.get();
    parts.transfers = transfers_.get();
    parts.metrics = &metrics_;
    parts.clock = RealClock();
    SLUICE_ASSIGN_OR_RETURN(engine_, Engine::Create(engine, parts));
    engine_thread_ = std::make_unique<EngineThread>(engine_.get());
    return absl::OkStatus();
  }
  ~BusyNode() {
    server_.reset();
    engine_thread_.reset();
  }

  absl::Status Serve() {
    IngestServiceOptions ingest;
    ingest.vocab_size = static_cast<uint32_t>(model_->config().vocab_size);
    ingest.transfers = transfers_.get();
    ingest.readiness = &readiness_;
    ingest.metrics = &metrics_;
    GrpcServer::Options server;
    server.listen = "127.0.0.1:0";
    server.max_receive_message_bytes = MaxChunkMessageBytes(64 << 20);
    SLUICE_ASSIGN_OR_RETURN(server_, GrpcServer::Start(server, {NewIngestService(ingest)}));
    return absl::OkStatus();
  }

  // Returns the tokens per second of one sequence from kPromptTokens on, while `beside` runs. Every
  // measurement decodes the same positions.
  absl::StatusOr<double> DecodeBeside(const std::function<absl::Status()>& beside) {
    auto stream = std::make_shared<TokenStream>(kMaxContext, nullptr);
    Request request;
    request.request_id = absl::StrCat("bench-", next_++);
    request.prompt.assign(kPromptTokens, 1);
    request.sampling.temperature = 0;
    request.sampling.max_tokens =
        static_cast<uint32_t>(std::min(kMaxContext, model_->max_context()) - kPromptTokens);
    request.sampling.ignore_eos = true;
    request.sink = stream;
    SLUICE_ASSIGN_OR_RETURN(const SequenceId id, engine_->Submit(std::move(request)));
    size_t before = 0;
    // The sequence has reached its pace.
    while (before < 8) before += stream->ReadBlocking().tokens.size();
    const absl::Time start = absl::Now();
    const absl::Status status = beside();
    size_t tokens = stream->Read().tokens.size();
    const double seconds = absl::ToDoubleSeconds(absl::Now() - start);
    engine_->Cancel(id, absl::CancelledError("measured"));
    while (!stream->ReadBlocking().finish.has_value()) continue;
    SLUICE_RETURN_IF_ERROR(status);
    return static_cast<double>(tokens) / seconds;
  }

  const Model& model() const { return *model_; }
  const std::string& address() const { return server_->address(); }

 private:
  absl::StatusOr<std::unique_ptr<PagePool>> NewPool(const std::string& name, int64_t bytes) {
    SLUICE_ASSIGN_OR_RETURN(
        Buffer arena,
        device_->Allocate(MemoryKind::kPinned, static_cast<size_t>(bytes + (1 << 20)), name));
    std::memset(arena.data(), 0, arena.bytes());
    return PagePool::Create(name, model_->cache_layout(), std::move(arena));
  }

  Metrics metrics_;
  Readiness readiness_;
  std::unique_ptr<Device> device_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<PagePool> hbm_, dram_;
  std::unique_ptr<FullPolicy> policy_;
  std::unique_ptr<TransferTable> transfers_;
  std::unique_ptr<Engine> engine_;
  std::unique_ptr<EngineThread> engine_thread_;
  std::unique_ptr<GrpcServer> server_;
  int next_ = 0;
};

Figure RateFigure(const std::string& name, const Timing& t) {
  Figure f;
  f.name = name;
  f.unit = "tokens/s";
  f.median = t.median;
  f.low = t.low;
  f.high = t.high;
  f.samples = t.samples;
  return f;
}

}  // namespace

absl::Status MeasureInterference(const IngestBenchOptions& o, IngestSender* sender,
                                 const Output& out, Report* report) {
  constexpr int64_t kChunkBytes = 1 << 20;
  constexpr int kTransferTokens = 4096;
  BusyNode node;
  SLUICE_RETURN_IF_ERROR(node.Start(o, kTransferTokens));
  const std::set<std::string> decoding = Threads();  // Includes this thread.
  SLUICE_RETURN_IF_ERROR(node.Serve());

  SendJob job;
  SetText(node.address(), &job.address);
  job.transfers = true;
  SetText(node.model().fingerprint(), &job.fingerprint);
  SetLayout(node.model().cache_layout(), &job);
  job.context = kTransferTokens;
  job.chunk_bytes = kChunkBytes;
  job.bytes_per_second = o.rate;
  job.seconds = o.window_seconds;
  const absl::Duration window = absl::Seconds(o.window_seconds);
  const absl::Duration period = absl::Seconds(static_cast<double>(kChunkBytes) / o.rate);

  std::vector<double> alone, ingest, spin, ratio, sent_rate, cpu_share;
  for (int64_t round = -1; round < o.rounds; ++round) {  // The first round does not count.
    SLUICE_ASSIGN_OR_RETURN(const double a, node.DecodeBeside([&] {
      absl::SleepFor(window);
      return absl::OkStatus();
    }));
    SendResult sent;
    double server_cpu = 0;
    SLUICE_ASSIGN_OR_RETURN(const double i, node.DecodeBeside([&]() -> absl::Status {
      const double before = CpuSecondsWithout(decoding);
      SLUICE_ASSIGN_OR_RETURN(sent, sender->Send(job));
      server_cpu = CpuSecondsWithout(decoding) - before;
      return absl::OkStatus();
    }));
    const double server_share = server_cpu / o.window_seconds;
    const double sender_share = sent.cpu_seconds / o.window_seconds;
    SLUICE_ASSIGN_OR_RETURN(const double s, node.DecodeBeside([&] {
      const absl::Time end = absl::Now() + window;
      std::thread as_server([&] { Spin(server_share, period, end); });
      std::thread as_sender([&] { Spin(sender_share, period, end); });
      as_server.join();
      as_sender.join();
      return absl::OkStatus();
    }));
    if (round < 0) continue;
    alone.push_back(a);
    ingest.push_back(i);
    spin.push_back(s);
    ratio.push_back(s / i);
    sent_rate.push_back(static_cast<double>(sent.payload_bytes) / o.window_seconds);
    cpu_share.push_back(server_share + sender_share);
  }
  const Timing a = TimingOf(alone), i = TimingOf(ingest), s = TimingOf(spin), r = TimingOf(ratio);
  const double rate = TimingOf(sent_rate).median, cores = TimingOf(cpu_share).median;
  out.Print(absl::StrFormat(
      "\ndecode, one sequence of %s: alone %.1f tokens/s (%.1f-%.1f); beside ingest of %.2f GB/s "
      "%.1f (%.1f-%.1f);\nbeside a spin load of its %.2f cores %.1f (%.1f-%.1f): the time "
      "per token is %.2f x (%.2f-%.2f) that beside the spin load\n",
      node.model().config().name, a.median, a.low, a.high, rate * 1e-9, i.median, i.low, i.high,
      cores, s.median, s.low, s.high, r.median, r.low, r.high));
  report->figures.push_back(RateFigure("decode alone", a));
  report->figures.push_back(RateFigure("decode beside ingest", i));
  report->figures.back().more = {{"ingest_bytes_per_second", rate}, {"ingest_cores", cores}};
  report->figures.push_back(RateFigure("decode beside a spin load", s));
  Figure f = RateFigure("time of a token, beside ingest over beside a spin load", r);
  f.unit = "1";
  f.lower_is_better = true;
  report->figures.push_back(std::move(f));
  return absl::OkStatus();
}

}  // namespace sluice::bench
