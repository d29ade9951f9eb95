#include <cmath>

#include "kernels/cpu/cpu_tables.h"
#include "kernels/cpu/unit_list.h"

namespace sluice::kernels::cpu {
namespace {

float ElementAt(const PagedCache& c, int64_t i) {
  return c.type == DType::kFloat32 ? static_cast<const float*>(c.base)[i]
                                   : Bf16ToFloat(static_cast<const uint16_t*>(c.base)[i]);
}

void AttendHead(const SparseAttentionParams& p, int64_t row, int64_t head) {
  const PagedCache& c = p.cache;
  const int64_t dim = c.head_dim, kv_head = head / (p.heads / c.kv_heads);
  const UnitList list = UnitListOf(p, row, kv_head);
  const float* q = p.q + row * p.q_stride + head * dim;
  float* o = p.o + (row * p.heads + head) * dim;
  float largest = kNegativeInfinity, sum = 0;
  for (int64_t d = 0; d < dim; ++d) o[d] = 0;
  for (int64_t v = 0; v < list.tokens; ++v) {
    const int64_t key = KeyIndex(c, p.slots[row], PlaceOfToken(list, v), kv_head);
    const int64_t value = key + int64_t{c.block_tokens} * dim;
    float score = 0;
    for (int64_t d = 0; d < dim; ++d) score += q[d] * ElementAt(c, key + d);
    score *= p.scale;
    const float best = score > largest ? score : largest;
    const float rescale = std::exp(largest - best), weight = std::exp(score - best);
    for (int64_t d = 0; d < dim; ++d) o[d] = o[d] * rescale + weight * ElementAt(c, value + d);
    sum = sum * rescale + weight;
    largest = best;
  }
  if (sum > 0) {
    for (int64_t d = 0; d < dim; ++d) o[d] /= sum;
  }
  p.lse[row * p.heads + head] = sum > 0 ? largest + std::log(sum) : kNegativeInfinity;
}

}  // namespace

void SparseAttention(const SparseAttentionParams& p, Worker worker) {
  const int64_t group = p.heads / p.cache.kv_heads;
  const int64_t heads = (p.kv_head_end - p.kv_head_begin) * group;
  const Range mine = Share(p.rows * heads, worker);
  for (int64_t i = mine.begin; i < mine.end; ++i) {
    AttendHead(p, i / heads, p.kv_head_begin * group + i % heads);
  }
}

}  // namespace sluice::kernels::cpu
