#include "src/kv/selection_hints.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/error.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

uint32_t RowOf(const SelectionHints::Entry& entry) {
  return entry.position.value_or(std::numeric_limits<uint32_t>::max());
}

absl::Status CheckBelow(const std::string& field, uint32_t value, uint32_t end, const char* what) {
  if (value < end) return absl::OkStatus();
  return InvalidField(field, absl::StrCat("must be below ", end, ", ", what, "; found ", value));
}

absl::Status CheckUnits(const std::string& field, const std::vector<uint32_t>& units,
                        uint32_t unit_tokens, const HintBounds& bounds) {
  const uint64_t end = (uint64_t{bounds.context_length} + unit_tokens - 1) / unit_tokens;
  if (bounds.most_tokens > 0 &&
      units.size() * uint64_t{unit_tokens} > static_cast<uint64_t>(bounds.most_tokens)) {
    return InvalidField(
        field, absl::StrCat("at most ", bounds.most_tokens / unit_tokens, " units of ", unit_tokens,
                            " tokens (ReserveResponse.hint_tokens is ", bounds.most_tokens,
                            "), found ", units.size(), "; send the most important ones only"));
  }
  for (size_t i = 0; i < units.size(); ++i) {
    if (units[i] >= end) {
      return InvalidField(
          absl::StrCat(field, "[", i, "]"),
          absl::StrCat("must be below ", end, ", the units of the ", bounds.context_length,
                       " tokens whose caches were sent; found ", units[i]));
    }
    if (i > 0 && units[i] <= units[i - 1]) {
      return InvalidField(
          absl::StrCat(field, "[", i, "]"),
          absl::StrCat("must be above the unit before it, ", units[i - 1], "; found ", units[i],
                       "; sort them in ascending order, each once"));
    }
  }
  return absl::OkStatus();
}

}  // namespace

size_t SelectionHints::bytes() const {
  size_t sum = entries.size() * sizeof(Entry) + queries.size() * sizeof(float);
  for (const Entry& entry : entries) sum += entry.units.size() * sizeof(uint32_t);
  return sum;
}

absl::Status CheckHints(const SelectionHints& hints, const HintBounds& bounds) {
  const std::vector<float>& queries = hints.queries;
  if (bounds.queries > 0 && !queries.empty() && std::ssize(queries) != bounds.queries) {
    return InvalidField("hints.queries",
                        absl::StrCat("expected ", bounds.queries,
                                     " numbers, layers x query heads x head_dim of the model, "
                                     "found ",
                                     queries.size(), "; send all of them or none"));
  }
  if (hints.entries.empty()) return absl::OkStatus();
  if (hints.unit_tokens != 1 && hints.unit_tokens != bounds.block_tokens) {
    return InvalidField("hints.unit_tokens",
                        absl::StrCat("expected 1 or block_tokens (", bounds.block_tokens,
                                     "), found ", hints.unit_tokens));
  }
  for (size_t i = 0; i < hints.entries.size(); ++i) {
    const SelectionHints::Entry& entry = hints.entries[i];
    const std::string field = absl::StrCat("hints.entries[", i, "]");
    SLUICE_RETURN_IF_ERROR(
        CheckBelow(field + ".layer", entry.layer, bounds.layers, "the model's layers"));
    if (entry.kv_head.has_value()) {
      SLUICE_RETURN_IF_ERROR(
          CheckBelow(field + ".kv_head", *entry.kv_head, bounds.kv_heads, "the model's KV heads"));
    }
    if (entry.position.has_value()) {
      SLUICE_RETURN_IF_ERROR(CheckBelow(field + ".position", *entry.position, bounds.context_length,
                                        "the tokens whose caches were sent"));
    }
    SLUICE_RETURN_IF_ERROR(CheckUnits(field + ".units", entry.units, hints.unit_tokens, bounds));
  }
  return absl::OkStatus();
}

SelectionHints HintsOf(const SelectionHints& hints, const HintPart& part) {
  SelectionHints out;
  out.unit_tokens = hints.unit_tokens;
  for (const SelectionHints::Entry& entry : hints.entries) {
    const uint32_t head = entry.kv_head.value_or(part.first);
    if (part.count > 0 && (head < part.first || head - part.first >= part.count)) continue;
    out.entries.push_back(entry);
    if (entry.kv_head.has_value()) out.entries.back().kv_head = head - part.first;
  }
  if (part.count == 0) {
    out.queries = hints.queries;
    return out;
  }
  const auto row = static_cast<ptrdiff_t>(size_t{part.query_heads} * part.head_dim);
  const auto from = static_cast<ptrdiff_t>(size_t{part.first_query} * part.head_dim);
  const auto own = static_cast<ptrdiff_t>(size_t{part.query_count} * part.head_dim);
  const auto& queries = hints.queries;
  for (auto at = queries.begin(); queries.end() - at >= row && row > 0; at += row) {
    out.queries.insert(out.queries.end(), at + from, at + from + own);
  }
  return out;
}

HintedUnits::HintedUnits(const SelectionHints& hints, int64_t unit_tokens, int64_t end)
    : hint_tokens_(hints.unit_tokens),
      unit_tokens_(unit_tokens),
      taken_by_(static_cast<size_t>(std::max<int64_t>(end, 0)), 0) {
  for (const SelectionHints::Entry& entry : hints.entries) order_.push_back(&entry);
  std::stable_sort(order_.begin(), order_.end(),
                   [](const SelectionHints::Entry* a, const SelectionHints::Entry* b) {
                     return a->layer != b->layer ? a->layer < b->layer : RowOf(*a) > RowOf(*b);
                   });
}

void HintedUnits::Append(uint32_t layer, uint32_t kv_head, size_t most,
                         std::vector<int32_t>* taken) {
  ++call_;
  const auto take = [this](int64_t unit) {
    uint32_t& by = taken_by_[static_cast<size_t>(unit)];
    return std::exchange(by, call_) != call_;
  };
  const auto end = static_cast<int64_t>(taken_by_.size());
  for (const int32_t unit : *taken) {
    if (unit < end) take(unit);
  }
  auto entry = std::lower_bound(
      order_.begin(), order_.end(), layer,
      [](const SelectionHints::Entry* e, uint32_t of_layer) { return e->layer < of_layer; });
  size_t appended = 0;
  for (; entry != order_.end() && (*entry)->layer == layer; ++entry) {
    if ((*entry)->kv_head.value_or(kv_head) != kv_head) continue;
    for (const uint32_t hinted : (*entry)->units) {
      const int64_t first = hinted * hint_tokens_ / unit_tokens_;
      const int64_t last = ((hinted + 1) * hint_tokens_ - 1) / unit_tokens_;
      for (int64_t unit = first; unit <= last && unit < end; ++unit) {
        if (appended == most) return;
        if (!take(unit)) continue;
        taken->push_back(static_cast<int32_t>(unit));
        ++appended;
      }
    }
  }
}

}  // namespace sluice
