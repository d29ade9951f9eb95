// Keeps batches and sends them again. Nothing here waits for a client.
#include "src/service/events/replays.h"

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <utility>
#include <zmq_addon.hpp>

#include "absl/time/clock.h"
#include "src/base/logging.h"

namespace sluice {
namespace {

constexpr uint64_t kEndSequence = ~uint64_t{0};

uint64_t DecodeSequence(const zmq::message_t& frame) {
  uint64_t sequence = 0;
  for (size_t i = 0; i < frame.size(); ++i) {
    sequence = sequence << 8 | frame.data<uint8_t>()[i];
  }
  return sequence;
}

}  // namespace

void Replays::Keep(uint64_t sequence, const zmq::message_t& payload) {
  next_sequence_ = sequence + 1;
  if (socket_ == nullptr) return;
  Batch& batch = batches_.emplace_back();
  batch.sequence = sequence;
  // The bytes are shared with the message that is published.
  batch.payload.copy(const_cast<zmq::message_t&>(payload));
  bytes_ += payload.size();
  while (batches_.size() > options_.max_batches || bytes_ > options_.max_bytes) {
    bytes_ -= batches_.front().payload.size();
    batches_.pop_front();
  }
}

void Replays::Serve() {
  if (socket_ == nullptr) return;
  TakeRequests();
  std::erase_if(clients_, [this](Client& client) { return Answer(client); });
}

void Replays::TakeRequests() {
  while (clients_.size() < options_.max_clients) {
    std::vector<zmq::message_t> frames;
    if (!zmq::recv_multipart(*socket_, std::back_inserter(frames), zmq::recv_flags::dontwait)) {
      return;
    }
    Client client;
    client.id = frames.front().to_string();
    client.end = next_sequence_;
    client.moved = absl::Now();
    // A request of another form gets the end marker alone.
    const bool good = frames.size() == 3 && frames[1].size() == 0 && frames[2].size() == 8;
    client.next = good ? DecodeSequence(frames[2]) : next_sequence_;
    const auto known = std::find_if(clients_.begin(), clients_.end(),
                                    [&](const Client& other) { return other.id == client.id; });
    if (known == clients_.end()) {
      clients_.push_back(std::move(client));
      continue;
    }
    known->next = client.next;
    known->end = client.end;
  }
}

Replays::Batch* Replays::Find(uint64_t sequence) {
  if (batches_.empty()) return nullptr;
  const uint64_t first = batches_.front().sequence;
  const uint64_t at = std::max(sequence, first) - first;
  return at < batches_.size() ? &batches_[at] : nullptr;
}

bool Replays::Answer(Client& client) {
  Sent sent = Sent::kYes;
  while (sent == Sent::kYes) {
    Batch* const batch = Find(client.next);
    const bool end = batch == nullptr || batch->sequence >= client.end;
    sent = end ? Send(client.id, kEndSequence, nullptr)
               : Send(client.id, batch->sequence, &batch->payload);
    if (sent != Sent::kYes) break;
    if (end) return true;
    client.next = batch->sequence + 1;
    client.moved = absl::Now();
  }
  if (sent == Sent::kGone) return true;
  if (absl::Now() - client.moved < options_.stall) return false;
  Log(LogLevel::kWarn, "a client does not read the batches of KV events that it asked for",
      {{"next_sequence", client.next}, {"last_sequence", client.end - 1}});
  return true;
}

Replays::Sent Replays::Send(const std::string& id, uint64_t sequence, zmq::message_t* payload) {
  // The first frame finds the client; the socket takes the others with it or none of them.
  std::vector<zmq::message_t> frames;
  frames.emplace_back(id);
  frames.emplace_back();
  if (options_.schema == EventSchema::kMaps) {
    frames.emplace_back(payload == nullptr ? std::string() : options_.topic);
  }
  frames.emplace_back(EncodeSequence(sequence));
  frames.emplace_back();
  if (payload != nullptr) frames.back().copy(*payload);
  try {
    if (!zmq::send_multipart(*socket_, frames, zmq::send_flags::dontwait)) return Sent::kFull;
  } catch (const zmq::error_t& error) {
    if (error.num() != EHOSTUNREACH) throw;
    return Sent::kGone;
  }
  return Sent::kYes;
}

}  // namespace sluice
