// PeerLink moves caches from one node to another without gRPC: from memory of the sender's device
// to memory of the receiver's. It has two ends, each in a process of its own, and goes one way. The
// ends agree elsewhere, by a call, on what is sent and in what order.
//
// The contract. A link carries messages. The receiving end asks for them in the order in which they
// are sent, and with their sizes. At most `depth` of them are under way at either end, so that the
// next ones move while one lands. A message's checksum is computed at the receiving end, where its
// bytes arrive, and at the sending end if it asks for that: on the device, if the device has memory
// of its own.
//
// Failure. If the other end ends, or leaves a message waiting for `deadline`, the link has failed
// for good: calls return UNAVAILABLE, and nothing more is written to the memory that Receive was
// given. Nothing hangs, and nothing but the link is affected: the device goes on. The ends then
// make another link.
//
// A call may block its thread, for as long as the deadline. So the engine's thread makes none. One
// thread at a time uses an end; any thread may call Abort.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace sluice {

class PeerLink {
 public:
  virtual ~PeerLink() = default;

  // A piece of a message lies in memory of either MemoryKind of the link's device.
  struct Piece {
    void* data;  // null at the receiving end: these bytes are dropped
    size_t bytes;
  };
  // Sends the pieces as one message. They must stay as they are until Flush or the message's Sent,
  // or until the link is gone. With `checksum`, Sent gives the message's checksum, and fewer than
  // depth() messages may be sent that Sent has not told of. INVALID_ARGUMENT: the message is empty,
  // or larger than PeerLinkOptions::message_bytes.
  absl::Status Send(absl::Span<const Piece> pieces, bool checksum = false);
  // Waits until the receiving end has the oldest message that Sent has not told of, and returns the
  // CRC-32C of the bytes that left. REQUIRES: that message was sent with a checksum.
  virtual absl::StatusOr<uint32_t> Sent() = 0;
  // Waits until the receiving end has all that was sent. Sent has nothing to tell then.
  virtual absl::Status Flush() = 0;
  // Asks for the next message, and puts its bytes into the pieces in order. The pieces are written
  // until Await has returned this message, or the link has failed. REQUIRES: fewer than depth()
  // messages are asked for and not awaited.
  absl::Status Receive(absl::Span<const Piece> pieces);
  // Waits for the oldest message that was asked for, and returns the CRC-32C of all its bytes.
  virtual absl::StatusOr<uint32_t> Await() = 0;
  // Fails the link with `why`, here and, as soon as it is noticed, at the other end. Any thread.
  virtual void Abort(const std::string& why) = 0;
  int depth() const { return depth_; }
  size_t message_bytes() const { return message_bytes_; }

  PeerLink(const PeerLink&) = delete;
  PeerLink& operator=(const PeerLink&) = delete;

 protected:
  PeerLink(size_t message_bytes, int depth) : message_bytes_(message_bytes), depth_(depth) {}
  virtual absl::Status SendMessage(absl::Span<const Piece> pieces, size_t bytes, bool checksum) = 0;
  virtual absl::Status ReceiveMessage(absl::Span<const Piece> pieces, size_t bytes) = 0;

 private:
  absl::StatusOr<size_t> BytesOf(absl::Span<const Piece> pieces) const;

  const size_t message_bytes_;
  const int depth_;
};

struct PeerLinkOptions {
  std::string id;      // of PeerLinks::NewId
  bool sends = false;  // this is the sending end; the receiving end has made the id
  size_t message_bytes = size_t{8} << 20;  // of the largest message; the same at both ends
  int depth = 4;                           // the same at both ends
  absl::Duration join_timeout = absl::Seconds(20);
  absl::Duration deadline = absl::Seconds(5);
};
inline constexpr size_t kMaxLinkMessageBytes = size_t{256} << 20;
inline constexpr int kMaxLinkDepth = 64;
// INVALID_ARGUMENT names the option that is out of range.
absl::Status CheckPeerLinkOptions(const PeerLinkOptions& options);

// Makes the links of a device. Any thread may call it.
class PeerLinks {
 public:
  virtual ~PeerLinks() = default;
  // Returns what carries the bytes, as metrics and logs name it: "nccl", "shared_memory".
  virtual const char* transport() const = 0;
  // Returns an id for one link, of printable characters. INTERNAL: NCCL has none to give.
  virtual absl::StatusOr<std::string> NewId() = 0;
  // Returns why no link of this id can be made here: FAILED_PRECONDITION if the other end's device
  // has links of another kind, or is on another host where links do not go there.
  virtual absl::Status CheckId(const std::string& id) const = 0;
  // Waits for the other end. Returns the errors of CheckPeerLinkOptions and CheckId;
  // RESOURCE_EXHAUSTED: no memory for the messages under way; UNAVAILABLE: the other end did not
  // come within join_timeout, or the link could not be made.
  virtual absl::StatusOr<std::unique_ptr<PeerLink>> Join(const PeerLinkOptions& options) = 0;
};

}  // namespace sluice
