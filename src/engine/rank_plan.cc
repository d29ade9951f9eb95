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
  void GetPages(RankPages* lists);
  SelectionHints GetHints();
  absl::Status DoAdmit(int slot);
  absl::Status DoReserveHostCopy(int slot);
  absl::Status DoJoin(int slot);
  absl::Status DoStep(int buffer);
  absl::Status DoOne(RankOrder order);
  // Does an order that begins with a number of tokens.
  absl::Status DoTokens(RankOrder order, int slot);

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

void RankPlanReader::GetPages(RankPages* lists) {
  const auto count = Get<uint32_t>();
  std::vector<PageRun> runs;
  for (uint32_t i = 0; ok_ && i < count; ++i) {
    GetAll(&runs);
    std::vector<int32_t>& pages = lists->emplace_back();
    for (const PageRun& run : runs) {
      for (int32_t page = 0; page < run.count; ++page) pages.push_back(run.first + page);
    }
  }
}

SelectionHints RankPlanReader::GetHints() {
  SelectionHints hints;
  hints.unit_tokens = Get<uint32_t>();
  const auto count = Get<uint32_t>();
  for (uint32_t i = 0; ok_ && i < count; ++i) {
    SelectionHints::Entry& entry = hints.entries.emplace_back();
    entry.layer = Get<uint32_t>();
    if (Get<bool>()) entry.kv_head = Get<uint32_t>();
    if (Get<bool>()) entry.position = Get<uint32_t>();
    GetAll(&entry.units);
  }
  GetAll(&hints.queries);
  return hints;
}

absl::Status RankPlanReader::DoAdmit(int slot) {
  RankAdmission admission;
  admission.context = Get<int64_t>();
  admission.total = Get<int64_t>();
  admission.firm = Get<bool>();
  admission.owner = Get<int32_t>();
  admission.has_home = Get<bool>();
  if (admission.has_home) {
    admission.home.shared_tokens = Get<int64_t>();
    admission.home.left = Get<PagePool::PagesByKind>();
    GetPages(&admission.home.pages);
  }
  return ok_ ? orders_.Admit(slot, std::move(admission)) : absl::OkStatus();
}

absl::Status RankPlanReader::DoReserveHostCopy(int slot) {
  const auto tokens = Get<int64_t>(), shared = Get<int64_t>();
  RankPages pages;
  GetPages(&pages);
  SharedPrefix prefix;
  if (shared > 0) prefix = SharedPrefix::OfOtherRank(shared, std::move(pages));
  return ok_ ? orders_.ReserveHostCopy(slot, tokens, std::move(prefix)) : absl::OkStatus();
}

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
  if (!ok_) return absl::OkStatus();
  switch (order) {
    case RankOrder::kAdmit:
      return DoAdmit(slot);
    case RankOrder::kReserveHostCopy:
      return DoReserveHostCopy(slot);
    case RankOrder::kJoin:
      return DoJoin(slot);
    case RankOrder::kStep:
      return DoStep(slot);
    case RankOrder::kWarm:
      return orders_.Warm(slot);
    case RankOrder::kRelease:
      return orders_.Release(slot);
    case RankOrder::kMakeFirm:
      return orders_.MakeFirm(slot);
    case RankOrder::kDetach:
      return orders_.Detach(slot);
    case RankOrder::kBeginPrompt:
    case RankOrder::kEndPrompt:
    case RankOrder::kGrow:
    case RankOrder::kEvict:
      return DoTokens(order, slot);
    case RankOrder::kStop:
      break;
  }
  return absl::InternalError(absl::StrCat("a plan has order ", static_cast<int>(order)));
}

absl::Status RankPlanReader::DoTokens(RankOrder order, int slot) {
  const auto tokens = Get<int64_t>();
  if (order == RankOrder::kBeginPrompt) {
    const auto cached = Get<int64_t>();
    return ok_ ? orders_.BeginPrompt(slot, tokens, cached) : absl::OkStatus();
  }
  if (order == RankOrder::kEndPrompt) {
    SelectionHints hints = GetHints();
    return ok_ ? orders_.EndPrompt(slot, tokens, std::move(hints)) : absl::OkStatus();
  }
  if (order == RankOrder::kEvict) {
    RankPages home;
    GetPages(&home);
    return ok_ ? orders_.Evict(slot, tokens, std::move(home)) : absl::OkStatus();
  }
  return ok_ ? orders_.Grow(slot, tokens) : absl::OkStatus();
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

void RankPlanWriter::PutPages(const RankPages& lists) {
  Put(static_cast<uint32_t>(lists.size()));
  std::vector<PageRun> runs;
  for (const std::vector<int32_t>& pages : lists) {
    runs.clear();
    for (const int32_t page : pages) {
      if (!runs.empty() && runs.back().first + runs.back().count == page) {
        ++runs.back().count;
      } else {
        runs.push_back({page, 1});
      }
    }
    PutAll(absl::MakeConstSpan(runs));
  }
}

void RankPlanWriter::Admit(int slot, const RankAdmission& admission) {
  Order(RankOrder::kAdmit, slot);
  Put(admission.context);
  Put(admission.total);
  Put(admission.firm);
  Put(int32_t{admission.owner});
  Put(admission.has_home);
  if (!admission.has_home) return;
  Put(admission.home.shared_tokens);
  Put(admission.home.left);
  PutPages(admission.home.pages);
}

void RankPlanWriter::BeginPrompt(int slot, int64_t tokens, int64_t cached) {
  Order(RankOrder::kBeginPrompt, slot);
  Put(tokens);
  Put(cached);
}

void RankPlanWriter::EndPrompt(int slot, int64_t tokens, const SelectionHints& hints) {
  Order(RankOrder::kEndPrompt, slot);
  Put(tokens);
  Put(hints.unit_tokens);
  Put(static_cast<uint32_t>(hints.entries.size()));
  for (const SelectionHints::Entry& entry : hints.entries) {
    Put(entry.layer);
    for (const std::optional<uint32_t>& number : {entry.kv_head, entry.position}) {
      Put(number.has_value());
      if (number.has_value()) Put(*number);
    }
    PutAll(absl::MakeConstSpan(entry.units));
  }
  PutAll(absl::MakeConstSpan(hints.queries));
}

void RankPlanWriter::Warm(int slot) { Order(RankOrder::kWarm, slot); }

void RankPlanWriter::Grow(int slot, int64_t tokens) {
  Order(RankOrder::kGrow, slot);
  Put(tokens);
}

void RankPlanWriter::Release(int slot) { Order(RankOrder::kRelease, slot); }
void RankPlanWriter::MakeFirm(int slot) { Order(RankOrder::kMakeFirm, slot); }
void RankPlanWriter::Detach(int slot) { Order(RankOrder::kDetach, slot); }

void RankPlanWriter::ReserveHostCopy(int slot, int64_t tokens, const SharedPrefix& prefix) {
  Order(RankOrder::kReserveHostCopy, slot);
  Put(tokens);
  Put(prefix.tokens());
  PutPages(prefix.pages());
}

void RankPlanWriter::Evict(int slot, int64_t tokens, const RankPages& home) {
  Order(RankOrder::kEvict, slot);
  Put(tokens);
  PutPages(home);
}

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
