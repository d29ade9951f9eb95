#include "src/prefill/held_prompts.h"

#include <pthread.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "src/base/crc32c.h"
#include "src/base/error.h"
#include "src/base/logging.h"
#include "src/base/reasons.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"
#include "src/request/source_ref.h"

namespace sluice {
namespace {

// How late a lease may end. Nobody waits for it.
constexpr absl::Duration kReapInterval = absl::Milliseconds(200);

}  // namespace

uint32_t HeldLayer::Crc32cOf(const CacheKind& of_kind, uint32_t from, uint32_t to,
                             uint32_t head_begin, uint32_t head_end) const {
  const auto block_tokens = static_cast<uint32_t>(of_kind.block_tokens);
  const Crc32cJoin whole(static_cast<uint64_t>(of_kind.block_bytes()));
  uint32_t sum = 0;
  for (uint32_t token = from; token < to; token += block_tokens) {
    const uint32_t* const block =
        crc32c.data() + token / block_tokens * static_cast<uint32_t>(of_kind.heads);
    const uint32_t count = std::min(block_tokens, static_cast<uint32_t>(tokens) - token);
    const Crc32cJoin join =
        count == block_tokens ? whole
                              : Crc32cJoin(static_cast<uint64_t>(of_kind.bytes_per_token * count));
    for (uint32_t head = head_begin; head < head_end; ++head) sum = join(sum, block[head]);
  }
  return sum;
}

// Copies the caches that the prefiller computes.
class HeldPrompts::Collector : public LayerSink {
 public:
  Collector(const Options& options, HeldPrompt* out) : options_(options), out_(out) {
    const auto tokens = static_cast<int>(out->context_length);
    uint8_t* at = out->memory.get();
    for (int layer = 0; layer < options.layout.layers; ++layer) {
      for (size_t index = 0; index < options.layout.kinds.size(); ++index) {
        const CacheKind& kind = options.layout.kinds[index];
        HeldLayer held;
        held.layer = layer;
        held.kind = index;
        held.tokens = tokens;
        held.bytes = at;
        held.size = static_cast<size_t>(kind.bytes_per_token * kind.heads * tokens);
        held.crc32c.resize(static_cast<size_t>(kind.BlocksFor(tokens) * kind.heads));
        at += held.size;
        out->layers.push_back(std::move(held));
      }
    }
  }

  absl::Status Begin() override { return absl::OkStatus(); }
  absl::Status Layer(int layer, const CacheKind& kind, int token_begin, int token_end,
                     absl::Span<const absl::Span<const uint8_t>> pieces) override {
    const int index = options_.layout.FindKind(kind.name);
    SLUICE_CHECK(index >= 0, "a cache kind ", kind.name, " that the layout does not have");
    HeldLayer& held = out_->layers.at(static_cast<size_t>(layer) * options_.layout.kinds.size() +
                                      static_cast<size_t>(index));
    SLUICE_CHECK(token_begin % kind.block_tokens == 0 && token_end <= held.tokens, "tokens [",
                 token_begin, ", ", token_end, ") of a prompt of ", held.tokens);
    const auto bytes_of = [&](int tokens) {
      return static_cast<size_t>(kind.bytes_per_token * kind.heads * tokens);
    };
    const uint8_t* block = held.bytes + bytes_of(token_begin);
    uint8_t* at = held.bytes + bytes_of(token_begin);
    size_t left = bytes_of(token_end - token_begin);
    for (const absl::Span<const uint8_t> piece : pieces) {
      SLUICE_CHECK(piece.size() <= left, "a layer has more bytes than its tokens");
      std::memcpy(at, piece.data(), piece.size());
      at += piece.size();
      left -= piece.size();
    }
    SLUICE_CHECK(left == 0, "a layer lacks ", left, " bytes");
    uint32_t* crc = held.crc32c.data() + token_begin / kind.block_tokens * kind.heads;
    for (int token = token_begin; token < token_end; token += kind.block_tokens) {
      const auto bytes = static_cast<size_t>(kind.bytes_per_token *
                                             std::min(kind.block_tokens, token_end - token));
      for (int head = 0; head < kind.heads; ++head, block += bytes) {
        *crc++ = Crc32c({block, bytes});
      }
    }
    out_->bytes += bytes_of(token_end - token_begin);
    return absl::OkStatus();
  }
  std::string tenant() const override { return out_->tenant; }
  int64_t hint_tokens() const override { return options_.hint_tokens; }
  bool wants_queries() const override { return true; }

 private:
  const Options& options_;
  HeldPrompt* const out_;
};

HeldPrompts::HeldPrompts(Options options, Prefiller* prefiller, Buffer arena)
    : options_(std::move(options)),
      prefiller_(prefiller),
      memory_(options_.max_bytes, std::move(arena)),
      reaper_([this] { ReapLoop(); }) {}

HeldPrompts::~HeldPrompts() {
  {
    absl::MutexLock lock(&mutex_);
    stopping_ = true;
  }
  reaper_.join();
}

absl::StatusOr<HeldPrompts::Held> HeldPrompts::Hold(const Wanted& wanted,
                                                    const std::function<bool()>& cancelled) {
  const auto tokens = static_cast<int64_t>(wanted.prompt.size());
  uint64_t bytes = 0;
  for (const CacheKind& kind : options_.layout.kinds) {
    bytes += static_cast<uint64_t>(kind.bytes_per_token * kind.heads * tokens) *
             static_cast<uint64_t>(options_.layout.layers);
  }
  if (bytes > options_.max_bytes) {
    return InvalidField(
        "prompt_token_ids",
        absl::StrCat("the caches of ", tokens, " tokens take ", bytes, " bytes, and hold_bytes is ",
                     options_.max_bytes, ": push them (decode_address), or raise hold_bytes"));
  }
  const auto full = [&] {
    return ResourceExhausted(reasons::kHoldFull,
                             absl::StrCat("no room for ", bytes,
                                          " bytes of caches beside what is "
                                          "held for decode nodes; try again, or another node"),
                             std::min(options_.max_lease, absl::Seconds(1)));
  };
  {
    absl::MutexLock lock(&mutex_);
    if (entries_.size() >= options_.max_prompts) return full();
  }
  const auto held = std::make_shared<HeldPrompt>();
  held->memory = memory_.Take(bytes);
  if (held->memory == nullptr) return full();
  held->source_id = absl::StrFormat("%016x%016x", RandomU64(), RandomU64());
  held->tenant = wanted.tenant;
  held->request_id = wanted.request_id;
  held->prompt_digest = PromptDigest(wanted.prompt);
  held->context_length = static_cast<uint32_t>(tokens);
  held->kept_with = wanted.keep;
  Collector collector(options_, held.get());
  SLUICE_ASSIGN_OR_RETURN(PrefillResult result,
                          prefiller_->Run(wanted.prompt, wanted.sampling, wanted.want_first_token,
                                          collector, cancelled));
  SLUICE_CHECK(held->bytes == bytes, "caches of ", bytes, " bytes were expected, found ",
               held->bytes);
  held->hints = std::move(result.hints);
  held->first_token = result.first_token;
  absl::MutexLock lock(&mutex_);
  entries_[held->source_id] = {held, absl::Now() + options_.max_lease};
  return Held{held, result.queued, result.compute, options_.max_lease};
}

std::map<std::string, HeldPrompts::Entry>::iterator HeldPrompts::FindLocked(
    const std::string& source_id, const std::string& tenant) {
  const auto found = entries_.find(source_id);
  if (found == entries_.end() || found->second.prompt->tenant != tenant ||
      found->second.end <= absl::Now()) {
    return entries_.end();
  }
  return found;
}

std::shared_ptr<const HeldPrompt> HeldPrompts::Find(const std::string& source_id,
                                                    const std::string& tenant) {
  absl::MutexLock lock(&mutex_);
  const auto found = FindLocked(source_id, tenant);
  if (found == entries_.end()) return nullptr;
  found->second.end = std::max(found->second.end, absl::Now() + options_.max_lease);
  return found->second.prompt;
}

std::optional<absl::Duration> HeldPrompts::Renew(const std::string& source_id,
                                                 const std::string& tenant, absl::Duration lease) {
  absl::MutexLock lock(&mutex_);
  const auto found = FindLocked(source_id, tenant);
  if (found == entries_.end()) return std::nullopt;
  const absl::Duration granted = std::min(lease, options_.max_lease);
  found->second.end = absl::Now() + granted;
  return granted;
}

bool HeldPrompts::Release(const std::string& source_id, const std::string& tenant) {
  std::shared_ptr<const HeldPrompt> last;  // goes after the lock
  absl::MutexLock lock(&mutex_);
  const auto found = FindLocked(source_id, tenant);
  if (found == entries_.end()) return false;
  last = std::move(found->second.prompt);
  entries_.erase(found);
  return true;
}

bool HeldPrompts::ReleaseRequest(const std::string& request_id) {
  if (request_id.empty()) return false;
  std::vector<std::shared_ptr<const HeldPrompt>> last;  // go after the lock
  absl::MutexLock lock(&mutex_);
  for (auto it = entries_.begin(); it != entries_.end();) {
    if (it->second.prompt->request_id != request_id) {
      ++it;
      continue;
    }
    last.push_back(std::move(it->second.prompt));
    it = entries_.erase(it);
  }
  return !last.empty();
}

HeldPrompts::Usage HeldPrompts::usage() const {
  absl::MutexLock lock(&mutex_);
  return {entries_.size(), memory_.taken(), expired_, options_.max_bytes};
}

void HeldPrompts::ReapLoop() {
  pthread_setname_np(pthread_self(), "held-prompts");
  while (true) {
    std::vector<std::shared_ptr<const HeldPrompt>> over;  // freed without the lock
    {
      absl::MutexLock lock(&mutex_);
      mutex_.AwaitWithTimeout(absl::Condition(&stopping_), kReapInterval);
      if (stopping_) return;
      const absl::Time now = absl::Now();
      for (auto it = entries_.begin(); it != entries_.end();) {
        if (it->second.end > now) {
          ++it;
          continue;
        }
        over.push_back(std::move(it->second.prompt));
        it = entries_.erase(it);
      }
      expired_ += over.size();
    }
    if (!over.empty()) {
      Log(LogLevel::kWarn, "leases of held prompts ended: no decode node has read them in time",
          {{"prompts", over.size()}, {"newest", over.back()->source_id}});
    }
  }
}

}  // namespace sluice
