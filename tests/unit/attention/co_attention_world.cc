// The checks of the world of co-attention's tests.
#include "tests/unit/attention/co_attention_world.h"

namespace sluice::co_attention {

void World::Check(int rows, double tolerance) const {
  for (int layer = 0; layer < shape.layers; ++layer) {
    for (int row = 0; row < rows; ++row) {
      const int slot = slots[static_cast<size_t>(row)];
      if (slot < 0 || !co_attention->workers().Health(slot).ok()) continue;
      for (int head = 0; head < shape.heads; ++head) {
        CheckHead(layer, row, head, tolerance);
      }
      for (int head = 0; head < shape.kv_heads && shape.pullers == 0; ++head)
        CheckBits(layer, row, head);
    }
  }
}

int World::UnitsOfPart(int count) const {
  const int64_t unit =
      int64_t{2} * shape.unit_tokens * shape.head_dim * kernels::SizeOf(shape.type);
  const int worth = std::max(static_cast<int>(shape.part_bytes / unit), 1);
  return std::max(worth, (count + 31) / 32);
}

std::pair<int, int> World::PartsAsked(int rows) const {
  int parts = 0, longest = 0;
  for (const Request& r : requests_) {
    for (int list = 0; list < rows * shape.kv_heads; ++list) {
      if (slots[static_cast<size_t>(list / shape.kv_heads)] < 0) continue;
      const int count = r.counts[static_cast<size_t>(list)];
      const int size = UnitsOfPart(count), of_list = (count + size - 1) / size;
      parts += of_list;
      longest = std::max(longest, of_list);
    }
  }
  return {parts, longest};
}

double World::Element(int layer, int slot, int kv_head, int position, int part, int d) const {
  const kernels::PagedCache& c = homes_[static_cast<size_t>(layer)];
  const int64_t page = c.block_table[slot * c.table_stride + position / c.block_tokens];
  const int64_t at = ((page * c.kv_heads + kv_head) * 2 + part) * c.block_tokens * c.head_dim +
                     position % c.block_tokens * c.head_dim + d;
  return c.type == kernels::DType::kFloat32
             ? static_cast<const float*>(c.base)[at]
             : kernels::Bf16ToFloat(static_cast<const uint16_t*>(c.base)[at]);
}

void World::CheckHead(int layer, int row, int head, double tolerance) const {
  const Request& r = requests_[static_cast<size_t>(layer)];
  const int kv_head = head / (shape.heads / shape.kv_heads);
  const int slot = slots[static_cast<size_t>(row)];
  const size_t list = static_cast<size_t>(row * shape.kv_heads + kv_head);
  std::vector<double> scores, sum(static_cast<size_t>(shape.head_dim));
  std::vector<int> tokens;
  for (int32_t i = 0; i < r.counts[list]; ++i) {
    const int32_t unit =
        r.units[list * static_cast<size_t>(shape.capacity) + static_cast<size_t>(i)];
    for (int t = unit * shape.unit_tokens; t < (unit + 1) * shape.unit_tokens; ++t) {
      if (t > positions[static_cast<size_t>(row)]) break;
      double dot = 0;
      for (int d = 0; d < shape.head_dim; ++d) {
        dot += double{r.q[static_cast<size_t>(row * Stride() + head * shape.head_dim + d)]} *
               Element(layer, slot, kv_head, t, 0, d);
      }
      scores.push_back(dot * double{Scale()});
      tokens.push_back(t);
    }
  }
  const size_t at = static_cast<size_t>(row * shape.heads + head);
  const float got_lse = lse[static_cast<size_t>(layer)][at];
  const float* const got =
      o[static_cast<size_t>(layer)].data() + at * static_cast<size_t>(shape.head_dim);
  double largest = -std::numeric_limits<double>::infinity(), total = 0;
  for (double s : scores) largest = std::max(largest, s);
  for (double s : scores) total += std::exp(s - largest);
  for (size_t i = 0; i < scores.size(); ++i) {
    for (int d = 0; d < shape.head_dim; ++d) {
      sum[static_cast<size_t>(d)] +=
          std::exp(scores[i] - largest) / total * Element(layer, slot, kv_head, tokens[i], 1, d);
    }
  }
  INFO("layer " << layer << " row " << row << " slot " << slot << " head " << head);
  if (scores.empty()) {
    REQUIRE(got_lse == -std::numeric_limits<float>::infinity());
  } else {
    REQUIRE(std::fabs(got_lse - (largest + std::log(total))) <= tolerance);
  }
  for (int d = 0; d < shape.head_dim; ++d) {
    REQUIRE(std::fabs(got[d] - sum[static_cast<size_t>(d)]) <= tolerance);
  }
}

// Computes part after part on the host caches themselves.
void World::CheckBits(int layer, int row, int kv_head) const {
  const Request& r = requests_[static_cast<size_t>(layer)];
  const int64_t list = int64_t{row} * shape.kv_heads + kv_head;
  const int group = shape.heads / shape.kv_heads;
  const auto width = static_cast<size_t>(group * shape.head_dim);
  const int32_t count = r.counts[static_cast<size_t>(list)];
  const int size = UnitsOfPart(count), parts = std::max((count + size - 1) / size, 1);
  std::vector<float> o_parts, lse_parts;
  for (int part = 0; part < parts; ++part) {
    const int first = part * size;
    std::vector<float> of(width), lse_of(static_cast<size_t>(group));
    ComputePart(layer, row, kv_head, r.units.data() + list * shape.capacity + first,
                std::min(size, count - first), of.data(), lse_of.data());
    o_parts.insert(o_parts.end(), of.begin(), of.end());
    lse_parts.insert(lse_parts.end(), lse_of.begin(), lse_of.end());
  }
  std::vector<float> want = o_parts, want_lse = lse_parts;
  if (parts > 1) {
    kernels::MergeParams m{};
    m.o = o_parts.data();
    m.lse = lse_parts.data();
    m.out = want.data();
    m.out_lse = want_lse.data();
    m.parts = parts;
    m.rows = 1;
    m.heads = group;
    m.head_dim = shape.head_dim;
    table_.merge(m, {0, 1});
  }
  const float* const got = o[static_cast<size_t>(layer)].data() + list * static_cast<int>(width);
  const float* const got_lse = lse[static_cast<size_t>(layer)].data() + list * group;
  INFO("layer " << layer << " row " << row << " KV head " << kv_head << ", " << parts << " parts");
  REQUIRE(std::memcmp(want.data(), got, width * sizeof(float)) == 0);
  REQUIRE(std::memcmp(want_lse.data(), got_lse, static_cast<size_t>(group) * sizeof(float)) == 0);
}

// Writes the results of one call of the kernel for `count` units of a row and KV head.
void World::ComputePart(int layer, int row, int kv_head, const int32_t* units, int32_t count,
                        float* out, float* out_lse) const {
  const Request& r = requests_[static_cast<size_t>(layer)];
  const auto heads = static_cast<size_t>(shape.kv_heads);
  const int group = shape.heads / shape.kv_heads;
  std::vector<int32_t> lists(heads * static_cast<size_t>(shape.capacity)), counts(heads);
  std::copy_n(units, count, lists.begin() + kv_head * shape.capacity);
  counts[static_cast<size_t>(kv_head)] = count;
  std::vector<float> all(static_cast<size_t>(shape.heads * shape.head_dim));
  std::vector<float> all_lse(static_cast<size_t>(shape.heads));
  kernels::SparseAttentionParams p{};
  p.q = r.q.data() + row * Stride();
  p.q_stride = Stride();
  p.slots = &slots[static_cast<size_t>(row)];
  p.positions = &positions[static_cast<size_t>(row)];
  p.cache = homes_[static_cast<size_t>(layer)];
  p.units = lists.data();
  p.counts = counts.data();
  p.o = all.data();
  p.lse = all_lse.data();
  p.capacity = shape.capacity;
  p.unit_tokens = shape.unit_tokens;
  p.rows = 1;
  p.heads = shape.heads;
  p.kv_head_begin = kv_head;
  p.kv_head_end = kv_head + 1;
  p.scale = Scale();
  table_.sparse_attention(p, {0, 1});
  std::copy_n(all.begin() + kv_head * group * shape.head_dim, group * shape.head_dim, out);
  std::copy_n(all_lse.begin() + kv_head * group, group, out_lse);
}

}  // namespace sluice::co_attention
