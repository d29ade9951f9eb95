// Pulls the caches of a prompt that another node holds into a transfer of this node. Begin opens
// the transfer in the node's own table, so that the engine waits for it as for one that is pushed.
// A thread reads, lands and commits. Whatever goes wrong ends the transfer with a status that says
// so, and with it the waiting Generate. Thread-safe.
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

namespace v1 {
class ReadRequest;
}

class Channels;
class LinkReader;
class Metrics;
class PullStream;

class Puller {
 public:
  struct Options {
    std::string model_fingerprint;
    CacheLayout layout;
    uint32_t max_context = 0;
    uint64_t max_chunk_bytes = uint64_t{8} << 20;
    // Maximum pulls at a time. A thread waits for as long as its source is silent, so a few dead
    // sources must not take all threads.
    int threads = 32;
    size_t max_queued = 256;  // pulls that may wait for a thread
    int streams = 2;          // streams of one pull, if the caches are large
    // A source that sends no chunk for this long is taken to be dead.
    absl::Duration idle_timeout = absl::Seconds(10);
    // The timeout of calls other than the streams.
    absl::Duration call_timeout = absl::Seconds(10);
    // A room to which no prefill leg comes for this long is taken to stay empty.
    absl::Duration room_timeout = absl::Seconds(10);
    // Maximum tokens of prompt and output together that a sequence can have here.
    uint32_t max_tokens = 0;
    // The addresses that callers may name as a source.
    AddressList sources;
    // These outlive the puller.
    const Metrics* metrics = nullptr;
    TransferTable* transfers = nullptr;
    Channels* channels = nullptr;
    // Links to sources; null: all comes over gRPC (kv_transport grpc).
    LinkReader* links = nullptr;
  };
  explicit Puller(Options options);
  // Ends the pulls that run and wait. May take call_timeout.
  ~Puller();

  // Opens a transfer for a request whose handoff has a source, and puts the transfer's id in place
  // of the source. The returned function begins to pull. Call it once the request was submitted, so
  // that a pull that fails at once finds its Generate. An error means that nothing was begun:
  //   INVALID_ARGUMENT     the reference or the prompt is wrong, or not the one that is held
  //   PERMISSION_DENIED    the source is none of Options::sources (SOURCE_NOT_ALLOWED)
  //   FAILED_PRECONDITION  the caches are of another model (FINGERPRINT_MISMATCH)
  //   RESOURCE_EXHAUSTED   there is no room for the caches
  // Later the Generate may end with
  //   RESOURCE_EXHAUSTED   too many pulls wait (PULLS_FULL)
  //   NOT_FOUND            the source does not hold the prompt any more (SOURCE_NOT_FOUND)
  //   FAILED_PRECONDITION  the source holds another prompt or other caches (SOURCE_MISMATCH)
  //   DATA_LOSS            chunks did not have their checksums, twice
  //   DEADLINE_EXCEEDED    the source sent nothing for idle_timeout, twice (SOURCE_SILENT)
  //   UNAVAILABLE          the source cannot be reached, or broke off twice (SOURCE_UNREACHABLE)
  // If the source is a room, it may also end with
  //   DEADLINE_EXCEEDED    no prefill leg came to the room for room_timeout (ROOM_EMPTY)
  //   FAILED_PRECONDITION  another decode leg has the room (ROOM_TAKEN)
  //   the prefill leg's error, or PREFILL_FAILED if another node would not fare better
  absl::StatusOr<std::function<void()>> Begin(Request* request);
  // Ends the transfer of a request that was begun and then not submitted.
  void Abandon(const std::string& transfer_id);

 private:
  struct Pull;
  class PromptWait;
  void Start(const std::shared_ptr<Pull>& pull);
  void Post(const std::shared_ptr<Pull>& pull);
  void Run(const std::shared_ptr<Pull>& pull);
  absl::Status Attempt(Pull& pull, bool again);
  absl::Status Describe(Pull& pull);
  // Reads over a link, as much as comes. An error means that the transfer takes no chunks.
  absl::Status ReadByLink(Pull& pull);
  // Adds the tokens of a layer that are not here.
  void AddRanges(const Pull& pull, int layer, v1::ReadRequest* request) const;
  // Reads over gRPC: everything, or with `again` what is missing.
  absl::Status ReadAll(Pull& pull, bool again);
  absl::Status Commit(Pull& pull);
  void Release(const Pull& pull);
  // Ends a pull that came to nothing.
  void Failed(const Pull& pull, absl::Status status);
  bool Wanted(const Pull& pull) const;
  void Count(const Pull& pull, const absl::Status& status) const;
  void Watch();

  const Options options_;
  absl::Mutex mutex_;
  std::map<PullStream*, const Pull*> streams_ ABSL_GUARDED_BY(mutex_);
  std::list<std::shared_ptr<PromptWait>> prompt_waits_ ABSL_GUARDED_BY(mutex_);
  // there are no streams and waits, and none will come
  bool unwatched_ ABSL_GUARDED_BY(mutex_) = false;
  std::atomic<bool> ending_ = false;
  std::thread watch_;
  std::unique_ptr<WorkerQueue> workers_;  // last: its threads use the rest
};

}  // namespace sluice
