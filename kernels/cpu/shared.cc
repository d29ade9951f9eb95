#include <cmath>

#include "kernels/cpu/cpu_tables.h"
#include "kernels/scalar.h"

namespace sluice::kernels::cpu {

void Embedding(const EmbeddingParams& p, Worker worker) {
  const int64_t hidden = p.table.k;
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    float* out = p.out + r * hidden;
    if (p.slots[r] < 0) {
      for (int64_t i = 0; i < hidden; ++i) out[i] = 0;
      continue;
    }
    const int64_t token = p.tokens[p.slots[r] * p.token_stride + p.positions[r]];
    // A row whose sampling failed left token -1. Its sequence has ended, and its rows are surplus.
    if (token < 0 || token >= p.table.n) {
      for (int64_t i = 0; i < hidden; ++i) out[i] = 0;
      continue;
    }
    const uint16_t* in = p.table.data + WeightIndex(p.table, token, 0);
    if (p.table.layout == WeightLayout::kRowMajor) {
      for (int64_t i = 0; i < hidden; ++i) out[i] = Bf16ToFloat(in[i]);
    } else {
      for (int64_t i = 0; i < hidden; ++i) {
        out[i] = Bf16ToFloat(in[i / 2 * (2 * kPanelColumns) + i % 2]);
      }
    }
  }
}

void RopeTable(const RopeTableParams& p, Worker worker) {
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    const float position = static_cast<float>(p.positions[r]);
    float* out = p.cos_sin + r * p.half_dim * 2;
    for (int64_t i = 0; i < p.half_dim; ++i) {
      // The angle is computed in double: positions reach 1e5 and more, where float32 argument
      // reduction loses digits.
      const double angle = position * p.inv_freq[i];
      out[2 * i] = static_cast<float>(double{p.scale} * std::cos(angle));
      out[2 * i + 1] = static_cast<float>(double{p.scale} * std::sin(angle));
    }
  }
}

}  // namespace sluice::kernels::cpu
