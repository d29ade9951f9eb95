// Rotation, quantisation and cache elements, which the operators of latent attention share.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/latent_layout.h"
#include "kernels/latent_scales.h"
#include "kernels/reference/element.h"

namespace sluice::kernels::reference {
namespace {

// Rotates the neighbours (2 i, 2 i + 1) of x[0, dim) by the row's angles; cos_sin is [dim / 2][2].
inline void RotatePairs(double* x, int64_t dim, const float* cos_sin) {
  for (int64_t i = 0; i < dim / 2; ++i) {
    const double c = cos_sin[2 * i], s = cos_sin[2 * i + 1];
    const double a = x[2 * i], b = x[2 * i + 1];
    x[2 * i] = a * c - b * s;
    x[2 * i + 1] = b * c + a * s;
  }
}

// Rotates the halves (i, i + dim / 2) of x[0, dim).
inline void RotateHalves(double* x, int64_t dim, const float* cos_sin) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const double c = cos_sin[2 * i], s = cos_sin[2 * i + 1];
    const double a = x[i], b = x[i + half];
    x[i] = a * c - b * s;
    x[i + half] = b * c + a * s;
  }
}

// Applies the Walsh-Hadamard transform to x[0, 128) in natural (Sylvester's) order, scaled by
// 128^-1/2.
inline void Hadamard(double* x) {
  std::vector<double> y(static_cast<size_t>(kIndexDim), 0.0);
  for (int32_t i = 0; i < kIndexDim; ++i) {
    for (int32_t j = 0; j < kIndexDim; ++j) {
      y[static_cast<size_t>(i)] += __builtin_parity(static_cast<unsigned>(i & j)) ? -x[j] : x[j];
    }
  }
  for (int32_t i = 0; i < kIndexDim; ++i) x[i] = y[static_cast<size_t>(i)] / std::sqrt(128.0);
}

// Returns the scale by which the largest magnitude of `count` values becomes e4m3's largest.
inline float LeastScale(const double* x, int64_t count) {
  double largest = 0;
  for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(x[i]));
  return E4M3Scale(static_cast<float>(largest));
}

inline void QuantizeBy(float scale, const double* x, int64_t count, uint8_t* out) {
  for (int64_t i = 0; i < count; ++i) {
    out[i] = FloatToE4M3(static_cast<float>(x[i] / double{scale}));
  }
}

// Writes `count` values as e4m3 and returns their scale.
inline float Quantize(const double* x, int64_t count, uint8_t* out) {
  const float scale = LeastScale(x, count);
  QuantizeBy(scale, x, count, out);
  return scale;
}

// Writes kPackedScaleTokens latent values and returns the scale whose result is the closest.
inline float QuantizeLatents(const double* x, uint8_t* out) {
  const float least = LeastScale(x, kPackedScaleTokens);
  float best = least;
  double best_error = std::numeric_limits<double>::infinity();
  for (int32_t candidate = 0; candidate < kLatentScales; ++candidate) {
    const float scale = least * LatentScaleFactor(candidate);
    QuantizeBy(scale, x, kPackedScaleTokens, out);
    double error = 0;
    for (int64_t i = 0; i < kPackedScaleTokens; ++i) {
      const double off = double{scale} * double{E4M3ToFloat(out[i])} - x[i];
      error += off * off;
    }
    if (!(error < best_error)) continue;
    best = scale;
    best_error = error;
  }
  QuantizeBy(best, x, kPackedScaleTokens, out);
  return best;
}

// Returns the elements of one entry.
inline std::vector<double> EntryOf(const PagedLatents& c, int64_t slot, int64_t entry) {
  const char* data = static_cast<const char*>(c.base) + EntryOffset(c, slot, entry);
  std::vector<double> x(static_cast<size_t>(c.rank + c.rope));
  for (int64_t i = 0; i < c.rank + c.rope; ++i) {
    double& value = x[static_cast<size_t>(i)];
    if (c.type != DType::kFloat8E4M3) {
      value = Get(data, c.type, i);
    } else if (i < c.rank) {
      float scale;
      __builtin_memcpy(&scale, data + kPackedScalesAt + i / kPackedScaleTokens * 4, 4);
      value = double{scale} * double{E4M3ToFloat(static_cast<uint8_t>(data[i]))};
    } else {
      value = Get(data + kPackedRopeAt, DType::kBFloat16, i - c.rank);
    }
  }
  return x;
}

// Returns the elements of a token's index key, times its scale.
inline std::vector<double> IndexKeyOf(const PagedIndexKeys& c, int64_t slot, int64_t token) {
  const char* base = static_cast<const char*>(c.base);
  const char* data = base + IndexKeyOffset(c, slot, token);
  std::vector<double> x(static_cast<size_t>(kIndexDim));
  for (int64_t i = 0; i < kIndexDim; ++i) {
    double& value = x[static_cast<size_t>(i)];
    if (c.type != DType::kFloat8E4M3) {
      value = Get(data, c.type, i);
    } else {
      float scale;
      __builtin_memcpy(&scale, base + IndexScaleOffset(c, slot, token), 4);
      value = double{scale} * double{E4M3ToFloat(static_cast<uint8_t>(data[i]))};
    }
  }
  return x;
}

}  // namespace
}  // namespace sluice::kernels::reference
