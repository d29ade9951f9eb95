// Decides after each output token whether a sequence is over. Pure except for the text that it
// remembers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace sluice {

class StopConditions {
 public:
  // `stop_ids` has the EOS ids and the request's own. `stop_strings` are searched in the bytes of
  // the output tokens, and the first to be completed ends the sequence. Nothing stops the sequence
  // before `min_tokens` tokens.
  StopConditions(std::vector<int32_t> stop_ids, std::vector<std::string> stop_strings,
                 uint32_t min_tokens);

  struct Match {
    std::optional<int32_t> token_id;
    std::optional<std::string> text;
  };
  // Takes output token `id` with its bytes, which are null if the model has no tokenizer.
  std::optional<Match> Take(int32_t id, const std::string* bytes);

  const std::vector<int32_t>& stop_ids() const { return stop_ids_; }

 private:
  std::vector<int32_t> stop_ids_;
  std::vector<std::string> stop_strings_;
  uint32_t min_tokens_;
  size_t longest_ = 0;
  uint32_t taken_ = 0;
  std::string tail_;  // the last longest_ - 1 bytes of output
};

}  // namespace sluice
