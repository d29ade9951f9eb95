// The queries of prompts' last rows, from which a policy learns what a sequence will look for
// before its first decode row. They are known where the last row of the prompt was computed on this
// node, as the rows of a second turn are, or where the prefill node's hints have them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "src/attention/offload/prompt_queries.h"
#include "src/attention/policy_options.h"
#include "src/kv/selection_hints.h"

namespace sluice {

// Only the engine's thread may call it.
class FirstQueries {
 public:
  // RESOURCE_EXHAUSTED: there is no memory for the queries.
  static absl::StatusOr<std::unique_ptr<FirstQueries>> Create(const PolicyOptions& options);

  // Collects the queries of prompt rows, and keeps them where of() says.
  PromptQueries& prompts() { return *prompts_; }
  // Returns the queries of a layer in device memory, [slots][heads][head_dim].
  float* of(int layer) const { return prompts_->Of(layer, 0, 0); }
  float* OfSlot(int layer, int slot) const { return of(layer) + slot * layer_values(); }

  // Ends the slot's prompt of `tokens` tokens. Queries that were computed here go before those of
  // `hints`, which do not count if one of them is not finite. REQUIRES: no warm-up of the slot is
  // under way.
  void EndPrompt(int slot, int64_t tokens, const SelectionHints& hints);
  // Returns whether the queries of the slot's prompt are known.
  bool Has(int slot) const { return from_[static_cast<size_t>(slot)] != From::kNone; }
  // Enqueues that the slot's queries of a layer lie where of() says, if they come from hints. If
  // `labelled` [kv_heads] is not null, the position whose queries they are goes there, or -1 if
  // none are known.
  void Put(Stream& stream, int layer, int slot, int32_t* labelled) const;

 private:
  enum class From : uint8_t { kNone, kPrompt, kHints };

  explicit FirstQueries(const PolicyOptions& options);
  int64_t layer_values() const { return heads_ * head_dim_; }

  const int64_t layers_, heads_, kv_heads_, head_dim_;
  std::vector<From> from_;  // by slot
  std::unique_ptr<PromptQueries> prompts_;
  Buffer hinted_;     // float [slots][layers][heads][head_dim], pinned
  Buffer positions_;  // int32 [slots][kv_heads], pinned
};

}  // namespace sluice
