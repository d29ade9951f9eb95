#include "src/device/rank_channel.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/status_macros.h"
#include "src/device/host_ranks.h"
#include "src/device/latest_bytes.h"

namespace sluice {
namespace {

// The ring has this many bytes, some thousand plans. It divides 2^32, since positions wrap.
constexpr uint32_t kRing = uint32_t{1} << 20;
constexpr absl::Duration kLook = absl::Milliseconds(200);

class HostChannel final : public RankChannel {
 public:
  HostChannel(const HostChannelOptions& options, std::unique_ptr<HostRanks> host)
      : options_(options), host_(std::move(host)) {}

  int rank() const override { return host_->rank(); }
  int size() const override { return host_->size(); }
  void EndWith(const RankGroup* group) override { group_ = group; }
  absl::Status Send(absl::Span<const uint8_t> message) override;
  absl::StatusOr<absl::Span<const uint8_t>> Receive() override;
  uint32_t sent() const override { return messages_; }
  void Done() override;
  absl::Status AwaitDone(uint32_t messages) override;
  void Show(uint32_t number) override;
  uint32_t Shown(int rank) const override;
  absl::Status Meet(absl::Duration timeout) override;
  void Report(absl::Span<const uint8_t> bytes) override;
  std::optional<std::vector<uint8_t>> ReportOf(int rank) const override;

  struct Shared;

 private:
  Shared& shared() const;
  LatestBytes& report(int rank) const;
  // HostRanks::Await, which ends with the group as well.
  absl::Status Await(RankWord& word, uint32_t value, int who, absl::Duration timeout,
                     const char* what) const;
  absl::Status GroupStatus() const;
  // Write and read bytes of the ring, in as many pieces as it takes.
  absl::Status Write(const uint8_t* data, size_t bytes);
  absl::Status Read(uint8_t* data, size_t bytes);

  const HostChannelOptions options_;
  const std::unique_ptr<HostRanks> host_;
  const RankGroup* group_ = nullptr;
  uint32_t position_ = 0;  // bytes written or read so far; wraps
  uint32_t meetings_ = 0;
  uint32_t messages_ = 0;  // sent or received so far; wraps
  std::vector<uint8_t> message_;
};

struct HostChannel::Shared {
  RankWord written;           // bytes
  RankWord read[kMaxRanks];   // bytes, by rank
  RankWord meets[kMaxRanks];  // meetings that the rank has come to
  RankWord done[kMaxRanks];   // messages that the rank has carried out
  RankWord shown[kMaxRanks];
  uint8_t ring[kRing];
};

HostChannel::Shared& HostChannel::shared() const {
  return *reinterpret_cast<Shared*>(host_->data());
}

// The reports come behind the rest, one for each rank that there is.
LatestBytes& HostChannel::report(int rank) const {
  return reinterpret_cast<LatestBytes*>(host_->data() + sizeof(Shared))[rank];
}

absl::Status HostChannel::GroupStatus() const {
  return group_ == nullptr ? absl::OkStatus() : group_->status();
}

absl::Status HostChannel::Await(RankWord& word, uint32_t value, int who, absl::Duration timeout,
                                const char* what) const {
  const absl::Time give_up = absl::Now() + timeout;
  for (;;) {
    const absl::Duration left = give_up - absl::Now();
    SLUICE_ASSIGN_OR_RETURN(const bool there,
                            host_->AwaitFor(word, value, who, std::min(left, kLook)));
    if (there) return absl::OkStatus();
    SLUICE_RETURN_IF_ERROR(GroupStatus());
    if (left <= kLook) {
      return host_->Fail(
          RankLost(who, absl::StrCat("of '", options_.name, "' did not come to ", what, " within ",
                                     absl::FormatDuration(timeout))));
    }
  }
}

absl::Status HostChannel::Write(const uint8_t* data, size_t bytes) {
  Shared& s = shared();
  while (bytes > 0) {
    const uint32_t at = position_ % kRing;
    const auto n = static_cast<uint32_t>(std::min<size_t>({bytes, kRing - at, kRing / 2}));
    for (int rank = 1; rank < size(); ++rank) {
      SLUICE_RETURN_IF_ERROR(
          Await(s.read[rank], position_ + n - kRing, rank, options_.deadline, "a plan"));
    }
    std::memcpy(s.ring + at, data, n);
    position_ += n;
    HostRanks::Post(s.written, position_);
    data += n;
    bytes -= n;
  }
  return absl::OkStatus();
}

absl::Status HostChannel::Read(uint8_t* data, size_t bytes) {
  Shared& s = shared();
  while (bytes > 0) {
    const uint32_t at = position_ % kRing;
    const auto n = static_cast<uint32_t>(std::min<size_t>({bytes, kRing - at, kRing / 2}));
    for (bool there = false; !there;) {
      SLUICE_RETURN_IF_ERROR(GroupStatus());
      SLUICE_ASSIGN_OR_RETURN(there, host_->AwaitFor(s.written, position_ + n, 0, kLook));
    }
    std::memcpy(data, s.ring + at, n);
    position_ += n;
    HostRanks::Post(s.read[rank()], position_);
    data += n;
    bytes -= n;
  }
  return absl::OkStatus();
}

absl::Status HostChannel::Send(absl::Span<const uint8_t> message) {
  SLUICE_CHECK(rank() == 0, "rank 0 sends");
  const auto bytes = static_cast<uint32_t>(message.size());
  ++messages_;
  SLUICE_RETURN_IF_ERROR(Write(reinterpret_cast<const uint8_t*>(&bytes), sizeof(bytes)));
  return Write(message.data(), message.size());
}

absl::StatusOr<absl::Span<const uint8_t>> HostChannel::Receive() {
  SLUICE_CHECK(rank() != 0, "rank 0 sends");
  uint32_t bytes = 0;
  SLUICE_RETURN_IF_ERROR(Read(reinterpret_cast<uint8_t*>(&bytes), sizeof(bytes)));
  message_.resize(bytes);
  SLUICE_RETURN_IF_ERROR(Read(message_.data(), bytes));
  ++messages_;
  return absl::MakeConstSpan(message_);
}

void HostChannel::Done() { HostRanks::Post(shared().done[rank()], messages_); }

absl::Status HostChannel::AwaitDone(uint32_t messages) {
  for (int rank = 1; rank < size(); ++rank) {
    SLUICE_RETURN_IF_ERROR(
        Await(shared().done[rank], messages, rank, options_.deadline, "the end of an order"));
  }
  return absl::OkStatus();
}

void HostChannel::Show(uint32_t number) { HostRanks::Post(shared().shown[rank()], number); }

uint32_t HostChannel::Shown(int rank) const { return shared().shown[rank].value.load(); }

absl::Status HostChannel::Meet(absl::Duration timeout) {
  Shared& s = shared();
  HostRanks::Post(s.meets[rank()], ++meetings_);
  for (int other = 0; other < size(); ++other) {
    SLUICE_RETURN_IF_ERROR(Await(s.meets[other], meetings_, other, timeout, "the start"));
  }
  return absl::OkStatus();
}

void HostChannel::Report(absl::Span<const uint8_t> bytes) {
  SLUICE_CHECK(rank() != 0, "ranks report to rank 0");
  report(rank()).Post(bytes);
}

std::optional<std::vector<uint8_t>> HostChannel::ReportOf(int rank) const {
  SLUICE_CHECK(this->rank() == 0, "ranks report to rank 0");
  return report(rank).Read();
}

}  // namespace

absl::StatusOr<std::unique_ptr<RankChannel>> JoinHostChannel(const HostChannelOptions& options) {
  static_assert(RankChannel::kMostReportBytes == LatestBytes::kMostBytes);
  const size_t bytes = sizeof(HostChannel::Shared) +
                       sizeof(LatestBytes) * static_cast<size_t>(std::max(options.size, 0));
  SLUICE_ASSIGN_OR_RETURN(
      std::unique_ptr<HostRanks> host,
      HostRanks::Join({options.name, options.rank, options.size, bytes, options.join_timeout}));
  return std::make_unique<HostChannel>(options, std::move(host));
}

}  // namespace sluice
