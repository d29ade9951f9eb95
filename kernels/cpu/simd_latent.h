// LatentAppend, IndexAppend and the queries of both, for any path (`S`: see simd_math.h). Rows, or
// rows and heads, are split over workers.
#pragma once

#include "kernels/cpu/simd_elementwise.h"
#include "kernels/fp8.h"
#include "kernels/latent_layout.h"

namespace sluice::kernels::cpu {
namespace {

constexpr int64_t kMaxLatentRank = 512;
constexpr int64_t kMaxLatentRope = 64;

// Rotates the neighbours (2 i, 2 i + 1) of x[0, dim) by the row's angles.
inline void RotatePairs(const float* x, const float* cos_sin, int64_t dim, float* out) {
  for (int64_t i = 0; i < dim; i += 2) {
    const float a = x[i], b = x[i + 1];
    out[i] = a * cos_sin[i] - b * cos_sin[i + 1];
    out[i + 1] = b * cos_sin[i] + a * cos_sin[i + 1];
  }
}

// Rotates the halves (i, i + dim / 2), in place.
inline void RotateHalves(float* x, const float* cos_sin, int64_t dim) {
  const int64_t half = dim / 2;
  for (int64_t i = 0; i < half; ++i) {
    const float a = x[i], b = x[i + half];
    x[i] = a * cos_sin[2 * i] - b * cos_sin[2 * i + 1];
    x[i + half] = b * cos_sin[2 * i] + a * cos_sin[2 * i + 1];
  }
}

// Applies the Walsh-Hadamard transform to x[0, 128) in natural order, scaled by 128^-1/2, in place.
inline void Hadamard(float* x) {
  for (int64_t step = 1; step < kIndexDim; step *= 2) {
    for (int64_t first = 0; first < kIndexDim; first += 2 * step) {
      for (int64_t i = first; i < first + step; ++i) {
        const float a = x[i], b = x[i + step];
        x[i] = a + b;
        x[i + step] = a - b;
      }
    }
  }
  constexpr float kScale = 0.08838834764831845f;
  for (int64_t i = 0; i < kIndexDim; ++i) x[i] *= kScale;
}

inline void WriteEntry(const PagedLatents& c, const float* x, char* out) {
  if (c.type != DType::kFloat8E4M3) {
    WriteRounded(out, c.type, 0, x, c.rank + c.rope);
    return;
  }
  for (int64_t i = 0; i < kPackedRank; i += kPackedScaleTokens) {
    const float scale = QuantizeLatents(x + i, reinterpret_cast<uint8_t*>(out + i));
    __builtin_memcpy(out + kPackedScalesAt + i / kPackedScaleTokens * 4, &scale, 4);
  }
  WriteRounded(out + kPackedRopeAt, DType::kBFloat16, 0, x + kPackedRank, kPackedRope);
}

inline void CheckLatents(const PagedLatents& c, const char* what) {
  if (c.rank % 16 != 0 || c.rank > kMaxLatentRank || c.rope % 16 != 0 || c.rope > kMaxLatentRope ||
      (c.type == DType::kFloat8E4M3 && (c.rank != kPackedRank || c.rope != kPackedRope))) {
    KernelCheckFailed(what);
  }
}

template <class S>
void LatentAppend(const LatentAppendParams& p, Worker worker) {
  const PagedLatents& c = p.cache;
  CheckLatents(c, "latent_append: rank <= 512 and rope <= 64, multiples of 16; packed: 512 and 64");
  const int64_t bytes = EntryBytes(c.type, c.rank, c.rope);
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    if (p.slots[r] < 0) continue;
    alignas(64) float x[kMaxLatentRank + kMaxLatentRope];
    const float* kv = p.kv + r * p.kv_stride;
    const float factor = InverseRms<S>(kv, c.rank, p.epsilon);
    for (int64_t i = 0; i < c.rank; ++i) x[i] = kv[i] * factor * p.norm[i];
    RotatePairs(kv + c.rank, p.cos_sin + r * c.rope, c.rope, x + c.rank);
    char* copy = static_cast<char*>(p.written) + r * bytes;
    if (p.written != nullptr) WriteEntry(c, x, copy);
    int64_t entry = p.positions[r];
    if (p.place_of.base != nullptr) entry = *TableRow(p.place_of, p.slots[r], entry);
    if (c.base == nullptr || entry < 0) continue;
    char* out = static_cast<char*>(c.base) + EntryOffset(c, p.slots[r], entry);
    if (p.written != nullptr) {
      __builtin_memcpy(out, copy, static_cast<size_t>(bytes));
    } else {
      WriteEntry(c, x, out);
    }
  }
}

template <class S>
void MlaQuery(const MlaQueryParams& p, Worker worker) {
  const int64_t from = p.nope_dim + p.rope, to = p.rank + p.rope;
  if (p.rope > kMaxLatentRope || p.rope % 2 != 0) KernelCheckFailed("mla_query: rope even, <= 64");
  const Range mine = Share(int64_t{p.rows} * p.heads, worker);
  for (int64_t item = mine.begin; item < mine.end; ++item) {
    alignas(64) float turned[kMaxLatentRope];
    const float* q = p.q + item * from;
    WriteRounded(p.nope, p.type, item * p.nope_dim, q, p.nope_dim);
    RotatePairs(q + p.nope_dim, p.cos_sin + item / p.heads * p.rope, p.rope, turned);
    WriteRounded(p.out, p.type, item * to + p.rank, turned, p.rope);
  }
}

// Sums run in 16 lanes, in one order.
template <class S>
void IndexAppend(const IndexAppendParams& p, Worker worker) {
  const PagedIndexKeys& c = p.cache;
  if (p.rope_dim > kIndexDim || p.rope_dim % 2 != 0) {
    KernelCheckFailed("index_append: rope_dim even, <= 128");
  }
  const bool packed = c.type == DType::kFloat8E4M3;
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    if (p.slots[r] < 0) continue;
    alignas(64) float x[kIndexDim], sums[16] = {}, squares[16] = {};
    const float* k = p.k + r * p.k_stride;
    float mean = 0, variance = 0;
    for (int64_t i = 0; i < kIndexDim; ++i) sums[i % 16] += k[i];
    for (float sum : sums) mean += sum;
    mean /= kIndexDim;
    for (int64_t i = 0; i < kIndexDim; ++i) {
      x[i] = k[i] - mean;
      squares[i % 16] += x[i] * x[i];
    }
    for (float square : squares) variance += square;
    const float factor = 1.0f / __builtin_sqrtf(variance / kIndexDim + p.epsilon);
    for (int64_t i = 0; i < kIndexDim; ++i) {
      x[i] = x[i] * factor * p.norm_weight[i] + p.norm_bias[i];
    }
    RotateHalves(x, p.cos_sin + r * p.rope_dim, p.rope_dim);
    // Writes the elements in the cache's form, and in the packed form the scale.
    alignas(64) char key[kIndexDim * 4];
    float scale = 1;
    if (packed) {
      Hadamard(x);
      scale = QuantizeE4M3(x, kIndexDim, reinterpret_cast<uint8_t*>(key));
    } else {
      WriteRounded(key, c.type, 0, x, kIndexDim);
    }
    const auto bytes = static_cast<size_t>(kIndexDim * SizeOf(c.type));
    const int64_t slot = p.slots[r], position = p.positions[r];
    if (char* base = static_cast<char*>(c.base); base != nullptr) {
      __builtin_memcpy(base + IndexKeyOffset(c, slot, position), key, bytes);
      if (packed) __builtin_memcpy(base + IndexScaleOffset(c, slot, position), &scale, 4);
    }
    if (p.written != nullptr) {
      char* written = static_cast<char*>(p.written) + r * IndexKeyBytes(c.type);
      __builtin_memcpy(written, key, bytes);
      if (packed) __builtin_memcpy(written + kIndexDim, &scale, 4);
    }
  }
}

template <class S>
void IndexQuery(const IndexQueryParams& p, Worker worker) {
  if (p.rope_dim > kIndexDim || p.rope_dim % 2 != 0) {
    KernelCheckFailed("index_query: rope_dim even, <= 128");
  }
  const Range mine = Share(int64_t{p.rows} * p.heads, worker);
  for (int64_t item = mine.begin; item < mine.end; ++item) {
    const int64_t r = item / p.heads, h = item % p.heads;
    alignas(64) float x[kIndexDim];
    for (int64_t i = 0; i < kIndexDim; ++i) x[i] = p.q[item * kIndexDim + i];
    RotateHalves(x, p.cos_sin + r * p.rope_dim, p.rope_dim);
    float weight = p.weights[r * p.weights_stride + h] * p.weight_scale;
    if (p.type == DType::kFloat8E4M3) {
      Hadamard(x);
      weight *= QuantizeE4M3(x, kIndexDim, static_cast<uint8_t*>(p.out) + item * kIndexDim);
    } else {
      WriteRounded(p.out, DType::kFloat32, item * kIndexDim, x, kIndexDim);
    }
    p.out_weights[item] = weight;
  }
}

// Rows and pieces of their width are split over workers.
template <class S>
void Combine(const CombineParams& p, Worker worker) {
  constexpr int64_t kPiece = 256;
  const int64_t pieces = CeilDiv(p.dim, kPiece);
  const Range mine = Share(p.rows * pieces, worker);
  for (int64_t item = mine.begin; item < mine.end; ++item) {
    const int64_t r = item / pieces, first = item % pieces * kPiece;
    const int64_t last = Min(first + kPiece, p.dim);
    float* out = p.out + r * p.dim;
    for (int64_t pair = r * p.k; pair < (r + 1) * p.k; ++pair) {
      if (p.chosen[pair] < 0) continue;
      const float weight = p.weights[pair];
      const float* y = p.y + pair * p.dim;
      for (int64_t i = first; i < last; ++i) out[i] += weight * y[i];
    }
  }
}

}  // namespace
}  // namespace sluice::kernels::cpu
