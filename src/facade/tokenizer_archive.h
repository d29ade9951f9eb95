// Packs a model directory's tokenizer as one zip archive, for gateways that do not have it.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace sluice {

struct TokenizerArchive {
  std::string zip;     // members are stored, not compressed
  std::string sha256;  // of `zip`, in 64 hexadecimal digits
};

// Packs the files of `directory` that make a tokenizer, as far as they are there: tokenizer.json,
// tokenizer_config.json, special_tokens_map.json, chat_template.jinja, config.json and
// generation_config.json. The same files give the same bytes.
//   NOT_FOUND            there is no tokenizer.json
//   RESOURCE_EXHAUSTED   the files have more than kMaxTokenizerBytes
absl::StatusOr<TokenizerArchive> MakeTokenizerArchive(const std::string& directory);

}  // namespace sluice
