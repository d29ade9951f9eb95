#include "src/service/wire/call_record.h"

#include <array>
#include <atomic>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/hash/hash.h"

namespace sluice {
namespace {

// gRPC has no field in a call for our data, so a record is found by the address of its call's
// context. The records are divided into shards so that calls that begin at once do not wait for one
// another.
struct Shard {
  absl::Mutex mutex;
  absl::flat_hash_map<const grpc::ServerContextBase*, std::shared_ptr<CallRecord>> records
      ABSL_GUARDED_BY(mutex);
};
constexpr size_t kShards = 16;
std::atomic<int> records_kept{0};  // while 0, nothing is looked up

Shard& ShardOf(const grpc::ServerContextBase* context) {
  static auto* const shards = new std::array<Shard, kShards>;
  return (*shards)[absl::HashOf(context) % kShards];
}

}  // namespace

void NoteCall(const grpc::ServerContextBase& context,
              const std::function<void(CallFields&)>& update) {
  if (records_kept.load(std::memory_order_relaxed) == 0) return;
  std::shared_ptr<CallRecord> record;
  {
    Shard& shard = ShardOf(&context);
    absl::MutexLock lock(&shard.mutex);
    const auto found = shard.records.find(&context);
    if (found == shard.records.end()) return;
    record = found->second;
  }
  record->Update(update);
}

void KeepRecord(const grpc::ServerContextBase* context, std::shared_ptr<CallRecord> record) {
  Shard& shard = ShardOf(context);
  absl::MutexLock lock(&shard.mutex);
  shard.records[context] = std::move(record);
  records_kept.fetch_add(1, std::memory_order_relaxed);
}

void ForgetRecord(const grpc::ServerContextBase* context) {
  Shard& shard = ShardOf(context);
  absl::MutexLock lock(&shard.mutex);
  shard.records.erase(context);
  records_kept.fetch_sub(1, std::memory_order_relaxed);
}

}  // namespace sluice
