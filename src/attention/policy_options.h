// What a policy is made of and with: one struct for all, so that a factory, a test and a bench give
// each of them the same world. What a policy does not name it does not read.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "kernels/kernel_table.h"
#include "kernels/sparse_params.h"
#include "src/attention/miss_profile.h"
#include "src/attention/policies/ess/ess_probe.h"
#include "src/device/device.h"
#include "src/kv/page_pool.h"

namespace sluice {

struct PolicyOptions {
  std::string name = "full";
  Device* device = nullptr;
  PagePool* hbm = nullptr;
  PagePool* dram = nullptr;  // full: may be null, then nothing is preempted
  int slots = 0;
  int max_context = 0;
  int heads = 0;             // query heads of the model
  int max_rows = 0;          // of a step, prompts included
  std::string architecture;  // of the model, for messages

  int64_t hbm_bytes = 0;  // of the arenas, for whoever cuts them
  int64_t dram_bytes = 0;

  // Of models with latent caches.
  int latent_rank = 0;  // latent values of an entry
  int index_top_k = 0;  // of the indexer; 0: there is none

  // Every sparse policy.
  int budget_tokens = 2048;  // selected of a sequence, for each layer and KV head
  int dense_layers = 2;      // the first ones, wholly in HBM
  kernels::GroupReduction reduction = kernels::GroupReduction::kMax;

  // Compute the last rows of a prompt that was handed over whole and without hints again, so that
  // the working set begins with what they attend to: one of scout and hgca, 32 of ess. By itself
  // ess alone does: its rows read what they select, those of the others the whole cache.
  enum class RecomputeLast { kAuto, kOn, kOff };
  RecomputeLast recompute_last = RecomputeLast::kAuto;

  // CPU workers that attend to what is not in HBM.
  const kernels::KernelTable* host_kernels = nullptr;  // null: the best of this processor
  int workers = 1;
  absl::Duration worker_deadline = absl::Seconds(1);

  struct Scout {
    float share_limit = 0.12f;       // beta: of the budget that the CPU attends to
    std::vector<int32_t> intervals;  // steps between recalls, by layer; empty: a controller decides
    bool layer_ahead = true;         // false: the CPU gets the real query, when it is known
    bool recall = true;              // false: in a sequence's first step alone
    bool attend_whole = false;       // all that is resident, selected or not
    int resident_tokens = 0;  // places for recalled blocks; 0: as many as the budget can fill
  } scout;

  struct Recall {
    float margin = 4.5f;     // alpha: scores below the largest by more are not fetched
    bool fetch_all = false;  // nothing stays resident from step to step
    int rank = 0;            // elements of a partial key; 0: a quarter of head_dim
    // [layers][kv_heads][head_dim][rank] from sluice-profile; empty: plain columns, of the pairs
    // that RoPE turns slowest (policies/recall/projection.h).
    std::vector<float> projection;
  } recall;

  struct Hgca {
    int window_tokens = 512;  // blk_num * blk_size
    float beta = 1.0f;
    float alpha = 0.3f;                                                 // of the moving average
    kernels::GroupReduction reduction = kernels::GroupReduction::kMax;  // kMax or kMean
    // Selects on a thread of its own, ahead of the workers. They select where they need it else, to
    // the same bits (a device with a single thread).
    bool selection_thread = true;
  } hgca;

  // ess; offload-naive is the same without warm-up, LRU and overlap.
  struct Ess {
    double sparse_memory_ratio = 0;  // places in HBM to tokens; 0: what HBM has for each slot
    int least_places = 6400;         // whatever the ratio (ESS, section 3.4)
    // Layers have places by what they miss, where the profile says it (pool_division.h): the same
    // places together, but fewer than least_places in layers that would hardly miss more.
    bool divide_places = false;
    // Entries of a layer that just missed being selected by a sequence's row, at most, which are
    // brought for the next step while this one goes on; 0: none.
    int prefetch = 0;
    bool warm_up = true;  // false: pools begin empty
    bool lru = true;      // false: every entry is fetched in every step
    enum class Overlap { kNone, kDa, kDba, kLayerWise };
    Overlap overlap = Overlap::kLayerWise;
    // Multiprocessors that fetch, which attention to what is resident leaves them; with 4 the link
    // is full (kernels/cuda/residency/transfer.cu).
    int transfer_workers = 4;
    MissProfile profile;  // from sluice-profile; may be empty
    EssProbe probe;       // For benches and profiles alone.
  } ess;

  struct Oracle {
    enum class Selector { kExact, kDigest, kEnds, kRandom };
    Selector selector = Selector::kExact;
    uint64_t seed = 1;
  } oracle;
};

}  // namespace sluice
