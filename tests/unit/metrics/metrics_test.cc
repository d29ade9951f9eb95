#include "src/metrics/metrics.h"

#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <new>
#include <set>
#include <sstream>
#include <string_view>
#include <thread>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "src/base/error.h"
#include "src/metrics/metric_names.h"
#include "src/metrics/process_metrics.h"
#include "src/metrics/reasons.h"
#include "tests/test_main.h"

// Counts the allocations of this program, for the test that updates allocate nothing. They are not
// inlined, because the compiler takes an inlined pair for a mismatched new and free.
static std::atomic<size_t> allocations{0};
[[gnu::noinline]] void* operator new(size_t bytes) {
  ++allocations;
  if (void* p = std::malloc(bytes == 0 ? 1 : bytes)) return p;
  throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(size_t bytes, const std::nothrow_t&) noexcept {
  ++allocations;
  return std::malloc(bytes == 0 ? 1 : bytes);
}
[[gnu::noinline]] void operator delete(void* p) noexcept { std::free(p); }
[[gnu::noinline]] void operator delete(void* p, size_t) noexcept { std::free(p); }

namespace sluice {
namespace {

// A scrape, read back by the rules of the text format.
struct Scrape {
  std::map<std::string, std::string> types;
  std::map<std::string, std::string> helps;
  std::map<std::string, double> samples;  // by name{label="value",...}
};

// Returns the longest prefix of `text` that is a name: [a-zA-Z_][a-zA-Z0-9_]*, with colons in
// metrics' names.
std::string TakeName(std::string_view text, bool colons) {
  size_t n = 0;
  while (n < text.size() &&
         (absl::ascii_isalpha(text[n]) || text[n] == '_' || (colons && text[n] == ':') ||
          (n > 0 && absl::ascii_isdigit(text[n])))) {
    ++n;
  }
  return std::string(text.substr(0, n));
}

// Returns name{label="value",...} up to the blank before the value. No label here needs an escape.
std::string TakeSeries(std::string_view line) {
  std::string series = TakeName(line, true);
  REQUIRE_FALSE(series.empty());
  if (line.substr(series.size(), 1) != "{") return series;
  char before = '{';
  while (before != '}') {
    series += before;
    const std::string label = TakeName(line.substr(series.size()), false);
    REQUIRE_FALSE(label.empty());
    series += label;
    REQUIRE(line.substr(series.size(), 2) == "=\"");
    const size_t end = line.find('"', series.size() + 2);
    REQUIRE(end < line.size() - 1);
    series = std::string(line.substr(0, end + 1));
    before = line[end + 1];
    REQUIRE((before == ',' || before == '}'));
  }
  return series + "}";
}

Scrape Parse(const std::string& text) {
  Scrape scrape;
  REQUIRE(text.back() == '\n');
  const std::vector<std::string> lines = absl::StrSplit(text, '\n', absl::SkipEmpty());
  for (const std::string& line : lines) {
    CAPTURE(line);
    if (line[0] == '#') {
      const std::vector<std::string> parts = absl::StrSplit(line, absl::MaxSplits(' ', 3));
      REQUIRE(parts.size() == 4);
      REQUIRE((parts[1] == "HELP" || parts[1] == "TYPE"));
      CHECK(TakeName(parts[2], true) == parts[2]);
      auto& into = parts[1] == "HELP" ? scrape.helps : scrape.types;
      CHECK(into.emplace(parts[2], parts[3]).second);  // once for each family
      continue;
    }
    const std::string series = TakeSeries(line);
    REQUIRE(line.substr(series.size(), 1) == " ");
    double value = 0;
    REQUIRE(absl::SimpleAtod(line.substr(series.size() + 1), &value));
    CHECK(scrape.samples.emplace(series, value).second);
  }
  return scrape;
}

double Sample(const Metrics& metrics, const std::string& name) {
  const Scrape scrape = Parse(metrics.Render());
  CAPTURE(name);
  REQUIRE(scrape.samples.contains(name));
  return scrape.samples.at(name);
}

std::string RequestsSeries(std::string_view outcome, std::string_view reason) {
  return absl::StrCat("sluice_requests_total{outcome=\"", std::string(outcome), "\",reason=\"",
                      std::string(reason), "\"}");
}

const char* TypeName(metric_names::Type type) {
  return type == metric_names::Type::kCounter ? "counter"
         : type == metric_names::Type::kGauge ? "gauge"
                                              : "histogram";
}

TEST_CASE("every metric of the header is exported with its help and type, and nothing else") {
  Metrics metrics;
  metrics.Tier("dram", "kv");
  metrics.SetBuildInfo({"0", "m", "cpu", "amx", "full"});
  metrics.SetCacheConfig({32, 100, 1000, "bf16"});
  metrics.SetSelection({{{1, 1, 1}}, 1, 1, 1});
  metrics.SetRank(0, {});
  const Scrape scrape = Parse(metrics.Render());
  CHECK(scrape.types.size() == std::size(metric_names::kAll));
  for (const metric_names::Metric* metric : metric_names::kAll) {
    CAPTURE(metric->name);
    REQUIRE(scrape.types.contains(metric->name));
    CHECK(scrape.types.at(metric->name) == TypeName(metric->type));
    CHECK(scrape.helps.at(metric->name) == metric->help);
  }
}

TEST_CASE("names follow the rules of Prometheus") {
  std::set<std::string> seen;
  for (const metric_names::Metric* metric : metric_names::kAll) {
    const std::string name = metric->name;
    CAPTURE(name);
    CHECK(seen.insert(name).second);
    CHECK((absl::StartsWith(name, "sluice_") || absl::StartsWith(name, "process_") ||
           absl::StartsWith(name, "vllm:")));
    CHECK(absl::EndsWith(name, "_total") == (metric->type == metric_names::Type::kCounter));
    for (const char* scaled : {"_ms", "_us", "_millis", "_kb", "_mb", "_gb"}) {
      CHECK_FALSE(absl::StrContains(name + "_", absl::StrCat(scaled, "_")));
    }
  }
}

TEST_CASE("samples carry the labels that the header names") {
  Metrics metrics;
  metrics.Tier("hbm", "kv");
  metrics.SetBuildInfo({"0", "m", "cpu", "amx", "full"});
  metrics.SetCacheConfig({32, 100, 1000, "bf16"});
  metrics.SetSelection({{{1, 1, 1}}, 1, 1, 1});
  metrics.SetRank(0, {});
  const Scrape scrape = Parse(metrics.Render());
  for (const metric_names::Metric* metric : metric_names::kAll) {
    const std::vector<std::string> labels = absl::StrSplit(metric->labels, ',', absl::SkipEmpty());
    int samples = 0;
    for (const auto& [sample, value] : scrape.samples) {
      const std::string name = sample.substr(0, sample.find('{'));
      if (name != metric->name && name != absl::StrCat(metric->name, "_count")) continue;
      CAPTURE(sample);
      ++samples;
      CHECK(static_cast<size_t>(std::count(sample.begin(), sample.end(), '=')) == labels.size());
      for (const std::string& label : labels) CHECK(absl::StrContains(sample, label + "=\""));
    }
    CAPTURE(metric->name);
    CHECK(samples >= 1);
  }
}

TEST_CASE("counters and gauges move when updated, and only the one that was") {
  Metrics metrics;
  const Scrape before = Parse(metrics.Render());
  int expected = 0;
  for (const auto& [outcome, reason] : kRequestReasons) {
    metrics.requests(outcome, reason).Add(++expected);
  }
  expected = 0;
  for (const std::string_view reason : kReserveReasons) {
    metrics.reserves_refused(reason).Add(++expected);
  }
  expected = 0;
  for (const std::string_view reason : kPullReasons) metrics.pulls_failed(reason).Add(++expected);
  metrics.reserves_accepted.Add(12);
  metrics.preemptions.Add(13);
  metrics.resumes.Add(14);
  metrics.tokens(TokenKind::kOutput).Add(5);
  metrics.tokens(TokenKind::kPrompt).Add(6);
  metrics.tokens(TokenKind::kHandedOver).Add(7);
  metrics.decoded_tokens(true).Add(15);
  metrics.decoded_tokens(false).Add(16);
  metrics.exact_limit.Set(2112);
  metrics.rehearsed_rows.Add(17);
  metrics.slow_readers.Add();
  metrics.malformed_trace_headers.Add(9);
  metrics.ingest_bytes.Add(1 << 20);
  metrics.ingest_blocks.Add(3);
  metrics.checksum_failures.Add(2);
  metrics.rank.Set(2);
  metrics.ranks_alive.Set(4);
  metrics.transfers_open.Add(4);
  metrics.transfers_open.Add(-1);
  metrics.leases_expired.Add(8);
  metrics.SetRunning(9);
  metrics.waiting.Set(10);
  metrics.kv_usage.Set(0.25);
  metrics.SetSelection({{{10, 4, 3}, {20, 5, 6}}, 7, 4096, 96});
  metrics.SetSelection({{{11, 4, 4}, {22, 5, 6}}, 8, 8192, 48});
  metrics.SetSelection({{{9, 3, 2}, {8, 5, 6}}, 6, 1024, 48});  // older
  metrics.SetWorkers({3, 1.5, 20, {4, 5, 6}});
  metrics.SetWorkers({2, 2.5, 30, {7, 5, 6}});
  metrics.SetWorkers({2, 1.0, 10, {7, 5, 6}});  // older
  metrics.SetSchedules({{10, 20, 31}, 4});
  metrics.SetSchedules({{11, 12, 13}, 3});  // older changes
  metrics.SetLink({1, {25e9, 40e9}});
  metrics.SetConnections({21, {5, 6, 7}});
  metrics.SetConnections({20, {5, 8, 6}});
  metrics.SetDraftTokens(2);
  metrics.Drafted(2);
  metrics.Drafted(1);
  metrics.AcceptedDraft(0);
  metrics.AcceptedDraft(1);
  metrics.AcceptedDraft(0);

  std::map<std::string, double> moved;
  for (const auto& [name, value] : Parse(metrics.Render()).samples) {
    const auto was = before.samples.find(name);  // layers appear when they are counted
    if (value != (was == before.samples.end() ? 0 : was->second)) moved[name] = value;
  }
  std::map<std::string, double> wanted = {
      {"sluice_tokens_total{kind=\"output\"}", 5},
      {"sluice_tokens_total{kind=\"prompt\"}", 6},
      {"sluice_tokens_total{kind=\"handed_over\"}", 7},
      {"sluice_decoded_tokens_total{exact=\"true\"}", 15},
      {"sluice_decoded_tokens_total{exact=\"false\"}", 16},
      {"sluice_exact_limit_tokens", 2112},
      {"sluice_rehearsed_rows_total", 17},
      {"sluice_slow_readers_total", 1},
      {"sluice_malformed_trace_headers_total", 9},
      {"sluice_preemptions_total", 13},
      {"sluice_ingest_resumes_total", 14},
      {R"(sluice_reserves_total{outcome="accepted",reason="NONE"})", 12},
      {"sluice_ingest_bytes_total", 1 << 20},
      {"sluice_ingest_blocks_total", 3},
      {"sluice_ingest_checksum_failures_total", 2},
      {"sluice_rank", 2},
      {"sluice_ranks_alive", 4},
      {"sluice_transfers_open", 3},
      {"sluice_leases_expired_total", 8},
      {"sluice_batch_sequences", 9},
      {"vllm:num_requests_running", 9},
      {"vllm:num_requests_waiting", 10},
      {"vllm:kv_cache_usage_perc", 0.25},
      {"sluice_selected_tokens_total{layer=\"0\"}", 11},
      {"sluice_selected_tokens_total{layer=\"1\"}", 22},
      {"sluice_missed_tokens_total{layer=\"0\"}", 4},
      {"sluice_missed_tokens_total{layer=\"1\"}", 5},
      {"sluice_fetched_tokens_total{layer=\"0\"}", 4},
      {"sluice_fetched_tokens_total{layer=\"1\"}", 6},
      {"sluice_selecting_rows_total", 8},
      {"sluice_link_bytes_total", 8192},
      {"sluice_resident_places", 48},
      {"sluice_attention_workers", 2},
      {"sluice_attention_worker_busy_seconds_total", 2.5},
      {"sluice_attention_worker_tokens_total", 30},
      {R"(sluice_attention_worker_failures_total{reason="failed"})", 7},
      {R"(sluice_attention_worker_failures_total{reason="left"})", 5},
      {R"(sluice_attention_worker_failures_total{reason="late"})", 6},
      {R"(sluice_ess_schedule_layers{schedule="none"})", 11},
      {R"(sluice_ess_schedule_layers{schedule="da"})", 12},
      {R"(sluice_ess_schedule_layers{schedule="dba"})", 13},
      {"sluice_ess_schedule_changes_total", 4},
      {R"(sluice_ess_mover{mover="cpu"})", 1},
      {R"(sluice_ess_mover_bytes_per_second{mover="uva"})", 25e9},
      {R"(sluice_ess_mover_bytes_per_second{mover="cpu"})", 40e9},
      {"sluice_connections", 20},
      {R"(sluice_connections_refused_total{reason="peer"})", 5},
      {R"(sluice_connections_refused_total{reason="all"})", 8},
      {R"(sluice_connections_refused_total{reason="system"})", 7},
      {"vllm:spec_decode_num_drafts_total", 2},
      {"vllm:spec_decode_num_draft_tokens_total", 3},
      {"vllm:spec_decode_num_accepted_tokens_total", 3},
      {R"(vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"})", 2},
      {R"(vllm:spec_decode_num_accepted_tokens_per_pos_total{position="1"})", 1},
  };
  expected = 0;
  for (const auto& [outcome, reason] : kRequestReasons) {
    wanted[RequestsSeries(kRequestOutcomeNames[static_cast<size_t>(outcome)], reason)] = ++expected;
  }
  expected = 0;
  for (const std::string_view reason : kReserveReasons) {
    wanted[absl::StrCat(R"(sluice_reserves_total{outcome="refused",reason=")", std::string(reason),
                        R"("})")] = ++expected;
  }
  expected = 0;
  for (const std::string_view reason : kPullReasons) {
    wanted[absl::StrCat(R"(sluice_pulls_total{outcome="failed",reason=")", std::string(reason),
                        R"("})")] = ++expected;
  }
  CHECK(moved == wanted);
}

TEST_CASE("a reason that is not listed makes no series: it counts as OTHER") {
  Metrics metrics;
  const size_t series = Parse(metrics.Render()).samples.size();
  metrics.requests(RequestOutcome::kError, "caller's own words").Add();
  metrics.requests(RequestOutcome::kRefused, "NO_SUCH_REASON").Add();
  metrics.reserves_refused("NO_SUCH_REASON").Add();
  CHECK(Sample(metrics, RequestsSeries("error", "OTHER")) == 1);
  CHECK(Sample(metrics, RequestsSeries("refused", "OTHER")) == 1);
  CHECK(Sample(metrics, R"(sluice_reserves_total{outcome="refused",reason="OTHER"})") == 1);
  CHECK(Parse(metrics.Render()).samples.size() == series);
}

TEST_CASE("a status is counted by its reason, without one by its code") {
  CHECK(ReasonLabel(WithReason(absl::AbortedError("x"), "SLOW_READER")) == "SLOW_READER");
  CHECK(ReasonLabel(InvalidField("f", "x")) == "INVALID_ARGUMENT");
  CHECK(ReasonLabel(absl::DeadlineExceededError("x")) == "DEADLINE_EXCEEDED");
  CHECK(OutcomeOfError(absl::CancelledError("x")) == RequestOutcome::kCancelled);
  CHECK(OutcomeOfError(absl::DeadlineExceededError("x")) == RequestOutcome::kDeadline);
  CHECK(OutcomeOfError(WithReason(absl::AbortedError("x"), "SLOW_READER")) ==
        RequestOutcome::kSlowReader);
  CHECK(OutcomeOfError(absl::AbortedError("x")) == RequestOutcome::kError);
}

TEST_CASE("histograms count into cumulative buckets") {
  Metrics metrics;
  metrics.inter_token_latency.Observe(0.015);
  metrics.inter_token_latency.Observe(absl::Milliseconds(150));
  metrics.inter_token_latency.Observe(absl::Hours(1));
  const std::string name = "sluice_inter_token_latency_seconds";
  CHECK(Sample(metrics, name + "_count") == 3);
  CHECK(Sample(metrics, name + "_sum") == Approx(3600.165));
  CHECK(Sample(metrics, name + "_bucket{le=\"0.01\"}") == 0);
  CHECK(Sample(metrics, name + "_bucket{le=\"0.02\"}") == 1);
  CHECK(Sample(metrics, name + "_bucket{le=\"0.2\"}") == 2);
  CHECK(Sample(metrics, name + "_bucket{le=\"+Inf\"}") == 3);

  metrics.step_seconds(StepPhase::kPlan).Observe(absl::Microseconds(60));
  metrics.step_seconds(StepPhase::kCompute).Observe(0.02);
  metrics.step_seconds(StepPhase::kEmit).Observe(0.001);
  metrics.step_seconds(StepPhase::kLaunch).Observe(0.004);
  metrics.step_seconds(StepPhase::kCopy).Observe(0.002);
  metrics.step_seconds(StepPhase::kSample).Observe(0.003);
  metrics.step_seconds(StepPhase::kTotal).Observe(0.0215);
  CHECK(Sample(metrics, "sluice_step_seconds_sum{phase=\"plan\"}") == Approx(60e-6));
  CHECK(Sample(metrics, "sluice_step_seconds_sum{phase=\"compute\"}") == Approx(0.02));
  CHECK(Sample(metrics, "sluice_step_seconds_sum{phase=\"emit\"}") == Approx(0.001));
  CHECK(Sample(metrics, "sluice_step_seconds_sum{phase=\"launch\"}") == Approx(0.004));
  CHECK(Sample(metrics, "sluice_step_seconds_sum{phase=\"copy\"}") == Approx(0.002));
  CHECK(Sample(metrics, "sluice_step_seconds_sum{phase=\"sample\"}") == Approx(0.003));
  CHECK(Sample(metrics, "sluice_step_seconds_sum{phase=\"total\"}") == Approx(0.0215));

  metrics.time_to_first_token.Observe(1);
  metrics.request_seconds.Observe(2);
  metrics.queue_seconds.Observe(3);
  metrics.preempted_seconds.Observe(6);
  metrics.ingest_seconds.Observe(4);
  metrics.step_sequences.Observe(5);
  CHECK(Sample(metrics, "sluice_time_to_first_token_seconds_sum") == 1);
  CHECK(Sample(metrics, "sluice_request_duration_seconds_sum") == 2);
  CHECK(Sample(metrics, "sluice_queue_seconds_sum") == 3);
  CHECK(Sample(metrics, "sluice_preempted_seconds_sum") == 6);
  CHECK(Sample(metrics, "sluice_ingest_seconds_sum") == 4);
  CHECK(Sample(metrics, "sluice_step_sequences_sum") == 5);
}

TEST_CASE("a tier's gauges go by tier and kind, asked for twice they are the same") {
  Metrics metrics;
  const TierGauges dram = metrics.Tier("dram", "kv");
  const TierGauges hbm = metrics.Tier("hbm", "kv");
  dram.capacity_bytes.Set(4294967296);
  hbm.capacity_bytes.Set(1073741824);
  hbm.reserved_bytes.Set(4096);
  metrics.Tier("hbm", "kv").used_bytes.Set(1024);
  const auto samples = Parse(metrics.Render()).samples;
  CHECK(samples.at("sluice_tier_capacity_bytes{kind=\"kv\",tier=\"dram\"}") == 4294967296);
  CHECK(samples.at("sluice_tier_capacity_bytes{kind=\"kv\",tier=\"hbm\"}") == 1073741824);
  CHECK(samples.at("sluice_tier_reserved_bytes{kind=\"kv\",tier=\"hbm\"}") == 4096);
  CHECK(samples.at("sluice_tier_used_bytes{kind=\"kv\",tier=\"hbm\"}") == 1024);
  CHECK(samples.at("sluice_tier_used_bytes{kind=\"kv\",tier=\"dram\"}") == 0);
}

TEST_CASE("a rank's counters follow its totals, and never go down") {
  Metrics metrics;
  CHECK_FALSE(absl::StrContains(metrics.Render(), "sluice_rank_link_bytes_total"));
  metrics.SetRank(0, {1, 2, 3, 4, 0.5});
  metrics.SetRank(1, {10, 20, 30, 40, 5});
  metrics.SetRank(1, {11, 22, 33, 44, 5.5});
  metrics.SetRank(1, {10, 20, 30, 40, 5});
  const auto of = [&](const char* what, const char* rank) {
    return Sample(metrics, absl::StrCat("sluice_rank_", what, "_total{rank=\"", rank, "\"}"));
  };
  CHECK(of("selecting_rows", "0") == 1);
  CHECK(of("missed_tokens", "0") == 2);
  CHECK(of("link_bytes", "0") == 3);
  CHECK(of("worker_tokens", "0") == 4);
  CHECK(of("worker_busy_seconds", "0") == 0.5);
  CHECK(of("selecting_rows", "1") == 11);
  CHECK(of("missed_tokens", "1") == 22);
  CHECK(of("link_bytes", "1") == 33);
  CHECK(of("worker_tokens", "1") == 44);
  CHECK(of("worker_busy_seconds", "1") == 5.5);
}

TEST_CASE("updates allocate nothing") {
  Metrics metrics;
  const TierGauges tier = metrics.Tier("hbm", "kv");
  const size_t before = allocations;
  for (int i = 0; i < 100; ++i) {
    metrics.requests(RequestOutcome::kFinishedStop, kStopToken).Add();
    metrics.tokens(TokenKind::kOutput).Add(32);
    metrics.step_seconds(StepPhase::kTotal).Observe(absl::Milliseconds(20));
    metrics.inter_token_latency.Observe(0.02);
    metrics.step_sequences.Observe(32);
    metrics.SetRunning(32);
    metrics.waiting.Set(i);
    tier.used_bytes.Set(i);
  }
  CHECK(allocations == before);
  metrics.Render();
  CHECK(allocations > before);  // the counter itself counts
}

TEST_CASE("threads lose no updates, and render in between") {
  Metrics metrics;
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 5000; ++i) {
        metrics.tokens(TokenKind::kOutput).Add();
        metrics.inter_token_latency.Observe(0.01);
      }
    });
  }
  for (int i = 0; i < 10; ++i) Parse(metrics.Render());
  for (std::thread& thread : threads) thread.join();
  CHECK(Sample(metrics, "sluice_tokens_total{kind=\"output\"}") == 20000);
  CHECK(Sample(metrics, "sluice_inter_token_latency_seconds_count") == 20000);
}

TEST_CASE("the process's figures are those of this process") {
  Metrics metrics;
  ProcessMetrics process;
  process.Update(metrics);
  const double cpu = Sample(metrics, "process_cpu_seconds_total");
  const double fds = Sample(metrics, "process_open_fds");
  CHECK(cpu > 0);
  CHECK(Sample(metrics, "process_max_fds") >= fds);
  CHECK(Sample(metrics, "process_resident_memory_bytes") > 1 << 20);
  const double now = absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch());
  CHECK(Sample(metrics, "process_start_time_seconds") <= now + 1);
  CHECK(Sample(metrics, "process_start_time_seconds") > now - 3600);

  std::FILE* file = std::fopen("/dev/null", "r");
  const absl::Time busy_until = absl::Now() + absl::Milliseconds(30);
  while (absl::Now() < busy_until) {
  }
  process.Update(metrics);
  CHECK(Sample(metrics, "process_open_fds") == fds + 1);
  CHECK(Sample(metrics, "process_cpu_seconds_total") > cpu);
  std::fclose(file);
}

// Returns the table of deploy/prometheus/README.md, made from the header.
std::string MetricsTable() {
  std::string table = "| Metric | Type | Labels | Meaning |\n| --- | --- | --- | --- |\n";
  for (const metric_names::Metric* metric : metric_names::kAll) {
    const std::vector<std::string> labels = absl::StrSplit(metric->labels, ',', absl::SkipEmpty());
    absl::StrAppend(&table, "| `", metric->name, "` | ", TypeName(metric->type), " | ",
                    absl::StrJoin(labels, ", ",
                                  [](std::string* out, const std::string& label) {
                                    absl::StrAppend(out, "`", label, "`");
                                  }),
                    " | ", metric->help, " |\n");
  }
  return table;
}

TEST_CASE("the documented table of metrics is the header's") {
  std::stringstream text;
  text << std::ifstream(SLUICE_SOURCE_DIR "/deploy/prometheus/README.md").rdbuf();
  const std::string readme = text.str();
  const std::string begin = "<!-- metrics-table -->\n", end = "<!-- /metrics-table -->";
  const size_t from = readme.find(begin), to = readme.find(end);
  REQUIRE(from != std::string::npos);
  REQUIRE(to != std::string::npos);
  const bool same = readme.substr(from + begin.size(), to - from - begin.size()) == MetricsTable();
  // This does not go through Catch, which would wrap the lines.
  if (!same) std::fprintf(stderr, "%s%s%s\n", begin.c_str(), MetricsTable().c_str(), end.c_str());
  INFO("what deploy/prometheus/README.md must have between the markers is printed above");
  CHECK(same);
}

TEST_CASE("promtool finds nothing to say about the names") {
  const std::string promtool = SLUICE_SOURCE_DIR "/.venv/bin/promtool";
  if (!std::filesystem::exists(promtool)) {
    SkipTest("no .venv/bin/promtool: tools/setup puts it there");
    return;
  }
  Metrics metrics;
  metrics.Tier("hbm", "kv");
  metrics.SetBuildInfo({"0", "m", "cpu", "amx", "full"});
  metrics.SetCacheConfig({32, 100, 1000, "bf16"});
  std::FILE* pipe = popen((promtool + " check metrics").c_str(), "w");
  REQUIRE(pipe != nullptr);
  // promtool complains of colons, which are for recording rules, and of _perc, which is no unit.
  // These names are vLLM's.
  std::string text;
  for (const auto line : absl::StrSplit(metrics.Render(), '\n', absl::SkipEmpty())) {
    const bool vllm = absl::StrContains(line, "vllm:num_requests_running") ||
                      absl::StrContains(line, "vllm:num_requests_waiting") ||
                      absl::StrContains(line, "vllm:spec_decode_num_") ||
                      absl::StrContains(line, "vllm:prefix_cache_") ||
                      absl::StrContains(line, "vllm:kv_cache_usage_perc") ||
                      absl::StrContains(line, "vllm:cache_config_info") ||
                      absl::StrContains(line, "vllm:lora_requests_info");
    if (!vllm) absl::StrAppend(&text, line, "\n");
  }
  REQUIRE(std::fwrite(text.data(), 1, text.size(), pipe) == text.size());
  CHECK(pclose(pipe) == 0);
}

}  // namespace
}  // namespace sluice
