// Model is a loaded model: the weights in the device's form, and the layer loop of its family.
//
// Forward() enqueues one step on a stream and returns; it allocates nothing and reads nothing back.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "src/device/device.h"
#include "src/kv/cache_layout.h"
#include "src/model/expert_placement.h"
#include "src/model/model_config.h"
#include "src/model/shard.h"

namespace sluice {

class AttentionPolicy;
class LatentAttention;
class RankGroup;
class WeightSource;

// One step's rows, as the device sees them. A row is one token: tokens[slot * token_stride +
// position].
struct StepInputs {
  const int32_t* tokens = nullptr;  // [slots][token_stride]
  int64_t token_stride = 0;
  const int32_t* slots = nullptr;      // [rows]; -1: padded
  const int32_t* positions = nullptr;  // [rows]
  // [decode_rows] How many decode rows the row's sequence had before since its prompt, rehearsals
  // (AttentionPolicy::rehearsals) included. Null: it is not known, and the look-ahead learns
  // nothing from earlier rows.
  const int32_t* numbers = nullptr;
  int32_t rows = 0;
  int32_t decode_rows = 0;              // the first of the rows; see kernels/params.h
  const int32_t* logit_rows = nullptr;  // [logit_count] rows whose logits are wanted; -1: padded
  int32_t logit_count = 0;
  float* logits = nullptr;  // [logit_count][vocab]
  // The most rows that any rank has in this step, the same on each, where ranks divide the experts;
  // 0: `rows`. A rank without sequences has one padded row.
  int32_t most_rows = 0;
  // The step runs as two halves, each with its exchanges beneath what the other computes: the same
  // bits. REQUIRES: Options::halves, and that every rank has decode rows alone.
  bool halves = false;
};

// The rows of a draft layer (multi-token prediction: DeepSeek-V3, arXiv 2412.19437, section 2.2).
// The row at position p of a sequence has the token behind it, tokens[slot * token_stride + p + 1],
// and a hidden state of its sequence at p; what it drafts is the token at p + 2.
struct DraftInputs {
  const int32_t* tokens = nullptr;  // [slots][token_stride]
  int64_t token_stride = 0;
  const int32_t* slots = nullptr;  // [rows]; -1: padded
  // [rows] The same, but -1 at position 0: that row counts no token, as in vLLM, whose drafts these
  // are to be.
  const int32_t* token_slots = nullptr;
  const int32_t* positions = nullptr;  // [rows]
  int32_t rows = 0;
  int32_t decode_rows = 0;  // as in StepInputs
  // Null: the rows are those of the newest Forward, whose hidden states are the model's after its
  // last norm. Otherwise row r goes on from row previous[r] of the newest Draft, with what its
  // layer gave before the norm of its head; -1: padded. (vLLM passes on the same.)
  const int32_t* previous = nullptr;    // [rows]
  const int32_t* logit_rows = nullptr;  // [logit_count]; -1: padded
  int32_t logit_count = 0;
  float* logits = nullptr;  // [logit_count][vocab]
};

// Returns the cache layout of a model with this config: one kind "kv", or those of latent_caches.h.
// Returns INVALID_ARGUMENT if kv_dtype is fp8 and the model's caches have no such form.
absl::StatusOr<CacheLayout> CacheLayoutOf(const ModelConfig& config, DType kv_dtype,
                                          int block_tokens);

// Returns INVALID_ARGUMENT, which names `program`, if the model's caches are not keys and values of
// heads.
absl::Status CheckKeysAndValues(const ModelConfig& config, const std::string& program);

class Model {
 public:
  struct Options {
    std::string directory;
    std::string load_format = "auto";  // or "dummy"
    // If set, it makes the weights, and load_format does not count.
    std::function<absl::StatusOr<std::unique_ptr<WeightSource>>(const ModelConfig&)> weights;
    DType kv_dtype = DType::kBFloat16;
    int block_tokens = 32;
    int max_context = 0;    // 0: what the config allows
    int max_rows = 512;     // maximum rows in a step
    int max_logits = 32;    // maximum logit rows in a step
    int sequence_rows = 1;  // maximum decode rows of a sequence in a step: 1 + its draft tokens
    // False: no policy that looks ahead will run, and its state takes no memory.
    bool look_ahead = true;
    // Whether the checkpoint's layer that drafts is loaded (tensor_list.h: DraftTensors): never, if
    // the checkpoint has it, or always, so that it is an error if it lacks.
    enum class DraftLayer { kNone, kIfThere, kRequired } draft_layer = DraftLayer::kNone;
    // The model is divided among ranks (shard.h), and this is number `rank` of them. `ranks` has as
    // many, and outlives the model; null: nothing will be computed. At most one of the two numbers
    // is above 1. With tensor_parallel all ranks enqueue the same steps. With expert_parallel each
    // enqueues steps of rows of its own, as many steps as the others.
    int tensor_parallel = 1;
    int expert_parallel = 1;
    int rank = 0;
    RankGroup* ranks = nullptr;
    // Whether rows travel to other ranks' experts as e4m3 (kernels/exchange_params.h).
    bool fp8_dispatch = false;
    bool halves = false;  // StepInputs::halves may be set
    // How many copies of other ranks' experts a rank has in each layer, and how busy experts are,
    // by which they are placed (expert_placement.h); empty: nothing is known. The same on every
    // rank.
    int expert_redundancy = 0;
    ExpertLoad expert_load;
    bool count_expert_load = false;  // so that CountedExpertLoad has something to say
  };
  // Loads a model. Errors name the file, tensor or key, what was expected and what was found.
  static absl::StatusOr<std::unique_ptr<Model>> Load(const Options& options, Device* device);
  virtual ~Model() = default;

  // Returns the config as this rank sees it: of a divided model, heads, kv_heads and
  // intermediate_size are the rank's. So is the layout of the caches; the fingerprint is the whole
  // model's.
  virtual const ModelConfig& config() const = 0;
  // Returns the whole model's config, as its directory has it.
  virtual const ModelConfig& whole_config() const { return config(); }
  // Returns the part of the whole model's heads that this rank has.
  virtual Shard shard() const { return {}; }
  virtual const std::string& fingerprint() const = 0;
  // Returns a hash of which rank has which experts; empty: ranks do not divide them.
  virtual std::string expert_digest() const { return ""; }
  // Returns how often this rank's rows chose each expert since it started; empty: nothing was
  // counted. REQUIRES: no step is under way.
  virtual absl::StatusOr<ExpertLoad> CountedExpertLoad() const { return ExpertLoad{}; }
  virtual const CacheLayout& cache_layout() const = 0;
  virtual int max_context() const = 0;
  virtual int max_rows() const = 0;
  virtual int max_logits() const = 0;
  // Returns the bytes of weights in memory, in the form in which they are used.
  virtual int64_t weight_bytes() const = 0;
  // Returns the bytes of activations and scratch.
  virtual int64_t workspace_bytes() const = 0;

  // Enqueues a step. REQUIRES: rows <= max_rows(), logit_count <= max_logits(), and
  // CheckAttends(policy, cache_layout()) is OK.
  virtual void Forward(Stream& stream, const StepInputs& inputs, AttentionPolicy& policy) = 0;

  // Returns whether the model has a draft layer, so that Draft may be called.
  virtual bool drafts() const { return false; }
  // Enqueues a pass of the draft layer, behind the Forward or Draft whose hidden states it takes
  // and with no other between them. It writes and reads caches of its own, layer 0 of `attention`;
  // the policy's stay as they are. REQUIRES: drafts(), rows <= max_rows(), logit_count <=
  // max_logits().
  virtual void Draft(Stream& stream, const DraftInputs& inputs, LatentAttention& attention);
};

}  // namespace sluice
