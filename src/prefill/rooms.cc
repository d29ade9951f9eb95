#include "src/prefill/rooms.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "src/base/error.h"
#include "src/base/reasons.h"

namespace sluice {
namespace {

absl::Status OtherPrompt() {
  return WithReason(absl::FailedPreconditionError("the room's prompt is not the decode leg's"),
                    reasons::kSourceMismatch);
}

absl::Status GivenUp() {
  return WithReason(absl::NotFoundError("its prompt was given up: its leg was cancelled, or the "
                                        "lease of its caches has ended"),
                    reasons::kSourceNotFound);
}

}  // namespace

Rooms::Promise::~Promise() { rooms_->GiveUp(key_, why_.ok() ? GivenUp() : why_); }

void Rooms::Promise::Fill(const std::string& source_id) { rooms_->Fill(key_, source_id); }

void Rooms::Promise::Fail(absl::Status why) { why_ = std::move(why); }

absl::StatusOr<std::shared_ptr<Rooms::Promise>> Rooms::Open(const Key& key,
                                                            std::string prompt_digest) {
  Told told;
  {
    absl::MutexLock lock(&mutex_);
    Room& room = rooms_[key];
    if (room.promised) {
      return WithReason(
          absl::AlreadyExistsError(absl::StrCat("room ", key.room, ": another prompt has it")),
          reasons::kRoomTaken);
    }
    room.promised = true;
    room.prompt_digest = std::move(prompt_digest);
    for (auto it = room.waiters.begin(); it != room.waiters.end();) {
      if (it->prompt_digest == room.prompt_digest) {
        ++it;
        continue;
      }
      waits_.erase(it->wait);
      told.emplace_back(std::move(it->done), OtherPrompt());
      it = room.waiters.erase(it);
    }
    if (room.waiters.empty()) room.reader.clear();
  }
  Tell(std::move(told));
  return std::make_shared<Promise>(shared_from_this(), key);
}

uint64_t Rooms::AwaitPrompt(const Key& key, const std::string& prompt_digest,
                            const std::string& reader, Done done) {
  absl::StatusOr<Awaited> now = Awaited();
  {
    absl::MutexLock lock(&mutex_);
    if (waits_.size() >= max_waiting_) {
      now = ResourceExhausted(reasons::kRoomsFull,
                              absl::StrCat("more than ", max_waiting_, " decode legs wait here"),
                              absl::Seconds(1));
    } else {
      Room& room = rooms_[key];
      if (room.promised && room.prompt_digest != prompt_digest) {
        now = OtherPrompt();
      } else if (!room.reader.empty() && room.reader != reader) {
        now = WithReason(absl::FailedPreconditionError(
                             absl::StrCat("room ", key.room, ": another decode leg has it")),
                         reasons::kRoomTaken);
      } else {
        room.reader = reader;
        now = Awaited{room.source_id, room.promised};
        if (room.source_id.empty()) {
          const uint64_t wait = next_wait_++;
          waits_.emplace(wait, key);
          room.waiters.push_back({wait, prompt_digest, std::move(done)});
          return wait;
        }
      }
      if (room.idle()) rooms_.erase(key);
    }
  }
  done(std::move(now));
  return 0;
}

void Rooms::StopWaiting(uint64_t wait) {
  Told told;
  {
    absl::MutexLock lock(&mutex_);
    const auto found = waits_.find(wait);
    if (found == waits_.end()) return;
    const auto room = rooms_.find(found->second);
    auto& waiters = room->second.waiters;
    const auto waiter = std::find_if(waiters.begin(), waiters.end(),
                                     [&](const Waiter& w) { return w.wait == wait; });
    told.emplace_back(std::move(waiter->done), Awaited{"", room->second.promised});
    waiters.erase(waiter);
    waits_.erase(found);
    if (room->second.idle()) rooms_.erase(room);
  }
  Tell(std::move(told));
}

void Rooms::Fill(const Key& key, const std::string& source_id) {
  Told told;
  {
    absl::MutexLock lock(&mutex_);
    Room& room = rooms_.at(key);
    room.source_id = source_id;
    TellAllLocked(room, Awaited{source_id, true}, &told);
  }
  Tell(std::move(told));
}

void Rooms::GiveUp(const Key& key, const absl::Status& why) {
  Told told;
  {
    absl::MutexLock lock(&mutex_);
    const auto room = rooms_.find(key);
    TellAllLocked(room->second, why, &told);
    rooms_.erase(room);
  }
  Tell(std::move(told));
}

void Rooms::TellAllLocked(Room& room, const absl::StatusOr<Awaited>& what, Told* told) {
  for (Waiter& waiter : room.waiters) {
    waits_.erase(waiter.wait);
    told->emplace_back(std::move(waiter.done), what);
  }
  room.waiters.clear();
}

void Rooms::Tell(Told told) {
  for (auto& [done, what] : told) done(std::move(what));
}

}  // namespace sluice
