// The shared memory has a ring of messages. The sender fills the slot of message n once the message
// that had it before is taken, and posts n + 1; the receiver copies it out and posts that it is
// taken. Either end sees the other's death and its silence while it waits (HostRanks::Await).
#include "src/device/cpu/cpu_peer_link.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <cstring>
#include <deque>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "src/base/crc32c.h"
#include "src/base/memory_copy.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"
#include "src/device/host_ranks.h"

namespace sluice {
namespace {

constexpr int kReceiver = 0, kSender = 1;
constexpr size_t kPassBytes = 16 << 10;  // half of a small L1 data cache
constexpr size_t kLine = 64;
constexpr char kIdFront[] = "shm:";
constexpr char kNameFront[] = "sluice-link-";
constexpr size_t kNameBytes = sizeof kNameFront - 1 + 32;

struct Shared {
  RankWord sent, taken;  // messages so far
  uint64_t bytes[kMaxLinkDepth];
};

size_t SlotBytes(const PeerLinkOptions& options) {
  return (options.message_bytes + kLine - 1) / kLine * kLine;
}

// Returns a name of the running system, which containers of one host share.
std::string BootId() {
  std::ifstream file("/proc/sys/kernel/random/boot_id");
  std::string id;
  file >> id;
  return id;
}

class CpuPeerLink : public PeerLink {
 public:
  CpuPeerLink(const PeerLinkOptions& options, std::unique_ptr<HostRanks> host)
      : PeerLink(options.message_bytes, options.depth), options_(options), host_(std::move(host)) {}
  ~CpuPeerLink() override { Abort("it was given up"); }

  static size_t SharedBytes(const PeerLinkOptions& options) {
    return (sizeof(Shared) + kLine - 1) / kLine * kLine +
           SlotBytes(options) * static_cast<size_t>(options.depth);
  }

  absl::Status Flush() override {
    told_ = sent_;
    return AwaitWord(shared().taken, sent_, "its messages");
  }

  absl::StatusOr<uint32_t> Sent() override {
    SLUICE_CHECK(told_ != sent_, "Sent without a Send");
    SLUICE_RETURN_IF_ERROR(AwaitWord(shared().taken, told_ + 1, "its oldest message"));
    return crcs_[Slot(told_++)];
  }

  absl::StatusOr<uint32_t> Await() override {
    SLUICE_CHECK(!asked_.empty(), "Await without a Receive");
    SLUICE_RETURN_IF_ERROR(AwaitWord(shared().sent, taken_ + 1, "a message"));
    const std::vector<Piece> pieces = std::move(asked_.front());
    asked_.pop_front();
    size_t expected = 0;
    for (const Piece& piece : pieces) expected += piece.bytes;
    const uint64_t found = shared().bytes[Slot(taken_)];
    if (found != expected) {
      Abort(absl::StrCat("a message of ", expected, " bytes was expected, found ", found));
      return Failure();
    }
    const uint8_t* from = DataOf(taken_);
    uint32_t crc = 0;
    for (const Piece& piece : pieces) {
      // The copy finds in the CPU's cache what the checksum has read.
      for (size_t at = 0; at < piece.bytes; at += kPassBytes) {
        const size_t take = std::min(kPassBytes, piece.bytes - at);
        crc = ExtendCrc32c(crc, {from + at, take});
        if (piece.data == nullptr) continue;
        StreamCopy(static_cast<uint8_t*>(piece.data) + at, from + at, take);
      }
      from += piece.bytes;
    }
    FenceStreamedStores();
    HostRanks::Post(shared().taken, ++taken_);
    return crc;
  }

  void Abort(const std::string& why) override {
    host_->Fail(absl::UnavailableError(why)).IgnoreError();
  }

 private:
  Shared& shared() const { return *reinterpret_cast<Shared*>(host_->data()); }
  size_t Slot(uint32_t message) const { return message % static_cast<uint32_t>(options_.depth); }
  uint8_t* DataOf(uint32_t message) const {
    return host_->data() + (sizeof(Shared) + kLine - 1) / kLine * kLine +
           Slot(message) * SlotBytes(options_);
  }
  absl::Status Failure() const {
    return absl::UnavailableError(
        absl::StrCat("the link has failed: ", host_->failure().message()));
  }
  absl::Status AwaitWord(RankWord& word, uint32_t value, const char* what) {
    const absl::Status status =
        host_->Await(word, value, options_.sends ? kReceiver : kSender, options_.deadline, what);
    if (status.ok()) return status;
    return absl::UnavailableError(
        absl::StrCat("the link failed while this end waited for ", what, ": ", status.message()));
  }

  absl::Status SendMessage(absl::Span<const Piece> pieces, size_t bytes, bool checksum) override {
    SLUICE_CHECK(options_.sends, "only the sending end of a link sends");
    const auto ring = static_cast<uint32_t>(depth());
    SLUICE_CHECK(!checksum || sent_ - told_ < ring, "nobody asked for the last checksums");
    if (!host_->failure().ok()) return Failure();
    SLUICE_RETURN_IF_ERROR(AwaitWord(shared().taken, sent_ + 1 - ring, "room for a message"));
    if (sent_ - told_ == ring) ++told_;
    shared().bytes[Slot(sent_)] = bytes;
    uint8_t* to = DataOf(sent_);
    uint32_t crc = 0;
    for (const Piece& piece : pieces) {
      for (size_t at = 0; at < piece.bytes; at += kPassBytes) {
        const size_t take = std::min(kPassBytes, piece.bytes - at);
        std::memcpy(to, static_cast<const uint8_t*>(piece.data) + at, take);
        if (checksum) crc = ExtendCrc32c(crc, {to, take});
        to += take;
      }
    }
    crcs_[Slot(sent_)] = crc;
    HostRanks::Post(shared().sent, ++sent_);
    return absl::OkStatus();
  }
  absl::Status ReceiveMessage(absl::Span<const Piece> pieces, size_t) override {
    SLUICE_CHECK(!options_.sends, "only the receiving end of a link receives");
    SLUICE_CHECK(asked_.size() < static_cast<size_t>(depth()), "too many messages are asked for");
    if (!host_->failure().ok()) return Failure();
    asked_.emplace_back(pieces.begin(), pieces.end());
    return absl::OkStatus();
  }

  const PeerLinkOptions options_;
  const std::unique_ptr<HostRanks> host_;
  uint32_t sent_ = 0, taken_ = 0;
  uint32_t told_ = 0;  // messages of which Sent or Flush has told
  std::array<uint32_t, kMaxLinkDepth> crcs_;
  std::deque<std::vector<Piece>> asked_;
};

class CpuPeerLinks : public PeerLinks {
 public:
  const char* transport() const override { return "shared_memory"; }
  absl::StatusOr<std::string> NewId() override {
    return absl::StrCat(kIdFront, BootId(), ":", kNameFront,
                        absl::StrFormat("%016x%016x", RandomU64(), RandomU64()));
  }
  absl::Status CheckId(const std::string& id) const override { return NameOf(id).status(); }
  absl::StatusOr<std::unique_ptr<PeerLink>> Join(const PeerLinkOptions& options) override {
    SLUICE_RETURN_IF_ERROR(CheckPeerLinkOptions(options));
    HostRanks::Options host;
    SLUICE_ASSIGN_OR_RETURN(host.name, NameOf(options.id));
    host.rank = options.sends ? kSender : kReceiver;
    host.size = 2;
    host.bytes = CpuPeerLink::SharedBytes(options);
    host.join_timeout = options.join_timeout;
    SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<HostRanks> ranks, HostRanks::Join(host));
    return std::make_unique<CpuPeerLink>(options, std::move(ranks));
  }

 private:
  // The name comes from another process, so that nothing but a link's own memory may be opened.
  static absl::StatusOr<std::string> NameOf(const std::string& id) {
    absl::string_view rest = id;
    if (!absl::ConsumePrefix(&rest, kIdFront)) {
      return absl::FailedPreconditionError(
          "the other end's device has links of another kind than the CPU's shared memory: run both "
          "nodes on GPUs, or with kv_transport grpc");
    }
    if (!absl::ConsumePrefix(&rest, absl::StrCat(BootId(), ":"))) {
      return absl::FailedPreconditionError(
          "the other end is on another host, and links of the CPU device stay on one");
    }
    const std::string name(rest);
    const auto is_digit = [](unsigned char c) { return std::isxdigit(c) != 0; };
    if (name.size() != kNameBytes || !absl::StartsWith(name, kNameFront) ||
        !std::all_of(name.begin() + sizeof kNameFront - 1, name.end(), is_digit)) {
      return absl::FailedPreconditionError("the link's id names no memory of a link");
    }
    return name;
  }
};

}  // namespace

std::unique_ptr<PeerLinks> NewCpuPeerLinks() { return std::make_unique<CpuPeerLinks>(); }

}  // namespace sluice
