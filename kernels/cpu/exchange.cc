// These take rows to other ranks' experts and bring sums back, for every path: rows are copied, and
// at most rounded.
#include <cstring>

#include "kernels/cpu/cpu_tables.h"
#include "kernels/fp8.h"
#include "kernels/scalar.h"

namespace sluice::kernels::cpu {
namespace {

float ValueOf(const void* data, DType type, int64_t i) {
  return type == DType::kFloat32 ? static_cast<const float*>(data)[i]
                                 : Bf16ToFloat(static_cast<const uint16_t*>(data)[i]);
}

// Writes a row's values as e4m3, with a scale for each block of columns.
void Quantize(const PackRowsParams& p, int64_t row, char* values, char* scales) {
  float block[kFp8BlockColumns];
  for (int64_t first = 0; first < p.dim; first += kFp8BlockColumns) {
    const int64_t n = Min(kFp8BlockColumns, p.dim - first);
    for (int64_t i = 0; i < n; ++i) block[i] = ValueOf(p.x, p.x_type, row * p.dim + first + i);
    const float scale = QuantizeE4M3(block, n, reinterpret_cast<uint8_t*>(values) + first);
    std::memcpy(scales + first / kFp8BlockColumns * 4, &scale, 4);
  }
}

void PackUnit(const PackRowsParams& p, const RowUnit& layout, int64_t row, int32_t rank,
              char* unit) {
  if (p.type == p.x_type) {
    const int64_t bytes = p.dim * SizeOf(p.type);
    std::memcpy(unit, static_cast<const char*>(p.x) + row * bytes, static_cast<size_t>(bytes));
  } else {
    Quantize(p, row, unit, unit + layout.scales);
  }
  const int32_t first = rank * p.experts_each;
  for (int64_t j = 0; j < p.choices; ++j) {
    const int32_t expert = PhysicalExpert(p, row * p.choices + j);
    const bool there = expert >= first && expert < first + p.experts_each;
    const int32_t own = there ? expert - first : -1;
    const float weight = there ? p.weights[row * p.choices + j] : 0;
    std::memcpy(unit + layout.choices + j * 4, &own, 4);
    std::memcpy(unit + layout.weights + j * 4, &weight, 4);
  }
}

void UnpackValues(const UnpackRowsParams& p, const RowUnit& layout, int64_t row, const char* unit) {
  char* x = static_cast<char*>(p.x) + row * p.dim * SizeOf(p.x_type);
  if (p.type == p.x_type) {
    std::memcpy(x, unit, static_cast<size_t>(p.dim * SizeOf(p.x_type)));
    return;
  }
  const auto* values = reinterpret_cast<const uint8_t*>(unit);
  for (int64_t i = 0; i < p.dim; ++i) {
    float scale;
    std::memcpy(&scale, unit + layout.scales + i / kFp8BlockColumns * 4, 4);
    const float value = scale * E4M3ToFloat(values[i]);
    if (p.x_type == DType::kFloat32) {
      reinterpret_cast<float*>(x)[i] = value;
    } else {
      reinterpret_cast<uint16_t*>(x)[i] = FloatToBf16(value);
    }
  }
}

}  // namespace

// This is a pass over a few numbers a row, and little enough for one worker.
void PackPlaces(const PackRowsParams& p, Worker worker) {
  if (worker.index != 0) return;
  if (p.ranks > kMaxExchangeRanks || p.rows > p.capacity) {
    KernelCheckFailed("pack_rows: up to 64 ranks, and a rank has room for every row");
  }
  for (int64_t rank = 0; rank < p.ranks; ++rank) p.counts[rank] = 0;
  for (int64_t row = 0; row < p.rows; ++row) {
    int32_t* places = p.places + row * p.ranks;
    for (int64_t rank = 0; rank < p.ranks; ++rank) places[rank] = -1;
    for (int64_t j = 0; j < p.choices; ++j) {
      const int32_t expert = PhysicalExpert(p, row * p.choices + j);
      if (expert < 0) continue;
      if (p.load != nullptr) ++p.load[p.chosen[row * p.choices + j]];
      const int32_t rank = expert / p.experts_each;
      if (places[rank] < 0) places[rank] = rank * p.capacity + p.counts[rank]++;
    }
  }
}

void PackRows(const PackRowsParams& p, Worker worker) {
  const RowUnit layout = RowUnitOf(p.dim, p.choices, p.type);
  const Range mine = Share(p.rows, worker);
  for (int64_t row = mine.begin; row < mine.end; ++row) {
    for (int32_t rank = 0; rank < p.ranks; ++rank) {
      const int64_t place = p.places[row * p.ranks + rank];
      if (place < 0) continue;
      PackUnit(p, layout, row, rank, static_cast<char*>(p.units) + place * layout.bytes);
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
      for (int64_t j = 0; j < p.choices; ++j) {
        chosen[j] = -1;
        weights[j] = 0;
      }
      continue;
    }
    const char* unit = static_cast<const char*>(p.units) + row * layout.bytes;
    std::memcpy(chosen, unit + layout.choices, static_cast<size_t>(p.choices) * 4);
    std::memcpy(weights, unit + layout.weights, static_cast<size_t>(p.choices) * 4);
    std::memset(p.sums + row * p.dim, 0, static_cast<size_t>(p.dim) * 4);
    UnpackValues(p, layout, row, unit);
  }
}

void UnpackPairs(const UnpackRowsParams& p, Worker worker) { RoutePairs(PairsOf(p), worker); }

void AddParts(const AddPartsParams& p, Worker worker) {
  const Range mine = Share(p.rows, worker);
  for (int64_t r = mine.begin; r < mine.end; ++r) {
    float* out = p.out + r * p.dim;
    const int32_t* places = p.places + r * p.ranks;
    for (int64_t i = 0; i < p.dim; ++i) {
      float sum = 0;
      for (int64_t rank = 0; rank < p.ranks; ++rank) {
        if (places[rank] >= 0) sum += p.parts[int64_t{places[rank]} * p.dim + i];
      }
      out[i] += sum;
    }
  }
}

}  // namespace sluice::kernels::cpu
