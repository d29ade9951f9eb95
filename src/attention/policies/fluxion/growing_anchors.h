// New anchors of sequences that grow. The statistics that budgets are predicted from are those of
// one query, the *anchor* (kernels/fluxion_params.h), at first the last of the prompt. An answer
// leaves it behind, and a prompt that was too short for a cpu segment had nothing to measure. So
// now and then the query of a decode row becomes the next anchor:
// - The step of that row keeps its queries, at a position that NextAnchorTokens() says.
// - Later steps measure it, a layer at a time, on a stream of its own beside the step. What is
//   measured lies in a table of its own meanwhile.
// - From the row on that is AnchorDelay() positions later it counts, in all layers at once: the
//   step of that row first waits for what is left to measure, and then copies the numbers to the
//   table that predictions read.
// Both positions follow from the sequence alone, and so do the statistics, since keys, values and
// digests up to the anchor never change. Therefore results do not depend on how fast the stream
// is, nor on the other sequences of the batch.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/attention/kv_attention.h"
#include "src/attention/offload/first_queries.h"
#include "src/attention/policies/fluxion/anchor_table.h"
#include "src/device/allocation.h"

namespace sluice {

// A sequence without an anchor gets one when it has this many tokens outside of HBM, as many as
// local ones: with fewer, reading all of them costs less than the default set does, and moments of
// so few tokens say little.
inline constexpr int32_t kFirstAnchorCpuTokens = kernels::kFluxionLocalTokens;
// A sequence that has an anchor gets the next one when it has grown by half since. So all anchors
// of an answer together read at most three times its cache, however long it becomes.
constexpr int64_t GrownByHalf(int64_t tokens) { return tokens + tokens / 2; }
// The least number of positions before an anchor counts, about one step for each layer of a model
// of this many. A sequence that has no anchor reads everything until then, so it is short.
inline constexpr int64_t kLeastAnchorDelay = 32;

// Returns whether a decode row with `tokens` tokens, its own included, is the next anchor of a
// sequence whose anchor had `anchor_tokens`; 0: it has none that counts.
bool IsNextAnchor(int64_t anchor_tokens, int64_t tokens);
// Returns how many positions after an anchor of `tokens` tokens it counts. `anchor_tokens` is as
// above. An eighth of the tokens: what a step reads to measure then does not grow with the length.
int64_t AnchorDelay(int64_t anchor_tokens, int64_t tokens);

// Only the engine's thread may call it.
class GrowingAnchors {
 public:
  struct Options {
    Device* device = nullptr;
    FluxionShape shape;
    const OffloadTier* tier = nullptr;
    int64_t max_context = 0;
    double tau = 0;
    const FirstQueries* queries = nullptr;  // where anchors' queries lie
    const AnchorTable* counting = nullptr;  // what predictions read
  };
  // The objects in the options outlive the result. RESOURCE_EXHAUSTED: there is no memory.
  static absl::StatusOr<std::unique_ptr<GrowingAnchors>> Create(const Options& options);

  // Ends the slot's prompt of `tokens` tokens, of which the last is the anchor if `has_anchor`.
  // Decode rows follow.
  void EndPrompt(int slot, int64_t tokens, bool has_anchor);
  // Takes note that the sequence leaves the slot. Waits until nothing reads its caches here any
  // more, which is at most one layer's measurement away. REQUIRES: every step that has the slot is
  // done.
  void Left(int slot);
  // Begins a step with these rows: enqueues what the step needs on `stream`, which is the step's,
  // and a layer to measure on the stream of this object.
  void BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                 absl::Span<const int32_t> positions);
  // Enqueues that the queries of those rows are kept that are anchors. Part of every step, so that
  // it may be recorded. Whatever overwrites the queries comes after it.
  void Keep(Stream& stream, int layer, const KvAttention::Queries& queries) const;

 private:
  enum class Stage : uint8_t {
    kNone,       // no anchor is under way
    kKept,       // the step that began last keeps its queries
    kMeasuring,  // layers from `layer` on are not enqueued
  };
  struct Slot {
    bool answers = false;       // whether the prompt has ended
    int64_t anchor_tokens = 0;  // tokens at the anchor that counts; 0: none does
    Stage stage = Stage::kNone;
    int64_t next_tokens = 0;                // tokens at the anchor that is under way
    int64_t counts_at = 0;                  // the first position for which that one counts
    int64_t newest = 0;                     // position of the newest row
    int layer = 0;                          // the next one to measure
    std::unique_ptr<Event> kept, measured;  // all layers' queries, all layers' numbers
    std::vector<Stream::CopyOp> copies;     // from next_ to the table that counts
  };
  // Which rows of a step are kept, int32: their count, the rows [slots], their slots [slots].
  struct KeepList {
    Buffer words;  // pinned
    std::unique_ptr<Event> sent;
  };
  // Maximum steps under way at once.
  static constexpr size_t kSteps = 2;

  GrowingAnchors(const Options& options, AnchorTable next, AnchorMeter meter)
      : options_(options), next_(std::move(next)), meter_(std::move(meter)) {}
  absl::Status Allocate();
  int64_t list_words() const { return 1 + int64_t{2} * options_.shape.slots; }
  void BeginMeasuring(Stream& stream);
  void MeasureOneLayer();
  void Measure(int slot);
  void Count(Stream& stream, int slot);
  void SendList(Stream& stream, absl::Span<const int32_t> rows, absl::Span<const int32_t> slots);

  const Options options_;
  std::vector<Slot> slots_;
  std::vector<int32_t> kept_rows_, kept_slots_;  // of the step that begins
  KeepList lists_[kSteps];
  size_t next_list_ = 0;
  bool keeps_ = false;              // whether the list on the device has entries
  Buffer list_;                     // the words of the list that steps read, in device memory
  MirroredBuffer anchors_;          // int32 [slots][2]: the slot, and the anchor's position
  const AnchorTable next_;          // what is measured and does not count yet
  const AnchorMeter meter_;         // used on stream_
  std::unique_ptr<Event> paced_;    // the newest layer of MeasureOneLayer
  int paced_slot_ = -1;             // whose layer that is
  std::unique_ptr<Stream> stream_;  // last: what it runs uses the members above
};

}  // namespace sluice
