// The rooms in which the two legs of a request find each other when a gateway sends both at once. A
// room is a number that both legs came with. The prefill leg promises a prompt in the room, and the
// decode leg waits there for the name under which the prompt's caches are held. Either may be
// first. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"

namespace sluice {

class Rooms : public std::enable_shared_from_this<Rooms> {
 public:
  // `max_waiting` limits the readers that wait, over all rooms.
  explicit Rooms(size_t max_waiting = 4096) : max_waiting_(max_waiting) {}

  struct Key {
    std::string tenant;
    uint64_t room = 0;
    bool operator<(const Key& other) const {
      return std::tie(room, tenant) < std::tie(other.room, other.tenant);
    }
  };

  // A prefill leg's promise of its room's prompt. The room belongs to the leg for as long as this
  // lives. If it goes unfilled, waiting readers are told that nothing will come.
  class Promise {
   public:
    Promise(std::shared_ptr<Rooms> rooms, Key key)
        : rooms_(std::move(rooms)), key_(std::move(key)) {}
    ~Promise();
    Promise(const Promise&) = delete;
    Promise& operator=(const Promise&) = delete;
    // Says that the prompt is held under this name. May be called once.
    void Fill(const std::string& source_id);
    // Says that the prompt will not come, and why. Must come before this goes. After Fill it does
    // nothing.
    void Fail(absl::Status why);

   private:
    const std::shared_ptr<Rooms> rooms_;
    const Key key_;
    absl::Status why_;
  };
  // Promises a prompt in a room. ALREADY_EXISTS (ROOM_TAKEN) if another prompt has the room.
  absl::StatusOr<std::shared_ptr<Promise>> Open(const Key& key, std::string prompt_digest);

  struct Awaited {
    std::string source_id;  // empty if the prompt has not been computed yet
    bool expected = false;  // the prefill leg has come
  };
  // Gets the prompt's name, or an error:
  //   FAILED_PRECONDITION  the room's prompt is another one (SOURCE_MISMATCH), or another reader
  //   has the
  //                        room (ROOM_TAKEN)
  //   RESOURCE_EXHAUSTED   too many readers wait (ROOMS_FULL)
  //   the prefill leg's own error, or NOT_FOUND (SOURCE_NOT_FOUND) if the prompt was given up
  using Done = std::function<void(absl::StatusOr<Awaited>)>;
  // Waits in a room for the prompt with this digest. `reader` is a name of the caller's choosing: a
  // room has one reader, who may come again. `done` runs once, now or on another thread, without a
  // lock. Returns the number that StopWaiting takes, or 0 if `done` ran already.
  uint64_t AwaitPrompt(const Key& key, const std::string& prompt_digest, const std::string& reader,
                       Done done);
  // Ends a wait that has not ended: `done` runs with what is known.
  void StopWaiting(uint64_t wait);

 private:
  struct Waiter {
    uint64_t wait = 0;
    std::string prompt_digest;
    Done done;
  };
  struct Room {
    bool promised = false;  // a prefill leg has it
    std::string prompt_digest, source_id;
    std::string reader;  // empty: none yet
    std::vector<Waiter> waiters;
    // Returns whether nobody is in it.
    bool idle() const { return !promised && waiters.empty(); }
  };
  using Told = std::vector<std::pair<Done, absl::StatusOr<Awaited>>>;

  // Moves everybody who waits in the room to `told`, for Tell to run without the lock.
  void TellAllLocked(Room& room, const absl::StatusOr<Awaited>& what, Told* told)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void Tell(Told told);
  void Fill(const Key& key, const std::string& source_id);
  void GiveUp(const Key& key, const absl::Status& why);

  const size_t max_waiting_;
  absl::Mutex mutex_;
  std::map<Key, Room> rooms_ ABSL_GUARDED_BY(mutex_);
  absl::flat_hash_map<uint64_t, Key> waits_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_wait_ ABSL_GUARDED_BY(mutex_) = 1;
};

}  // namespace sluice
