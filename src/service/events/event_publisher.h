// Publishes what the prefix caches of a node get and lose over ZeroMQ, as vLLM does, from a thread
// of its own. Nothing that a cache, a step or a call does waits for it or for a subscriber:
//
//   * A queue that is full drops its events; then the subscribers are told AllBlocksCleared, and
//     all that the caches have again. So is said at the start, when there is nothing.
//   * A subscriber that does not read is sent no more than max_messages, which it finds out by the
//     sequence numbers; when its connection took nothing for `stall`, it is closed.
//   * A replay client that does not read loses its answer (src/service/events/replays.h).
//
// Each batch is a message [topic, sequence number, payload]. Numbers count up from 0. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/kv/prefix_cache.h"
#include "src/service/events/event_format.h"

namespace sluice {

class Metrics;

class EventPublisher {
 public:
  struct Options {
    std::string endpoint;
    std::string replay_endpoint;  // empty: no replays
    std::string topic;
    EventSchema schema = EventSchema::kMaps;
    size_t buffer_steps = 10000;       // batches that are kept for replays
    const Metrics* metrics = nullptr;  // outlives the publisher
    // Tokens and hashes that wait for the thread, at most: 64 MiB or less.
    size_t max_queued = size_t{8} << 20;
    size_t max_batch_tokens = 16384;  // of one message, which is at most about 100 KB
    int max_messages = 1000;          // of one subscriber, that wait to be sent
    absl::Duration stall = absl::Seconds(30);
    // How long the destructor lets messages leave for.
    absl::Duration flush = absl::Milliseconds(500);
  };
  // Binds or connects the sockets. Errors name the setting: INVALID_ARGUMENT if an endpoint is none
  // or cannot be had.
  static absl::StatusOr<std::unique_ptr<EventPublisher>> Create(Options options);
  // Publishes what is queued.
  ~EventPublisher();
  EventPublisher(const EventPublisher&) = delete;
  EventPublisher& operator=(const EventPublisher&) = delete;

  // Publishes what these caches have, one for each rank that has caches of its own; the hashes are
  // of `model`. Call it once, before anything is published there. The caches outlive the publisher.
  void Follow(std::vector<PrefixCache*> caches, const std::string& model);

  // Return where the sockets are bound or connected to, with the port that a * became.
  std::string endpoint() const;
  std::string replay_endpoint() const;

 private:
  class Worker;
  explicit EventPublisher(std::unique_ptr<Worker> worker);

  std::unique_ptr<Worker> worker_;
};

}  // namespace sluice
