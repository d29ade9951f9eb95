// The arbiter's side of a device that pulls parts of lists (kernels/pull_params.h): it answers the
// asks of the device's pullers with parts that it claims on the board of the CPU workers.
//
// All words are pinned, and each has one writer. The numbers of asks and grants go on from round to
// round. So both sides must agree on them: after a round in which a puller was not told that
// nothing is left, the pulling is closed for good.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/pull_params.h"
#include "src/attention/offload/part_board.h"

namespace sluice {

struct PullWords {
  kernels::PullAsk* asks = nullptr;      // [pullers] written by the device
  kernels::PullGrant* grants = nullptr;  // [pullers] written by the arbiter
  uint32_t* closed = nullptr;            // written by the host
  uint32_t* missed = nullptr;            // written by the device
};

// One thread at a time calls a round's functions, in this order: Begin, Offer for each list, and
// then, until the round is over, Asking, Claim and Grant. A list may be offered later, too, as long
// as no puller has been told that nothing is left.
class PartArbiter {
 public:
  struct Part {
    int64_t list = -1;  // -1: nothing is left
    int part = 0;
  };

  // REQUIRES: the words are 0.
  PartArbiter(const PullWords& words, int pullers);

  void Begin();
  // Offers the parts of a list to the device: before the first Asking, in ascending order, or when
  // the list has been made.
  void Offer(int64_t list) { left_.push_back(list); }
  // Returns a puller that waits for a grant, or -1. Pullers that ask at the same time have turns.
  int Asking();
  // Claims a part of an offered list, or nothing if none is left. It takes the last free part of
  // each list in turn, from the last list on, so that it meets the CPU workers, who begin at the
  // front of their shares, as late as possible.
  Part Claim(const PartBoard& board);
  // Answers the puller, which has asked.
  void Grant(int puller, Part part);
  // Returns whether every puller has been told that nothing is left. A round that is over leaves
  // nothing that is granted and not seen.
  bool over() const { return told_ == static_cast<int>(granted_.size()); }

  // The following may be called by any thread, at any time.
  //
  // Tells pullers that begin from now on to ask for nothing.
  void Close() const;
  bool closed() const;
  // Returns whether a puller ever gave up waiting for a grant.
  bool missed() const;

 private:
  const PullWords words_;
  std::vector<uint32_t> granted_;  // [pullers] the number of the last grant
  std::vector<int64_t> left_;      // offered lists that may have free parts
  size_t turn_ = 0;                // of left_, whose turn comes next, plus 1; 0: the last one's
  int puller_ = 0;                 // that is looked at next
  int told_ = 0;                   // pullers that know that nothing is left
};

}  // namespace sluice
