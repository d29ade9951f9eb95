// The board on which several processors claim and finish the parts of lists (kernels/list_parts.h).
// CPU workers share the lists of co-attention so (src/attention/offload/co_attention.h).
#pragma once

#include <cstdint>

#include "kernels/list_parts.h"

namespace sluice {

// The state of one list: `claimed` and `done` are bits by part. All are 0 before a round.
struct PartWords {
  uint32_t claimed = 0;
  uint32_t done = 0;
  uint32_t made = 0;  // 1: the list is there, where it is made while the round goes on
};

// A view of the lists of one round. Any thread may call these functions.
class PartBoard {
 public:
  // A part is worth having from `least_units` on. `counts` are the units of each list; if it is
  // null, every list is one part, whatever it holds. The arrays are [lists] and outlive the board.
  PartBoard(PartWords* words, const int32_t* counts, int32_t least_units)
      : words_(words), counts_(counts), least_units_(least_units) {}

  // Returns the largest number of parts of any list of at most `capacity` units.
  static int MostParts(int32_t capacity, int32_t least_units);

  // Says that the list is there, with its units and its count, where lists are made while the round
  // goes on. Nothing else may be asked of such a list by anyone for whom IsMade was not true.
  void SetMade(int64_t list) const;
  // Returns whether the list is there. If so, the caller sees it as it was made.
  bool IsMade(int64_t list) const;

  int Parts(int64_t list) const;
  // Entries [begin, end) of a list.
  struct Units {
    int32_t begin, end;
  };
  // Returns the units of a part. REQUIRES: there are counts.
  Units UnitsOf(int64_t list, int part) const;

  // Claims the first part in [begin, end) of the list that nobody has claimed, and returns it, or
  // -1 where there is none. Each part is claimed once in a round.
  int Claim(int64_t list, int begin, int end) const;
  // Claims the last part of the list that nobody has claimed, likewise.
  int ClaimLast(int64_t list) const;
  // Says that a claimed part is done, and returns whether it was the last one of its list. Whoever
  // gets true sees everything that others wrote before they finished their parts. If a claimer
  // never finishes, nobody gets true.
  bool Finish(int64_t list, int part) const;

 private:
  bool Take(int64_t list, int part, uint32_t* before) const;

  PartWords* const words_;
  const int32_t* const counts_;
  const int32_t least_units_;
};

}  // namespace sluice
