// The id-to-bytes direction of a tokenizer, to match stop strings against generated tokens.
// Immutable once loaded: any thread may read it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace sluice {

class TokenBytes {
 public:
  // Reads a tokenizer.json (Hugging Face tokenizers). Two kinds of decoder are known: byte-level
  // (the GPT-2 alphabet: Llama 3, Qwen, SmolLM) and byte-fallback ("<0x0A>", U+2581 for a space:
  // Llama 2).
  //   NOT_FOUND         no such file
  //   INVALID_ARGUMENT  not JSON, or a key is missing or wrong
  //   UNIMPLEMENTED     another kind of decoder
  static absl::StatusOr<TokenBytes> Load(const std::string& path);

  // The bytes that token `id` stands for, added and special tokens included. Empty for an id that
  // the vocabulary lacks, negative ones among them. A first token's leading space is kept: what a
  // byte-fallback decoder strips from a whole text is not a property of a token.
  const std::string& Bytes(int32_t id) const;
  // One past the largest id.
  int32_t size() const { return static_cast<int32_t>(bytes_.size()); }

 private:
  TokenBytes() = default;

  std::vector<std::string> bytes_;
};

}  // namespace sluice
