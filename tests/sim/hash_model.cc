#include "tests/sim/hash_model.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <string>

#include "src/attention/attention_policy.h"
#include "src/base/status_macros.h"
#include "src/device/cpu/host_stream.h"
#include "tests/sim/hash.h"
#include "tests/sim/hash_fluxion.h"
#include "tests/sim/hash_latents.h"

namespace sluice::sim {
namespace {

constexpr int kQkv = (kHeads + 2 * kKvHeads) * kHeadDim;  // floats per row
constexpr float kScale = 0.5f;

// Returns the first byte of a part of a token's head in the cache.
uint8_t* PartAddress(const kernels::PagedCache& cache, int32_t slot, int64_t position, int head,
                     int part) {
  int64_t block = position / cache.block_tokens;
  if (cache.ring_blocks > 0) block %= cache.ring_blocks;
  const int64_t part_bytes = int64_t{cache.block_tokens} * cache.head_dim * SizeOf(cache.type);
  return static_cast<uint8_t*>(cache.base) + HeadBlockOffset(cache, slot, block, head) +
         part * part_bytes + position % cache.block_tokens * cache.head_dim * SizeOf(cache.type);
}

// Returns the hash of a token's key and value of one head, as they are in the cache.
uint64_t HashToken(const kernels::PagedCache& cache, int32_t slot, int64_t position, int head) {
  uint64_t words[kParts][kWords];
  for (int part = 0; part < kParts; ++part) {
    std::memcpy(words[part], PartAddress(cache, slot, position, head, part), sizeof(words[part]));
  }
  return TokenHash(words[0], words[1]);
}

// Writes keys and values to the cache as they are. Queries stay unchanged.
void AppendBytes(const kernels::RopeAppendParams& p, kernels::Worker) {
  for (int64_t r = 0; r < p.rows; ++r) {
    if (p.slots[r] < 0) continue;
    for (int head = 0; head < p.cache.kv_heads; ++head) {
      for (int part = 0; part < kParts; ++part) {
        const float* from =
            p.qkv + r * kQkv + (p.heads + part * p.cache.kv_heads + head) * p.cache.head_dim;
        const size_t bytes = static_cast<size_t>(p.cache.head_dim) * 4;
        std::memcpy(PartAddress(p.cache, p.slots[r], p.positions[r], head, part), from, bytes);
        if (p.written == nullptr) continue;
        std::memcpy(static_cast<float*>(p.written) +
                        ((r * p.cache.kv_heads + head) * kParts + part) * p.cache.head_dim,
                    from, bytes);
      }
    }
  }
}

// Writes a head's result of a row: the sum of its tokens' hashes, in the first 8 bytes.
void Put(void* out, int64_t row, int head, uint64_t sum) {
  static_assert(kHeads == kKvHeads);
  std::memcpy(static_cast<float*>(out) + (row * kHeads + head) * kHeadDim, &sum, sizeof(sum));
}

// Attends to positions 0..positions[r].
void HashContext(const kernels::AttentionParams& p, kernels::Worker) {
  for (int64_t r = 0; r < p.rows; ++r) {
    for (int head = 0; head < p.cache.kv_heads; ++head) {
      uint64_t sum = 0;
      for (int64_t position = 0; p.slots[r] >= 0 && position <= p.positions[r]; ++position) {
        sum += HashToken(p.cache, p.slots[r], position, head);
      }
      Put(p.out, r, head, sum);
    }
  }
}

void NothingToMerge(const kernels::AttentionParams&, kernels::Worker) {}

// Attends to the tokens of its lists of units, up to the row's own.
void HashUnits(const kernels::SparseAttentionParams& p, kernels::Worker) {
  for (int64_t r = 0; r < p.rows; ++r) {
    for (int head = p.kv_head_begin; head < p.kv_head_end; ++head) {
      const int64_t list = r * p.cache.kv_heads + head;
      uint64_t sum = 0;
      const int32_t count = p.slots[r] < 0 ? 0 : p.counts[list];
      for (int64_t i = 0; i < count; ++i) {
        const int64_t unit = p.units == nullptr ? i : p.units[list * p.capacity + i];
        const int64_t place = p.places == nullptr ? unit : p.places[list * p.capacity + i];
        for (int32_t t = 0; t < p.unit_tokens; ++t) {
          if (p.units != nullptr && unit * p.unit_tokens + t > p.positions[r]) break;
          sum += HashToken(p.cache, p.slots[r], place * p.unit_tokens + t, head);
        }
      }
      Put(p.o, r, head, sum);
      p.lse[r * p.heads + head] = count > 0 ? 0 : -std::numeric_limits<float>::infinity();
    }
  }
}

// Adds up the parts.
void AddParts(const kernels::MergeParams& p, kernels::Worker) {
  for (int64_t r = 0; r < p.rows; ++r) {
    for (int head = 0; head < p.heads; ++head) {
      uint64_t sum = 0;
      float lse = -std::numeric_limits<float>::infinity();
      for (int64_t part = 0; part < p.parts; ++part) {
        const int64_t at = (part * p.rows + r) * p.heads + head;
        if (std::isinf(p.lse[at])) continue;
        uint64_t more;
        std::memcpy(&more, p.o + at * p.head_dim, sizeof(more));
        sum += more;
        lse = 0;
      }
      Put(p.out, r, head, sum);
      if (p.out_lse != nullptr) p.out_lse[r * p.heads + head] = lse;
    }
  }
}

class HashModelImpl : public HashModel {
 public:
  HashModelImpl(const HashModelOptions& options, Buffer states, Buffer drift, Buffer qkv,
                Buffer predicted, Buffer index_q, Buffer out)
      : options_(options),
        states_(std::move(states)),
        drift_(std::move(drift)),
        qkv_(std::move(qkv)),
        predicted_(std::move(predicted)),
        index_q_(std::move(index_q)),
        out_(std::move(out)) {
    config_.name = config_.architecture = "sim";
    config_.layers = kLayers;
    config_.heads = kHeads;
    config_.kv_heads = kKvHeads;
    config_.head_dim = kHeadDim;
    config_.vocab_size = kVocab;
    config_.max_position_embeddings = options.max_context;
    config_.eos_token_ids = {kEosToken};
    CacheKind kv;
    kv.name = "kv";
    kv.element_type = DType::kFloat32;
    kv.heads = kKvHeads;
    kv.block_tokens = options.block_tokens;
    kv.SetEqualParts(kParts, kParts * kHeadDim * 4);
    layout_ = {kLayers, {kv}};
    if (options.top_k == 0) return;
    LatentConfig& latent = config_.latent.emplace();
    latent.rank = kRank;
    latent.rope_dim = kRope;
    latent.indexer = IndexerConfig{1, options.top_k};
    CacheKind entry = kv, key = kv;
    entry.name = "latent";
    key.name = "index";
    entry.heads = key.heads = 1;
    entry.SetEqualParts(1, kEntryWords * 8);
    key.SetEqualParts(1, kKeyWords * 8);
    layout_.kinds = {entry, key};
  }

  const ModelConfig& config() const override { return config_; }
  const std::string& fingerprint() const override { return fingerprint_; }
  const CacheLayout& cache_layout() const override { return layout_; }
  int max_context() const override { return options_.max_context; }
  int max_rows() const override { return options_.max_rows; }
  int max_logits() const override { return options_.max_logits; }
  int64_t weight_bytes() const override { return 0; }
  int64_t workspace_bytes() const override {
    return static_cast<int64_t>(states_.bytes() + qkv_.bytes() + predicted_.bytes() + out_.bytes());
  }
  int deepest() const override { return deepest_; }

  void Forward(Stream& stream, const StepInputs& in, AttentionPolicy& policy) override {
    SLUICE_CHECK(in.rows <= options_.max_rows && in.logit_count <= options_.max_logits);
    SLUICE_CHECK(CheckAttends(policy, cache_layout()).ok());
    auto& host = static_cast<HostStream&>(stream);
    deepest_ = std::max(deepest_, ++under_way_);
    for (int layer = 0; layer < kLayers; ++layer) {
      host.Enqueue<Step>(layer == 0 ? &Embeddings : &MixIn, {this, in, layer});
      if (options_.top_k > 0) {
        LatentLayer(host, in, layer, *policy.latent_attention());
        continue;
      }
      KvAttention& attention = *policy.kv_attention();
      if (layer == 0) LookAhead(host, in, 0, attention);
      if (layer == 0 || !attention.LooksEarly()) LookAhead(host, in, layer + 1, attention);
      host.Enqueue<Step>(&Project, {this, in, layer});
      kernels::RopeAppendParams append{};
      append.qkv = qkv_.as<float>();
      append.slots = in.slots;
      append.positions = in.positions;
      append.rows = in.rows;
      append.heads = kHeads;
      append.decode_rows = in.decode_rows;
      attention.Append(stream, layer, append);
      kernels::AttentionParams attend{};
      attend.q = qkv_.as<float>();
      attend.q_stride = kQkv;
      attend.slots = in.slots;
      attend.positions = in.positions;
      attend.out = out_.data();
      attend.rows = in.rows;
      attend.decode_rows = in.decode_rows;
      attend.heads = kHeads;
      attend.scale = kScale;
      attend.out_type = DType::kFloat32;
      attention.Attend(stream, layer, attend);
      if (attention.LooksEarly()) LookAhead(host, in, layer + 2, attention);
    }
    host.Enqueue<Step>(&MixIn, {this, in, kLayers});
    host.Enqueue<Step>(&Logits, {this, in, kLayers});
    stream.After(stream.Branch(AttentionPolicy::kAheadBranch));
    policy.EndStep(stream);
  }

  bool drafts() const override { return options_.drafts; }
  // The layer has no caches: what it drafts is a function of the token that it is given, so that
  // whoever knows a sequence's tokens knows its drafts.
  void Draft(Stream& stream, const DraftInputs& in, LatentAttention&) override {
    SLUICE_CHECK(in.rows <= options_.max_rows && in.logit_count <= options_.max_logits);
    static_cast<HostStream&>(stream).Enqueue<DraftInputs>(&DraftLogits, in);
  }

 private:
  struct Step {
    HashModelImpl* model;
    StepInputs in;
    int layer;
  };
  // Keeps the real model's order: DenseModel::LookAhead.
  void LookAhead(HostStream& host, const StepInputs& in, int layer, KvAttention& attention) {
    if (in.decode_rows == 0 || layer >= kLayers || !attention.LooksAhead(layer)) return;
    // As there, this comes before its input changes; two layers' predictions are under way at once.
    StepInputs to_predict = in;
    if (!attention.FollowsDrift()) to_predict.numbers = nullptr;
    host.Enqueue<Step>(&Predict, {this, to_predict, layer});
    Stream& ahead = host.Branch(AttentionPolicy::kAheadBranch);
    ahead.After(host);
    attention.Ahead(ahead, layer,
                    {Predicted(layer), kHeads * kHeadDim, in.slots, in.positions, in.decode_rows,
                     kHeads, kScale});
  }
  // Writes entries and keys to the caches, then attends; the queries are made beside the selection.
  void LatentLayer(HostStream& host, const StepInputs& in, int layer, LatentAttention& attention) {
    host.Enqueue<Step>(&Project, {this, in, layer});
    kernels::LatentAppendParams entry{};
    entry.kv = qkv_.as<float>();
    entry.kv_stride = kQkv;
    entry.slots = in.slots;
    entry.positions = in.positions;
    entry.rows = in.rows;
    entry.decode_rows = in.decode_rows;
    attention.AppendLatent(host, layer, entry, 0);
    kernels::IndexAppendParams key{};
    key.k = qkv_.as<float>() + kRank + kRope;
    key.k_stride = kQkv;
    key.slots = in.slots;
    key.positions = in.positions;
    key.rows = in.rows;
    key.decode_rows = in.decode_rows;
    attention.AppendIndex(host, layer, key);
    const auto make = [&](Stream& stream) {
      static_cast<HostStream&>(stream).Enqueue<Step>(&MakeQueries, {this, in, layer});
    };
    LatentAttention::Params attend{.make_queries = make};
    attend.index_q = index_q_.data();
    attend.index_weights = index_q_.as<float>();
    attend.index_heads = 1;
    attend.top_k = options_.top_k;
    attend.q = predicted_.data();
    attend.slots = in.slots;
    attend.positions = in.positions;
    attend.rows = in.rows;
    attend.decode_rows = in.decode_rows;
    attend.heads = kHeads;
    attend.scale = kScale;
    attend.out = out_.data();
    attention.AttendLatent(host, layer, attend);
  }
  uint64_t& query(int64_t row) { return predicted_.as<uint64_t>()[row]; }
  static void MakeQueries(const Step& s, CpuTeam*) {
    for (int64_t r = 0; r < s.in.rows; ++r) {
      s.model->query(r) = QueryWord(s.model->state(r), s.layer, kLatentQueryWord);
    }
  }

  static int32_t TokenOf(const StepInputs& in, int32_t row) {
    return in.tokens[in.slots[row] * in.token_stride + in.positions[row]];
  }
  float* Predicted(int layer) const {
    return predicted_.as<float>() + int64_t{layer % 2} * options_.max_rows * kHeads * kHeadDim;
  }
  uint64_t& state(int64_t row) { return states_.as<uint64_t>()[row]; }
  uint64_t& drift(int32_t slot, int layer) {
    return drift_.as<uint64_t>()[int64_t{slot} * kLayers + layer];
  }

  static void Embeddings(const Step& s, CpuTeam*) {
    for (int32_t r = 0; r < s.in.rows; ++r) {
      s.model->state(r) = 0;
      if (s.in.slots[r] < 0) continue;
      s.model->state(r) = Embed(TokenOf(s.in, r), s.in.positions[r]);
    }
  }
  static void MixIn(const Step& s, CpuTeam*) {
    for (int64_t r = 0; r < s.in.rows; ++r) {
      for (int64_t head = 0; head < kKvHeads; ++head) {
        uint64_t sum;
        std::memcpy(&sum, s.model->out_.as<float>() + (r * kHeads + head) * kHeadDim, sizeof(sum));
        s.model->state(r) = Mix(s.model->state(r), sum);
      }
      if (s.model->options_.top_k > 0) {
        s.model->state(r) = Mix(s.model->state(r), s.model->query(r));
      }
    }
  }
  static void Project(const Step& s, CpuTeam*) {
    for (int64_t r = 0; r < s.in.rows; ++r) {
      float* row = s.model->qkv_.as<float>() + r * kQkv;
      if (s.model->options_.top_k > 0) {
        for (int i = 0; i < kTokenWords; ++i) {
          const uint64_t value = KvWord(s.model->state(r), s.layer, i);
          std::memcpy(row + 2 * i, &value, sizeof(value));
        }
        const uint64_t index = QueryWord(s.model->state(r), s.layer, kIndexQueryWord);
        std::memcpy(s.model->index_q_.as<float>() + r * kernels::kIndexDim, &index, sizeof(index));
        continue;
      }
      WriteQueries(s.model->state(r), s.layer, row);
      int word = 0;
      for (int head = 0; head < kKvHeads; ++head) {
        for (int part = 0; part < kParts; ++part) {
          for (int i = 0; i < kWords; ++i) {
            const uint64_t value = KvWord(s.model->state(r), s.layer, word++);
            std::memcpy(row + (kHeads + part * kKvHeads + head) * kHeadDim + 2 * i, &value,
                        sizeof(value));
          }
        }
      }
    }
  }
  static void WriteQueries(uint64_t state, int layer, float* to) {
    for (int i = 0; i < kHeads * kWords; ++i) {
      const uint64_t value = QueryWord(state, layer, i);
      std::memcpy(to + 2 * i, &value, sizeof(value));
    }
  }
  // Makes predicted queries that are nothing like the real ones, except for layer 0 without drift:
  // what a policy does with them must be right whatever they are. As in a real model, the drift is
  // that of the sequence's earlier decode rows, and what an earlier sequence left in the slot must
  // not count.
  static void Predict(const Step& s, CpuTeam*) {
    for (int64_t r = 0; r < s.in.decode_rows; ++r) {
      const int32_t slot = s.in.slots[r];
      const uint64_t state = s.model->state(r);
      uint64_t predicted = state;
      if (s.in.numbers != nullptr && slot >= 0) {
        uint64_t& drift = s.model->drift(slot, s.layer);
        if (s.in.numbers[r] > 0) predicted = Mix(state, drift);
        drift = s.in.numbers[r] > 0 ? Mix(drift, state) : state;
      }
      WriteQueries(predicted, s.layer, s.model->Predicted(s.layer) + r * kHeads * kHeadDim);
    }
  }
  static void Logits(const Step& s, CpuTeam*) {
    --s.model->under_way_;
    for (int64_t i = 0; i < s.in.logit_count; ++i) {
      const int32_t row = s.in.logit_rows[i];
      for (int v = 0; v < kVocab; ++v) {
        s.in.logits[i * kVocab + v] =
            row < 0 ? 0 : Logit(s.model->state(row), TokenOf(s.in, row), v);
      }
    }
  }

  static void DraftLogits(const DraftInputs& in, CpuTeam*) {
    for (int64_t i = 0; i < in.logit_count; ++i) {
      const int32_t row = in.logit_rows[i];
      float* const logits = in.logits + i * kVocab;
      std::fill_n(logits, kVocab, 0.0f);
      if (row < 0 || in.slots[row] < 0) continue;
      const int32_t at = in.positions[row] + 1;
      const int32_t draft = DraftBehind(in.tokens[in.slots[row] * in.token_stride + at], at);
      if (draft < 0) {
        std::fill_n(logits, kVocab, std::numeric_limits<float>::quiet_NaN());
      } else {
        logits[draft] = 1.0f;
      }
    }
  }

  const HashModelOptions options_;
  const Buffer states_;  // uint64 [max_rows]
  const Buffer drift_;   // uint64 [slots][kLayers]
  const Buffer qkv_;     // [max_rows][kQkv], K and V as 32-bit halves of words
  // [2][max_rows][kHeads * kHeadDim], by a layer's parity. With latent attention: one word per row.
  const Buffer predicted_;
  const Buffer index_q_;  // [max_rows][kernels::kIndexDim], the first word counts
  const Buffer out_;      // [max_rows][kHeads][kHeadDim]; the first 8 bytes of each head count
  const std::string fingerprint_ = "sim";
  ModelConfig config_;
  CacheLayout layout_;
  int under_way_ = 0;
  int deepest_ = 0;
};

}  // namespace

const kernels::KernelTable& HashKernels() {
  static const kernels::KernelTable table = [] {
    kernels::KernelTable t = *kernels::FindKernelTable("portable");
    t.name = "hash";
    t.rope_append = &AppendBytes;
    t.attention = &HashContext;
    t.attention_merge = &NothingToMerge;
    t.merge = &AddParts;
    t.sparse_attention = &HashUnits;
    // Operators that treat keys as numbers come from the reference, because the CPU's have minimum
    // sizes of heads and blocks.
    const kernels::KernelTable& reference = *kernels::FindKernelTable("reference");
    t.digest = reference.digest;
    t.digest_scores = reference.digest_scores;
    t.refine_scores = reference.refine_scores;
    t.exact_scores = reference.exact_scores;
    t.partial_keys = reference.partial_keys;
    t.partial_scores = reference.partial_scores;
    t.key_centres = reference.key_centres;
    t.hash_keys = reference.hash_keys;
    t.hash_queries = reference.hash_queries;
    t.label_lookup = reference.label_lookup;
    t.moving_average = reference.moving_average;
    UseLatentHashes(&t);
    UseFluxionHashes(&t);
    return t;
  }();
  return table;
}

absl::StatusOr<std::unique_ptr<HashModel>> NewHashModel(const HashModelOptions& options,
                                                        Device* device) {
  const auto rows = static_cast<size_t>(options.max_rows);
  const auto allocate = [&](size_t row_bytes) {
    return device->Allocate(MemoryKind::kDevice, rows * row_bytes, "activations");
  };
  SLUICE_ASSIGN_OR_RETURN(Buffer states, allocate(8));
  // A slot has at most one row that wants logits.
  SLUICE_ASSIGN_OR_RETURN(
      Buffer drift,
      device->Allocate(MemoryKind::kDevice, static_cast<size_t>(options.max_logits) * kLayers * 8,
                       "drift"));
  SLUICE_ASSIGN_OR_RETURN(Buffer qkv, allocate(kQkv * 4));
  SLUICE_ASSIGN_OR_RETURN(Buffer predicted, allocate(2 * kHeads * kHeadDim * 4));
  SLUICE_ASSIGN_OR_RETURN(Buffer out, allocate(kHeads * kHeadDim * 4));
  SLUICE_ASSIGN_OR_RETURN(Buffer index_q, allocate(kernels::kIndexDim * 4));
  return std::make_unique<HashModelImpl>(options, std::move(states), std::move(drift),
                                         std::move(qkv), std::move(predicted), std::move(index_q),
                                         std::move(out));
}

}  // namespace sluice::sim
