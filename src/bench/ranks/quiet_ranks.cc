#include "src/bench/ranks/quiet_ranks.h"

#include <string>

namespace sluice::bench {
namespace {

class Quiet : public RankGroup {
 public:
  Quiet(RankGroup* group, const bool* quiet)
      : RankGroup(group->rank(), group->size()), group_(group), quiet_(quiet) {}

  absl::Status Register(void* data, size_t bytes) override { return group_->Register(data, bytes); }
  void Abort(const std::string& why) override { group_->Abort(why); }
  absl::Status status() const override { return group_->status(); }
  int alive() const override { return group_->alive(); }

 protected:
  void Enqueue(Stream& stream, const Operation& o) override {
    if (*quiet_) return;
    const auto bytes = static_cast<size_t>(o.count);
    switch (o.kind) {
      case Collective::kAllReduce:
        return group_->AllReduce(stream, o.in, o.out, o.count, o.type);
      case Collective::kAllGather:
        return group_->AllGather(stream, o.in, o.out, bytes);
      case Collective::kReduceScatter:
        return group_->ReduceScatter(stream, o.in, o.out, o.count, o.type);
      case Collective::kAllToAll:
        return group_->AllToAll(stream, o.exchange);
      case Collective::kBroadcast:
        return group_->Broadcast(stream, o.out, bytes, o.peer);
      case Collective::kSend:
        return group_->Send(stream, o.in, bytes, o.peer);
      case Collective::kReceive:
        return group_->Receive(stream, o.out, bytes, o.peer);
    }
  }

 private:
  RankGroup* const group_;
  const bool* const quiet_;
};

}  // namespace

std::unique_ptr<RankGroup> QuietRanks(RankGroup* group, const bool* quiet) {
  return std::make_unique<Quiet>(group, quiet);
}

}  // namespace sluice::bench
