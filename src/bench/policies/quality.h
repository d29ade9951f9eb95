// Measures how far a policy's logits are from those of another on the same text, and reads the file
// of texts. Pure arithmetic apart from reading the file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace sluice::bench {

// The log-probabilities of one step, natural logarithms.
struct StepLogits {
  std::vector<float> log_probabilities;  // [vocab]
  int32_t top = 0;                       // The lowest id among equals.
};
StepLogits NormalizeLogits(absl::Span<const float> logits);

// Sums over steps that were given the same tokens.
class Distance {
 public:
  // `next` is the text's own next token.
  void Add(const StepLogits& reference, const StepLogits& found, int32_t next);
  void Add(const Distance& other);

  int64_t steps() const { return steps_; }
  double top1_agreement() const;  // Share of steps with the same most probable token.
  // sum p_reference log(p_reference / p_found), in nats per step.
  double mean_kl() const;
  double perplexity() const;            // Perplexity of the text, by the found logits.
  double reference_perplexity() const;  // Perplexity by the reference's logits.
  double perplexity_change() const { return perplexity() / reference_perplexity() - 1; }

 private:
  int64_t steps_ = 0, agree_ = 0;
  double kl_ = 0, nll_ = 0, reference_nll_ = 0;
};

// Texts as token ids. `tools/sluice texts` makes them, because C++ has no tokenizer.
struct QualityTexts {
  struct Text {
    std::string name;
    std::string kind;  // licence, code, news, dialogue or given
    std::vector<int32_t> ids;
  };
  struct Passkey {
    std::string name;
    std::string kind;             // That of the text in which the key lies.
    std::string variant;          // single, multi or topic
    double depth = 0;             // Where the key lies, as a share of the text.
    std::vector<int32_t> ids;     // The text and the question.
    std::vector<int32_t> answer;  // The expected continuation.
  };
  std::vector<Text> texts;
  std::vector<Passkey> passkeys;
};
// INVALID_ARGUMENT says what is wrong. REQUIRES: ids are below `vocab`.
absl::StatusOr<QualityTexts> ParseQualityTexts(const std::string& json, int vocab);
absl::StatusOr<QualityTexts> ReadQualityTexts(const std::string& path, int vocab);

}  // namespace sluice::bench
