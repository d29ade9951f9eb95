#include "kernels/reference/latent.h"

#include <algorithm>
#include <limits>

#include "kernels/reference/reference.h"

namespace sluice::kernels::reference {
namespace {

void PutEntry(const PagedLatents& c, const std::vector<double>& x, char* out) {
  if (c.type != DType::kFloat8E4M3) {
    for (size_t i = 0; i < x.size(); ++i) Put(out, c.type, static_cast<int64_t>(i), x[i]);
    return;
  }
  for (int64_t i = 0; i < kPackedRank; i += kPackedScaleTokens) {
    const float scale = QuantizeLatents(x.data() + i, reinterpret_cast<uint8_t*>(out + i));
    __builtin_memcpy(out + kPackedScalesAt + i / kPackedScaleTokens * 4, &scale, 4);
  }
  for (int64_t i = 0; i < kPackedRope; ++i) {
    Put(out + kPackedRopeAt, DType::kBFloat16, i, x[static_cast<size_t>(kPackedRank + i)]);
  }
}

void AttendHead(const SparseMlaParams& p, int64_t r, int64_t h,
                const std::vector<std::vector<double>>& entries) {
  const int64_t rank = p.cache.rank, width = rank + p.cache.rope;
  const int64_t item = r * p.heads + h;
  std::vector<double> scores;
  double largest = -std::numeric_limits<double>::infinity();
  for (const std::vector<double>& entry : entries) {
    double dot = 0;
    for (int64_t i = 0; i < width; ++i) {
      dot += Get(p.q, p.q_type, item * width + i) * entry[static_cast<size_t>(i)];
    }
    scores.push_back(dot * double{p.scale});
    largest = std::max(largest, scores.back());
  }
  const bool other = p.slots[r] >= 0 && p.other_o != nullptr &&
                     p.other_lse[item] != -std::numeric_limits<float>::infinity();
  if (other) largest = std::max(largest, double{p.other_lse[item]});
  // The other result counts as one more entry, whose latent is its o.
  double sum = 0;
  std::vector<double> o(static_cast<size_t>(rank), 0.0);
  if (other) {
    sum = std::exp(double{p.other_lse[item]} - largest);
    for (int64_t i = 0; i < rank; ++i) {
      o[static_cast<size_t>(i)] = sum * double{p.other_o[item * rank + i]};
    }
  }
  for (size_t e = 0; e < entries.size(); ++e) {
    const double weight = std::exp(scores[e] - largest);
    sum += weight;
    for (size_t i = 0; i < o.size(); ++i) o[i] += weight * entries[e][i];
  }
  const bool empty = entries.empty() && !other;
  for (int64_t i = 0; i < rank; ++i) {
    Put(p.out, p.out_type, item * rank + i, empty ? 0.0 : o[static_cast<size_t>(i)] / sum);
  }
  if (p.lse != nullptr) {
    p.lse[item] = empty ? kNegativeInfinity : static_cast<float>(largest + std::log(sum));
  }
}

}  // namespace

void LatentAppend(const LatentAppendParams& p, Worker worker) {
  const PagedLatents& c = p.cache;
  const int64_t rank = c.rank, rope = c.rope;
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    if (p.slots[r] < 0) continue;
    const float* kv = p.kv + r * p.kv_stride;
    std::vector<double> x(kv, kv + rank + rope);
    double squares = 0;
    for (int64_t i = 0; i < rank; ++i) squares += double{kv[i]} * double{kv[i]};
    const double factor = 1.0 / std::sqrt(squares / static_cast<double>(rank) + double{p.epsilon});
    for (int64_t i = 0; i < rank; ++i) x[static_cast<size_t>(i)] *= factor * double{p.norm[i]};
    RotatePairs(x.data() + rank, rope, p.cos_sin + r * rope);
    int64_t entry = p.positions[r];
    if (p.place_of.base != nullptr) entry = *TableRow(p.place_of, p.slots[r], entry);
    if (c.base != nullptr && entry >= 0) {
      PutEntry(c, x, static_cast<char*>(c.base) + EntryOffset(c, p.slots[r], entry));
    }
    if (p.written != nullptr) {
      PutEntry(c, x, static_cast<char*>(p.written) + r * EntryBytes(c.type, c.rank, c.rope));
    }
  }
}

void MlaQuery(const MlaQueryParams& p, Worker worker) {
  const int64_t from = p.nope_dim + p.rope, to = p.rank + p.rope;
  const Range mine = Share(int64_t{p.rows} * p.heads, worker);
  for (int64_t item = mine.begin; item < mine.end; ++item) {
    const float* q = p.q + item * from;
    for (int64_t i = 0; i < p.nope_dim; ++i) Put(p.nope, p.type, item * p.nope_dim + i, q[i]);
    std::vector<double> x(q + p.nope_dim, q + from);
    RotatePairs(x.data(), p.rope, p.cos_sin + item / p.heads * p.rope);
    for (int64_t i = 0; i < p.rope; ++i) {
      Put(p.out, p.type, item * to + p.rank + i, x[static_cast<size_t>(i)]);
    }
  }
}

void SparseMla(const SparseMlaParams& p, Worker worker) {
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    std::vector<std::vector<double>> entries;
    if (p.slots[r] >= 0) {
      const int64_t count = std::clamp(int64_t{p.counts[r]}, int64_t{0}, p.capacity);
      for (int64_t i = 0; i < count; ++i) {
        const int64_t entry = p.entries != nullptr ? p.entries[r * p.capacity + i] : i;
        entries.push_back(EntryOf(p.cache, p.slots[r], entry));
      }
    }
    for (int64_t h = 0; h < p.heads; ++h) AttendHead(p, r, h, entries);
  }
}

void SparseMlaMerge(const SparseMlaParams&, Worker) {}

}  // namespace sluice::kernels::reference
