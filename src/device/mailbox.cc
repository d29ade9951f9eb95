#include "src/device/mailbox.h"

#include <algorithm>
#include <bit>
#include <chrono>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

int64_t NowNs() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

uint32_t OwedBy(uint64_t round) { return static_cast<uint32_t>(round); }
uint32_t NumberOf(uint64_t round) { return static_cast<uint32_t>(round >> 32); }

uint64_t BitOf(int worker) { return uint64_t{1} << worker; }

}  // namespace

absl::Status Mailbox::CheckOptions(const MailboxOptions& options) {
  if (options.workers < 1 || options.workers > kMaxWorkers) {
    return absl::InvalidArgumentError(
        absl::StrCat("mailbox: ", options.workers, " workers; it takes 1 to ", kMaxWorkers));
  }
  if (options.channels < 1 || options.slots < 1 || options.deadline <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "mailbox: ", options.channels, " channels, ", options.slots, " slots, a deadline of ",
        absl::FormatDuration(options.deadline), "; each must be above 0"));
  }
  return absl::OkStatus();
}

size_t Mailbox::PinnedBytes(const MailboxOptions& options) {
  return sizeof(Word) * static_cast<size_t>(options.channels) +
         sizeof(uint32_t) * static_cast<size_t>(options.slots);
}

Mailbox::Mailbox(Buffer pinned, const MailboxOptions& options)
    : options_(options),
      pinned_(std::move(pinned)),
      words_(pinned_.as<Word>()),
      errors_(reinterpret_cast<uint32_t*>(words_ + options.channels)),
      channels_(std::make_unique<Channel[]>(static_cast<size_t>(options.channels))),
      worker_states_(std::make_unique<WorkerState[]>(static_cast<size_t>(options.workers))),
      servers_(std::make_unique<std::atomic<uint64_t>[]>(static_cast<size_t>(options.slots))) {
  SLUICE_CHECK(CheckOptions(options).ok() && pinned_.bytes() >= PinnedBytes(options));
  for (int slot = 0; slot < options_.slots; ++slot) SetServers(slot, Everyone());
  watchdog_ = std::thread([this] { WatchdogLoop(); });
}

Mailbox::~Mailbox() {
  {
    absl::MutexLock lock(&mutex_);
    stop_ = true;
    changed_.Signal();
  }
  watchdog_.join();
}

uint64_t Mailbox::Everyone() const {
  return options_.workers == kMaxWorkers ? ~uint64_t{0} : BitOf(options_.workers) - 1;
}

// Any number of threads may call this at once: the one that sets `open` has the round.
void Mailbox::OpenIfRaised(int channel) {
  const std::atomic_ref<uint32_t> asked(*word(channel));
  Channel& c = channels_[channel];
  if (asked.load(std::memory_order_relaxed) != kAsked) return;
  if (c.open.load(std::memory_order_relaxed) || c.open.exchange(true, std::memory_order_acquire)) {
    return;
  }
  // The word that was read above may have been the last round's. This second look cannot be: the
  // last round was closed before its `open` went.
  if (asked.load(std::memory_order_acquire) != kAsked) {
    c.open.store(false, std::memory_order_release);
    return;
  }
  const uint64_t gone = gone_.load(std::memory_order_acquire);
  const uint64_t late = late_.load(std::memory_order_acquire) & ~gone;
  const uint64_t present = Everyone() & ~gone & ~late;
  if (gone != 0) SetErrors(gone, MailboxError::kLeft);
  if (late != 0) SetErrors(late, MailboxError::kDeadline);
  const uint64_t number = NumberOf(c.rounds[0].load(std::memory_order_relaxed)) + 1u;
  c.opened_ns.store(NowNs(), std::memory_order_relaxed);
  uint32_t owed[kParts];
  int left = 0;
  for (int part = 0; part < kParts; ++part) {
    owed[part] = static_cast<uint32_t>(present >> (part * kPartWorkers));
    left += owed[part] != 0 ? 1 : 0;
  }
  c.parts_left.store(left, std::memory_order_relaxed);
  for (int part = 0; part < kParts; ++part) {
    c.rounds[part].store(number << 32 | owed[part], std::memory_order_release);
  }
  if (left == 0) Close(channel);
}

// The last answer of the last part ends the round.
void Mailbox::EndPart(int channel) {
  if (channels_[channel].parts_left.fetch_sub(1, std::memory_order_acq_rel) == 1) Close(channel);
}

// The order matters, see OpenIfRaised. The device may ask again between the two stores.
void Mailbox::Close(int channel) {
  std::atomic_ref<uint32_t>(*word(channel)).store(kAnswered, std::memory_order_release);
  channels_[channel].open.store(false, std::memory_order_release);
}

// Every look at a word makes the next write by the device slower, and so does every worker that
// would open the round. So two workers look each time, and the others now and then, in case those
// two are busy.
bool Mailbox::LooksAtWords(int worker) {
  constexpr uint32_t kOthersEvery = 16;
  constexpr int kFirst = 2;
  const uint64_t away =
      gone_.load(std::memory_order_relaxed) | late_.load(std::memory_order_relaxed);
  const uint64_t before = Everyone() & ~away & (BitOf(worker) - 1);
  return std::popcount(before) < kFirst || ++worker_states_[worker].polls % kOthersEvery == 0;
}

int Mailbox::Poll(int worker) {
  const uint64_t bit = BitOf(worker);
  // The worker now owes nothing but what it finds below.
  if ((late_.load(std::memory_order_relaxed) & bit) != 0) late_.fetch_and(~bit);
  WorkerState& state = worker_states_[worker];
  const bool looks = LooksAtWords(worker);
  // The search begins at the channel after the last one: so no channel waits for ever, and the next
  // layer's comes first.
  int channel = state.channel;
  for (int i = 0; i < options_.channels; ++i) {
    channel = channel + 1 < options_.channels ? channel + 1 : 0;
    if (looks) OpenIfRaised(channel);
    const uint64_t round =
        channels_[channel].rounds[worker / kPartWorkers].load(std::memory_order_acquire);
    if ((OwedBy(round) & BitOf(worker % kPartWorkers)) == 0) continue;
    state.channel = channel;
    state.number = NumberOf(round);
    return channel;
  }
  return -1;
}

void Mailbox::Fail(int worker, int slot) {
  if (!Hold(worker)) return;
  SetError(slot, MailboxError::kFailed);
  LetGo(worker);
}

void Mailbox::FailAll(int worker) {
  if (!Hold(worker)) return;
  SetErrors(BitOf(worker), MailboxError::kFailed);
  Count(MailboxError::kFailed, 1);
  LetGo(worker);
}

// The worker says that it holds, then looks at the round. Whoever ends the round takes the worker's
// bit away, then looks which workers hold. In the one order of these four operations, one of the
// two sees the other.
bool Mailbox::Hold(int worker) {
  worker_states_[worker].holds.exchange(true, std::memory_order_seq_cst);
  if (Owes(worker)) return true;
  LetGo(worker);
  return false;
}

void Mailbox::LetGo(int worker) {
  worker_states_[worker].holds.store(false, std::memory_order_release);
}

void Mailbox::AwaitLetGo(uint64_t workers) const {
  for (; workers != 0; workers &= workers - 1) {
    const WorkerState& state = worker_states_[std::countr_zero(workers)];
    while (state.holds.load(std::memory_order_seq_cst)) std::this_thread::yield();
  }
}

// As in Answer, the bit is that of the round taken up or of none.
bool Mailbox::Owes(int worker) const {
  const Channel& c = channels_[worker_states_[worker].channel];
  const uint64_t round = c.rounds[worker / kPartWorkers].load(std::memory_order_seq_cst);
  return (OwedBy(round) & BitOf(worker % kPartWorkers)) != 0;
}

// The round's number need not be compared: a worker that is late is in no later round before it has
// polled (OpenIfRaised), so its bit is not there to be cleared.
bool Mailbox::Answer(int worker) {
  const uint64_t bit = BitOf(worker % kPartWorkers);
  const int channel = worker_states_[worker].channel;
  const uint64_t before =
      channels_[channel].rounds[worker / kPartWorkers].fetch_and(~bit, std::memory_order_acq_rel);
  if ((OwedBy(before) & bit) == 0) return false;
  if (OwedBy(before) == bit) EndPart(channel);  // the part's last answer
  return true;
}

void Mailbox::Leave(int worker) {
  const uint64_t bit = BitOf(worker);
  if ((gone_.fetch_or(bit, std::memory_order_acq_rel) & bit) == 0) Count(MailboxError::kLeft, 1);
  absl::MutexLock lock(&mutex_);
  look_ = true;
  changed_.Signal();
}

void Mailbox::SetServers(int slot, uint64_t workers) {
  servers_[slot].store(workers, std::memory_order_release);
}

MailboxError Mailbox::error(int slot) const {
  return static_cast<MailboxError>(
      std::atomic_ref<uint32_t>(errors_[slot]).load(std::memory_order_acquire));
}

void Mailbox::Reset(int slot) {
  std::atomic_ref<uint32_t>(errors_[slot]).store(0, std::memory_order_release);
}

void Mailbox::SetError(int slot, MailboxError error) {
  uint32_t none = 0;
  std::atomic_ref<uint32_t>(errors_[slot])
      .compare_exchange_strong(none, static_cast<uint32_t>(error), std::memory_order_acq_rel);
}

void Mailbox::SetErrors(uint64_t workers, MailboxError error) {
  for (int slot = 0; slot < options_.slots; ++slot) {
    if ((servers_[slot].load(std::memory_order_acquire) & workers) != 0) SetError(slot, error);
  }
}

void Mailbox::Watch(int channel) {
  OpenIfRaised(channel);  // no other worker may be left to see it
  for (int part = 0; part < kParts; ++part) WatchPart(channel, part);
}

// Answers for workers that will not. Errors are written before the answer is.
void Mailbox::WatchPart(int channel, int part) {
  Channel& c = channels_[channel];
  const int shift = part * kPartWorkers;
  std::atomic<uint64_t>& of_part = c.rounds[part];
  uint64_t round = of_part.load(std::memory_order_acquire);
  const uint32_t number = NumberOf(round);
  const uint64_t bits = OwedBy(round);
  if (bits == 0) return;
  const uint64_t owed = bits << shift;
  const uint64_t gone = owed & gone_.load(std::memory_order_acquire);
  const bool over = NowNs() - c.opened_ns.load(std::memory_order_relaxed) >
                    absl::ToInt64Nanoseconds(options_.deadline);
  if (over || gone == owed) {
    // The workers are late before the answer is given, so that the next round does not count on
    // them.
    late_.fetch_or(owed & ~gone, std::memory_order_acq_rel);
    if (!of_part.compare_exchange_strong(round, round & ~bits, std::memory_order_seq_cst)) {
      // Another answer came meanwhile: the next look sees what is left.
      const uint64_t left = NumberOf(round) == number ? uint64_t{OwedBy(round)} << shift : 0;
      late_.fetch_and(~(owed & ~left), std::memory_order_acq_rel);
      return;
    }
    AwaitLetGo(owed);
    SetErrors(gone, MailboxError::kLeft);
    SetErrors(owed & ~gone, MailboxError::kDeadline);
    Count(MailboxError::kDeadline, std::popcount(owed & ~gone));
    EndPart(channel);
  } else if (gone != 0) {
    // Others owe too; the last of them gives the answer, maybe at once.
    SetErrors(gone, MailboxError::kLeft);
    of_part.compare_exchange_strong(round, round & ~(gone >> shift), std::memory_order_acq_rel);
  }
}

void Mailbox::WatchdogLoop() {
  // The period is short enough that a deadline is not missed by much. Where only the watchdog is
  // left, it answers every round.
  const absl::Duration period =
      std::clamp(options_.deadline / 8, absl::Microseconds(100), absl::Milliseconds(10));
  for (;;) {
    const uint64_t gone = gone_.load(std::memory_order_acquire);
    {
      absl::MutexLock lock(&mutex_);
      if (!stop_ && !look_) {
        changed_.WaitWithTimeout(&mutex_, gone == Everyone() ? absl::Microseconds(100) : period);
      }
      if (stop_) return;
      look_ = false;
    }
    for (int channel = 0; channel < options_.channels; ++channel) Watch(channel);
  }
}

}  // namespace sluice
