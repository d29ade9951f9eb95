// This file declares the contract of Bring, the operator that selects tokens and gives each of them
// a place in HBM (kernels/sparse_params.h has its words). It is what TopK, Split and Recall do in
// turn for units of one token, in one operator, because each operator of a chain waits for memory
// several times, and a step has no time for that between two layers.
#pragma once

#include <cstdint>

#include "kernels/params.h"
#include "kernels/sparse_params.h"

namespace sluice::kernels {

// For each list that `select.wanted` names, whose head is not persistent:
// 1. The list selects tokens as TopK does.
// 2. With `forget`, every place behind the ring is taken back from its token.
// 3. The places of selected tokens are stamped with positions[r].
// 4. Selected tokens that have no place are given one, while there are places to give: free places
//    first, then those of the tokens selected longest ago, lower places first among equals, and
//    never a place that was stamped with positions[r]. Of the places so chosen the lowest goes to
//    the lowest token, and so on. Places that are given are stamped, too.
// 5. The moves are listed as indices of tokens' K rows in the two caches, as RecallParams has them,
//    in the order of tokens.
// A persistent head selects, and changes no place: all of its tokens have one.
//
// Then `resident` and `places` list the tokens to which rows attend, of each list that `listed`
// names: with `whole`, every token that has a place, or else the selected ones that have one, in
// the order of tokens. Persistent heads list what they selected, too.
struct BringParams {
  // unit_tokens is 1, and k at least 1. `selected` and `runners_up` are not used. The scores of a
  // list that is not wanted are not read.
  TopKParams select;
  ResidencyTable residency;
  // [lists] 0: nothing of the list is listed, and it is not wanted. Null: every list is listed. A
  // list that is listed and not wanted has all of its tokens with `whole`, else none.
  const int32_t* listed;
  UnitLists resident;  // capacity >= every row's k, and with `whole` >= all places
  int32_t* places;     // [lists][resident.capacity], the places of `resident`
  PagedCache home;     // block_table by block
  PagedCache cache;    // block_table by place / block_tokens
  // [lists][move_capacity]; move_capacity >= every row's k. Null where every wanted list's head is
  // persistent.
  int32_t* source_units;
  int32_t* target_units;
  int32_t* move_counts;  // [lists], 0 for lists that move nothing; null with source_units
  // [slots] Adds to each row's `steps` and `recalls`, and to `selected` (`held` of persistent
  // heads), `missing` and `recalled`.
  SparseCounters* counters;
  int32_t move_capacity;
  bool whole;
  // With `whole`: the tokens come in the order of their places, so that the table of all tokens is
  // not looked through.
  bool by_place;
  bool forget;
};

}  // namespace sluice::kernels
