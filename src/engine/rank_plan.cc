#include "src/engine/rank_plan.h"

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

using LogitBias = BatchState::Joining::LogitBias;

class Reader {
 public:
  explicit Reader(absl::Span<const uint8_t> message) : left_(message) {}

  bool ok() const { return ok_; }
  bool done() const { return left_.empty(); }
  template <typename T>
  T Get() {
    T value{};
    if (left_.size() < sizeof(T)) {
      ok_ = false;
      left_ = {};
      return value;
    }
    std::memcpy(&value, left_.data(), sizeof(T));
    left_.remove_prefix(sizeof(T));
    return value;
  }
  template <typename T>
  std::vector<T> GetAll() {
    const auto n = Get<uint32_t>();
    std::vector<T> values;
    if (left_.size() < uint64_t{n} * sizeof(T)) {
      ok_ = false;
      left_ = {};
      return values;
    }
    values.resize(n);
    std::memcpy(values.data(), left_.data(), n * sizeof(T));
    left_.remove_prefix(n * sizeof(T));
    return values;
  }

 private:
  absl::Span<const uint8_t> left_;
  bool ok_ = true;
};

absl::Status DoJoin(int slot, Reader& reader, RankOrders& orders) {
  BatchState::Joining joining;
  const auto tokens = reader.GetAll<int32_t>();
  joining.sampling = reader.Get<kernels::SamplingSlot>();
  const auto stop_ids = reader.GetAll<int32_t>();
  const auto bias = reader.GetAll<LogitBias>();
  joining.tokens = tokens;
  joining.stop_ids = stop_ids;
  joining.logit_bias = bias;
  return reader.ok() ? orders.Join(slot, joining) : absl::OkStatus();
}

absl::Status DoStep(int buffer, Reader& reader, RankOrders& orders) {
  StepPlan plan;
  plan.row_count = reader.Get<int32_t>();
  plan.decode_rows = reader.Get<int32_t>();
  plan.sample_count = reader.Get<int32_t>();
  plan.rows = reader.GetAll<PlanRow>();
  return reader.ok() ? orders.Step(buffer, plan) : absl::OkStatus();
}

absl::Status DoOne(RankOrder order, Reader& reader, RankOrders& orders) {
  const int slot = reader.Get<int32_t>();
  if (order == RankOrder::kJoin) return DoJoin(slot, reader, orders);
  if (order == RankOrder::kStep) return DoStep(slot, reader, orders);
  if (order == RankOrder::kWarm) return orders.Warm(slot);
  if (order == RankOrder::kRelease) return orders.Release(slot);
  const auto tokens = reader.Get<int64_t>();
  if (order == RankOrder::kEndPrompt) return orders.EndPrompt(slot, tokens);
  if (order == RankOrder::kGrow) return orders.Grow(slot, tokens);
  const auto more = reader.Get<int64_t>();
  if (order == RankOrder::kBeginPrompt) return orders.BeginPrompt(slot, tokens, more);
  if (order == RankOrder::kAdmit) return orders.Admit(slot, tokens, more != 0);
  return absl::InternalError(absl::StrCat("a plan has order ", static_cast<int>(order)));
}

}  // namespace

void RankPlanWriter::Admit(int slot, int64_t total, bool firm) {
  Order(RankOrder::kAdmit, slot);
  Put(total);
  Put(int64_t{firm ? 1 : 0});
}

void RankPlanWriter::BeginPrompt(int slot, int64_t tokens, int64_t cached) {
  Order(RankOrder::kBeginPrompt, slot);
  Put(tokens);
  Put(cached);
}

void RankPlanWriter::EndPrompt(int slot, int64_t tokens) {
  Order(RankOrder::kEndPrompt, slot);
  Put(tokens);
}

void RankPlanWriter::Warm(int slot) { Order(RankOrder::kWarm, slot); }

void RankPlanWriter::Grow(int slot, int64_t tokens) {
  Order(RankOrder::kGrow, slot);
  Put(tokens);
}

void RankPlanWriter::Release(int slot) { Order(RankOrder::kRelease, slot); }

void RankPlanWriter::Join(int slot, const BatchState::Joining& joining) {
  Order(RankOrder::kJoin, slot);
  PutAll(joining.tokens);
  Put(joining.sampling);
  PutAll(joining.stop_ids);
  PutAll(joining.logit_bias);
}

void RankPlanWriter::Step(int buffer, const StepPlan& plan) {
  Order(RankOrder::kStep, buffer);
  Put(plan.row_count);
  Put(plan.decode_rows);
  Put(plan.sample_count);
  PutAll(absl::MakeConstSpan(plan.rows));
}

void RankPlanWriter::Stop() { Put(RankOrder::kStop); }

absl::StatusOr<bool> CarryOut(absl::Span<const uint8_t> message, RankOrders& orders) {
  Reader reader(message);
  while (!reader.done()) {
    const auto order = reader.Get<RankOrder>();
    if (order == RankOrder::kStop) return true;
    SLUICE_RETURN_IF_ERROR(DoOne(order, reader, orders));
    if (!reader.ok()) return absl::InternalError("a plan ends inside an order");
  }
  return false;
}

}  // namespace sluice
