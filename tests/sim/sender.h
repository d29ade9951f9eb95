// The prefill leg of a simulated request. It reserves, sends its chunks in any order and in every
// wrong way, commits or does not, and knows which answers each of its calls may get.
#pragma once

#include <cstdint>
#include <functional>
#include <list>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "src/base/rng.h"
#include "src/kv/transfer_table.h"
#include "tests/sim/oracle.h"
#include "tests/sim/scenario.h"

namespace sluice::sim {

class World;

class Sender {
 public:
  // `reserved` and `committed` are called at most once.
  Sender(World* world, const RequestSpec& request, std::function<void()> reserved,
         std::function<void()> committed);
  void Start();

  const std::string& transfer_id() const { return id_; }
  std::string rendezvous_key() const;
  bool is_committed() const { return committed_; }
  bool is_poisoned() const { return poisoned_; }
  bool is_aborted() const { return aborted_; }
  // Returns whether its lease may be over.
  bool LeaseMayBeOver() const;
  // Returns whether the transfer may be gone.
  bool MayBeGone() const;
  // Called when the Generate has ended, and the transfer with it.
  void CallerEnded() { caller_ended_ = true; }
  // Called when a Generate was accepted: once committed, the engine takes the transfer.
  void CallerAttached() { attached_ = true; }
  // Returns whether the engine could take the transfer and has not.
  bool IsReady() const;

 private:
  enum class Fault { kNone, kCorrupt, kDropped, kHeldUp, kDiffers };
  struct Chunk {
    // A head of latent caches stands for a kind: each kind has one head.
    uint32_t layer, head_begin, head_end, block_begin, block_end;
    Fault fault = Fault::kNone;
  };
  struct Held {
    Chunk chunk;
    std::unique_ptr<ChunkLanding> landing;
    std::vector<uint8_t> payload;  // bytes still to be sent
  };

  void Reserve();
  void PlanChunks();
  // Notes what the node has of the prompt; some senders send it all the same.
  void TakeCached(int64_t tokens);
  // Returns the first bytes of a chunk's payload, which the node drops because it has them.
  size_t Dropped(const Chunk& chunk, size_t bytes) const;
  // Makes the next call after a random time of at most `most`.
  void Continue(absl::Duration most);
  void Step();
  void Send(Chunk chunk);
  void FinishLanding(const Chunk& chunk, std::unique_ptr<ChunkLanding> landing, bool corrupted);
  void HoldUp(const Chunk& chunk, std::unique_ptr<ChunkLanding> landing,
              std::vector<uint8_t> payload);
  void TryCommit();
  // Returns the hints of a Commit, and whether they are to be refused.
  SelectionHints Hints(bool* spoiled);
  void Abort();
  void AfterCommit();

  bool latents() const;
  ChunkHeader Header(const Chunk& chunk) const;
  std::vector<uint8_t> Payload(const Chunk& chunk) const;
  // The state of a block as far as the sender knows.
  enum class Block : uint8_t { kMissing, kHeld, kLanded };
  Block& block(uint32_t layer, uint32_t head, uint32_t b);
  template <typename Visit>
  void EachBlock(const Chunk& chunk, Visit visit);
  uint32_t blocks() const { return (request_.context + block_tokens_ - 1) / block_tokens_; }
  void LeaseRenewed();
  // Fails the seed unless `status` is one that a call may get now.
  void CheckRefusal(const char* call, const absl::Status& status, bool busy = false);

  World* const world_;
  const RequestSpec& request_;
  const uint32_t block_tokens_;
  const std::function<void()> on_reserved_, on_committed_;
  SplitMix64 random_;
  History history_;  // history of the prompt
  absl::Duration lease_;
  absl::Duration pace_;  // maximum time between two calls

  std::string id_;
  int reserve_attempts_ = 0;
  uint32_t cached_blocks_ = 0;  // leading blocks that the node had at the Reserve
  std::vector<Chunk> to_send_;  // taken from the back
  std::vector<Block> known_;
  std::list<Held> held_;
  // Earliest time at which the lease may end: the table may renew more often than the sender knows.
  absl::Time lease_end_ = absl::InfiniteFuture();
  bool committed_ = false;
  bool poisoned_ = false;
  bool aborted_ = false;
  bool attached_ = false;
  bool caller_ended_ = false;
  bool stopped_ = false;          // whether it sends nothing more
  uint64_t steps_to_abort_ = 0;   // 0: it does not abort
  uint64_t steps_to_forget_ = 0;  // 0: it goes on to the end
  bool commits_early_ = false;
};

}  // namespace sluice::sim
