// Two processes with an end of a link each, for tests of PeerLink.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "src/device/device.h"
#include "src/device/peer_link.h"

namespace sluice::testing {

inline constexpr size_t kMessage = 100'000;  // bytes of the largest message of a test's links
inline constexpr absl::Duration kDeadline = absl::Seconds(2);  // of a message of theirs

// Memory that both processes see.
struct Box {
  std::atomic<int> ready;
  std::atomic<int> step;
  char id[1024];
};
void AwaitStep(const Box* box, int step);

// One end of a link, on a device of its own.
struct End {
  std::unique_ptr<Device> device;
  std::unique_ptr<PeerLinks> links;
  std::unique_ptr<PeerLink> link;
  std::string wrong;
  bool sends = false;

  End(const std::string& kernels, int rank);
  // Makes `link`. Rank 0, which receives, makes the id, the `number`th of the box.
  void Join(Box* box, int number = 1, int depth = 3);
};

// Runs the two ends in processes of their own, rank 0 first, each of which returns what is wrong.
// With kernels "cuda" a machine without a GPU skips the test.
using EndBody = std::function<std::string(End& end, Box* box)>;
void RunEnds(const std::string& kernels, const EndBody& receiver, const EndBody& sender,
             const std::vector<std::string>& expected = {"", ""});

// Joins, and does nothing more until step 1. Returns what is wrong.
std::string JoinAndWait(End& end, Box* box);

// Returns the bytes of a message that every end knows.
std::vector<uint8_t> BytesOf(int message, size_t bytes);
// Returns the bytes of message 0 in memory that the device reaches.
Buffer PinnedBytes(Device& device, size_t bytes);
// Returns what is wrong with an ending of a link on a device that goes on.
std::string Lost(const absl::Status& status, absl::Duration took, absl::Duration least,
                 absl::Duration most, const Device& device);

}  // namespace sluice::testing
