// How a layer's transfers are laid beside its compute (ESS, section 3.3), and the arithmetic that
// chooses: pure functions.
//
//   none  indexer, transfer, PreAttn, then Attn0 and Attn1
//   DA    PreAttn beside top-k and UpdateResidency; the transfer beneath Attn0, the attention
//         to what is resident, whose launch goes on with Attn1 when the transfer is done
//   DBA   the indexer in two halves of the batch: the first half's transfer beneath the second
//         half's logits and top-k, the second half's, and what is left of it, beneath Attn0
// (The paper begins PreAttn behind the transfer's start: there it hides the transfer, and nothing
// runs beside top-k, which leaves most processors idle.)
#pragma once

#include <cstdint>

#include "src/attention/miss_profile.h"

namespace sluice {

enum class Overlap { kNone, kDa, kDba };

// Times of a layer's stages for a batch, in microseconds.
struct StageTimes {
  double transfer = 0;  // of all rows' misses
  double prepare = 0;   // PreAttn: q_b, absorption, RoPE
  double attend = 0;    // Attn0 and Attn1
  double index = 0;     // logits and top-k of all rows
  double branch = 2.9;  // a fork and a join: two graph nodes with their dependencies
  // What the indexer and UpdateResidency cost more in two halves: their launches, tails.
  double halves = 10;
  double spared = 0;  // what attention loses with the processors that it leaves the transfer
  double beside = 0;  // of top-k and UpdateResidency, beneath which PreAttn can run
};

// How much longer the layer takes under a schedule than with no transfer and all else in one queue;
// below zero where it is shorter.
double AddedTime(Overlap overlap, const StageTimes& times);
// The schedule that adds least for a batch of `rows`; the simplest among equals. One row has no
// halves.
Overlap ChooseOverlap(const StageTimes& times, int rows);

// Rates of DeepSeek-V3.2's shape (128 heads, 64 of the indexer) on an H200, where a profile has
// none of this device: from figures that the function names.
StageRates AssumedRates(int64_t entry_bytes, int64_t index_key_bytes);

// What a layer has to do for each sequence.
struct LayerLoad {
  double misses = 0;    // entries fetched in a step
  double context = 0;   // tokens
  double selected = 0;  // entries attended to
};
StageTimes TimesOf(const StageRates& rates, const LayerLoad& load, int rows);

// Whether misses had better be attended to where they lie, by CPU workers, in the absorbed form:
// the arithmetic of issue "CPU co-attention over latents". Queries go down and partial results come
// up for every sequence and layer, however few its misses are.
struct CoAttentionCosts {
  int heads = 128;
  int rank = 512, rope = 64;
  int64_t entry_bytes = 656;
  double link_bytes_per_s = 45e9;  // FlashTrans; up and down at once
  double cpu_flops = 0;            // of all workers, in SparseMla
  int64_t result_bytes = 4;        // of an element of a partial result
};
// Seconds of one sequence and layer: the link's for fetching `misses` entries, and for having all
// of them attended to on the CPU (the slowest of link down, link up, and CPU).
double FetchSeconds(const CoAttentionCosts& costs, int64_t misses);
double CoAttentionSeconds(const CoAttentionCosts& costs, int64_t misses);
// The least number of misses from which the CPU is faster, or -1: at no number.
int64_t CoAttentionBreakEven(const CoAttentionCosts& costs);

}  // namespace sluice
