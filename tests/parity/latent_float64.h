// The DeepSeek-V3 family in float64, written from the published formulas and apart from src/: every
// layer over a whole sequence, with each head's keys and values made from the latent entries, and
// attention to everything before. It serves sequences of at most index_topk tokens, where that is
// what an indexer selects.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "src/model/model_config.h"
#include "src/model/weight_source.h"

namespace sluice::testing {

class LatentFloat64 {
 public:
  using Row = std::vector<double>;

  LatentFloat64(ModelConfig config, std::unique_ptr<WeightSource> weights);

  // Returns the hidden states of all tokens after the model's last norm.
  std::vector<Row> Hidden(const std::vector<int32_t>& tokens);
  // Returns the model's logits of a row of Hidden.
  Row Logits(const Row& hidden);

  // Returns the next-token layer's output for rows [0, n): row p has the token next[p] and the
  // hidden state hidden[p]. Its logits are those of DraftLogits.
  std::vector<Row> Draft(const std::vector<int32_t>& next, const std::vector<Row>& hidden);
  Row DraftLogits(const Row& output);

 private:
  struct Matrix {
    int64_t rows = 0, cols = 0;
    std::vector<double> values;
  };
  const Matrix& Weight(const std::string& name, int64_t rows, int64_t cols);
  const Row& Vector(const std::string& name, int64_t n);
  static Row Times(const Matrix& m, const Row& x, int64_t first_row = 0, int64_t rows = -1);
  Row Norm(const Row& x, const Row& weight, double epsilon) const;
  Row HiddenNorm(const Row& x, const std::string& name);
  Row Embedding(int32_t token);
  // Turns pairs of neighbours by the angles of `position`.
  void Turn(int64_t position, double* values) const;
  void Layer(int layer, std::vector<Row>* rows);
  std::vector<Row> Attention(const std::string& prefix, const std::vector<Row>& rows);
  Row Ffn(const std::string& prefix, int64_t inner, const Row& x);
  Row Experts(const std::string& prefix, const Row& x);

  const ModelConfig config_;
  const LatentConfig& latent_;
  const std::unique_ptr<WeightSource> weights_;
  std::vector<float> frequencies_;
  std::map<std::string, Matrix> matrices_;
  std::map<std::string, Row> vectors_;
};

}  // namespace sluice::testing
