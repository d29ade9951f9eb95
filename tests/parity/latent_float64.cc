#include "tests/parity/latent_float64.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/model/rope.h"
#include "tests/support/or_fail.h"

namespace sluice::testing {
namespace {

double Dot(const double* a, const double* b, int64_t n) {
  return std::inner_product(a, a + n, b, 0.0);
}

void Add(const LatentFloat64::Row& from, LatentFloat64::Row* to, double weight = 1) {
  for (size_t i = 0; i < from.size(); ++i) (*to)[i] += weight * from[i];
}

}  // namespace

LatentFloat64::LatentFloat64(ModelConfig config, std::unique_ptr<WeightSource> weights)
    : config_(std::move(config)),
      latent_(*config_.latent),
      weights_(std::move(weights)),
      frequencies_(RopeInverseFrequencies(config_.rope, latent_.rope_dim)) {}

const LatentFloat64::Matrix& LatentFloat64::Weight(const std::string& name, int64_t rows,
                                                   int64_t cols) {
  const auto [it, inserted] = matrices_.try_emplace(name);
  if (inserted) {
    const MatrixView view = OrFail(weights_->Matrix(name, rows, cols));
    it->second = {rows, cols, std::vector<double>(static_cast<size_t>(rows * cols))};
    std::vector<float> row(static_cast<size_t>(cols));
    for (int64_t r = 0; r < rows; ++r) {
      view.FloatRow(r, row.data());
      std::copy(row.begin(), row.end(), it->second.values.begin() + r * cols);
    }
  }
  return it->second;
}

const LatentFloat64::Row& LatentFloat64::Vector(const std::string& name, int64_t n) {
  const auto [it, inserted] = vectors_.try_emplace(name);
  if (inserted) {
    const std::vector<float> values = OrFail(weights_->Vector(name, n));
    it->second.assign(values.begin(), values.end());
  }
  return it->second;
}

LatentFloat64::Row LatentFloat64::Times(const Matrix& m, const Row& x, int64_t first_row,
                                        int64_t rows) {
  if (rows < 0) rows = m.rows;
  Row out(static_cast<size_t>(rows));
  for (int64_t r = 0; r < rows; ++r) {
    out[static_cast<size_t>(r)] = Dot(m.values.data() + (first_row + r) * m.cols, x.data(), m.cols);
  }
  return out;
}

LatentFloat64::Row LatentFloat64::Norm(const Row& x, const Row& weight, double epsilon) const {
  const double mean = Dot(x.data(), x.data(), std::ssize(x)) / static_cast<double>(x.size());
  Row out(x.size());
  for (size_t i = 0; i < x.size(); ++i) out[i] = x[i] / std::sqrt(mean + epsilon) * weight[i];
  return out;
}

LatentFloat64::Row LatentFloat64::HiddenNorm(const Row& x, const std::string& name) {
  return Norm(x, Vector(name, config_.hidden_size), config_.rms_norm_eps);
}

LatentFloat64::Row LatentFloat64::Embedding(int32_t token) {
  const Matrix& table =
      Weight("model.embed_tokens.weight", config_.vocab_size, config_.hidden_size);
  const auto begin = table.values.begin() + token * table.cols;
  return {begin, begin + table.cols};
}

void LatentFloat64::Turn(int64_t position, double* values) const {
  const double factor = RopeAttentionFactor(config_.rope);
  for (size_t i = 0; i < frequencies_.size(); ++i) {
    const double angle = static_cast<double>(static_cast<float>(position) * frequencies_[i]);
    const double c = factor * std::cos(angle), s = factor * std::sin(angle);
    const double a = values[2 * i], b = values[2 * i + 1];
    values[2 * i] = a * c - b * s;
    values[2 * i + 1] = a * s + b * c;
  }
}

std::vector<LatentFloat64::Row> LatentFloat64::Attention(const std::string& prefix,
                                                         const std::vector<Row>& rows) {
  const int64_t hidden = config_.hidden_size, heads = config_.heads;
  const int64_t rank = latent_.rank, rope = latent_.rope_dim;
  const int64_t nope = latent_.nope_dim, v = latent_.v_dim, qk = nope + rope;
  const auto matrix = [&](const char* name, int64_t m, int64_t n) -> const Matrix& {
    return Weight(prefix + name, m, n);
  };
  std::vector<Row> queries, keys, values, turned, out;
  for (size_t t = 0; t < rows.size(); ++t) {
    const Row q = Norm(Times(matrix("q_a_proj.weight", latent_.q_rank, hidden), rows[t]),
                       Vector(prefix + "q_a_layernorm.weight", latent_.q_rank), 1e-6);
    queries.push_back(Times(matrix("q_b_proj.weight", heads * qk, latent_.q_rank), q));
    for (int64_t h = 0; h < heads; ++h)
      Turn(std::ssize(queries) - 1, &queries.back()[static_cast<size_t>(h * qk + nope)]);
    Row entry = Times(matrix("kv_a_proj_with_mqa.weight", rank + rope, hidden), rows[t]);
    turned.emplace_back(entry.begin() + rank, entry.end());
    Turn(static_cast<int64_t>(t), turned.back().data());
    entry.resize(static_cast<size_t>(rank));
    values.push_back(Times(matrix("kv_b_proj.weight", heads * (nope + v), rank),
                           Norm(entry, Vector(prefix + "kv_a_layernorm.weight", rank), 1e-6)));
  }
  for (size_t t = 0; t < rows.size(); ++t) {
    Row attended(static_cast<size_t>(heads * v));
    for (int64_t h = 0; h < heads; ++h) {
      const double* q = queries[t].data() + h * qk;
      Row p;
      for (size_t e = 0; e <= t; ++e) {
        p.push_back(latent_.softmax_scale * (Dot(q, values[e].data() + h * (nope + v), nope) +
                                             Dot(q + nope, turned[e].data(), rope)));
      }
      const double most = *std::max_element(p.begin(), p.end());
      for (double& one : p) one = std::exp(one - most);
      const double sum = std::accumulate(p.begin(), p.end(), 0.0);
      for (size_t e = 0; e <= t; ++e) {
        const double* from = values[e].data() + h * (nope + v) + nope;
        for (int64_t d = 0; d < v; ++d) {
          attended[static_cast<size_t>(h * v + d)] += p[e] / sum * from[d];
        }
      }
    }
    out.push_back(Times(matrix("o_proj.weight", hidden, heads * v), attended));
  }
  return out;
}

LatentFloat64::Row LatentFloat64::Ffn(const std::string& prefix, int64_t inner, const Row& x) {
  const int64_t hidden = config_.hidden_size;
  Row gate = Times(Weight(prefix + "gate_proj.weight", inner, hidden), x);
  const Row up = Times(Weight(prefix + "up_proj.weight", inner, hidden), x);
  for (size_t i = 0; i < gate.size(); ++i) gate[i] *= up[i] / (1 + std::exp(-gate[i]));
  return Times(Weight(prefix + "down_proj.weight", hidden, inner), gate);
}

LatentFloat64::Row LatentFloat64::Experts(const std::string& prefix, const Row& x) {
  const ExpertConfig& e = latent_.experts;
  Row scores = Times(Weight(prefix + "gate.weight", e.routed, config_.hidden_size), x);
  for (double& score : scores) score = 1 / (1 + std::exp(-score));
  Row choice = scores;
  Add(Vector(prefix + "gate.e_score_correction_bias", e.routed), &choice);
  const int size = e.routed / e.groups;
  const auto best = [](const Row& of, size_t k) {  // the k largest, lower numbers first
    std::vector<int> order(of.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int a, int b) {
      return of[static_cast<size_t>(a)] > of[static_cast<size_t>(b)];
    });
    order.resize(k);
    return order;
  };
  Row groups;
  for (int g = 0; g < e.groups; ++g) {
    Row of(choice.begin() + g * size, choice.begin() + (g + 1) * size);
    std::sort(of.rbegin(), of.rend());
    groups.push_back(of[0] + (size > 1 ? of[1] : 0));
  }
  const std::vector<int> open = best(groups, static_cast<size_t>(e.top_groups));
  for (int i = 0; i < e.routed; ++i) {
    if (std::find(open.begin(), open.end(), i / size) == open.end()) {
      choice[static_cast<size_t>(i)] = -1e30;
    }
  }
  const std::vector<int> chosen = best(choice, static_cast<size_t>(e.per_token));
  double sum = 0;
  for (const int i : chosen) sum += scores[static_cast<size_t>(i)];
  Row out(x.size());
  for (const int i : chosen) {
    const double weight = scores[static_cast<size_t>(i)] / (e.normalise ? sum + 1e-20 : 1);
    Add(Ffn(absl::StrCat(prefix, "experts.", i, "."), e.intermediate, x), &out, weight * e.scaling);
  }
  if (e.shared > 0) Add(Ffn(prefix + "shared_experts.", e.shared_size(), x), &out);
  return out;
}

void LatentFloat64::Layer(int layer, std::vector<Row>* rows) {
  const std::string prefix = absl::StrCat("model.layers.", layer, ".");
  std::vector<Row> normed;
  for (const Row& row : *rows) normed.push_back(HiddenNorm(row, prefix + "input_layernorm.weight"));
  const std::vector<Row> attended = Attention(prefix + "self_attn.", normed);
  for (size_t t = 0; t < rows->size(); ++t) {
    Row& row = (*rows)[t];
    Add(attended[t], &row);
    const Row x = HiddenNorm(row, prefix + "post_attention_layernorm.weight");
    Add(layer < latent_.dense_layers ? Ffn(prefix + "mlp.", config_.intermediate_size, x)
                                     : Experts(prefix + "mlp.", x),
        &row);
  }
}

std::vector<LatentFloat64::Row> LatentFloat64::Hidden(const std::vector<int32_t>& tokens) {
  std::vector<Row> rows;
  for (const int32_t token : tokens) rows.push_back(Embedding(token));
  for (int layer = 0; layer < config_.layers; ++layer) Layer(layer, &rows);
  for (Row& row : rows) row = HiddenNorm(row, "model.norm.weight");
  return rows;
}

LatentFloat64::Row LatentFloat64::Logits(const Row& hidden) {
  return Times(Weight("lm_head.weight", config_.vocab_size, config_.hidden_size), hidden);
}

std::vector<LatentFloat64::Row> LatentFloat64::Draft(const std::vector<int32_t>& next,
                                                     const std::vector<Row>& hidden) {
  const std::string prefix = absl::StrCat("model.layers.", config_.layers, ".");
  const Matrix& project =
      Weight(prefix + "eh_proj.weight", config_.hidden_size, 2 * int64_t{config_.hidden_size});
  std::vector<Row> rows;
  for (size_t p = 0; p < next.size(); ++p) {
    Row token = p == 0 ? Row(hidden[p].size()) : Embedding(next[p]);
    Row both = HiddenNorm(token, prefix + "enorm.weight");
    const Row state = HiddenNorm(hidden[p], prefix + "hnorm.weight");
    both.insert(both.end(), state.begin(), state.end());
    rows.push_back(Times(project, both));
  }
  Layer(config_.layers, &rows);
  return rows;
}

LatentFloat64::Row LatentFloat64::DraftLogits(const Row& output) {
  const std::string prefix = absl::StrCat("model.layers.", config_.layers, ".shared_head.");
  return Times(Weight(prefix + "head.weight", config_.vocab_size, config_.hidden_size),
               HiddenNorm(output, prefix + "norm.weight"));
}

}  // namespace sluice::testing
