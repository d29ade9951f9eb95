#include "tests/bench/links/link_bench.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "absl/time/clock.h"
#include "src/base/status_macros.h"

namespace sluice::bench {
namespace {

double GbPerS(size_t bytes, absl::Duration time) {
  return static_cast<double>(bytes) / 1e9 / absl::ToDoubleSeconds(time);
}

}  // namespace

const std::string& Fingerprint() {
  static const auto* const fingerprint = new std::string(64, 'a');
  return *fingerprint;
}

CacheLayout Layout(int ranks) {
  CacheKind kind;
  kind.name = "kv";
  kind.heads = kHeads / ranks;
  kind.block_tokens = 32;
  kind.SetEqualParts(2, 512);  // keys and values of 128 elements in bf16
  return {32, {kind}};
}

void Print(const char* what, size_t bytes, std::vector<absl::Duration> times) {
  std::sort(times.begin(), times.end());
  std::printf("%-46s %8.2f GB/s  (%.2f to %.2f)  %7.1f ms\n", what,
              GbPerS(bytes, times[times.size() / 2]), GbPerS(bytes, times.back()),
              GbPerS(bytes, times.front()), absl::ToDoubleMilliseconds(times[times.size() / 2]));
  std::fflush(stdout);
}

Process::Process(const Flags* flags, RankGroupOptions options, Device* device, Box* box)
    : flags_(*flags), options_(std::move(options)), device_(*device), box_(*box) {}

void Process::Meet() {
  const int own = box_.step[options_.rank].fetch_add(1) + 1;
  while (box_.step[1 - options_.rank].load() < own) absl::SleepFor(absl::Microseconds(20));
}

void Process::Leave(const std::string& text) {
  SLUICE_CHECK(text.size() < sizeof(box_.text));
  std::memcpy(box_.text, text.c_str(), text.size() + 1);
}

absl::Status Process::Time(const char* what, size_t bytes,
                           const std::function<absl::Status()>& once) {
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

absl::StatusOr<Home> NewHome(const Flags& flags, Device& device) {
  Home home;
  const CacheLayout layout = Layout(flags.ranks);
  const auto bytes = static_cast<size_t>(layout.BytesFor(flags.tokens));
  for (int rank = 0; rank < flags.ranks; ++rank) {
    SLUICE_ASSIGN_OR_RETURN(Buffer memory, device.Allocate(MemoryKind::kPinned,
                                                           bytes + bytes / 8 + (64 << 20), "pool"));
    SLUICE_ASSIGN_OR_RETURN(home.emplace_back(),
                            PagePool::Create("dram", layout, std::move(memory)));
  }
  return home;
}

TransferTable::Options TableOptions(const Flags& flags, const Home& home) {
  TransferTable::Options options;
  if (home.size() > 1) {
    HeadPlaces places;
    places.layout = Layout();
    places.places.emplace_back();
    const int own = kHeads / flags.ranks;
    for (int head = 0; head < kHeads; ++head) {
      const auto rank = static_cast<size_t>(head / own);
      places.places[0].push_back({head % own, {home[rank]->base(0) - home[0]->base(0)}});
    }
    options.places.push_back(std::move(places));
    options.await_free_pages = [] { return absl::OkStatus(); };
  }
  options.model_fingerprint = Fingerprint();
  options.vocab_size = 1000;
  options.max_context = 1 << 20;
  options.footprint = [](int64_t context, int64_t) { return Footprint{context, 0}; };
  options.prefix_cache = false;
  return options;
}

}  // namespace sluice::bench
