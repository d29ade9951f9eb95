// Runs a model with latent caches step by step with the tokens that the test dictates, over caches
// that the test can read and write. It shows the logits and the selections.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "src/device/device.h"
#include "src/model/model.h"
#include "tests/fixtures/fixtures.h"
#include "tests/parity/plain_latent_policy.h"

namespace sluice::testing {

class LatentTeacher {
 public:
  LatentTeacher(const std::string& model_dir, const std::string& kernels, DType kv_dtype,
                const std::string& load_format = "auto");

  // Begins a sequence: its prompt and the tokens that will be dictated after it.
  void Begin(const std::vector<int32_t>& tokens);
  // Computes tokens [position, position + count) and returns the logits of the last one, [vocab].
  // `padding` rows of no sequence follow them.
  std::vector<float> Step(int position, int count, bool generates, int padding = 0);
  // Returns what the last row of the last step attended to in a layer, ascending. REQUIRES: the
  // model has an indexer.
  std::vector<int32_t> Selected(int layer);

  // Returns that row's index scores of positions [0, count).
  std::vector<float> Scores(int layer, int count);

  // Forces what one-row steps attend to from now on, by layer. Empty: the indexer selects.
  void ForceSelection(const std::vector<std::vector<int32_t>>& lists) {
    policy_->ForceSelection(lists);
  }

  // All caches, as bytes, [layer][kind]. Two teachers of one model and kv_dtype have the same
  // layout.
  std::vector<std::string> Caches();
  void SetCaches(const std::vector<std::string>& caches);
  // Writes a golden prompt's caches, in the form of the model's caches.
  void SetGolden(const fixtures::GoldenCase& golden);

  const ModelConfig& config() const { return model_->config(); }

 private:
  std::string Read(const Buffer& from);
  void Write(const Buffer& to, const std::string& bytes);
  void Finish();

  std::unique_ptr<Device> device_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<PlainLatentPolicy> policy_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> done_;
  Buffer tokens_, rows_, logits_;
  int last_row_ = 0;
};

}  // namespace sluice::testing
