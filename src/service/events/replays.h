// The latest batches, and the answers to those who ask for what they missed.
//
// A request is a sequence number. It is answered with all kept batches from that on, and an end
// marker. A client that does not read is sent no more than its connection takes; when it took
// nothing for a while it gets nothing more. A client's new request takes the place of one whose
// answer is under way. One thread at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>
#include <zmq.hpp>

#include "absl/time/time.h"
#include "src/service/events/event_format.h"

namespace sluice {

class Replays {
 public:
  struct Options {
    EventSchema schema = EventSchema::kMaps;
    std::string topic;
    size_t max_batches = 10000;
    size_t max_bytes = size_t{64} << 20;
    size_t max_clients = 64;  // answered at once; others wait for their turn
    absl::Duration stall = absl::Seconds(30);
  };
  // `socket` is a ROUTER with ROUTER_MANDATORY, or null: batches are kept for nobody.
  Replays(Options options, zmq::socket_t* socket) : options_(std::move(options)), socket_(socket) {}

  // Keeps the next batch, and drops those that there is no more room for.
  void Keep(uint64_t sequence, const zmq::message_t& payload);
  // Takes requests, and sends as much as the clients take without waiting.
  void Serve();
  // Whether somebody waits for more than it could be sent.
  bool busy() const { return !clients_.empty(); }

 private:
  struct Batch {
    uint64_t sequence = 0;
    zmq::message_t payload;
  };
  struct Client {
    std::string id;
    uint64_t next = 0;  // sequence number
    uint64_t end = 0;   // the first batch that came after the request
    absl::Time moved;   // when it last took something
  };
  enum class Sent { kYes, kFull, kGone };

  void TakeRequests();
  // Returns whether the client has all.
  bool Answer(Client& client);
  // Sends a batch, or the end marker if there is no payload.
  Sent Send(const std::string& id, uint64_t sequence, zmq::message_t* payload);
  // Returns the kept batch with that number or the first one after it; null if there is none.
  Batch* Find(uint64_t sequence);

  const Options options_;
  zmq::socket_t* const socket_;
  std::deque<Batch> batches_;  // their numbers follow one another
  size_t bytes_ = 0;
  uint64_t next_sequence_ = 0;
  std::vector<Client> clients_;
};

}  // namespace sluice
