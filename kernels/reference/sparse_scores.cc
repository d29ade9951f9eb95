#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/reference/element.h"
#include "kernels/reference/reference.h"

namespace sluice::kernels::reference {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

double LogSumExp(const std::vector<double>& x) {
  double largest = kMinusInfinity;
  for (double v : x) largest = std::max(largest, v);
  double sum = 0;
  for (double v : x) sum += std::exp(v - largest);
  return largest + std::log(sum);
}

// Returns the address of a row of words.
uint32_t* WordsAt(const PagedRows& r, int64_t slot, int64_t row, int64_t head) {
  return reinterpret_cast<uint32_t*>(static_cast<char*>(r.base) + RowOffset(r, slot, row, head));
}

bool BitOf(const uint32_t* words, int64_t d) { return (words[d / 32] >> (d % 32) & 1) != 0; }

// Writes the key codes of a complete block.
void WriteCodes(const DigestParams& p, int64_t slot, int64_t block, int64_t head) {
  const PagedCache& c = p.cache;
  const int64_t words = KeyCodeWords(c.head_dim);
  const char* digest =
      static_cast<const char*>(p.digests.base) + RowOffset(p.digests, slot, block, head);
  for (int64_t t = block * c.block_tokens; t < (block + 1) * c.block_tokens; ++t) {
    uint32_t* const row = WordsAt(p.codes, slot, t, head);
    std::fill_n(row, 2 * words, 0u);
    for (int64_t d = 0; d < c.head_dim; ++d) {
      const auto least = static_cast<float>(Get(digest, p.digests.type, d));
      const auto largest = static_cast<float>(Get(digest, p.digests.type, c.head_dim + d));
      const auto key = static_cast<float>(Get(c.base, c.type, KeyIndex(c, slot, t, head) + d));
      const float middle = (least + largest) * 0.5f, quarter = (largest - least) * 0.25f;
      const bool upper = key > middle;
      const bool outer = upper ? key > middle + quarter : key <= middle - quarter;
      row[d / 32] |= uint32_t{upper} << (d % 32);
      row[words + d / 32] |= uint32_t{outer} << (d % 32);
    }
  }
}

// Makes one score per unit from those of every head of a group.
void Reduce(const std::vector<std::vector<double>>& heads, GroupReduction reduction, float* out) {
  std::vector<double> lse;
  for (const std::vector<double>& scores : heads) lse.push_back(LogSumExp(scores));
  for (size_t u = 0; u < heads[0].size(); ++u) {
    double result = reduction == GroupReduction::kMax ? kMinusInfinity : 0;
    for (size_t h = 0; h < heads.size(); ++h) {
      const double score = heads[h][u];
      if (reduction == GroupReduction::kMax) {
        result = std::max(result, score);
      } else if (reduction == GroupReduction::kMean) {
        result += score / static_cast<double>(heads.size());
      } else {
        result += std::exp(score - lse[h]);
      }
    }
    out[u] = static_cast<float>(result);
  }
}

// Returns scale * q . k of one query head and the key at element `key` of the cache.
double Score(const float* q, const PagedCache& c, int64_t key, float scale) {
  double dot = 0;
  for (int64_t d = 0; d < c.head_dim; ++d) dot += double{q[d]} * Get(c.base, c.type, key + d);
  return dot * double{scale};
}

}  // namespace

void Digest(const DigestParams& p, Worker worker) {
  const PagedCache& c = p.cache;
  const int64_t dim = c.head_dim;
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    if (p.slots[r] < 0) continue;
    const int64_t last = p.positions[r];
    const int64_t first = p.first_positions != nullptr ? p.first_positions[r] : last;
    for (int64_t block = first / c.block_tokens; block <= last / c.block_tokens; ++block) {
      const int64_t begin = block * c.block_tokens;
      const int64_t end = Min(begin + c.block_tokens, last + 1);
      for (int64_t h = 0; h < c.kv_heads; ++h) {
        char* row = static_cast<char*>(p.digests.base) + RowOffset(p.digests, p.slots[r], block, h);
        for (int64_t d = 0; d < dim; ++d) {
          double least = -kMinusInfinity, largest = kMinusInfinity;
          for (int64_t t = begin; t < end; ++t) {
            const double key = Get(c.base, c.type, KeyIndex(c, p.slots[r], t, h) + d);
            least = std::min(least, key);
            largest = std::max(largest, key);
          }
          Put(row, p.digests.type, d, least);
          Put(row, p.digests.type, dim + d, largest);
        }
        if (p.codes.base != nullptr && end == begin + c.block_tokens) {
          WriteCodes(p, p.slots[r], block, h);
        }
      }
    }
  }
}

void DigestScores(const DigestScoresParams& p, Worker worker) {
  const int64_t kv_heads = p.digests.kv_heads, group = p.heads / kv_heads;
  const int64_t dim = p.digests.dim / 2;
  const Range mine = Share(p.rows * kv_heads, worker);
  for (int64_t list = mine.begin; list < mine.end; ++list) {
    const int64_t r = list / kv_heads, kv_head = list % kv_heads, slot = p.slots[r];
    if (slot < 0) continue;
    const int64_t newest = p.positions[r] / p.block_tokens;
    std::vector<std::vector<double>> scores(static_cast<size_t>(group));
    for (int64_t g = 0; g < group; ++g) {
      const float* q = p.q + r * p.q_stride + (kv_head * group + g) * dim;
      for (int64_t b = 0; b < newest; ++b) {
        const char* row =
            static_cast<const char*>(p.digests.base) + RowOffset(p.digests, slot, b, kv_head);
        double sum = 0;
        for (int64_t d = 0; d < dim; ++d) {
          const double least = Get(row, p.digests.type, d);
          const double largest = Get(row, p.digests.type, dim + d);
          sum += q[d] * (least + largest) / 2 +
                 (1 - double{p.narrowed}) * std::fabs(q[d]) * (largest - least) / 2;
        }
        scores[static_cast<size_t>(g)].push_back(double{p.scale} * sum);
      }
    }
    Reduce(scores, p.reduction, p.scores + list * p.score_stride);
    p.scores[list * p.score_stride + newest] = kNegativeInfinity;
  }
}

void RefineScores(const RefineScoresParams& p, Worker worker) {
  const int64_t kv_heads = p.digests.kv_heads, group = p.heads / kv_heads;
  const int64_t dim = p.digests.dim / 2, words = p.codes.dim / 2;
  const Range mine = Share(p.rows * kv_heads, worker);
  for (int64_t list = mine.begin; list < mine.end; ++list) {
    const int64_t r = list / kv_heads, kv_head = list % kv_heads, slot = p.slots[r];
    if (slot < 0) continue;
    const int64_t newest = p.positions[r] / p.block_tokens;
    float* const out = p.scores + list * p.score_stride;
    std::fill_n(out, newest + 1, kNegativeInfinity);
    std::vector<int64_t> blocks;
    for (int64_t i = 0; i < p.units.counts[list]; ++i) {
      const int64_t block = p.units.units[list * p.units.capacity + i];
      if (block < newest) blocks.push_back(block);
    }
    if (blocks.empty()) continue;
    std::vector<std::vector<double>> scores(static_cast<size_t>(group));
    for (int64_t g = 0; g < group; ++g) {
      const float* q = p.q + r * p.q_stride + (kv_head * group + g) * dim;
      for (const int64_t block : blocks) {
        const char* digest =
            static_cast<const char*>(p.digests.base) + RowOffset(p.digests, slot, block, kv_head);
        std::vector<double> of_tokens;
        for (int64_t t = block * p.block_tokens; t < (block + 1) * p.block_tokens; ++t) {
          const uint32_t* row = WordsAt(p.codes, slot, t, kv_head);
          double sum = 0;
          for (int64_t d = 0; d < dim; ++d) {
            const double least = Get(digest, p.digests.type, d);
            const double largest = Get(digest, p.digests.type, dim + d);
            const double level = KeyCodeLevel(BitOf(row, d), BitOf(row + words, d));
            const double key = least + (largest - least) * level;
            sum += double{q[d]} * key;
          }
          of_tokens.push_back(double{p.scale} * sum);
        }
        scores[static_cast<size_t>(g)].push_back(LogSumExp(of_tokens));
      }
    }
    std::vector<float> reduced(blocks.size());
    Reduce(scores, p.reduction, reduced.data());
    for (size_t i = 0; i < blocks.size(); ++i) out[blocks[i]] = reduced[i];
  }
}

void ExactScores(const ExactScoresParams& p, Worker worker) {
  const PagedCache& c = p.cache;
  const int64_t group = p.heads / c.kv_heads;
  const Range mine = Share(int64_t{p.rows} * c.kv_heads, worker);
  for (int64_t list = mine.begin; list < mine.end; ++list) {
    const int64_t r = list / c.kv_heads, kv_head = list % c.kv_heads, slot = p.slots[r];
    if (slot < 0) continue;
    const int64_t tokens = int64_t{p.positions[r]} + 1;
    std::vector<std::vector<double>> scores(static_cast<size_t>(group));
    for (int64_t g = 0; g < group; ++g) {
      const float* q = p.q + r * p.q_stride + (kv_head * group + g) * c.head_dim;
      for (int64_t begin = 0; begin < tokens; begin += p.unit_tokens) {
        std::vector<double> of_unit;
        for (int64_t t = begin; t < Min(begin + p.unit_tokens, tokens); ++t) {
          of_unit.push_back(Score(q, c, KeyIndex(c, slot, t, kv_head), p.scale));
        }
        scores[static_cast<size_t>(g)].push_back(LogSumExp(of_unit));
      }
    }
    Reduce(scores, p.reduction, p.scores + list * p.score_stride);
  }
}

}  // namespace sluice::kernels::reference
