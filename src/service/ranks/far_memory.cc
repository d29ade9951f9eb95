#include "src/service/ranks/far_memory.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "sluice/v1/ranks.grpc.pb.h"
#include "src/base/error.h"
#include "src/base/status_macros.h"
#include "src/service/ranks/range_landing.h"
#include "src/service/wire/host_port.h"

namespace sluice {
namespace {

// A message is sent when it has so many bytes: few enough to be under way while the next is
// gathered, and enough that its own cost does not matter.
constexpr size_t kMessageBytes = size_t{512} << 10;

}  // namespace

// Gathers what is for a rank into messages.
class FarMemory::Writes final : public FarWrites {
 public:
  explicit Writes(FarMemory* memory) : memory_(memory), next_(memory->ways_.size()) {}
  ~Writes() override { Wait(); }

  void Write(int rank, size_t kind, uint64_t offset, absl::Span<const uint8_t> bytes,
             bool compare) override {
    v1::LandRequest& next = next_[static_cast<size_t>(rank)];
    const int last = next.ranges_size() - 1;
    if (last >= 0 && next.ranges(last).kind() == kind && next.ranges(last).compare() == compare &&
        next.ranges(last).offset() + next.ranges(last).bytes() == offset) {
      next.mutable_ranges(last)->set_bytes(next.ranges(last).bytes() + bytes.size());
    } else {
      v1::LandRange* const range = next.add_ranges();
      range->set_kind(static_cast<uint32_t>(kind));
      range->set_offset(offset);
      range->set_bytes(bytes.size());
      range->set_compare(compare);
    }
    next.mutable_payload()->append(reinterpret_cast<const char*>(bytes.data()), bytes.size());
    if (next.payload().size() >= kMessageBytes) Flush(rank);
  }

  absl::StatusOr<bool> Finish() override {
    for (size_t rank = 0; rank < next_.size(); ++rank) Flush(static_cast<int>(rank));
    Wait();
    absl::MutexLock lock(&memory_->mutex_);
    SLUICE_RETURN_IF_ERROR(status_);
    return differs_;
  }

 private:
  friend class FarMemory;
  void Flush(int rank) {
    v1::LandRequest& next = next_[static_cast<size_t>(rank)];
    if (next.ranges_size() == 0) return;
    memory_->Send(rank, std::exchange(next, {}), this);
  }
  void Wait() {
    const auto over = [this] { return under_way_ == 0; };
    absl::MutexLock lock(&memory_->mutex_);
    memory_->mutex_.Await(absl::Condition(&over));
  }

  FarMemory* const memory_;
  std::vector<v1::LandRequest> next_;  // by rank
  // Guarded by the memory's mutex.
  int under_way_ = 0;
  bool differs_ = false;
  absl::Status status_;
};

FarMemory::FarMemory(int size, std::function<absl::Status(int rank)> lost)
    : lost_(std::move(lost)), ways_(static_cast<size_t>(size)) {}

std::unique_ptr<FarWrites> FarMemory::Begin() { return std::make_unique<Writes>(this); }

void FarMemory::Send(int rank, v1::LandRequest request, Writes* writes) {
  Way& way = ways_[static_cast<size_t>(rank)];
  uint64_t number = 0;
  bool sent = false;
  {
    absl::MutexLock lock(&mutex_);
    if (way.stream != nullptr) {
      number = ++way.number;
      way.under_way[number] = writes;
      ++writes->under_way_;
      ++way.writers;
    }
  }
  if (number > 0) {
    request.set_number(number);
    absl::MutexLock writing(&way.writing);
    sent = way.stream->Write(request);
  }
  if (!sent) {
    const absl::Status why = lost_(rank);
    absl::MutexLock lock(&mutex_);
    writes->status_ = why;
  }
  absl::MutexLock lock(&mutex_);
  if (number == 0) return;
  --way.writers;
  // A write that could not be sent has not arrived, unless the end of the way has said so already.
  if (!sent && way.under_way.erase(number) == 1) --writes->under_way_;
}

void FarMemory::Arrived(Way& way, const v1::LandAnswer& answer) {
  const auto found = way.under_way.find(answer.number());
  if (found == way.under_way.end()) return;
  found->second->differs_ = found->second->differs_ || answer.differs();
  --found->second->under_way_;
  way.under_way.erase(found);
}

absl::Status FarMemory::Serve(grpc::ServerContext* context, Stream* stream) {
  v1::LandAnswer answer;
  if (!stream->Read(&answer)) return absl::CancelledError("no rank opens this way");
  const uint32_t rank = answer.rank();
  {
    absl::MutexLock lock(&mutex_);
    if (rank == 0 || rank >= ways_.size() || ways_[rank].stream != nullptr) {
      return absl::FailedPreconditionError(
          absl::StrCat("ranks: rank ", rank, " has a way for caches, or is none of this node's"));
    }
    ways_[rank].context = context;
    ways_[rank].stream = stream;
    ways_[rank].ingest_address = SeenAddress(answer.ingest_address(), context->peer());
  }
  Way& way = ways_[rank];
  {
    absl::MutexLock writing(&way.writing);
    stream->Write(v1::LandRequest());  // says that the way is open
  }
  while (stream->Read(&answer)) {
    absl::MutexLock lock(&mutex_);
    Arrived(way, answer);
  }
  const auto unused = [&way] { return way.writers == 0; };
  absl::MutexLock lock(&mutex_);
  way.stream = nullptr;
  way.context = nullptr;
  mutex_.Await(absl::Condition(&unused));  // their writes fail, now that the stream has ended
  if (way.under_way.empty()) return absl::OkStatus();
  mutex_.Unlock();
  const absl::Status why = lost_(static_cast<int>(rank));
  mutex_.Lock();
  for (const auto& [number, writes] : way.under_way) {
    writes->status_ = why;
    --writes->under_way_;
  }
  way.under_way.clear();
  return absl::OkStatus();
}

std::string FarMemory::IngestAddress(int rank) {
  absl::MutexLock lock(&mutex_);
  return ways_[static_cast<size_t>(rank)].ingest_address;
}

void FarMemory::End() {
  absl::MutexLock lock(&mutex_);
  for (Way& way : ways_) {
    if (way.context != nullptr) way.context->TryCancel();
  }
}

std::string SeenAddress(const std::string& address, const std::string& peer) {
  absl::StatusOr<HostPort> own = ParseHostPort(address);
  if (!own.ok() || !IsAnyHost(own->host)) return address;
  // gRPC names a peer ipv4:1.2.3.4:5 or ipv6:%5B::1%5D:5.
  const std::string text =
      absl::StrReplaceAll(peer.substr(peer.find(':') + 1), {{"%5B", "["}, {"%5D", "]"}});
  const absl::StatusOr<HostPort> seen = ParseHostPort(text);
  if (!seen.ok()) return "";
  own->host = std::string(absl::StripPrefix(seen->host, "::ffff:"));
  return own->ToString();
}

absl::StatusOr<v1::LandAnswer> Land(const v1::LandRequest& request, const PagePool& pool) {
  SLUICE_ASSIGN_OR_RETURN(
      RangeLanding landing,
      RangeLanding::Begin(request.ranges(), request.payload().size(), pool, /*checksum=*/false));
  landing.Append(
      {reinterpret_cast<const uint8_t*>(request.payload().data()), request.payload().size()});
  v1::LandAnswer answer;
  answer.set_number(request.number());
  answer.set_differs(landing.differs());
  return answer;
}

}  // namespace sluice
