// The layout of AnchorStatisticsParams::scratch, which the CPU's paths and the CUDA path share, and
// sums of moments that lie in it.
//
// A *unit* is 16 tokens from a multiple of 16 on: a block of level 0, or as many tokens of the sink
// or of the local ones, of which the last unit may lack some. No unit straddles two segments. With
// s_i as the scores of a unit's tokens for a query head, its *peak* is the largest s_i, its weight
// is the sum of exp(s_i - peak), and its values are the sum of exp(s_i - peak) v_i. Every unit has
// a peak of its own, so that the weights of units with low scores do not vanish in float32.
#pragma once

#include <cstdint>

#include "kernels/fluxion_params.h"

namespace sluice::kernels {

inline constexpr int32_t kAnchorUnitTokens = 16;
// Sums over tokens are made for splits of this many tokens, which are added up later.
inline constexpr int32_t kAnchorSplitTokens = 512;

// The mean of some values, and the sums of the powers of what they differ from it.
struct AnchorMoments {
  double mean = 0, second = 0, third = 0, fourth = 0;
};

// A query head's largest score, the length of its output over all tokens, and of that over the
// default set.
struct AnchorOutput {
  double largest, length, resident, unused;
};

// Offsets in bytes of the arrays of one row.
struct AnchorLayout {
  int32_t units = 0, splits = 0, blocks = 0;
  int64_t kv_moments = 0;  // AnchorMoments [kv_heads][splits][2]: of the lengths of K, V
  int64_t z_moments = 0;   // AnchorMoments [heads][splits]: of q k
  int64_t heads = 0;       // AnchorOutput [heads]
  int64_t outputs = 0;     // double [heads][head_dim]: the output over all tokens
  int64_t order = 0;       // uint64_t [heads][blocks]: of all levels, level 0 first
  int64_t values = 0;      // float [heads][units][head_dim]
  int64_t peaks = 0;       // float [heads][units]
  int64_t weights = 0;     // float [heads][units]
  int64_t kv_sums = 0;     // float [kv_heads][splits][2][head_dim]: of K, V in the cpu segment
  int64_t bytes = 0;
};

// Functions have internal linkage for the reason that scalar.h gives.
namespace {

// Returns the sums about another value, `mean`, of `count` values.
constexpr AnchorMoments Moved(const AnchorMoments& m, double count, double mean) {
  const double by = m.mean - mean;
  return {mean, m.second + count * by * by, m.third + 3 * by * m.second + count * by * by * by,
          m.fourth + 4 * by * m.third + 6 * by * by * m.second + count * by * by * by * by};
}

// Returns the place of a level's first block in an array of the blocks of all levels.
constexpr int32_t AnchorBlocksBefore(int32_t units, int32_t level) {
  int32_t blocks = 0;
  for (int32_t l = 0; l < level; ++l) blocks += ((units - 1) >> l) + 1;
  return blocks;
}

constexpr AnchorLayout AnchorLayoutOf(int64_t tokens, int64_t heads, int64_t kv_heads,
                                      int64_t head_dim) {
  AnchorLayout out;
  out.units = static_cast<int32_t>((tokens - 1) / kAnchorUnitTokens + 1);
  out.splits = static_cast<int32_t>((tokens - 1) / kAnchorSplitTokens + 1);
  out.blocks = AnchorBlocksBefore(out.units, kFluxionLevels);
  // Numbers of 8 bytes come first, so that all are aligned.
  out.z_moments = out.kv_moments + kv_heads * out.splits * 2 * int64_t{sizeof(AnchorMoments)};
  out.heads = out.z_moments + heads * out.splits * int64_t{sizeof(AnchorMoments)};
  out.outputs = out.heads + heads * int64_t{sizeof(AnchorOutput)};
  out.order = out.outputs + heads * head_dim * 8;
  out.values = out.order + heads * out.blocks * 8;
  out.peaks = out.values + heads * out.units * head_dim * 4;
  out.weights = out.peaks + heads * out.units * 4;
  out.kv_sums = out.weights + heads * out.units * 4;
  out.bytes = out.kv_sums + kv_heads * out.splits * 2 * head_dim * 4;
  return out;
}

constexpr bool AnchorLayoutFits(int64_t tokens, int64_t heads, int64_t kv_heads, int64_t head_dim) {
  return AnchorLayoutOf(tokens, heads, kv_heads, head_dim).bytes <=
         AnchorScratchBytes(tokens, heads, head_dim);
}
static_assert(AnchorLayoutFits(1, 1, 1, 16) && AnchorLayoutFits(1, 64, 64, 256));
static_assert(AnchorLayoutFits(17, 3, 3, 256) && AnchorLayoutFits(513, 1, 1, 256));
static_assert(AnchorLayoutFits(1025, 1, 1, 16) && AnchorLayoutFits(131073, 8, 8, 256));
static_assert(AnchorLayoutFits(int64_t{1} << 20, 32, 32, 256));

// Moments of values that come in parts.
class AnchorSums {
 public:
  void Add(const float* x, int64_t count) {
    if (count == 0) return;
    const auto more = static_cast<double>(count);
    AnchorMoments part;
    for (int64_t i = 0; i < count; ++i) part.mean += double{x[i]};
    part.mean /= more;
    for (int64_t i = 0; i < count; ++i) {
      const double off = double{x[i]} - part.mean, square = off * off;
      part.second += square;
      part.third += square * off;
      part.fourth += square * square;
    }
    const double mean = sums_.mean + (part.mean - sums_.mean) * (more / (count_ + more));
    const AnchorMoments a = Moved(sums_, count_, mean), b = Moved(part, more, mean);
    sums_ = {mean, a.second + b.second, a.third + b.third, a.fourth + b.fourth};
    count_ += more;
  }

  // Writes mean, variance, skewness and kurtosis of the values times `factor`.
  void Put(double factor, float* out) const {
    for (int i = 0; i < 4; ++i) out[i] = 0;
    if (count_ == 0) return;
    const double variance = sums_.second / count_;
    out[0] = static_cast<float>(sums_.mean * factor);
    out[1] = static_cast<float>(variance * factor * factor);
    if (!(variance * factor > 0)) return;
    out[2] = static_cast<float>(sums_.third / count_ / (variance * __builtin_sqrt(variance)));
    out[3] = static_cast<float>(sums_.fourth / count_ / (variance * variance));
  }

 private:
  double count_ = 0;
  AnchorMoments sums_;
};

// The arrays in the scratch of one row.
struct AnchorArrays {
  AnchorArrays(const AnchorStatisticsParams& p, int64_t tokens)
      : dim(p.cache.head_dim),
        layout(AnchorLayoutOf(tokens, p.heads, p.cache.kv_heads, dim)),
        base(static_cast<char*>(p.scratch)) {}

  AnchorOutput& Output(int64_t head) const { return At<AnchorOutput>(layout.heads)[head]; }
  double* O(int64_t head) const { return At<double>(layout.outputs) + head * dim; }
  uint64_t* Order(int64_t head) const { return At<uint64_t>(layout.order) + head * layout.blocks; }
  float* Peaks(int64_t head) const { return At<float>(layout.peaks) + head * layout.units; }
  float* Weights(int64_t head) const { return At<float>(layout.weights) + head * layout.units; }
  float* Values(int64_t head, int64_t unit) const {
    return At<float>(layout.values) + (head * layout.units + unit) * dim;
  }
  template <typename T>
  T* At(int64_t offset) const {
    return reinterpret_cast<T*>(base + offset);
  }

  const int64_t dim;
  const AnchorLayout layout;
  char* const base;
};

}  // namespace
}  // namespace sluice::kernels
