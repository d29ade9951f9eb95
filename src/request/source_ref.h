// Where a prompt's caches are held: what a prefill node hands to a decode node through whoever
// routes, as message v1.KvSourceRef or as the text that routers pass on unread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace sluice {

struct SourceRef {
  std::string address;            // host:port of the KvSource
  std::string source_id;          // 32 hexadecimal digits
  std::string prompt_digest;      // PromptDigest of the prompt; empty: not said
  std::string model_fingerprint;  // empty: not said
  // In place of source_id: the number under which the prefill leg promised the prompt, which may
  // not be computed yet (KvSource.AwaitPrompt). Only in requests, never written down.
  std::optional<uint64_t> room = std::nullopt;
  bool empty() const { return address.empty() && source_id.empty(); }
};

// What both legs of a request call the connector of this kind of handoff.
inline constexpr char kSourceConnector[] = "SluiceConnector";

// SHA-256 over the ids, each as 4 bytes, the lowest first; 64 hexadecimal digits.
std::string PromptDigest(absl::Span<const int32_t> prompt);

// INVALID_ARGUMENT naming the field ("source.source_id") of a reference that cannot be one. The
// address is checked by who calls it.
absl::Status CheckSourceRef(const SourceRef& ref, const std::string& field);

// {"connector": "SluiceConnector", "address": "host:port", "source_id": ..., "prompt_digest": ...,
// "model_fingerprint": ...}
std::string ToJson(const SourceRef& ref);
// INVALID_ARGUMENT naming the field, as "kv_transfer_params_json.source_id": no JSON object,
// another connector's handoff, a field that is missing, unknown or wrong.
absl::StatusOr<SourceRef> SourceRefFromJson(const std::string& json, const std::string& field);

}  // namespace sluice
