// Pulls: the caches of a prompt that another node holds become a transfer of this one. Begin opens
// it in the node's own table, so that the engine waits for it as for one that is pushed; a thread
// reads, lands and commits. Whatever goes wrong ends the transfer with a status that says so, and
// with it the Generate that waits. Thread-safe.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/time.h"
#include "src/kv/cache_layout.h"
#include "src/kv/transfer_table.h"
#include "src/request/request.h"
#include "src/service/pull/address_list.h"
#include "src/service/wire/worker_queue.h"

namespace sluice {

class Channels;
class Metrics;
class PullStream;

class Puller {
 public:
  struct Options {
    std::string model_fingerprint;
    CacheLayout layout;
    uint32_t max_context = 0;
    uint64_t max_chunk_bytes = uint64_t{8} << 20;
    // Pulls at a time. A thread waits for as long as its source is silent, so a few dead sources
    // must not take them all.
    int threads = 32;
    size_t max_queued = 256;  // that may wait for a thread
    int streams = 2;          // of a pull, of large caches
    // Without a chunk a source is taken to be dead.
    absl::Duration idle_timeout = absl::Seconds(10);
    // Of calls beside the streams.
    absl::Duration call_timeout = absl::Seconds(10);
    // Without its prefill leg a room is taken to stay empty.
    absl::Duration room_timeout = absl::Seconds(10);
    // Of prompt and output together, what a sequence can have at most here.
    uint32_t max_tokens = 0;
    // Whom callers may name as a source.
    AddressList sources;
    // Outlive the puller.
    const Metrics* metrics = nullptr;
    TransferTable* transfers = nullptr;
    Channels* channels = nullptr;
  };
  explicit Puller(Options options);
  // Ends the pulls that run and wait; may take call_timeout.
  ~Puller();

  // For a request whose handoff has a source: opens a transfer for it and puts the transfer's id in
  // the source's place. What it returns begins to pull: for when the request was submitted, so that
  // a pull that fails at once finds its Generate. An error means that nothing was begun:
  //   INVALID_ARGUMENT     the reference or the prompt is wrong, or not the one that is held
  //   PERMISSION_DENIED    the source is none of Options::sources (SOURCE_NOT_ALLOWED)
  //   FAILED_PRECONDITION  another model's caches (FINGERPRINT_MISMATCH)
  //   RESOURCE_EXHAUSTED   no room for the caches
  // Later the Generate may end with
  //   RESOURCE_EXHAUSTED   too many pulls wait (PULLS_FULL)
  //   NOT_FOUND            the source does not hold it any more (SOURCE_NOT_FOUND)
  //   FAILED_PRECONDITION  it holds another prompt or other caches (SOURCE_MISMATCH)
  //   DATA_LOSS            its chunks do not fit their checksums, twice
  //   DEADLINE_EXCEEDED    it sent nothing for idle_timeout, twice (SOURCE_SILENT)
  //   UNAVAILABLE          it cannot be reached, or broke off twice (SOURCE_UNREACHABLE)
  // and where the source is a room, with
  //   DEADLINE_EXCEEDED    no prefill leg came to it for room_timeout (ROOM_EMPTY)
  //   FAILED_PRECONDITION  another decode leg has it (ROOM_TAKEN)
  //   what the prefill leg ended with (PREFILL_FAILED: nothing that another node would do better)
  absl::StatusOr<std::function<void()>> Begin(Request* request);
  // For a caller that begins and then does not submit.
  void Abandon(const std::string& transfer_id);

 private:
  struct Pull;
  class Meeting;
  void Start(const std::shared_ptr<Pull>& pull);
  void Post(const std::shared_ptr<Pull>& pull);
  void Run(const std::shared_ptr<Pull>& pull);
  absl::Status Attempt(Pull& pull, bool again);
  absl::Status Describe(Pull& pull);
  absl::Status ReadAll(Pull& pull, bool again);
  absl::Status Commit(Pull& pull);
  void Release(const Pull& pull);
  // The pull came to nothing.
  void Failed(const Pull& pull, absl::Status status);
  bool Wanted(const Pull& pull) const;
  void Count(const Pull& pull, const absl::Status& status) const;
  void Watch();

  const Options options_;
  absl::Mutex mutex_;
  std::map<PullStream*, const Pull*> streams_ ABSL_GUARDED_BY(mutex_);
  std::list<std::shared_ptr<Meeting>> meetings_ ABSL_GUARDED_BY(mutex_);
  bool unwatched_ ABSL_GUARDED_BY(mutex_) = false;  // neither is there, and none will be
  std::atomic<bool> ending_ = false;
  std::thread watch_;
  std::unique_ptr<WorkerQueue> workers_;  // last: its threads use the rest
};

}  // namespace sluice
