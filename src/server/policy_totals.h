// PolicyTotals is what a rank's policy has counted, in the form of its metrics: the other ranks
// send theirs to rank 0, whose metrics are those of the node.
#pragma once

#include <cstdint>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/synchronization/notification.h"
#include "absl/types/span.h"
#include "src/attention/attention_policy.h"
#include "src/device/rank_channel.h"
#include "src/kv/page_pool.h"
#include "src/metrics/metrics.h"

namespace sluice {

struct PolicyTotals {
  SelectionTotals selection;
  WorkerTotals workers;
  ScheduleTotals schedules;
  LinkTotals link;
};

// Returns what the policy has counted so far. Any thread.
PolicyTotals TotalsOf(const AttentionPolicy& policy, const PagePool& hbm);

// Returns the totals of a node from those of its ranks, by rank. `own_rows`: each rank has
// sequences of its own; else each has a part of the heads of every sequence.
//
// Sums are what each rank does by itself: tokens that were selected, missed or fetched, which count
// once for each KV head that a rank has, bytes over its link, its workers, and its changes of
// schedules. A share of two sums is then weighted by what each rank did. Rows and places are summed
// where ranks have rows of their own, else they are the largest of any rank, since every rank
// counts the same rows. Choices are rank 0's: the schedule of each layer, and who moves entries at
// which rate. A sum of them would mean nothing, and every rank shows its own.
PolicyTotals TotalsOfNode(absl::Span<const PolicyTotals> ranks, bool own_rows);

// Return the form in which totals go from rank to rank, and read it. Both ranks are of one build.
// ReadTotals returns false, and leaves `totals` alone, if it is not of that form.
std::vector<uint8_t> WriteTotals(const PolicyTotals& totals);
bool ReadTotals(absl::Span<const uint8_t> bytes, PolicyTotals* totals);

// Leaves the totals of a rank other than 0 for rank 0, every kEvery, on a thread of its own: the
// steps know nothing of it.
class TotalsReporter {
 public:
  static constexpr absl::Duration kEvery = absl::Milliseconds(100);
  // All outlive this.
  TotalsReporter(const AttentionPolicy* policy, const PagePool* hbm, RankChannel* channel);
  ~TotalsReporter();

 private:
  absl::Notification stop_;
  std::thread thread_;
};

// Collects, on rank 0, the totals of all ranks. Thread-safe.
class TotalsCollector {
 public:
  // The channel outlives this.
  explicit TotalsCollector(const RankChannel* channel);
  // Returns the totals by rank, of which `own` are rank 0's: those of another rank are some
  // tenths of a second old, or the last that it left. A rank that has left none has zeros.
  std::vector<PolicyTotals> Collect(const PolicyTotals& own);

 private:
  const RankChannel* const channel_;
  absl::Mutex mutex_;
  std::vector<PolicyTotals> last_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace sluice
