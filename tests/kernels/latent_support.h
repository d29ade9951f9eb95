// Latent caches, index caches, weights in every layout and comparisons of the packed form, for the
// tests of the DeepSeek-V3.2 family's operators.
#pragma once

#include "kernels/fp8.h"
#include "kernels/fp8_pairs.h"
#include "kernels/latent_layout.h"
#include "tests/kernels/sparse_support.h"

namespace sluice::kernels {

inline bool IsCuda(const KernelTable& table) { return std::string_view(table.name) == "cuda"; }

inline const char* NameOf(DType type) {
  return type == DType::kFloat32 ? "float32" : type == DType::kBFloat16 ? "bf16" : "packed";
}

// Returns the bytes of an array of `count` elements of a type, random.
inline Guarded<uint8_t> RandomElements(int64_t count, DType type, Random& random,
                                       float scale = 1.0f) {
  Guarded<uint8_t> bytes(count * SizeOf(type));
  for (int64_t i = 0; i < count; ++i) {
    const float v = scale * NearlyNormal(random);
    if (type == DType::kFloat32) {
      std::memcpy(bytes.data() + i * 4, &v, 4);
    } else if (type == DType::kBFloat16) {
      const uint16_t rounded = FloatToBf16(v);
      std::memcpy(bytes.data() + i * 2, &rounded, 2);
    } else {
      bytes[i] = FloatToE4M3(v * 64);
    }
  }
  return bytes;
}

// Returns an array of `count` elements of a type as floats, from element `first` on.
inline std::vector<float> FloatsOf(const void* data, DType type, int64_t first, int64_t count) {
  std::vector<float> values(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = first + i;
    values[static_cast<size_t>(i)] = type == DType::kFloat32 ? static_cast<const float*>(data)[at]
                                     : type == DType::kBFloat16
                                         ? Bf16ToFloat(static_cast<const uint16_t*>(data)[at])
                                         : E4M3ToFloat(static_cast<const uint8_t*>(data)[at]);
  }
  return values;
}

// The entries of `slots` sequences. Starts as NaN.
struct TestLatents {
  TestLatents(int32_t slots, int32_t entries, int32_t block_tokens, int32_t rank, int32_t rope,
              DType type, Random& random)
      : blocks((entries + block_tokens - 1) / block_tokens),
        entry_bytes(EntryBytes(type, rank, rope)),
        table(ShuffledPages(slots, blocks, 2, random)),
        data((int64_t{slots} * blocks + 2) * block_tokens * entry_bytes),
        view{data.data(),  table.data(), blocks, block_tokens * entry_bytes,
             block_tokens, rank,         rope,   type} {}

  uint8_t* Entry(int64_t slot, int64_t entry) {
    return data.data() + EntryOffset(view, slot, entry);
  }
  // Random values of about `scale`.
  void FillEntry(uint8_t* to, Random& random, float scale) const {
    if (view.type != DType::kFloat8E4M3) {
      const auto values = RandomElements(view.rank + view.rope, view.type, random, scale);
      std::copy_n(values.data(), values.size(), to);
      return;
    }
    for (int64_t g = 0; g < kPackedRank; g += kPackedScaleTokens) {
      float values[kPackedScaleTokens];
      const float size = std::exp(0.5f * NearlyNormal(random));
      for (float& v : values) v = size * scale * NearlyNormal(random);
      const float s = QuantizeE4M3(values, kPackedScaleTokens, to + g);
      std::memcpy(to + kPackedScalesAt + g / kPackedScaleTokens * 4, &s, 4);
    }
    const auto rope = RandomElements(kPackedRope, DType::kBFloat16, random, scale);
    std::copy_n(rope.data(), rope.size(), to + kPackedRopeAt);
  }

  int32_t blocks;
  int64_t entry_bytes;
  Guarded<int32_t> table;
  Guarded<uint8_t> data;
  PagedLatents view;
};

// The index keys of `slots` sequences. Starts as NaN.
struct TestIndexKeys {
  TestIndexKeys(int32_t slots, int32_t tokens, int32_t block_tokens, DType type, Random& random)
      : blocks((tokens + block_tokens - 1) / block_tokens),
        table(ShuffledPages(slots, blocks, 2, random)),
        data((int64_t{slots} * blocks + 2) * block_tokens * IndexKeyBytes(type)),
        view{data.data(),  table.data(), blocks, block_tokens * IndexKeyBytes(type),
             block_tokens, type} {}

  void FillKey(int64_t slot, int64_t token, Random& random) {
    const auto values = RandomElements(kIndexDim, view.type, random);
    std::copy_n(values.data(), values.size(), data.data() + IndexKeyOffset(view, slot, token));
    if (view.type != DType::kFloat8E4M3) return;
    const float scale = std::uniform_real_distribution<float>(0.005f, 0.02f)(random);
    std::memcpy(data.data() + IndexScaleOffset(view, slot, token), &scale, 4);
  }

  int32_t blocks;
  Guarded<int32_t> table;
  Guarded<uint8_t> data;
  PagedIndexKeys view;
};

// The allowed difference between two computations of the same quantised values: each scale may
// differ by a few last places, and few values, where a quotient lies next to a tie, by one step.
// Once in a while two scales of a group are equally good to the last places, and either is right:
// then each value is within both steps of the other's.
class QuantisedDifference {
 public:
  void Group(const uint8_t* got, float got_scale, const uint8_t* want, float want_scale,
             int64_t count, const std::string& where) {
    ++groups_;
    const bool same = std::fabs(got_scale - want_scale) <= 1e-5f * std::fabs(want_scale);
    if (!same && !(got_scale < 2 * want_scale && want_scale < 2 * got_scale)) {
      Report(where + ": scale " + std::to_string(got_scale) + ", want " +
             std::to_string(want_scale));
    }
    if (!same) {
      ++other_scales_;
      for (int64_t i = 0; i < count; ++i) {
        const float g = got_scale * E4M3ToFloat(got[i]), w = want_scale * E4M3ToFloat(want[i]);
        const float steps = 0.126f * std::fabs(w) + 0x1p-8f * want_scale;
        if (std::fabs(g - w) <= steps) continue;
        Report(where + " column " + std::to_string(i) + ": got " + std::to_string(g) + ", want " +
               std::to_string(w));
      }
      return;
    }
    for (int64_t i = 0; i < count; ++i) {
      ++values_;
      if (got[i] == want[i]) continue;
      ++different_;
      const float g = E4M3ToFloat(got[i]), w = E4M3ToFloat(want[i]);
      if (std::fabs(g - w) <= 0.126f * std::fabs(w) + 0x1p-9f) continue;
      Report(where + " column " + std::to_string(i) + ": got " + std::to_string(g) + ", want " +
             std::to_string(w));
    }
  }
  // Returns an empty string where everything is within these bounds.
  std::string Result() const {
    if (other_scales_ > 1 + groups_ / 500) {
      return std::to_string(other_scales_) + " of " + std::to_string(groups_) + " scales differ";
    }
    if (!first_.empty() || different_ <= 2 + values_ / 500) return first_;
    return std::to_string(different_) + " of " + std::to_string(values_) + " values differ";
  }

 private:
  void Report(const std::string& what) {
    if (first_.empty()) first_ = what;
  }
  std::string first_;
  int64_t values_ = 0, different_ = 0, groups_ = 0, other_scales_ = 0;
};

// Returns how two arrays of entries, dense, differ. Entries with a negative index in `entries` are
// left out.
inline std::string EntryDifference(const uint8_t* got, const uint8_t* want, const PagedLatents& c,
                                   const std::vector<int64_t>& entries) {
  const int64_t bytes = EntryBytes(c.type, c.rank, c.rope);
  std::vector<float> got_values, want_values;
  QuantisedDifference quantised;
  const auto add = [&](std::vector<float>& to, const uint8_t* from, DType type, int64_t count) {
    const std::vector<float> values = FloatsOf(from, type, 0, count);
    to.insert(to.end(), values.begin(), values.end());
  };
  for (int64_t e : entries) {
    const uint8_t *g = got + e * bytes, *w = want + e * bytes;
    if (c.type != DType::kFloat8E4M3) {
      add(got_values, g, c.type, c.rank + c.rope);
      add(want_values, w, c.type, c.rank + c.rope);
      continue;
    }
    for (int64_t group = 0; group < kPackedRank / kPackedScaleTokens; ++group) {
      float got_scale, want_scale;
      std::memcpy(&got_scale, g + kPackedScalesAt + group * 4, 4);
      std::memcpy(&want_scale, w + kPackedScalesAt + group * 4, 4);
      const int64_t at = group * kPackedScaleTokens;
      quantised.Group(g + at, got_scale, w + at, want_scale, kPackedScaleTokens,
                      "entry " + std::to_string(e) + " group " + std::to_string(group));
    }
    add(got_values, g + kPackedRopeAt, DType::kBFloat16, kPackedRope);
    add(want_values, w + kPackedRopeAt, DType::kBFloat16, kPackedRope);
  }
  if (!quantised.Result().empty()) return quantised.Result();
  // A bf16 may be its neighbour where the value lies next to a tie.
  return Difference<float>(got_values, want_values, c.type == DType::kFloat32 ? 2e-6 : 3e-4,
                           c.type == DType::kFloat8E4M3 ? kPackedRope : c.rank + c.rope);
}

// A matrix of weights in every layout. The e4m3 form has weights of its own.
struct TestWeights {
  TestWeights(int32_t rows, int32_t columns, Random& random, float size = 0.1f)
      : n(rows),
        k(columns),
        row_major(NormalBuffer<uint16_t>(int64_t{n} * k, random, size)),
        panels(PanelElements(n, k)),
        values(NormalBuffer<float>(int64_t{n} * k, random, size)),
        fp8(RandomElements(int64_t{n} * k, DType::kFloat8E4M3, random)),
        pairs(int64_t{n} * k),
        scales((int64_t{n} + kFp8BlockRows - 1) / kFp8BlockRows *
               ((k + kFp8BlockColumns - 1) / kFp8BlockColumns)) {
    std::fill_n(panels.data(), panels.size(), uint16_t{0});
    PackPanels(row_major.data(), n, k, 0, panels.data());
    std::uniform_real_distribution<float> uniform(0.5f, 2.0f);
    for (float& s : scales) s = size / 64 * uniform(random);
    for (int64_t i = 0; HasFp8Pairs(k) && i < fp8.size(); ++i) pairs[PairedPlace(i)] = fp8[i];
  }
  // Stands for kFp8Blocks where k allows no kFp8Pairs.
  WeightMatrix As(WeightLayout layout) const {
    if (layout == kFp8Pairs && HasFp8Pairs(k)) {
      return {reinterpret_cast<const uint16_t*>(pairs.data()), n, k, layout, scales.data()};
    }
    switch (layout == kFp8Pairs ? WeightLayout::kFp8Blocks : layout) {
      case WeightLayout::kPanel16:
        return {panels.data(), n, k, layout};
      case WeightLayout::kFloat32:
        return {reinterpret_cast<const uint16_t*>(values.data()), n, k, layout};
      case WeightLayout::kFp8Blocks:
        return {reinterpret_cast<const uint16_t*>(fp8.data()), n, k, WeightLayout::kFp8Blocks,
                scales.data()};
      default:
        return {row_major.data(), n, k, WeightLayout::kRowMajor};
    }
  }
  // Returns the matrix that the reference reads for a path's layout: the same weights.
  WeightMatrix Plain(WeightLayout layout) const {
    return As(layout == WeightLayout::kPanel16 ? WeightLayout::kRowMajor
              : layout == kFp8Pairs            ? WeightLayout::kFp8Blocks
                                               : layout);
  }

  int32_t n;
  int32_t k;
  Guarded<uint16_t> row_major, panels;
  Guarded<float> values;
  Guarded<uint8_t> fp8, pairs;
  Guarded<float> scales;
};

// Returns the layouts of weights that a path takes.
inline std::vector<WeightLayout> LayoutsOf(const KernelTable& table) {
  if (IsCuda(table)) return {WeightLayout::kRowMajor, WeightLayout::kFp8Blocks, kFp8Pairs};
  return {table.weight_layout};
}

}  // namespace sluice::kernels
