// TokenBytes is the id-to-bytes direction of a tokenizer. It serves to match stop strings against
// generated tokens. It is immutable once loaded, so any thread may read it.
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

  // Returns the bytes that token `id` stands for, including added and special tokens. Returns
  // nothing for an id that the vocabulary lacks, such as a negative one. A first token's leading
  // space is kept: a byte-fallback decoder strips it from a whole text, which is no property of a
  // token.
  const std::string& Bytes(int32_t id) const;
  // Returns one more than the largest id.
  int32_t size() const { return static_cast<int32_t>(bytes_.size()); }

 private:
  TokenBytes() = default;

  std::vector<std::string> bytes_;
};

}  // namespace sluice
