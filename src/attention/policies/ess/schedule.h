// How a layer's transfers overlap its compute (ESS, section 3.3), and the arithmetic that chooses.
// All functions are pure.
//
//   none  indexer, transfer, PreAttn, then Attn0 and Attn1
//   DA    PreAttn runs beside top-k and UpdateResidency; the transfer runs beneath Attn0, the
//   attention
//         to resident entries, whose launch goes on with Attn1 once the transfer is done
//   DBA   the indexer runs in two halves of the batch: the first half's transfer runs beneath the
//         second half's logits and top-k; the second half's, with what is left of the first,
//         beneath Attn0
// (The paper begins PreAttn after the transfer has started. There PreAttn hides the transfer, but
// nothing runs beside top-k, which leaves most processors idle.)
#pragma once

#include <cstdint>

#include "src/attention/miss_profile.h"

namespace sluice {

enum class Overlap { kNone, kDa, kDba };

// Times of a layer's stages for a batch, in microseconds.
struct StageTimes {
  double transfer = 0;  // Transfer of all rows' misses.
  double prepare = 0;   // PreAttn: q_b, absorption, RoPE
  double attend = 0;    // Attn0 and Attn1
  double index = 0;     // Logits and top-k of all rows.
  double branch = 2.9;  // A fork and a join: two graph nodes with their dependencies.
  // Time that two halves add to the indexer and UpdateResidency: launches and tails.
  double halves = 10;
  double spared = 0;  // What attention loses with the processors that it leaves to the transfer.
  double beside = 0;  // Top-k and UpdateResidency, beneath which PreAttn can run.
};

// Returns how much longer the layer takes under a schedule than with no transfer and all else in
// one queue. It is negative where the layer takes less time.
double AddedTime(Overlap overlap, const StageTimes& times);
// Returns the schedule that adds least for a batch of `rows`, and the simplest among equals. One
// row cannot be halved.
Overlap ChooseOverlap(const StageTimes& times, int rows);

// Returns rates of DeepSeek-V3.2's shape (128 heads, 64 of the indexer) on an H200, for use where
// the profile has no rates of this device. The function's body names the figures they come from.
StageRates AssumedRates(int64_t entry_bytes, int64_t index_key_bytes);

// A layer's work for each sequence.
struct LayerLoad {
  double misses = 0;    // Entries fetched in a step.
  double context = 0;   // Tokens of the sequence.
  double selected = 0;  // Entries attended to.
};
StageTimes TimesOf(const StageRates& rates, const LayerLoad& load, int rows);

// Whether CPU workers should attend to misses where they lie, in the absorbed form: the arithmetic
// of issue "CPU co-attention over latents". Queries go down the link and partial results come up
// for every sequence and layer, however few its misses are.
struct CoAttentionCosts {
  int heads = 128;
  int rank = 512, rope = 64;
  int64_t entry_bytes = 656;
  double link_bytes_per_s = 45e9;  // FlashTrans; up and down at the same time.
  double cpu_flops = 0;            // All workers together, in SparseMla.
  int64_t result_bytes = 4;        // Bytes of an element of a partial result.
};
// Seconds for one sequence and layer. FetchSeconds is the link's time for `misses` entries;
// CoAttentionSeconds is the time for the CPU to attend to all of them (the slowest of link down,
// link up, and CPU).
double FetchSeconds(const CoAttentionCosts& costs, int64_t misses);
double CoAttentionSeconds(const CoAttentionCosts& costs, int64_t misses);
// Returns the least number of misses from which the CPU is faster, or -1 if it never is.
int64_t CoAttentionBreakEven(const CoAttentionCosts& costs);

}  // namespace sluice
