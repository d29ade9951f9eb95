// Page numbers of sequences' caches on the device, by (kind, layer, slot, block), for policies in
// which block b of a sequence is entry b of its table. Only the engine's thread may call it, except
// for table().
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/device/device.h"
#include "src/kv/page_pool.h"
#include "src/kv/sequence_cache.h"

namespace sluice {

class BlockTables {
 public:
  // Makes tables for the pool's kinds and for sequences of at most `max_context` tokens.
  // RESOURCE_EXHAUSTED: there is no memory for them.
  static absl::StatusOr<std::unique_ptr<BlockTables>> Create(Device* device, const PagePool& pool,
                                                             int slots, int64_t max_context);
  ~BlockTables();

  // Takes note that the slot has a new sequence, and adds to `copies` what the device must be told
  // of the pages that `cache` has. REQUIRES: what was sent for the slot before has arrived.
  void Begin(int slot, const SequenceCache& cache, std::vector<Stream::CopyOp>* copies);
  // Takes note that the slot's cache has more pages than the device knows.
  void Grew(int slot) { grown_[static_cast<size_t>(slot)] = true; }
  // Takes note that the slot's sequence has left.
  void End(int slot) { grown_[static_cast<size_t>(slot)] = false; }
  // Enqueues what the device must be told of those of `slots` that grew: one operator for all of
  // them, which reads the entries from the host's tables, or nothing if none grew. (A copy for each
  // layer of each slot would hold up the device for a microsecond apiece.)
  void Send(Stream& stream, absl::Span<const int32_t> slots,
            absl::FunctionRef<const SequenceCache&(int slot)> cache_of);

  // [slots][stride(kind)] page numbers, for operators.
  const int32_t* table(int layer, size_t kind) const {
    return device_tables_.as<int32_t>() + EntryOf(kind, layer, 0);
  }
  int64_t stride(size_t kind) const { return kinds_[kind].stride; }

 private:
  struct Kind {
    int64_t stride = 0;  // blocks per slot
    int64_t begin = 0;   // first entry
  };
  // Table entries on their way to the device.
  struct Batch {
    Buffer lists;  // int64 [MostLists()] first bytes, then int32 [MostLists()] counts
    std::unique_ptr<Event> done;
  };
  BlockTables(Device* device, const CacheLayout& layout, int slots, int64_t max_context);
  int64_t MostLists() const {
    return int64_t{slots_} * layers_ * static_cast<int64_t>(kinds_.size());
  }
  int64_t EntryOf(size_t kind, int layer, int slot) const {
    return kinds_[kind].begin + (int64_t{layer} * slots_ + slot) * kinds_[kind].stride;
  }
  // Writes the page numbers that the device does not know to the host's tables, and calls
  // visit(first entry, count) for those of each kind and layer. The entries stay unchanged until
  // the device has them: a slot's entries are written again only after the steps that read them.
  void ForNewEntries(int slot, const SequenceCache& cache,
                     absl::FunctionRef<void(int64_t first, int32_t count)> visit);

  Device* const device_;
  const int layers_;
  const int slots_;
  std::vector<Kind> kinds_;
  int64_t entries_ = 0;
  Buffer device_tables_;           // int32 [kinds][layers][slots][stride of the kind]
  Buffer host_tables_;             // the host's copy, from which entries are sent
  std::vector<size_t> published_;  // [slots][kinds] blocks that the device knows
  std::vector<bool> grown_;        // [slots]: the sequence grew since the device was told
  // Used in turn. Of the engine's steps, at most one is under way when the next begins.
  std::array<Batch, 2> batches_;
  size_t next_batch_ = 0;
};

}  // namespace sluice
