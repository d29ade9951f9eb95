// These are rows to other ranks' experts and back, as plainly as their contract reads.
#include <algorithm>
#include <cstring>

#include "kernels/reference/element.h"
#include "kernels/reference/reference.h"

namespace sluice::kernels::reference {
namespace {

bool GoesTo(const PackRowsParams& p, int64_t row, int32_t rank) {
  for (int64_t choice = row * p.choices; choice < (row + 1) * p.choices; ++choice) {
    const int32_t expert = PhysicalExpert(p, choice);
    if (expert >= 0 && expert / p.experts_each == rank) return true;
  }
  return false;
}

void PackValues(const PackRowsParams& p, int64_t row, char* unit) {
  if (p.type == p.x_type) {
    const int64_t bytes = p.dim * SizeOf(p.type);
    std::memcpy(unit, static_cast<const char*>(p.x) + row * bytes, static_cast<size_t>(bytes));
    return;
  }
  char* scales = unit + RowUnitOf(p.dim, p.choices, p.type).scales;
  for (int64_t first = 0; first < p.dim; first += kFp8BlockColumns) {
    const int64_t n = std::min<int64_t>(kFp8BlockColumns, p.dim - first);
    std::vector<float> values;
    for (int64_t i = 0; i < n; ++i) {
      values.push_back(static_cast<float>(Get(p.x, p.x_type, row * p.dim + first + i)));
    }
    const float scale = QuantizeE4M3(values.data(), n, reinterpret_cast<uint8_t*>(unit) + first);
    std::memcpy(scales + first / kFp8BlockColumns * 4, &scale, 4);
  }
}

}  // namespace

void PackPlaces(const PackRowsParams& p, Worker worker) {
  if (worker.index != 0) return;
  for (int64_t choice = 0; p.load != nullptr && choice < int64_t{p.rows} * p.choices; ++choice) {
    if (p.chosen[choice] >= 0) ++p.load[p.chosen[choice]];
  }
  for (int32_t rank = 0; rank < p.ranks; ++rank) {
    int32_t count = 0;
    for (int64_t row = 0; row < p.rows; ++row) {
      p.places[row * p.ranks + rank] = GoesTo(p, row, rank) ? rank * p.capacity + count++ : -1;
    }
    p.counts[rank] = count;
  }
}

void PackRows(const PackRowsParams& p, Worker worker) {
  const RowUnit layout = RowUnitOf(p.dim, p.choices, p.type);
  const Range mine = Share(p.rows, worker);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    for (int32_t rank = 0; rank < p.ranks; ++rank) {
      const int64_t place = p.places[row * p.ranks + rank];
      if (place < 0) continue;
      char* unit = static_cast<char*>(p.units) + place * layout.bytes;
      PackValues(p, row, unit);
      for (int64_t j = 0; j < p.choices; ++j) {
        const int32_t expert = PhysicalExpert(p, row * p.choices + j);
        const bool there = expert >= 0 && expert / p.experts_each == rank;
        const int32_t own = there ? expert - rank * p.experts_each : -1;
        const float weight = there ? p.weights[row * p.choices + j] : 0;
        std::memcpy(unit + layout.choices + j * 4, &own, 4);
        std::memcpy(unit + layout.weights + j * 4, &weight, 4);
      }
    }
  }
}

void UnpackRows(const UnpackRowsParams& p, Worker worker) {
  const RowUnit layout = RowUnitOf(p.dim, p.choices, p.type);
  const Range mine = Share(int64_t{p.ranks} * p.capacity, worker);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    int32_t* chosen = p.chosen + row * p.choices;
    float* weights = p.weights + row * p.choices;
    if (row % p.capacity >= p.counts[row / p.capacity]) {
      std::fill_n(chosen, p.choices, -1);
      std::fill_n(weights, p.choices, 0.0f);
      continue;
    }
    const char* unit = static_cast<const char*>(p.units) + row * layout.bytes;
    std::memcpy(chosen, unit + layout.choices, size_t(p.choices) * 4);
    std::memcpy(weights, unit + layout.weights, size_t(p.choices) * 4);
    std::fill_n(p.sums + row * p.dim, p.dim, 0.0f);
    for (int64_t i = 0; i < p.dim; ++i) {
      double value = 0;
      if (p.type == p.x_type) {
        value = Get(unit, p.type, i);
      } else {
        float scale = 0;
        std::memcpy(&scale, unit + layout.scales + i / kFp8BlockColumns * 4, 4);
        value = double{scale} * double{E4M3ToFloat(reinterpret_cast<const uint8_t*>(unit)[i])};
      }
      Put(p.x, p.x_type, row * p.dim + i, value);
    }
  }
}

void UnpackPairs(const UnpackRowsParams& p, Worker worker) { RoutePairs(PairsOf(p), worker); }

void AddParts(const AddPartsParams& p, Worker worker) {
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    for (int64_t i = 0; i < p.dim; ++i) {
      double sum = 0;
      for (int32_t rank = 0; rank < p.ranks; ++rank) {
        const int64_t place = p.places[r * p.ranks + rank];
        if (place >= 0) sum += double{p.parts[place * p.dim + i]};
      }
      p.out[r * p.dim + i] = static_cast<float>(double{p.out[r * p.dim + i]} + sum);
    }
  }
}

}  // namespace sluice::kernels::reference
