// The tiers of policy ess (ESS, sections 3 and 3.2). A sequence's *home* is all of its latent
// entries in pinned DRAM; new entries are written through to it. In HBM the sequence has its index
// keys, by position, and for each layer a Sparse Memory Pool: places for entries, with the tables
// that say which entry has which place. All of HBM is taken at admission for the whole length of
// the sequence, so that admission counts real bytes and a running sequence never lacks memory.
//
// The index keys of a handed-over cache leave DRAM once they are in HBM. They are copied back to
// DRAM if the sequence is kept.
//
// Only Release and DetachHostCache free pages. The engine calls them once every step that has the
// slot is done, so what a transfer of a running sequence reads and writes is the sequence's own.
//
// This class only places entries; the policy decides what is fetched and when. All functions are
// for the engine's thread, except the views of layers, which operators read by slot.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/latent_params.h"
#include "src/attention/attention_policy.h"
#include "src/attention/policies/ess/pool_pages.h"
#include "src/attention/policies/ess/pool_shape.h"
#include "src/attention/policies/ess/pool_tables.h"
#include "src/attention/policies/ess/pool_warmer.h"
#include "src/device/device.h"
#include "src/kv/page_pool.h"
#include "src/kv/selection_hints.h"
#include "src/kv/sequence_cache.h"

namespace sluice {

class EssTier {
 public:
  struct Options {
    Device* device = nullptr;
    PagePool* hbm = nullptr;
    PagePool* dram = nullptr;
    int slots = 0;
    EssPoolShape shape;
    int decode_rows = 0;  // Most decode rows of a step, including padding.
    int latent_rank = 0;
  };
  // RESOURCE_EXHAUSTED: there is no memory for the tables.
  static absl::StatusOr<std::unique_ptr<EssTier>> Create(const Options& options);
  ~EssTier();

  // The placement functions of AttentionPolicy, with firm promises only.
  Footprint FootprintOf(int64_t context, int64_t total) const;
  int64_t max_tokens() const;
  SequencePlacement::Headroom HeadroomNow() const;
  bool Admit(int slot, int64_t context, int64_t total, std::unique_ptr<SequenceCache>& home);
  bool Warm(int slot);
  Event& WarmEvent(int slot);
  void Grow(int slot, int64_t tokens) const;
  void Release(int slot);
  bool ReserveHostCopy(int slot, int64_t tokens);
  void Evict(int slot, int64_t tokens);
  std::unique_ptr<SequenceCache> DetachHostCache(int slot);
  const SequenceCache* HostCache(int slot) const {
    return slots_[static_cast<size_t>(slot)].home.get();
  }

  // Returns whether each of the slot's pools has a place for every token.
  bool HoldsWhole(int slot) const {
    return options_.shape.HoldsWhole(slots_[static_cast<size_t>(slot)].total);
  }
  // Fills the pools of a sequence whose first `tokens` tokens are cached, with all of them where
  // the pools hold the whole sequence, and reserves the next token's places. With `fill` false it
  // only reserves those places, and the pools stay empty. It returns before the work is done; Warm
  // returns true when it is.
  void WarmUp(int slot, int64_t tokens, SelectionHints hints, bool fill);
  // Not OK: the slot's sequence did not get what WarmUp promised it. REQUIRES: Warm(slot).
  const absl::Status& Health(int slot) const { return warmer_->Health(slot); }

  // Sends to the device where the step's decode rows lie in their homes, for WriteThrough. Padded
  // rows and rows of slots for which `generates` is false are written nowhere.
  void BeginStep(Stream& stream, absl::Span<const int32_t> slots,
                 absl::Span<const int32_t> positions, const std::vector<bool>& generates);
  // Copies the decode rows' entries of layers [begin, end) to their homes. `written` is
  // [layers][decode_rows] entries.
  void WriteThrough(Stream& stream, const void* written, int begin, int end) const;

  // Views of a layer, by slot: entries by position, entries by place, and index keys by position.
  kernels::PagedLatents Home(int layer) const;
  kernels::PagedLatents Pool(int layer) const;
  kernels::PagedIndexKeys Index(int layer) const;
  kernels::ResidencyTable Residency(int layer) const { return tables_.Residency(layer); }
  const int32_t* whole() const { return tables_.whole(); }

  const CacheKind& latent() const { return layout().kinds[kLatentKind]; }
  const CacheLayout& layout() const { return options_.hbm->layout(); }
  const EssPoolShape& shape() const { return options_.shape; }

 private:
  struct Slot {
    std::unique_ptr<SequenceCache> home;
    std::unique_ptr<SequenceCache> hbm;  // Null: the slot is free.
    int64_t total = 0;                   // Tokens of the sequence at its end.
    PoolPages pages;                     // Pages of `hbm` by layer.
    int64_t kept = 0;                    // Since Evict: tokens that the home is to be kept with.
    // The home has pages of index keys, which are freed once `placed` is ready.
    bool index_at_home = false;
    // Copies under way: of the placing or the eviction, and of the warm-up.
    std::vector<Stream::CopyOp> copies, then, warm_copies, warm_then;
    std::unique_ptr<Event> placed;   // Ready when tables and index keys are where they belong.
    std::unique_ptr<Event> cleared;  // The same for the warm-up, which may follow at once.
  };
  // A step's targets on their way to the device.
  struct Targets {
    Buffer units;  // int32 [layers][decode_rows]
    std::unique_ptr<Event> done;
  };

  EssTier(const Options& options, PoolTables tables, std::unique_ptr<PoolWarmer> warmer);
  absl::Status AllocateTargets();
  // Copies the index keys of tokens [begin, tokens). `begin` is a block's first token.
  void CopyIndex(Slot& s, const SequenceCache& from, const SequenceCache& to, int64_t tokens,
                 int64_t begin = 0) const;

  const Options options_;
  PoolTables tables_;
  std::vector<Slot> slots_;
  // Used in turn: at most one step is under way when the next begins.
  std::array<Targets, 2> targets_;
  size_t next_targets_ = 0;
  Buffer device_targets_;  // int32 [layers][decode_rows]: entries of homes, or -1.
  Buffer target_counts_;   // int32 [layers]: decode_rows each.
  std::unique_ptr<PoolWarmer> warmer_;
  std::unique_ptr<Stream> copy_stream_;  // Declared last: its thread ends first.
};

}  // namespace sluice
