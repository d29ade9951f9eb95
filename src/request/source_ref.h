// Says where a prompt's caches are held. A prefill node hands it to a decode node through the
// router, as message v1.KvSourceRef or as a text that routers pass on unread.
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
  std::string prompt_digest;      // PromptDigest of the prompt; empty: not given
  std::string model_fingerprint;  // empty: not given
  // Stands in place of source_id: the number under which the prefill leg promised the prompt, which
  // may not be computed yet (KvSource.AwaitPrompt). Only requests have it; it is never written
  // down.
  std::optional<uint64_t> room = std::nullopt;
  bool empty() const { return address.empty() && source_id.empty(); }
};

// The name of this kind of handoff. Gateways pair a prefill node with a decode node whose connector
// and block size are the same.
inline constexpr char kSourceConnector[] = "SluiceConnector";

// Returns SHA-256 over the ids, each as 4 bytes with the lowest first, in 64 hexadecimal digits.
std::string PromptDigest(absl::Span<const int32_t> prompt);

// Returns INVALID_ARGUMENT naming the field ("source.source_id") if this cannot be a reference. The
// code that calls the address checks it.
absl::Status CheckSourceRef(const SourceRef& ref, const std::string& field);

// Returns {"connector": "SluiceConnector", "address": "host:port", "source_id": ...,
// "prompt_digest": ..., "model_fingerprint": ...}.
std::string ToJson(const SourceRef& ref);
// Parses such a text. INVALID_ARGUMENT names the field, for example
// "kv_transfer_params_json.source_id", if the text is no JSON object, is another connector's
// handoff, or has a field that is missing, unknown or wrong.
absl::StatusOr<SourceRef> SourceRefFromJson(const std::string& json, const std::string& field);

}  // namespace sluice
