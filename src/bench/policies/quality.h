// How far a policy's logits are from those of another on the same text, and whether a greedy decode
// finds what was hidden in one. Pure arithmetic, and the file of texts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace sluice::bench {

// What is kept of one step's logits, natural logarithms.
struct StepLogits {
  std::vector<float> log_probabilities;  // [vocab]
  int32_t top = 0;                       // lowest id among equals
};
StepLogits NormalizeLogits(absl::Span<const float> logits);

// Sums over steps that were given the same tokens.
class Distance {
 public:
  // `next`: the text's own next token.
  void Add(const StepLogits& reference, const StepLogits& found, int32_t next);
  void Add(const Distance& other);

  int64_t steps() const { return steps_; }
  double top1_agreement() const;        // share of steps with the same most probable token
  double mean_kl() const;               // sum p_reference log(p_reference / p_found), nats a step
  double perplexity() const;            // of the text, as found
  double reference_perplexity() const;  // as the reference has it
  double perplexity_change() const { return perplexity() / reference_perplexity() - 1; }

 private:
  int64_t steps_ = 0, agree_ = 0;
  double kl_ = 0, nll_ = 0, reference_nll_ = 0;
};

// Texts as token ids, made by `tools/sluice quality-texts`: C++ has no tokenizer.
struct QualityTexts {
  struct Text {
    std::string name;
    std::vector<int32_t> ids;
  };
  struct Passkey {
    std::string name;
    std::vector<int32_t> ids;     // text, and the question
    std::vector<int32_t> answer;  // what should follow
  };
  std::vector<Text> texts;
  std::vector<Passkey> passkeys;
};
// INVALID_ARGUMENT says what is wrong; `vocab`: ids are below it.
absl::StatusOr<QualityTexts> ParseQualityTexts(const std::string& json, int vocab);
absl::StatusOr<QualityTexts> ReadQualityTexts(const std::string& path, int vocab);

}  // namespace sluice::bench
