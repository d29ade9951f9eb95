// MergeParts.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "kernels/reference/reference.h"
#include "kernels/scalar.h"

namespace sluice::kernels::reference {
namespace {

// Returns the indices in part_lse of a head's results of the parts in `taken` that are not empty.
std::vector<int64_t> FullParts(const MergePartsParams& p, int64_t list, int64_t head,
                               uint32_t taken) {
  std::vector<int64_t> parts;
  for (int64_t part = 0; part < p.most_parts; ++part) {
    const int64_t at = (list * p.most_parts + part) * (p.heads / p.kv_heads) + head;
    if ((taken >> part & 1) != 0 && p.part_lse[at] != kNegativeInfinity) parts.push_back(at);
  }
  return parts;
}

void MergeHead(const MergePartsParams& p, int64_t list, int64_t head, uint32_t taken) {
  const std::vector<int64_t> parts = FullParts(p, list, head, taken);
  double largest = -std::numeric_limits<double>::infinity();
  for (const int64_t part : parts) largest = std::max(largest, double{p.part_lse[part]});
  double sum = 0;
  std::vector<double> o(static_cast<size_t>(p.head_dim), 0.0);
  for (const int64_t part : parts) {
    const double weight = std::exp(double{p.part_lse[part]} - largest);
    sum += weight;
    for (int64_t d = 0; d < p.head_dim; ++d) {
      o[static_cast<size_t>(d)] += weight * double{p.part_o[part * p.head_dim + d]};
    }
  }
  const int64_t item = list * (p.heads / p.kv_heads) + head;
  for (int64_t d = 0; d < p.head_dim; ++d) {
    p.o[item * p.head_dim + d] =
        parts.empty() ? 0.0f : static_cast<float>(o[static_cast<size_t>(d)] / sum);
  }
  p.lse[item] = parts.empty() ? kNegativeInfinity : static_cast<float>(largest + std::log(sum));
}

}  // namespace

void MergeParts(const MergePartsParams& p, Worker worker) {
  const Range mine = Share(int64_t{p.rows} * p.kv_heads, worker);
  for (int64_t list = mine.begin; list < mine.end; ++list) {
    const uint32_t taken = p.taken[list];
    p.taken[list] = 0;
    if (p.slots[list / p.kv_heads] < 0) continue;
    for (int64_t head = 0; head < p.heads / p.kv_heads; ++head) MergeHead(p, list, head, taken);
  }
}

}  // namespace sluice::kernels::reference
