// Drafts by multi-token prediction, on the host's side.
#include "src/engine/mtp_drafter.h"

#include <algorithm>

#include "kernels/draft_params.h"
#include "src/engine/guess_score.h"

namespace sluice {
namespace {

class MtpSequence : public SequenceDrafter {
 public:
  MtpSequence() { drafts_.reserve(kernels::kMaxDeviceDrafts); }

  void Follow(absl::Span<const int32_t> tokens) override { known_ = tokens.size(); }

  void Learn(absl::Span<const int32_t> tokens, absl::Span<const int32_t> drafts) override {
    if (!drafts_.empty() && behind_ < tokens.size()) score_.Add(tokens[behind_] == drafts_[0]);
    drafts_.assign(drafts.begin(), drafts.end());
    behind_ = tokens.size();
  }

  // The step that chooses the next token brings drafts along.
  bool Expects() const override { return score_.good(); }

  void Propose(int most, std::vector<int32_t>* drafts) const override {
    drafts->clear();
    if (!score_.good() || behind_ != known_) return;
    const size_t count = std::min(drafts_.size(), static_cast<size_t>(most));
    drafts->assign(drafts_.begin(), drafts_.begin() + static_cast<std::ptrdiff_t>(count));
  }

 private:
  size_t known_ = 0;             // tokens of the last Follow
  std::vector<int32_t> drafts_;  // of the tokens behind the first behind_ ones
  size_t behind_ = 0;
  GuessScore score_;
};

class MtpDrafter : public Drafter {
 public:
  const char* name() const override { return "mtp"; }
  bool on_device() const override { return true; }
  std::unique_ptr<SequenceDrafter> Begin(int64_t) override {
    return std::make_unique<MtpSequence>();
  }
};

}  // namespace

std::unique_ptr<Drafter> NewMtpDrafter() { return std::make_unique<MtpDrafter>(); }

}  // namespace sluice
