// Declarations that the parts of sluice-bench ingest share.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "src/bench/ingest/ingest_sender.h"
#include "src/bench/report/report.h"
#include "src/bench/report/subcommand.h"
#include "src/kv/cache_layout.h"

namespace sluice::bench {

struct IngestBenchOptions {
  std::vector<int64_t> chunks_kib = {256, 1024, 4096};
  int64_t transfer_mib = 256;
  int64_t rounds = 9;
  int64_t streams = 1;
  bool tls = false;   // Use mTLS, with a certificate made for the run.
  std::string model;  // Model that decodes beside ingest; empty: none.
  bool dummy = false;
  int64_t threads = 0;
  double rate = 250e6;
  double window_seconds = 1;
  std::string json;
};

// Makes `job` send caches of this layout. REQUIRES: one kind.
void SetLayout(const CacheLayout& layout, SendJob* job);

// Measures the throughput of one decoding sequence, in turn alone, beside ingest at options.rate,
// and beside a load that spins away as much CPU time as that ingest took.
absl::Status MeasureInterference(const IngestBenchOptions& options, IngestSender* sender,
                                 const Output& out, Report* report);

}  // namespace sluice::bench
