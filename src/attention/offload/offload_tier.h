// The tiers of a policy that keeps a sequence's cache in DRAM and a fixed budget of it in HBM.
//
// A sequence's *home* is its host cache: its whole cache in pinned DRAM, namely what was handed
// over, and every new token, written through. In HBM the sequence has, for each sparse layer and KV
// head, *places* for units of its cache (kernels/sparse_params.h): a ring of the newest blocks, and
// places for what a policy recalls. Dense layers have all of their cache in HBM, and persistent
// heads of sparse layers have all of theirs behind the ring, by position. Beside that lie *arrays*,
// rows of numbers that grow with the sequence (digests, partial keys) or with its places. All of
// these are pages of the HBM pool, taken at admission for the whole length of the sequence, so that
// admission counts real bytes and a running sequence never lacks space. Arrays that CPU workers
// read lie in DRAM instead, in pages of the home behind those of its tokens.
//
// This is only placement: the policy decides which units are recalled, and when. Only the engine's
// thread may call it, except for the views of layers, which operators read by slot.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/sparse_params.h"
#include "src/attention/sequence_placement.h"
#include "src/device/device.h"
#include "src/kv/page_pool.h"
#include "src/kv/sequence_cache.h"

namespace sluice {

// An array that each slot has in every sparse layer.
struct OffloadArray {
  std::string name;
  // Tokens of the sequence per row; 0: one row for every token of its places.
  int64_t tokens_per_row = 0;
  int32_t dim = 0;
  kernels::DType type = kernels::DType::kFloat32;  // kFloat32 also stands for int32 tables
  // kDram: pinned memory, which the device writes over the link. Only with tokens_per_row > 0.
  enum class Place { kHbm, kDram };
  Place place = Place::kHbm;
};

struct OffloadTierOptions {
  Device* device = nullptr;
  PagePool* hbm = nullptr;
  PagePool* dram = nullptr;
  int slots = 0;
  int max_context = 0;
  // Layers [0, dense_layers) are dense.
  int dense_layers = 0;
  // Blocks of the ring, at least 1. The ring holds the newest blocks of a sequence, for all KV
  // heads.
  int ring_blocks = 2;
  // Places beside the ring, in blocks. A shorter sequence has fewer.
  int recall_blocks = 0;
  // A sequence this share of whose tokens at its end needs more blocks has as many places; 0: none
  // has more for being long.
  double recall_share = 0;
  // Tokens of a unit that is recalled: block_tokens or 1.
  int unit_tokens = 0;
  // [layers][kv_heads] Not 0: the head is persistent. Empty: none is. Those of dense layers count
  // for nothing.
  std::vector<uint8_t> persistent;
  std::vector<OffloadArray> arrays;
};

class OffloadTier {
 public:
  // RESOURCE_EXHAUSTED: there is no memory for the tables. INVALID_ARGUMENT: the message names the
  // option that is out of range.
  static absl::StatusOr<std::unique_ptr<OffloadTier>> Create(const OffloadTierOptions& options);
  virtual ~OffloadTier() = default;

  // These functions implement SequencePlacement, but without soft promises: no sequence is
  // preempted.
  virtual Footprint FootprintOf(int64_t context, int64_t total) const = 0;
  virtual int64_t max_tokens() const = 0;
  virtual SequencePlacement::Headroom HeadroomNow() const = 0;
  // Takes HBM and keeps `home`, enlarged if it is too small (or reserves one in DRAM, of the
  // footprint's size). The page numbers are then on their way to the device; WarmUp makes residency
  // and arrays. Returns false if there is no capacity now; then nothing has changed.
  virtual bool Admit(int slot, int64_t context, int64_t total,
                     std::unique_ptr<SequenceCache>& home) = 0;
  // Makes positions below `tokens` writable in the host cache.
  virtual void Grow(int slot, int64_t tokens) = 0;
  // REQUIRES: nothing reads or writes the slot's pages any more.
  virtual void Release(int slot) = 0;
  // Returns the host cache, so that it outlives the slot, without the pages of arrays: these are
  // built anew when it is admitted again. Called before Release.
  virtual std::unique_ptr<SequenceCache> DetachHostCache(int slot) = 0;

  // Starts to make the working set of the slot's first `tokens` tokens, as the row of position
  // `tokens` will find it: the newest blocks in the ring, the caches of dense layers and persistent
  // heads, and `units` in the places after the ring's, in their order and as many as there are
  // places for. `units` has a list for each sparse layer and KV head in turn ([layer -
  // dense_layers][kv_head]), which does not count where the head is persistent; each list is
  // ascending and older than that row's ring. Arrays with a row for every token of the places are
  // zeroed. Then `build(stream, row)`, which is called before WarmUp returns, may enqueue what the
  // policy's arrays need, with one row (slot, positions [0, tokens)) for Digest or PartialKeys.
  // REQUIRES: the host cache has those tokens, and no step has a decode row of the slot.
  struct BulkRow {
    const int32_t* slots;            // [1], readable by the device
    const int32_t* first_positions;  // [1] 0
    const int32_t* positions;        // [1] tokens - 1
  };
  virtual void WarmUp(int slot, int64_t tokens, const std::vector<std::vector<int32_t>>& units,
                      const std::function<void(Stream&, const BulkRow&)>& build) = 0;
  // Returns whether everything that Admit and WarmUp enqueued for the slot is done.
  virtual bool Warm(int slot) = 0;
  virtual Event& WarmEvent(int slot) = 0;

  // Views of a layer, for operators. Any thread.
  bool dense(int layer) const { return layer < options_.dense_layers; }
  bool persistent(int layer, int head) const {
    const auto heads = static_cast<size_t>(options_.hbm->layout().kinds[0].heads);
    return !options_.persistent.empty() &&
           options_.persistent[static_cast<size_t>(layer) * heads + static_cast<size_t>(head)] != 0;
  }
  virtual kernels::PagedCache Home(int layer) const = 0;   // by block; in pinned memory
  virtual kernels::PagedCache Dense(int layer) const = 0;  // REQUIRES: dense(layer); by block
  // Returns the host cache as CPU workers read it: its table is in the host's memory too.
  virtual kernels::PagedCache HostHome(int layer) const = 0;
  // REQUIRES for the views below: !dense(layer).
  virtual kernels::PagedCache Ring(int layer) const = 0;    // by block, ring_blocks set
  virtual kernels::PagedCache Places(int layer) const = 0;  // by place of a block, ring first
  virtual kernels::ResidencyTable Residency(int layer) const = 0;
  virtual kernels::PagedRows Array(int layer, size_t index) const = 0;
  // Returns an array in DRAM as CPU workers read it: its table is in the host's memory too.
  virtual kernels::PagedRows HostArray(int layer, size_t index) const = 0;

  // The host's view: the slot's host cache, and the device address of a row of an array.
  virtual const SequenceCache& HomeOf(int slot) const = 0;
  // Returns the same, for whoever shares its blocks.
  virtual SequenceCache* MutableHomeOf(int slot) = 0;
  virtual uint8_t* ArrayRow(int slot, int layer, size_t index, int head, int64_t row) const = 0;

  // Returns the places of a sequence of `total` tokens in a head that is not persistent, in units,
  // the ring's included.
  virtual int32_t PlacesOf(int64_t total) const = 0;
  int64_t block_tokens() const { return options_.hbm->layout().kinds[0].block_tokens; }
  const OffloadTierOptions& options() const { return options_; }

 protected:
  explicit OffloadTier(const OffloadTierOptions& options) : options_(options) {}
  const OffloadTierOptions options_;
};

}  // namespace sluice
