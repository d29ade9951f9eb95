// The options with which a policy is made: one struct for all policies, so that a factory, a test
// and a benchmark set up each of them in the same way. A policy ignores the options that do not
// concern it.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "kernels/hash_params.h"
#include "kernels/kernel_table.h"
#include "kernels/sparse_params.h"
#include "src/attention/miss_profile.h"
#include "src/attention/policies/ess/ess_probe.h"
#include "src/device/device.h"
#include "src/kv/page_pool.h"

namespace sluice {

struct FluxionPredictor;

// The heads that a rank has, [first, first + count) of `all`. 0: ranks do not divide them.
struct HeadsOfRank {
  int first = 0, count = 0, all = 0;
};

struct PolicyOptions {
  std::string name = "full";
  Device* device = nullptr;
  PagePool* hbm = nullptr;
  PagePool* dram = nullptr;  // may be null for policy full, which then evicts nothing
  int slots = 0;
  int max_context = 0;
  int heads = 0;                          // query heads of the model; of a divided one the rank's
  HeadsOfRank rank_heads, rank_kv_heads;  // query heads, KV heads
  int max_rows = 0;                       // maximum rows in a step, including prompt rows
  // Maximum decode rows of a sequence in a step: 1, and one more for each draft. Only ess has to
  // know it beforehand.
  int rows_per_sequence = 1;
  std::string architecture;  // the model's, for messages

  int64_t hbm_bytes = 0;  // sizes of the arenas, for the code that divides them
  int64_t dram_bytes = 0;

  // Options of models with latent caches.
  int latent_rank = 0;  // latent values of an entry
  int index_top_k = 0;  // entries that the indexer selects; 0: the model has no indexer

  // Options of every sparse policy.
  int budget_tokens = 2048;  // tokens selected of a sequence, for each layer and KV head
  int dense_layers = 2;      // number of first layers that lie wholly in HBM
  kernels::GroupReduction reduction = kernels::GroupReduction::kMax;

  // Says whether to compute the last rows of a prompt again that was handed over whole and without
  // hints, so that the working set begins with what those rows attend to: one row in scout and
  // hgca, 32 rows in ess. Under kAuto only ess does so: its rows read what they select, while the
  // rows of the others read the whole cache.
  enum class RecomputeLast { kAuto, kOn, kOff };
  RecomputeLast recompute_last = RecomputeLast::kAuto;

  // AttentionPolicy::rehearsals() of the policies that look ahead. Benches alone change it: 0 is
  // the published form.
  int rehearsals = 1;

  // The CPU workers that attend to what is not in HBM.
  const kernels::KernelTable* host_kernels = nullptr;  // null: the best for this processor
  int workers = 1;
  absl::Duration worker_deadline = absl::Seconds(1);

  struct Scout {
    float share_limit = 0.06f;       // beta: largest share of the budget that the CPU attends to
    std::vector<int32_t> intervals;  // steps between recalls, by layer; empty: a controller decides
    // False, for benches: blocks are selected by their digests alone, as published.
    bool key_codes = true;
    // Key codes are scored for so many tokens less a 16th of the context, but for no fewer than
    // half of it or two budgets (policies/scout/README.md). Benches alone change it.
    int shortlist_tokens = 8192;
    // How far ranges are narrowed for the scores that make the shortlist
    // (kernels::DigestScoresParams). Benches alone change it.
    float narrowed = 0.65f;
    // False, for benches: queries are predicted from the input of the layer before alone, as
    // published.
    bool drift = true;
    bool layer_ahead = true;  // false: the CPU gets the real query, once it is known
    bool recall = true;       // false: recall only in a sequence's first step
    // True: attend to all resident blocks, selected or not, and keep a block that leaves the ring
    // resident while there are KV slots. False, for benches: the paper's form, which attends to the
    // selected blocks alone and has to recall what left the ring.
    bool attend_whole = true;
    // KV slots for recalled blocks, in tokens; 0: as many as the budget fills
    int resident_tokens = 0;
  } scout;

  struct Recall {
    // Alpha: tokens whose score is lower than the largest by more are not selected, even where the
    // budget has room for them. 0: there is no margin, so that the whole budget is selected.
    float margin = 0;
    // [layers], from sluice-profile; takes the place of `margin` where that is 0. Empty: none.
    std::vector<float> margins;
    // True, for benches: nothing stays resident from step to step, as published.
    bool fetch_all = false;
    // False, for benches: queries are predicted from the input of the layer before alone, as
    // published.
    bool drift = true;
    int rank = 0;  // elements of a partial key; 0: the projection's, or half of head_dim
    // [layers][kv_heads][head_dim][rank], from sluice-profile. Empty: plain columns, namely those
    // of the pairs that RoPE turns slowest (policies/recall/projection.h).
    std::vector<float> projection;
  } recall;

  // How tokens come from the host KV cache to HBM (src/attention/offload/row_mover.h): the device
  // reads them by itself, or CPU workers gather them for it, or whichever is faster on this machine
  // (mover_choice.h; ess alone).
  enum class Mover { kUva, kCpu, kAuto };

  struct Clo {
    // A row of n tokens selects n / budget_divisor of them where that is more than budget_tokens;
    // 0: budget_tokens always.
    int budget_divisor = 10;
    // Eta: the cosine of a head's queries with those for which it selected, from which on it keeps
    // what it selected.
    float similarity = 0.8f;
    kernels::SimilarityRule rule = kernels::SimilarityRule::kHarmonic;
    // False, for benches: a head that never misses never selects what left the ring, as published.
    bool refresh = true;
    // False, for benches: queries are predicted from the input of the layer before alone, as
    // published.
    bool drift = true;
    bool early = true;  // KvAttention::LooksEarly
    int hash_bits = 128;
    // The levels of a query's code: 1 (signs, as HATA has them) or kernels::kMostHashLevels.
    int hash_levels = kernels::kMostHashLevels;
    bool centred = true;  // codes are of keys less the centre of the sequence's keys
    uint64_t seed = 1;    // of the random hash matrices
    // From sluice-profile. `hash` is [layers][kv_heads][head_dim][hash_bits]; empty: random
    // directions. `importance` is [layers][heads], s of equation 10; empty: 1. `thresholds` is
    // [layers][kv_heads] and takes the place of `similarity`; empty: none. `difficulty` and
    // `misses` are [layers][kv_heads], `predicted` is [layers], and `prefetchable` is a number of
    // heads (policies/clo/head_thresholds.h).
    std::vector<float> hash, importance, thresholds, difficulty, misses, predicted;
    double prefetchable = 0;
    // The share of the heads that are persistent at most (PersistentHeads). A persistent head's
    // whole cache lies in HBM, and it selects in every step.
    double persistent_share = 0;
    // True: a persistent head selects by predicted queries, as other heads do, so that nothing is
    // between a layer's queries and its attention. False, as published: by its queries themselves.
    bool persistent_ahead = true;
    // The following are for benches alone. kReplace: a head that misses fetches all that it
    // selected, as published. kDelta: it fetches what is new.
    enum class Refill { kDelta, kReplace };
    Refill refill = Refill::kDelta;
    // The share of a sequence's tokens that have a place for each head; 0: as many as it selects.
    double resident_share = 0;
    // False: every head selects in every step, and rows attend to that selection alone, not to all
    // that has a place.
    bool reuse = true;
    Mover mover = Mover::kUva;
    int mover_workers = 4;  // CPU workers of kCpu
  } clo;

  struct Fluxion {
    // Predicts how much each query head reads of what is not in HBM; null: each reads all of it.
    std::shared_ptr<const FluxionPredictor> predictor;
    // The placement says who reads the units that are not in HBM. kFixed: the device reads a share
    // of each list over the link and the CPU workers the others, so that no bit of a result depends
    // on timing. kPull: the device and the workers take parts of the lists until none is left.
    enum class Placement { kFixed, kPull };
    Placement placement = Placement::kFixed;
    // The device's share with kFixed, up to 1. Negative: by the number of workers.
    double device_share = -1;
    // The following are for benches alone. If fixed_block is not 0, every query head reads
    // fixed_share of its tokens, in blocks of this many, whatever the predictor says.
    int fixed_block = 0;
    double fixed_share = 0.05;
    // False: no block has a place in HBM for being selected often. HBM has digests, the first
    // tokens and the newest alone.
    bool resident = true;
    // True: digests lie in DRAM, and the CPU workers score them and select, as published. Then the
    // device has no fixed share (`device_share` is not above 0), and `resident` is false.
    bool digests_in_dram = false;
    // True: each list chooses its size of block among all levels by equation 3, as published, and
    // all levels have digests. False: lists have blocks of block_tokens or fixed_block tokens, and
    // level 0 alone has digests.
    bool all_levels = false;
    // The meaning of the device's share with kFixed. kEachList: of each list. The others give it
    // whole lists, assigned before each step: kHeads by their number, kLengths by the lengths of
    // their sequences (policies/fluxion/list_shares.h).
    enum class Division { kEachList, kHeads, kLengths };
    Division division = Division::kEachList;
  } fluxion;

  struct Hgca {
    int window_tokens = 512;  // blk_num * blk_size
    float beta = 1.0f;
    std::vector<float> betas;  // [layers][kv_heads], from sluice-profile; empty: beta everywhere
    // Tokens that are selected with a salient one: those that follow it in its block. A row looks
    // for what the next rows will continue with, so HGCA's own 0 forgets a name or a number behind
    // its first token.
    int following = 8;
    float alpha = 0.3f;  // weight of the newest step in the moving average
    kernels::GroupReduction reduction = kernels::GroupReduction::kMax;  // kMax or kMean
    // True: selections are made on a thread of their own, ahead of the workers. Otherwise (always
    // on a device with a single thread) the workers select where they need it, with the same bits.
    bool selection_thread = true;
  } hgca;

  // Options of ess; offload-naive is ess without warm-up, LRU and overlap.
  struct Ess {
    // KV slots in HBM per token; 0: what HBM has for each sequence slot
    double sparse_memory_ratio = 0;
    int least_places = 6400;  // minimum KV slots, whatever the ratio (ESS, section 3.4)
    // True: layers get KV slots according to what they miss, where the profile says it
    // (pool_division.h). The total stays the same, but layers that would hardly miss more get fewer
    // than least_places.
    bool divide_places = false;
    // True: DecideByProfile sets divide_places.
    bool divide_by_profile = false;
    // Maximum entries of a layer that a sequence's row just failed to select and that are fetched
    // for the next step while this one goes on; 0: none.
    int prefetch = 0;
    bool prefetch_by_profile = false;  // True: DecideByProfile sets prefetch.
    bool warm_up = true;               // false: pools begin empty
    bool lru = true;                   // false: every entry is fetched in every step
    enum class Overlap { kNone, kDa, kDba, kLayerWise };
    Overlap overlap = Overlap::kLayerWise;
    // Multiprocessors that attention to resident entries leaves to the fetching. With 4 the link is
    // full (kernels/cuda/residency/transfer.cu).
    int transfer_workers = 4;
    // How a decode row's misses come. `workers` CPU workers are those of kCpu. What is fetched for
    // the next step, for a warm-up or for a prompt's rows is read by the device, since nobody
    // waits.
    Mover mover = Mover::kUva;
    MissProfile profile;  // from sluice-profile; may be empty
    // Not null: it is given, once, on a thread of the policy's, what the node's own traffic would
    // miss in pools of other sizes (policies/ess/selection_sampler.h). Drafts and pools that hold
    // everything are not watched.
    std::function<void(std::vector<MissProfile::Point>)> on_misses;
    EssProbe probe;  // For benches and profiles alone.
  } ess;

  struct Oracle {
    enum class Selector { kExact, kDigest, kEnds, kRandom };
    Selector selector = Selector::kExact;
    uint64_t seed = 1;
  } oracle;
};

}  // namespace sluice
