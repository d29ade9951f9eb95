// Contracts of the operators that take rows to the ranks that have their experts, and bring back
// what the experts made of them (src/device/rank_group.h has the exchange itself). The conventions
// are those of kernels/params.h.
//
// Ranks have as many experts each, and a *physical expert* is one that a rank has: rank d has those
// from d * experts_each on. An expert may be on several ranks; each rank has a table which says to
// which of them its rows go. A row goes once to every rank that has some of its experts, however
// many. What travels is a *unit*:
//
//   values   [dim] of the unit's type; of e4m3, then a float32 scale for each kFp8BlockColumns
//   choices  int32 [choices]: numbers among the rank's own experts; -1: another rank's
//   weights  float32 [choices]
//
// Each part begins at a multiple of 4 bytes, and the unit takes a multiple of 16.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/latent_params.h"
#include "kernels/params.h"

namespace sluice::kernels {

// Where the parts of a unit lie, and its size, in bytes.
struct RowUnit {
  int64_t scales;  // of e4m3 values; else there are none
  int64_t choices;
  int64_t weights;
  int64_t bytes;
};

constexpr RowUnit RowUnitOf(int32_t dim, int32_t choices, DType type) {
  const int64_t scales = (dim * SizeOf(type) + 3) / 4 * 4;
  const int64_t blocks = (dim + kFp8BlockColumns - 1) / kFp8BlockColumns;
  const int64_t behind = scales + (type == DType::kFloat8E4M3 ? blocks * 4 : 0);
  const int64_t weights = behind + int64_t{choices} * 4;
  return {scales, behind, weights, (weights + int64_t{choices} * 4 + 15) / 16 * 16};
}

// Packs rows for the ranks of their experts: of every rank's block the first counts[rank] units are
// written, which are the rows that go there, in order. A choice of -1 goes nowhere. Every other one
// is counted, if `load` is set.
struct PackRowsParams {
  const void* x;          // [rows][dim], of x_type
  const int32_t* chosen;  // [rows][choices]
  const float* weights;   // [rows][choices]
  // [experts] The physical expert that works for this rank, below ranks * experts_each; null: each
  // expert is the physical one of its number.
  const int32_t* physical;
  void* units;      // [ranks][capacity] units
  int32_t* counts;  // [ranks]
  int64_t* load;    // [experts], to which the numbers of choices are added; or null
  // [rows][ranks] The number of the row's unit, rank * capacity + index; -1: it does not go there.
  int32_t* places;
  int32_t rows;  // at most `capacity`
  int32_t dim;
  int32_t choices;  // of a row
  int32_t ranks;    // at most kMaxExchangeRanks
  int32_t capacity;
  int32_t experts_each;
  DType x_type;
  DType type;  // of the units' values: x_type, or e4m3
};

inline constexpr int32_t kMaxExchangeRanks = 64;

// Returns the physical expert of a row's choice, an index into `chosen`; -1: there is none.
constexpr int32_t PhysicalExpert(const PackRowsParams& p, int64_t choice) {
  const int32_t expert = p.chosen[choice];
  return expert < 0 || p.physical == nullptr ? expert : p.physical[expert];
}

// Makes rows of units that arrived, for this rank's experts. Unit u is row u; those past their
// block's count become rows without a choice, and their x and sums are not written. The other
// outputs are those of Route, for the rank's own experts.
struct UnpackRowsParams {
  const void* units;      // [ranks][capacity] units
  const int32_t* counts;  // [ranks]
  void* x;                // [ranks * capacity][dim], of x_type
  float* sums;            // [ranks * capacity][dim]: zeros
  int32_t* chosen;        // [ranks * capacity][choices]
  float* weights;         // [ranks * capacity][choices]
  int32_t* pairs;         // [ranks * capacity * choices]
  int32_t* begins;        // [experts_each + 1]
  int32_t dim;
  int32_t choices;
  int32_t ranks;
  int32_t capacity;
  int32_t experts_each;
  DType x_type;
  DType type;
};
// Returns the parameters of RoutePairs that list the pairs of the rows that arrived.
inline RouteParams PairsOf(const UnpackRowsParams& p) {
  RouteParams route{};
  route.chosen = p.chosen;
  route.pairs = p.pairs;
  route.begins = p.begins;
  route.rows = p.ranks * p.capacity;
  route.k = p.choices;
  route.experts = p.experts_each;
  return route;
}

// Computes out[r] += parts[places[r][0]] + ... + parts[places[r][ranks - 1]], summed in that order;
// a place of -1 counts nothing.
struct AddPartsParams {
  const float* parts;     // [ranks * capacity][dim]
  const int32_t* places;  // [rows][ranks]
  float* out;             // [rows][dim]
  int32_t rows;
  int32_t ranks;
  int32_t dim;
};

}  // namespace sluice::kernels
