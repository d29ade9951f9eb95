#include "src/engine/rank_plan.h"

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace sluice {

class RankPlanReader {
 public:
  RankPlanReader(absl::Span<const uint8_t> message, RankOrders* orders)
      : left_(message), orders_(*orders) {}

  absl::StatusOr<bool> CarryOut();

 private:
  absl::Status DoJoin(int slot);
  absl::Status DoStep(int buffer);
  absl::Status DoOne(RankOrder order);

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
  void GetAll(std::vector<T>* values) {
    const auto n = Get<uint32_t>();
    values->clear();
    if (left_.size() < uint64_t{n} * sizeof(T)) {
      ok_ = false;
      left_ = {};
      return;
    }
    values->resize(n);
    if (n > 0) std::memcpy(values->data(), left_.data(), n * sizeof(T));
    left_.remove_prefix(n * sizeof(T));
  }

  absl::Span<const uint8_t> left_;
  RankOrders& orders_;
  bool ok_ = true;
};

absl::Status RankPlanReader::DoJoin(int slot) {
  BatchState::Joining joining;
  std::vector<int32_t> tokens, stop_ids;
  std::vector<BatchState::Joining::LogitBias> bias;
  GetAll(&tokens);
  joining.sampling = Get<kernels::SamplingSlot>();
  GetAll(&stop_ids);
  GetAll(&bias);
  joining.tokens = tokens;
  joining.stop_ids = stop_ids;
  joining.logit_bias = bias;
  return ok_ ? orders_.Join(slot, joining) : absl::OkStatus();
}

absl::Status RankPlanReader::DoStep(int buffer) {
  StepPlan& plan = orders_.plan_;
  plan.row_count = Get<int32_t>();
  plan.decode_rows = Get<int32_t>();
  plan.sample_count = Get<int32_t>();
  GetAll(&plan.rows);
  return ok_ ? orders_.Step(buffer, plan) : absl::OkStatus();
}

absl::Status RankPlanReader::DoOne(RankOrder order) {
  const int slot = Get<int32_t>();
  if (order == RankOrder::kJoin) return DoJoin(slot);
  if (order == RankOrder::kStep) return DoStep(slot);
  const bool counted = order != RankOrder::kWarm && order != RankOrder::kRelease;
  const int64_t tokens = counted ? Get<int64_t>() : 0;
  const bool two = order == RankOrder::kAdmit || order == RankOrder::kBeginPrompt;
  const int64_t more = two ? Get<int64_t>() : 0;
  if (!ok_) return absl::OkStatus();
  switch (order) {
    case RankOrder::kWarm:
      return orders_.Warm(slot);
    case RankOrder::kRelease:
      return orders_.Release(slot);
    case RankOrder::kEndPrompt:
      return orders_.EndPrompt(slot, tokens);
    case RankOrder::kGrow:
      return orders_.Grow(slot, tokens);
    case RankOrder::kBeginPrompt:
      return orders_.BeginPrompt(slot, tokens, more);
    case RankOrder::kAdmit:
      return orders_.Admit(slot, tokens, (more & 1) != 0, static_cast<int>(more >> 1));
    default:
      return absl::InternalError(absl::StrCat("a plan has order ", static_cast<int>(order)));
  }
}

absl::StatusOr<bool> RankPlanReader::CarryOut() {
  while (!left_.empty()) {
    const auto order = Get<RankOrder>();
    if (order == RankOrder::kStop) return true;
    SLUICE_RETURN_IF_ERROR(DoOne(order));
    if (!ok_) return absl::InternalError("a plan ends inside an order");
  }
  return false;
}

void RankPlanWriter::Admit(int slot, int64_t total, bool firm, int owner) {
  Order(RankOrder::kAdmit, slot);
  Put(total);
  Put(int64_t{owner} * 2 + (firm ? 1 : 0));
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
  return RankPlanReader(message, &orders).CarryOut();
}

}  // namespace sluice
