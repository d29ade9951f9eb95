#include <algorithm>

#include "kernels/reference/latent.h"
#include "kernels/reference/reference.h"

namespace sluice::kernels::reference {

void IndexAppend(const IndexAppendParams& p, Worker worker) {
  const PagedIndexKeys& c = p.cache;
  const bool packed = c.type == DType::kFloat8E4M3;
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    if (p.slots[r] < 0) continue;
    const float* k = p.k + r * p.k_stride;
    std::vector<double> x(k, k + kIndexDim);
    double mean = 0, variance = 0;
    for (double v : x) mean += v / kIndexDim;
    for (double v : x) variance += (v - mean) * (v - mean) / kIndexDim;
    for (size_t i = 0; i < x.size(); ++i) {
      x[i] = (x[i] - mean) / std::sqrt(variance + double{p.epsilon}) * double{p.norm_weight[i]} +
             double{p.norm_bias[i]};
    }
    RotateHalves(x.data(), p.rope_dim, p.cos_sin + r * p.rope_dim);
    if (packed) Hadamard(x.data());
    // Writes the elements, and the scale of the packed form, to the cache, to `written`, or to
    // both.
    const auto put = [&](char* elements, char* scale_at) {
      if (packed) {
        const float scale = Quantize(x.data(), kIndexDim, reinterpret_cast<uint8_t*>(elements));
        __builtin_memcpy(scale_at, &scale, 4);
        return;
      }
      for (size_t i = 0; i < x.size(); ++i) Put(elements, c.type, static_cast<int64_t>(i), x[i]);
    };
    const int64_t slot = p.slots[r], position = p.positions[r];
    if (char* base = static_cast<char*>(c.base); base != nullptr) {
      put(base + IndexKeyOffset(c, slot, position), base + IndexScaleOffset(c, slot, position));
    }
    if (char* written = static_cast<char*>(p.written); written != nullptr) {
      written += r * IndexKeyBytes(c.type);
      put(written, written + kIndexDim);
    }
  }
}

void IndexQuery(const IndexQueryParams& p, Worker worker) {
  const Range mine = Share(int64_t{p.rows} * p.heads, worker);
  for (int64_t item = mine.begin; item < mine.end; ++item) {
    const int64_t r = item / p.heads, h = item % p.heads;
    const float* q = p.q + item * kIndexDim;
    std::vector<double> x(q, q + kIndexDim);
    RotateHalves(x.data(), p.rope_dim, p.cos_sin + r * p.rope_dim);
    double weight = double{p.weights[r * p.weights_stride + h]} * double{p.weight_scale};
    if (p.type == DType::kFloat8E4M3) {
      Hadamard(x.data());
      const float scale =
          Quantize(x.data(), kIndexDim, static_cast<uint8_t*>(p.out) + item * kIndexDim);
      weight *= double{scale};
    } else {
      for (size_t i = 0; i < x.size(); ++i) {
        static_cast<float*>(p.out)[item * kIndexDim + static_cast<int64_t>(i)] =
            static_cast<float>(x[i]);
      }
    }
    p.out_weights[item] = static_cast<float>(weight);
  }
}

void IndexLogits(const IndexLogitsParams& p, Worker worker) {
  const bool packed = p.cache.type == DType::kFloat8E4M3;
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    if (p.slots[r] < 0) continue;
    std::vector<double> q(static_cast<size_t>(p.heads * kIndexDim));
    for (size_t i = 0; i < q.size(); ++i) {
      const int64_t at = r * p.heads * kIndexDim + static_cast<int64_t>(i);
      q[i] = packed ? E4M3ToFloat(static_cast<const uint8_t*>(p.q)[at])
                    : static_cast<const float*>(p.q)[at];
    }
    for (int64_t t = 0; t <= p.positions[r]; ++t) {
      const std::vector<double> k = IndexKeyOf(p.cache, p.slots[r], t);
      double score = 0;
      for (int64_t h = 0; h < p.heads; ++h) {
        double dot = 0;
        for (size_t i = 0; i < k.size(); ++i) {
          dot += q[static_cast<size_t>(h * kIndexDim) + i] * k[i];
        }
        score += double{p.weights[r * p.heads + h]} * std::max(dot, 0.0);
      }
      p.scores[r * p.score_stride + t] = static_cast<float>(score);
    }
  }
}

}  // namespace sluice::kernels::reference
