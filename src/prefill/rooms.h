// Where the two legs of a request meet that a gateway sends at once: the prefill leg promises a
// prompt under a number that both came with, the room, and the decode leg waits there for the name
// under which its caches are held. Either may be first. Thread-safe.
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
  // Of visitors that wait, over all rooms.
  explicit Rooms(size_t max_waiting = 4096) : max_waiting_(max_waiting) {}

  struct Key {
    std::string tenant;
    uint64_t room = 0;
    bool operator<(const Key& other) const {
      return std::tie(room, tenant) < std::tie(other.room, other.tenant);
    }
  };

  // A prefill leg's hold on its room, which is its own for as long as this lives. Whoever waits
  // when it goes unfilled is told that nothing will come.
  class Promise {
   public:
    Promise(std::shared_ptr<Rooms> rooms, Key key)
        : rooms_(std::move(rooms)), key_(std::move(key)) {}
    ~Promise();
    Promise(const Promise&) = delete;
    Promise& operator=(const Promise&) = delete;
    // The prompt is held under this name. Once.
    void Fill(const std::string& source_id);
    // It will not be, and why: to be said before this goes. After Fill it does nothing.
    void Fail(absl::Status why);

   private:
    const std::shared_ptr<Rooms> rooms_;
    const Key key_;
    absl::Status why_;
  };
  // ALREADY_EXISTS (ROOM_TAKEN): another prompt has this room.
  absl::StatusOr<std::shared_ptr<Promise>> Open(const Key& key, std::string prompt_digest);

  struct Awaited {
    std::string source_id;  // empty: it has not been computed yet
    bool expected = false;  // the prefill leg has come
  };
  // An error:
  //   FAILED_PRECONDITION  the room's prompt is another one (SOURCE_MISMATCH), or it is another
  //                        reader's (ROOM_TAKEN)
  //   RESOURCE_EXHAUSTED   too many visitors wait (ROOMS_FULL)
  //   the prefill leg's own, or NOT_FOUND (SOURCE_NOT_FOUND): it was given up
  using Done = std::function<void(absl::StatusOr<Awaited>)>;
  // Waits in a room for the prompt of this digest. `reader` is a name of the caller's own: a room
  // has one reader, who may come again. `done` runs once, now or on another thread, without a
  // lock. Returns what StopWaiting takes, 0 if it ran already.
  uint64_t AwaitPrompt(const Key& key, const std::string& prompt_digest, const std::string& reader,
                       Done done);
  // Ends a wait, if it has not ended: `done` runs with what there is.
  void StopWaiting(uint64_t wait);

 private:
  struct Waiter {
    uint64_t wait = 0;
    std::string prompt_digest;
    Done done;
  };
  struct Room {
    bool promised = false;  // by a prefill leg
    std::string prompt_digest, source_id;
    std::string reader;  // empty: none yet
    std::vector<Waiter> waiters;
    // Nobody is in it.
    bool idle() const { return !promised && waiters.empty(); }
  };
  using Told = std::vector<std::pair<Done, absl::StatusOr<Awaited>>>;

  // Who waits in the room will be told. To be run by Tell without the lock.
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
