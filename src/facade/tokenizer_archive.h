// A model directory's tokenizer as one zip archive, for gateways that do not have it.
#pragma once

#include <string>

#include "absl/status/statusor.h"

namespace sluice {

struct TokenizerArchive {
  std::string zip;     // members are stored, not compressed
  std::string sha256;  // of `zip`, 64 hexadecimal digits
};

// The files of `directory` that make a tokenizer: tokenizer.json, tokenizer_config.json,
// special_tokens_map.json, chat_template.jinja, config.json and generation_config.json, those of
// them that are there. The same files give the same bytes.
//   NOT_FOUND            no tokenizer.json
//   RESOURCE_EXHAUSTED   they have more than kMaxTokenizerBytes
absl::StatusOr<TokenizerArchive> MakeTokenizerArchive(const std::string& directory);

}  // namespace sluice
