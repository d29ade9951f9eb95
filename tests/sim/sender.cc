#include "tests/sim/sender.h"

#include <algorithm>
#include <cstring>
#include <utility>

extern "C" {
#include <isa-l/crc.h>
}

#include "absl/strings/str_cat.h"
#include "src/base/error.h"
#include "tests/sim/hints.h"
#include "tests/sim/world.h"

namespace sluice::sim {
namespace {

constexpr int kReserveAttempts = 4;

uint32_t Crc32c(const std::vector<uint8_t>& bytes) {
  return ~crc32_iscsi(const_cast<uint8_t*>(bytes.data()), static_cast<int>(bytes.size()), ~0u);
}

// Returns whether hints can change no token of this policy. Hints only say what lies in HBM first.
// Where a row attends to everything in HBM, selected or not (scout, recall and clo, but for some of
// their forms), hints rightly change its tokens, and a sequence alone has none. (Predicted queries
// are exact here. A real model's are not, and the place of a block decides which queries scout
// attends with, so there hints may change a token in the paper's form, too.)
bool HintsChangeNoToken(const PolicyOptions& policy) {
  if (policy.name == "scout") return !policy.scout.attend_whole;
  if (policy.name == "clo") return !policy.clo.reuse;
  if (policy.name == "fluxion") return false;  // its requests have hints of their own
  return policy.name != "recall" || policy.recall.fetch_all;
}

}  // namespace

Sender::Sender(World* world, const RequestSpec& request, std::function<void()> reserved,
               std::function<void()> committed)
    : world_(world),
      request_(request),
      block_tokens_(static_cast<uint32_t>(world->scenario().node.block_tokens)),
      on_reserved_(std::move(reserved)),
      on_committed_(std::move(committed)),
      random_(request.seed),
      history_(world->scenario().node.top_k),
      lease_(OneIn(random_, 3) ? world->scenario().node.lease * (0.1 + 0.9 * random_.Uniform())
                               : world->scenario().node.lease),
      pace_(absl::Milliseconds(OneIn(random_, 6) ? 30 : 2)),
      known_(size_t{kLayers} * kKvHeads * blocks(), Block::kMissing) {
  for (const int32_t token : request.prompt) history_.Append(token);
  if (OneIn(random_, 8)) steps_to_abort_ = 1 + random_.Below(20);
  if (OneIn(random_, 8)) steps_to_forget_ = 1 + random_.Below(20);
  commits_early_ = OneIn(random_, 5);
}

void Sender::Start() {
  world_->clock().After(request_.reserve_at, [this] { Reserve(); });
}

std::string Sender::rendezvous_key() const {
  return request_.meeting == Meeting::kByKey ? absl::StrCat("room ", request_.index) : "";
}

bool Sender::LeaseMayBeOver() const { return world_->clock().Now() >= lease_end_; }

bool Sender::MayBeGone() const {
  return aborted_ || caller_ended_ || LeaseMayBeOver() || (committed_ && attached_);
}

bool Sender::IsReady() const {
  if (!committed_ || !attached_ || !held_.empty() || LeaseMayBeOver()) return false;
  // The table remembers a transfer that was taken, but not its blocks.
  const auto info = world_->transfers().Get(id_, 0);
  return info.ok() && info->blocks_total > 0;
}

void Sender::LeaseRenewed() { lease_end_ = world_->clock().Now() + lease_; }

void Sender::Reserve() {
  Manifest manifest;
  manifest.model_fingerprint = world_->node().model().fingerprint();
  manifest.context_length = request_.context;
  manifest.prompt_token_ids.assign(request_.prompt.begin(), request_.prompt.end());
  manifest.max_new_tokens = request_.max_new_tokens;
  manifest.rendezvous_key = rendezvous_key();
  manifest.lease = lease_;
  const auto reserved = world_->transfers().Reserve(manifest);
  if (!reserved.ok()) {
    world_->Trace("sender ", request_.index, ": Reserve: ", ReasonOr(reserved.status()));
    if (!absl::IsResourceExhausted(reserved.status()) ||
        !RetryAfterOf(reserved.status()).has_value()) {
      world_->Fail(request_.index, "Reserve was refused: ", reserved.status().ToString());
    }
    world_->Note(Situation::kReserveRefusedForRoom);
    if (++reserve_attempts_ < kReserveAttempts) {
      world_->clock().After(*RetryAfterOf(reserved.status()), [this] { Reserve(); });
    }
    return;
  }
  id_ = reserved->transfer_id;
  LeaseRenewed();
  world_->Trace("sender ", request_.index, ": reserved");
  PlanChunks();
  TakeCached(reserved->cached_tokens);
  on_reserved_();
  Continue(pace_);
}

void Sender::PlanChunks() {
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    const bool by_head = OneIn(random_, 2) || latents();
    for (uint32_t head = 0; head < kKvHeads; head += by_head ? 1 : kKvHeads) {
      for (uint32_t begin = 0; begin < blocks();) {
        const uint32_t end =
            std::min(blocks(), begin + 1 + static_cast<uint32_t>(random_.Below(8)));
        to_send_.push_back({layer, head, by_head ? head + 1 : uint32_t{kKvHeads}, begin, end});
        begin = end;
      }
    }
  }
  for (size_t i = to_send_.size(); i > 1; --i) {
    std::swap(to_send_[i - 1], to_send_[random_.Below(i)]);
  }
  for (size_t i = 0; i < to_send_.size(); ++i) {
    switch (random_.Below(24)) {
      case 0:
        to_send_[i].fault = Fault::kCorrupt;
        break;
      case 1:
        to_send_[i].fault = Fault::kDropped;
        break;
      case 2:
        to_send_[i].fault = Fault::kHeldUp;
        break;
      case 3:
        to_send_.insert(to_send_.begin() + static_cast<int64_t>(random_.Below(i + 1)),
                        Chunk(to_send_[i]));
        ++i;
        break;
      default:
        break;
    }
  }
  if (OneIn(random_, 25)) {
    Chunk other = to_send_.back();
    other.fault = Fault::kDiffers;
    to_send_.insert(to_send_.begin() + static_cast<int64_t>(random_.Below(to_send_.size())), other);
  }
}

void Sender::TakeCached(int64_t tokens) {
  if (tokens == 0) return;
  world_->Note(Situation::kPrefixFound);
  cached_blocks_ = static_cast<uint32_t>(tokens) / block_tokens_;
  for (uint32_t layer = 0; layer < kLayers; ++layer) {
    for (uint32_t head = 0; head < kKvHeads; ++head) {
      for (uint32_t b = 0; b < cached_blocks_; ++b) block(layer, head, b) = Block::kLanded;
    }
  }
  if (OneIn(random_, 3)) {
    world_->Note(Situation::kPrefixSentAllTheSame);
    return;
  }
  std::erase_if(to_send_, [this](const Chunk& chunk) { return chunk.block_end <= cached_blocks_; });
}

size_t Sender::Dropped(const Chunk& chunk, size_t bytes) const {
  if (cached_blocks_ <= chunk.block_begin) return 0;
  if (cached_blocks_ >= chunk.block_end) return bytes;
  const uint32_t begin = chunk.block_begin * block_tokens_;
  const size_t tokens = std::min(chunk.block_end * block_tokens_, request_.context) - begin;
  return bytes / tokens * (cached_blocks_ * block_tokens_ - begin);
}

void Sender::Continue(absl::Duration most) {
  world_->clock().After(DrawDuration(random_, most), [this] { Step(); });
}

void Sender::Step() {
  if (stopped_) return;
  if (steps_to_abort_ > 0 && --steps_to_abort_ == 0) return Abort();
  if (steps_to_forget_ > 0 && --steps_to_forget_ == 0) {
    stopped_ = true;
    return;
  }
  if (OneIn(random_, 40)) {
    const auto reserved = [&] {
      Manifest manifest;
      manifest.model_fingerprint = world_->node().model().fingerprint();
      manifest.context_length = 1;
      manifest.prompt_token_ids = {2};
      manifest.max_new_tokens = 1;
      manifest.rendezvous_key = rendezvous_key();
      return world_->transfers().Reserve(manifest);
    };
    // A router that retries its rendezvous gets an answer, not a second transfer.
    if (request_.meeting == Meeting::kByKey && !MayBeGone()) {
      const absl::Status again = reserved().status();
      if (!absl::IsAlreadyExists(again)) {
        world_->Fail(request_.index, "Reserve with a key in use: ", again.ToString());
      }
      world_->Note(Situation::kReserveRetriedWithItsKey);
    }
  }
  if (commits_early_ && OneIn(random_, 4)) {
    commits_early_ = false;
    return TryCommit();
  }
  if (to_send_.empty()) {
    if (held_.empty()) return TryCommit();
    return Continue(absl::Milliseconds(20));
  }
  const Chunk chunk = to_send_.back();
  to_send_.pop_back();
  Send(chunk);
}

template <typename Visit>
void Sender::EachBlock(const Chunk& chunk, Visit visit) {
  for (uint32_t head = chunk.head_begin; head < chunk.head_end; ++head) {
    for (uint32_t b = chunk.block_begin; b < chunk.block_end; ++b)
      visit(block(chunk.layer, head, b));
  }
}

Sender::Block& Sender::block(uint32_t layer, uint32_t head, uint32_t b) {
  return known_[(layer * kKvHeads + head) * blocks() + b];
}

bool Sender::latents() const { return world_->scenario().node.top_k > 0; }

ChunkHeader Sender::Header(const Chunk& chunk) const {
  ChunkHeader header;
  header.transfer_id = id_;
  header.layer = chunk.layer;
  header.kind = "kv";
  header.head_begin = chunk.head_begin;
  header.head_end = chunk.head_end;
  if (latents()) {
    header.kind = world_->node().model().cache_layout().kinds[chunk.head_begin].name;
    header.head_begin = 0;
    header.head_end = 1;
  }
  header.token_begin = chunk.block_begin * block_tokens_;
  header.token_end = std::min(chunk.block_end * block_tokens_, request_.context);
  return header;
}

std::vector<uint8_t> Sender::Payload(const Chunk& chunk) const {
  return history_.Payload(static_cast<int>(chunk.layer), static_cast<int>(chunk.head_begin),
                          static_cast<int>(chunk.head_end), chunk.block_begin * block_tokens_,
                          std::min(chunk.block_end * block_tokens_, request_.context),
                          static_cast<int>(block_tokens_));
}

void Sender::CheckRefusal(const char* call, const absl::Status& status, bool busy) {
  const std::string reason = ReasonOf(status).value_or("");
  const bool expected = (absl::IsNotFound(status) && MayBeGone()) ||
                        (reason == "POISONED" && poisoned_) ||
                        (reason == "COMMITTED" && committed_) || (reason == "BLOCK_BUSY" && busy);
  if (!expected) world_->Fail(request_.index, call, " was refused: ", status.ToString());
}

void Sender::Send(Chunk chunk) {
  std::vector<uint8_t> payload = Payload(chunk);
  ChunkHeader header = Header(chunk);
  header.crc32c = Crc32c(payload);
  const bool skipped = world_->scenario().plant == Plant::kChecksumSkipped;
  const size_t dropped = Dropped(chunk, payload.size());
  if (dropped == payload.size() &&
      (chunk.fault == Fault::kCorrupt || chunk.fault == Fault::kDiffers)) {
    std::fill(payload.begin(), payload.end(), uint8_t{0xEE});  // nobody looks at it
    chunk.fault = Fault::kNone;
  }
  bool corrupted = chunk.fault == Fault::kCorrupt;
  if (corrupted || chunk.fault == Fault::kDiffers) {
    payload[dropped + random_.Below(payload.size() - dropped)] ^=
        static_cast<uint8_t>(1 + random_.Below(255));
    if (!corrupted || skipped) header.crc32c = Crc32c(payload);
    if (skipped) corrupted = false;
  }
  bool busy = false, landed = true;
  EachBlock(chunk, [&](const Block& b) {
    busy = busy || b == Block::kHeld;
    landed = landed && b == Block::kLanded;
  });
  if (chunk.fault == Fault::kDiffers && !landed) {
    // The block is not there yet, so the chunk would land: it is sent later.
    if (!to_send_.empty()) to_send_.insert(to_send_.begin(), chunk);
    return Continue(pace_);
  }
  auto landing = world_->transfers().BeginChunk(header, payload.size());
  if (!landing.ok()) {
    world_->Trace("sender ", request_.index, ": chunk: ", ReasonOr(landing.status()));
    CheckRefusal("a chunk", landing.status(), busy);
    if (busy && ReasonOf(landing.status()) == "BLOCK_BUSY") {
      world_->Note(Situation::kBlockBusy);
      to_send_.insert(to_send_.begin(), chunk);
    } else {
      stopped_ = !OneIn(random_, 3);  // some senders go on in vain
    }
    return Continue(pace_);
  }
  if (busy || poisoned_ || committed_ || aborted_) {
    world_->Fail(request_.index, "a chunk was taken that could not be");
  }
  LeaseRenewed();
  if (landed && chunk.fault != Fault::kDiffers) world_->Note(Situation::kChunkTwice);
  if (chunk.fault == Fault::kHeldUp || chunk.fault == Fault::kDropped) {
    // The blocks that this chunk claims stay claimed until it goes.
    const size_t half = random_.Below(payload.size() + 1);
    (*landing)->Append({payload.data(), half});
    chunk.fault = chunk.fault == Fault::kHeldUp ? Fault::kHeldUp : Fault::kNone;
    if (chunk.fault == Fault::kHeldUp) {
      payload.erase(payload.begin(), payload.begin() + static_cast<int64_t>(half));
      HoldUp(chunk, *std::move(landing), std::move(payload));
    } else {
      world_->Note(Situation::kChunkDropped);
      to_send_.insert(to_send_.begin() + static_cast<int64_t>(random_.Below(to_send_.size() + 1)),
                      chunk);
    }
    return Continue(pace_);
  }
  // Sent in slices, as a transport hands them over.
  for (size_t at = 0; at < payload.size();) {
    const size_t take = std::min(payload.size() - at, 1 + random_.Below(200));
    (*landing)->Append({payload.data() + at, take});
    at += take;
  }
  FinishLanding(chunk, *std::move(landing), corrupted);
  Continue(pace_);
}

void Sender::FinishLanding(const Chunk& chunk, std::unique_ptr<ChunkLanding> landing,
                           bool corrupted) {
  uint64_t claimed = 0;
  EachBlock(chunk, [&](const Block& b) { claimed += b != Block::kLanded ? 1 : 0; });
  const auto landed = landing->Finish();
  world_->Trace("sender ", request_.index, ": chunk of ", claimed,
                " new blocks: ", landed.ok() ? "landed" : ReasonOr(landed.status()));
  if (corrupted) {
    if (!absl::IsDataLoss(landed.status())) {
      world_->Fail(request_.index, "a corrupted chunk: ", landed.status().ToString());
    }
    world_->Note(Situation::kChunkCorrupted);
    Chunk again = chunk;
    again.fault = Fault::kNone;
    to_send_.insert(to_send_.begin() + static_cast<int64_t>(random_.Below(to_send_.size() + 1)),
                    again);
    return;
  }
  if (chunk.fault == Fault::kDiffers) {
    if (absl::IsNotFound(landed.status()) && MayBeGone()) return;
    if (landed.ok() || ReasonOf(landed.status()) != "POISONED") {
      world_->Fail(request_.index, "other bytes for a landed block: ", landed.status().ToString());
    }
    world_->Note(Situation::kChunkDiffers);
    poisoned_ = true;
    return;
  }
  if (!landed.ok()) return CheckRefusal("the end of a chunk", landed.status());
  if (*landed != claimed) {
    world_->Fail(request_.index, "a chunk of ", claimed, " new blocks counted as ", *landed);
  }
  EachBlock(chunk, [](Block& b) { b = Block::kLanded; });
  LeaseRenewed();
}

void Sender::HoldUp(const Chunk& chunk, std::unique_ptr<ChunkLanding> landing,
                    std::vector<uint8_t> payload) {
  world_->Note(Situation::kChunkHeldUp);
  if (OneIn(random_, 3)) {
    // The sender takes the stream for lost and sends the chunk again.
    Chunk again = chunk;
    again.fault = Fault::kNone;
    to_send_.push_back(again);
  }
  EachBlock(chunk, [](Block& b) {
    if (b == Block::kMissing) b = Block::kHeld;
  });
  held_.push_back({chunk, std::move(landing), std::move(payload)});
  const auto it = std::prev(held_.end());
  const absl::Duration held_for =
      OneIn(random_, 2) ? 3 * random_.Uniform() * lease_ : DrawDuration(random_, 10 * pace_);
  world_->Trace("sender ", request_.index, ": held up for ", absl::FormatDuration(held_for));
  world_->clock().After(held_for, [this, it] {
    Held held = std::move(*it);
    held_.erase(it);
    if (MayBeGone()) world_->Note(Situation::kChunkHeldUpPastTheEnd);
    held.landing->Append(held.payload);
    const bool gives_up = OneIn(random_, 4);
    if (!gives_up) FinishLanding(held.chunk, std::move(held.landing), /*corrupted=*/false);
    held.landing.reset();
    EachBlock(held.chunk, [](Block& b) {
      if (b == Block::kHeld) b = Block::kMissing;
    });
    if (gives_up) {
      held.chunk.fault = Fault::kNone;
      to_send_.insert(to_send_.begin(), held.chunk);
    }
  });
}

// Sometimes a hint names a layer that is none, or has a query too many.
SelectionHints Sender::Hints(bool* spoiled) {
  const NodeSpec& node = world_->scenario().node;
  SelectionHints hints;
  if (request_.hints.has_value()) {
    hints = *request_.hints;
  } else if (HintsChangeNoToken(node.policy) && OneIn(random_, 2)) {
    const AttentionPolicy& policy = world_->node().policy();
    hints = DrawHints(
        random_, {request_.context, block_tokens_, policy.hint_tokens(), policy.hint_queries()});
  } else {
    return hints;
  }
  *spoiled = !hints.empty() && OneIn(random_, 8);
  if (*spoiled && hints.entries.empty()) {
    hints.queries.push_back(0);
  } else if (*spoiled) {
    hints.entries.back().layer = kLayers;
  }
  return hints;
}

void Sender::TryCommit() {
  std::vector<OutputToken> first = request_.first;
  TransferInfo missing;
  bool spoiled = false;
  SelectionHints hints = Hints(&spoiled);
  if (!hints.empty()) world_->Note(Situation::kHinted);
  const auto committed =
      world_->transfers().Commit(id_, std::move(first), &missing, std::move(hints));
  world_->Trace("sender ", request_.index,
                ": Commit: ", committed.ok() ? "done" : ReasonOr(committed.status()));
  const bool complete =
      std::all_of(known_.begin(), known_.end(), [](Block b) { return b == Block::kLanded; });
  if (committed.ok()) {
    if (committed_) return;  // answered like the first one
    if (spoiled) world_->Fail(request_.index, "hints that do not fit the model were taken");
    if (!complete || poisoned_ || aborted_) {
      world_->Fail(request_.index, "a transfer was committed that is not whole");
    }
    if (*committed != request_.context) {
      world_->Fail(request_.index, "Commit says a context of ", *committed);
    }
    committed_ = true;
    LeaseRenewed();
    on_committed_();
    return AfterCommit();
  }
  if (spoiled && absl::IsInvalidArgument(committed.status())) {
    world_->Note(Situation::kHintsRefused);
    return Continue(pace_);
  }
  if (ReasonOf(committed.status()) == "MISSING_BLOCKS") {
    if (complete) world_->Fail(request_.index, "Commit misses blocks that have landed");
    for (const MissingRange& range : missing.missing) {
      const uint32_t head = range.kind == "index" ? 1 : range.head_begin;
      if (block(range.layer, head, range.token_begin / block_tokens_) == Block::kLanded) {
        world_->Fail(request_.index, "Commit says that a landed block is missing");
      }
    }
    world_->Note(Situation::kCommitTooEarly);
    LeaseRenewed();
    return Continue(pace_);
  }
  CheckRefusal("Commit", committed.status());
  if (poisoned_ && OneIn(random_, 2)) return Abort();
}

void Sender::AfterCommit() {
  if (OneIn(random_, 4)) {
    world_->clock().After(DrawDuration(random_, 10 * pace_), [this] {
      const auto again = world_->transfers().Commit(id_, {}, nullptr);
      world_->Note(Situation::kCommitTwice);
      if (!again.ok()) CheckRefusal("a second Commit", again.status());
    });
  }
  if (OneIn(random_, 6)) {
    world_->clock().After(DrawDuration(random_, 10 * pace_), [this] {
      world_->Note(Situation::kWriteAfterCommit);
      stopped_ = true;
      Send({0, 0, 1, 0, 1});
    });
  }
  if (OneIn(random_, 10)) {
    world_->clock().After(DrawDuration(random_, 20 * pace_), [this] { Abort(); });
  }
}

void Sender::Abort() {
  world_->Note(Situation::kAbort);
  if (!held_.empty()) world_->Note(Situation::kAbortDuringChunk);
  world_->Trace("sender ", request_.index, ": aborts");
  aborted_ = true;
  const absl::Status status = world_->transfers().Abort(id_, "simulated");
  if (!status.ok()) world_->Fail(request_.index, "Abort: ", status.ToString());
  if (world_->transfers().Get(id_, 1).ok() && !committed_) {
    world_->Fail(request_.index, "an aborted transfer is still there");
  }
  // A sender that was not notified, or a second stream, may go on for a while.
  stopped_ = OneIn(random_, 2);
  Continue(pace_);
}

}  // namespace sluice::sim
