#include "src/server/policy_totals.h"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <type_traits>
#include <utility>

#include "absl/time/time.h"

namespace sluice {
namespace {

// The form of totals: this, and then the layers of the selection.
struct Head {
  double rows = 0;
  double link_bytes = 0;
  double places = 0;
  WorkerTotals workers;
  ScheduleTotals schedules;
  LinkTotals link;
};
using Layer = SelectionTotals::Layer;
static_assert(std::is_trivially_copyable_v<Head> && std::is_trivially_copyable_v<Layer>);
// The models that can be read have at most 1024 layers.
static_assert(sizeof(Head) + 1024 * sizeof(Layer) <= RankChannel::kMostReportBytes);

template <size_t n>
void Add(const std::array<double, n>& more, std::array<double, n>& sums) {
  for (size_t i = 0; i < n; ++i) sums[i] += more[i];
}

void AddSelection(const SelectionTotals& more, bool own_rows, SelectionTotals& sums) {
  sums.layers.resize(std::max(sums.layers.size(), more.layers.size()));
  for (size_t i = 0; i < more.layers.size(); ++i) {
    sums.layers[i].selected += more.layers[i].selected;
    sums.layers[i].missed += more.layers[i].missed;
    sums.layers[i].fetched += more.layers[i].fetched;
  }
  sums.link_bytes += more.link_bytes;
  sums.rows = own_rows ? sums.rows + more.rows : std::max(sums.rows, more.rows);
  sums.places = own_rows ? sums.places + more.places : std::max(sums.places, more.places);
}

}  // namespace

PolicyTotals TotalsOf(const AttentionPolicy& policy, const PagePool& hbm) {
  PolicyTotals totals;
  const WorkerStatistics workers = policy.Workers();
  totals.workers = {static_cast<double>(workers.workers),
                    absl::ToDoubleSeconds(workers.busy),
                    static_cast<double>(workers.tokens),
                    {static_cast<double>(workers.failed), static_cast<double>(workers.left),
                     static_cast<double>(workers.late)}};
  const ScheduleStatistics schedules = policy.Schedules();
  for (size_t i = 0; i < schedules.layers.size(); ++i) {
    totals.schedules.layers[i] = schedules.layers[i];
  }
  totals.schedules.changes = static_cast<double>(schedules.changes);
  const LinkStatistics link = policy.Link();
  totals.link = {link.mover, link.bytes_per_s};
  const PolicyStatistics recent = policy.Recent();
  SelectionTotals& selection = totals.selection;
  for (const PolicyStatistics::Layer& layer : recent.layers) {
    selection.layers.push_back({static_cast<double>(layer.selected),
                                static_cast<double>(layer.missing),
                                static_cast<double>(layer.recalled)});
    selection.rows = std::max(selection.rows, static_cast<double>(layer.steps));
    selection.link_bytes += static_cast<double>(layer.link_bytes);
  }
  if (!recent.layers.empty()) {  // such a policy has nothing but KV slots in HBM's latent pages
    const CacheLayout& layout = hbm.layout();
    selection.places = static_cast<double>(hbm.UsageOf(0).used_bytes /
                                           layout.kinds[0].bytes_per_token / layout.layers);
  }
  return totals;
}

PolicyTotals TotalsOfNode(absl::Span<const PolicyTotals> ranks, bool own_rows) {
  PolicyTotals node = ranks.front();
  for (const PolicyTotals& rank : ranks.subspan(1)) {
    AddSelection(rank.selection, own_rows, node.selection);
    node.workers.alive += rank.workers.alive;
    node.workers.busy_seconds += rank.workers.busy_seconds;
    node.workers.tokens += rank.workers.tokens;
    Add(rank.workers.failures, node.workers.failures);
    node.schedules.changes += rank.schedules.changes;
  }
  return node;
}

std::vector<uint8_t> WriteTotals(const PolicyTotals& totals) {
  const SelectionTotals& selection = totals.selection;
  const Head head = {selection.rows, selection.link_bytes, selection.places,
                     totals.workers, totals.schedules,     totals.link};
  std::vector<uint8_t> bytes(sizeof(Head) + selection.layers.size() * sizeof(Layer));
  std::memcpy(bytes.data(), &head, sizeof(Head));
  if (!selection.layers.empty()) {
    std::memcpy(bytes.data() + sizeof(Head), selection.layers.data(), bytes.size() - sizeof(Head));
  }
  return bytes;
}

bool ReadTotals(absl::Span<const uint8_t> bytes, PolicyTotals* totals) {
  if (bytes.size() < sizeof(Head) || (bytes.size() - sizeof(Head)) % sizeof(Layer) != 0) {
    return false;
  }
  Head head;
  std::memcpy(&head, bytes.data(), sizeof(Head));
  std::vector<Layer> layers((bytes.size() - sizeof(Head)) / sizeof(Layer));
  if (!layers.empty()) {
    std::memcpy(layers.data(), bytes.data() + sizeof(Head), bytes.size() - sizeof(Head));
  }
  totals->selection = {std::move(layers), head.rows, head.link_bytes, head.places};
  totals->workers = head.workers;
  totals->schedules = head.schedules;
  totals->link = head.link;
  return true;
}

TotalsReporter::TotalsReporter(const AttentionPolicy* policy, const PagePool* hbm,
                               RankChannel* channel)
    : thread_([this, policy, hbm, channel] {
        pthread_setname_np(pthread_self(), "totals");
        do {
          channel->Report(WriteTotals(TotalsOf(*policy, *hbm)));
        } while (!stop_.WaitForNotificationWithTimeout(kEvery));
      }) {}

TotalsReporter::~TotalsReporter() {
  stop_.Notify();
  thread_.join();
}

TotalsCollector::TotalsCollector(const RankChannel* channel)
    : channel_(channel), last_(static_cast<size_t>(channel->size())) {}

std::vector<PolicyTotals> TotalsCollector::Collect(const PolicyTotals& own) {
  absl::MutexLock lock(&mutex_);
  last_[0] = own;
  for (int rank = 1; rank < channel_->size(); ++rank) {
    if (const auto bytes = channel_->ReportOf(rank)) {
      ReadTotals(*bytes, &last_[static_cast<size_t>(rank)]);
    }
  }
  return last_;
}

}  // namespace sluice
