// FarMemory is rank 0's end of RankService.Land: it writes bytes of chunks to the pools of ranks on
// other hosts, and waits until they say that it has arrived. Thread-safe.
#pragma once

#include <grpcpp/grpcpp.h>
#include <grpcpp/support/sync_stream.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/synchronization/mutex.h"
#include "sluice/v1/ranks.pb.h"
#include "src/kv/far_heads.h"
#include "src/kv/page_pool.h"

namespace sluice {

class FarMemory final : public FarHeads {
 public:
  // `lost` is told of a rank that takes no more bytes, and returns why the node has failed.
  FarMemory(int size, std::function<absl::Status(int rank)> lost);

  std::unique_ptr<FarWrites> Begin() override;

  using Stream = grpc::ServerReaderWriter<v1::LandRequest, v1::LandAnswer>;
  // Serves the way to a rank until that rank ends it.
  absl::Status Serve(grpc::ServerContext* context, Stream* stream);
  // Returns where the rank takes chunks itself, or nothing. REQUIRES: its way was opened.
  std::string IngestAddress(int rank);
  // Ends all ways, and with them what is under way.
  void End();

 private:
  class Writes;
  struct Way {
    absl::Mutex writing;  // a stream takes one message at a time
    grpc::ServerContext* context = nullptr;
    Stream* stream = nullptr;  // null: there is no way
    int writers = 0;           // that use the stream
    uint64_t number = 0;
    std::string ingest_address;  // stays when the way ends
    std::map<uint64_t, Writes*> under_way;
  };
  // Sends a request of `writes`. Waits for room on the way.
  void Send(int rank, v1::LandRequest request, Writes* writes);
  void Arrived(Way& way, const v1::LandAnswer& answer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const std::function<absl::Status(int rank)> lost_;
  absl::Mutex mutex_;
  // By rank; the members but `writing` are guarded by mutex_.
  std::vector<Way> ways_;
};

// Returns the address with the host of `peer`, as gRPC names it, if its own host stands for all
// addresses; nothing if the peer has no host.
std::string SeenAddress(const std::string& address, const std::string& peer);

// Carries a request out in the pool. INTERNAL: it does not fit the pool.
absl::StatusOr<v1::LandAnswer> Land(const v1::LandRequest& request, const PagePool& pool);

}  // namespace sluice
