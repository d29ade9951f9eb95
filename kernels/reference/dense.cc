#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels/reference/element.h"
#include "kernels/reference/reference.h"

namespace sluice::kernels::reference {
namespace {

// Computes x[i] * weight[i] / sqrt(mean(x^2) + eps), in place.
void NormaliseHead(std::vector<double>& x, const float* weight, double epsilon) {
  if (weight == nullptr) return;
  double sum = 0;
  for (double v : x) sum += v * v;
  const double factor = 1.0 / std::sqrt(sum / static_cast<double>(x.size()) + epsilon);
  for (size_t i = 0; i < x.size(); ++i) x[i] = x[i] * factor * double{weight[i]};
}

// Rotates the pair (i, i + half) by the row's angles; cos_sin is [half][2].
void Rotate(std::vector<double>& x, const float* cos_sin) {
  const size_t half = x.size() / 2;
  for (size_t i = 0; i < half; ++i) {
    const double c = cos_sin[2 * i], s = cos_sin[2 * i + 1];
    const double a = x[i], b = x[i + half];
    x[i] = a * c - b * s;
    x[i + half] = b * c + a * s;
  }
}

}  // namespace

void Embedding(const EmbeddingParams& p, Worker worker) {
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    float* out = p.out + r * p.table.k;
    for (int32_t i = 0; i < p.table.k; ++i) {
      out[i] = 0;
      if (p.slots[r] < 0) continue;
      const int32_t token = p.tokens[p.slots[r] * p.token_stride + p.positions[r]];
      if (token < 0 || token >= p.table.n) continue;
      out[i] = static_cast<float>(WeightValue(p.table, token, i));
    }
  }
}

namespace {

// Returns x + drift of a row of the look-ahead, and updates the drift of the layer before.
std::vector<double> AheadInput(const RmsNormParams& p, int64_t r) {
  const AheadNormParams& a = p.ahead;
  const float* const x = p.x + r * p.x_stride;
  std::vector<double> ahead(x, x + p.dim);
  const int32_t slot = a.slots == nullptr ? -1 : a.slots[r];
  const int64_t n = slot < 0 ? 0 : a.numbers[r];
  for (int32_t i = 0; i < p.dim; ++i) {
    if (slot >= 0 && n > 0 && a.drift != nullptr) {
      ahead[static_cast<size_t>(i)] += a.drift[slot * a.slot_stride + i];
    }
    if (a.before == nullptr) continue;
    float& before = a.before[r * p.dim + i];
    if (slot >= 0 && a.drift_before != nullptr) {
      float& drift = a.drift_before[slot * a.slot_stride + i];
      const double change = double{x[i]} - before;
      const double weight = std::max(double{kDriftWeight}, 1.0 / static_cast<double>(n + 1));
      drift = static_cast<float>(n == 0 ? change : drift + weight * (change - drift));
    }
    before = x[i];
  }
  return ahead;
}

}  // namespace

void RmsNorm(const RmsNormParams& p, Worker worker) {
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    const int64_t source = p.row_index != nullptr ? p.row_index[r] : r;
    const auto put = [&](std::vector<double> x, const float* weight, void* out) {
      if (source >= 0) NormaliseHead(x, weight, p.epsilon);
      for (int32_t i = 0; i < p.dim; ++i) {
        Put(out, p.out_type, r * p.dim + i, x[static_cast<size_t>(i)]);
      }
    };
    std::vector<double> x(static_cast<size_t>(p.dim), 0.0);
    if (source >= 0) std::copy_n(p.x + source * p.x_stride, p.dim, x.begin());
    put(std::move(x), p.weight, p.out);
    if (r >= p.ahead.rows) continue;
    std::vector<double> ahead = AheadInput(p, r);
    if (p.ahead.out != nullptr) put(std::move(ahead), p.ahead.weight, p.ahead.out);
  }
}

void Linear(const LinearParams& p, Worker worker) {
  const Range mine = Share(p.w.n, worker);
  for (int64_t j = mine.begin; j < mine.end; ++j) {
    const std::vector<double> w = WeightRow(p.w, j);
    for (int64_t r = 0; r < p.rows; ++r) {
      double sum = p.bias != nullptr ? p.bias[j] : 0.0;
      for (int64_t i = 0; i < p.w.k; ++i) {
        sum += Get(p.x, p.x_type, r * p.w.k + i) * w[static_cast<size_t>(i)];
      }
      float& y = p.y[r * p.w.n + j];
      y = static_cast<float>(p.accumulate ? sum + double{y} : sum);
    }
  }
}

void RopeTable(const RopeTableParams& p, Worker worker) {
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    for (int64_t i = 0; i < p.half_dim; ++i) {
      const float angle = static_cast<float>(p.positions[r]) * p.inv_freq[i];
      float* out = p.cos_sin + (r * p.half_dim + i) * 2;
      out[0] = static_cast<float>(double{p.scale} * std::cos(double{angle}));
      out[1] = static_cast<float>(double{p.scale} * std::sin(double{angle}));
    }
  }
}

void RopeAppend(const RopeAppendParams& p, Worker worker) {
  const PagedCache& c = p.cache;
  const int64_t dim = c.head_dim;
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    if (p.slots[r] < 0) continue;
    float* row = p.qkv + r * (p.heads + 2 * c.kv_heads) * dim;
    const float* cos_sin = p.cos_sin + r * dim;
    for (int64_t h = 0; h < p.heads + c.kv_heads; ++h) {
      const bool is_query = h < p.heads;
      float* head = row + h * dim;
      std::vector<double> x(head, head + dim);
      NormaliseHead(x, is_query ? p.q_norm : p.k_norm, p.epsilon);
      Rotate(x, cos_sin);
      const int64_t kv_head = h - p.heads;
      const int64_t key = is_query ? 0 : KeyIndex(c, p.slots[r], p.positions[r], kv_head);
      const int64_t copy = (r * c.kv_heads + kv_head) * 2 * dim;
      for (int64_t i = 0; i < dim; ++i) {
        if (is_query) {
          head[i] = static_cast<float>(x[static_cast<size_t>(i)]);
          continue;
        }
        const double k = x[static_cast<size_t>(i)];
        const float v = row[(p.heads + c.kv_heads + kv_head) * dim + i];
        Put(c.base, c.type, key + i, k);
        Put(c.base, c.type, key + int64_t{c.block_tokens} * dim + i, v);
        if (p.written == nullptr) continue;
        Put(p.written, c.type, copy + i, k);
        Put(p.written, c.type, copy + dim + i, v);
      }
    }
  }
}

void SiluMul(const SiluMulParams& p, Worker worker) {
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    for (int64_t i = 0; i < p.dim; ++i) {
      const double gate = p.gate_up[r * 2 * p.dim + i];
      const double up = p.gate_up[r * 2 * p.dim + p.dim + i];
      Put(p.out, p.out_type, r * p.dim + i, gate / (1.0 + std::exp(-gate)) * up);
    }
  }
}

}  // namespace sluice::kernels::reference
