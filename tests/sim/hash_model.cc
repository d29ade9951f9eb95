#include "tests/sim/hash_model.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "src/attention/attention_policy.h"
#include "src/base/status_macros.h"
#include "src/device/cpu/host_stream.h"
#include "tests/sim/hash.h"

namespace sluice::sim {
namespace {

constexpr int kQkv = (kHeads + 2 * kKvHeads) * kHeadDim;  // floats of a row

// First byte of a part of a token's head in the cache.
uint8_t* PartAddress(const kernels::PagedCache& cache, int32_t slot, int32_t position, int head,
                     int part) {
  const int32_t page = cache.block_table[slot * cache.table_stride + position / cache.block_tokens];
  const int64_t part_bytes = int64_t{cache.block_tokens} * cache.head_dim * SizeOf(cache.type);
  return static_cast<uint8_t*>(cache.base) + page * cache.page_bytes +
         (int64_t{head} * kParts + part) * part_bytes +
         int64_t{position % cache.block_tokens} * cache.head_dim * SizeOf(cache.type);
}

// Keys and values go to the cache as they are.
void AppendBytes(const kernels::RopeAppendParams& p, kernels::Worker) {
  for (int64_t r = 0; r < p.rows; ++r) {
    if (p.slots[r] < 0) continue;
    for (int head = 0; head < p.cache.kv_heads; ++head) {
      for (int part = 0; part < kParts; ++part) {
        const float* from =
            p.qkv + r * kQkv + (p.heads + part * p.cache.kv_heads + head) * p.cache.head_dim;
        std::memcpy(PartAddress(p.cache, p.slots[r], p.positions[r], head, part), from,
                    static_cast<size_t>(p.cache.head_dim) * 4);
      }
    }
  }
}

// The hash of every byte of positions 0..positions[r]; it is all that a row's output holds.
void HashContext(const kernels::AttentionParams& p, kernels::Worker) {
  for (int64_t r = 0; r < p.rows; ++r) {
    uint64_t hash = kEmpty;
    for (int32_t position = 0; p.slots[r] >= 0 && position <= p.positions[r]; ++position) {
      for (int head = 0; head < p.cache.kv_heads; ++head) {
        for (int part = 0; part < kParts; ++part) {
          uint64_t words[kWords];
          std::memcpy(words, PartAddress(p.cache, p.slots[r], position, head, part), sizeof(words));
          for (const uint64_t word : words) hash = Mix(hash, word);
        }
      }
    }
    std::memcpy(static_cast<float*>(p.out) + r * p.heads * p.cache.head_dim, &hash, sizeof(hash));
  }
}

void NothingToMerge(const kernels::AttentionParams&, kernels::Worker) {}

class HashModelImpl : public HashModel {
 public:
  HashModelImpl(const HashModelOptions& options, Buffer states, Buffer qkv, Buffer out)
      : options_(options), states_(std::move(states)), qkv_(std::move(qkv)), out_(std::move(out)) {
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
    kv.block_tokens = kBlockTokens;
    kv.parts = kParts;
    kv.bytes_per_token = kParts * kHeadDim * 4;
    layout_ = {kLayers, {kv}};
  }

  const ModelConfig& config() const override { return config_; }
  const std::string& fingerprint() const override { return fingerprint_; }
  const CacheLayout& cache_layout() const override { return layout_; }
  int max_context() const override { return options_.max_context; }
  int max_rows() const override { return options_.max_rows; }
  int max_logits() const override { return options_.max_logits; }
  int64_t weight_bytes() const override { return 0; }
  int64_t workspace_bytes() const override {
    return static_cast<int64_t>(states_.bytes() + qkv_.bytes() + out_.bytes());
  }
  int deepest() const override { return deepest_; }

  void Forward(Stream& stream, const StepInputs& in, AttentionPolicy& policy) override {
    SLUICE_CHECK(in.rows <= options_.max_rows && in.logit_count <= options_.max_logits);
    auto& host = static_cast<HostStream&>(stream);
    deepest_ = std::max(deepest_, ++under_way_);
    for (int layer = 0; layer < kLayers; ++layer) {
      host.Enqueue<Step>(layer == 0 ? &Embeddings : &MixIn, {this, in, layer});
      host.Enqueue<Step>(&Project, {this, in, layer});
      kernels::RopeAppendParams append{};
      append.qkv = qkv_.as<float>();
      append.slots = in.slots;
      append.positions = in.positions;
      append.rows = in.rows;
      append.heads = kHeads;
      policy.Append(stream, layer, append);
      kernels::AttentionParams attend{};
      attend.q = qkv_.as<float>();
      attend.q_stride = kQkv;
      attend.slots = in.slots;
      attend.positions = in.positions;
      attend.out = out_.data();
      attend.rows = in.rows;
      attend.heads = kHeads;
      attend.out_type = DType::kFloat32;
      policy.Attend(stream, layer, attend);
    }
    host.Enqueue<Step>(&MixIn, {this, in, kLayers});
    host.Enqueue<Step>(&Logits, {this, in, kLayers});
  }

 private:
  struct Step {
    HashModelImpl* model;
    StepInputs in;
    int layer;
  };
  static int32_t TokenOf(const StepInputs& in, int32_t row) {
    return in.tokens[in.slots[row] * in.token_stride + in.positions[row]];
  }
  uint64_t& state(int64_t row) { return states_.as<uint64_t>()[row]; }

  static void Embeddings(const Step& s, CpuTeam*) {
    for (int32_t r = 0; r < s.in.rows; ++r) {
      s.model->state(r) = 0;
      if (s.in.slots[r] < 0) continue;
      s.model->state(r) = Embed(TokenOf(s.in, r), s.in.positions[r]);
    }
  }
  static void MixIn(const Step& s, CpuTeam*) {
    for (int64_t r = 0; r < s.in.rows; ++r) {
      uint64_t hash;
      std::memcpy(&hash, s.model->out_.as<float>() + r * kHeads * kHeadDim, sizeof(hash));
      s.model->state(r) = Mix(s.model->state(r), hash);
    }
  }
  static void Project(const Step& s, CpuTeam*) {
    for (int64_t r = 0; r < s.in.rows; ++r) {
      float* row = s.model->qkv_.as<float>() + r * kQkv;
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

  const HashModelOptions options_;
  const Buffer states_;  // uint64 [max_rows]
  const Buffer qkv_;     // [max_rows][kQkv], K and V of 32-bit halves of words
  const Buffer out_;     // [max_rows][kHeads * kHeadDim], of which the first 8 bytes count
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
  SLUICE_ASSIGN_OR_RETURN(Buffer qkv, allocate(kQkv * 4));
  SLUICE_ASSIGN_OR_RETURN(Buffer out, allocate(kHeads * kHeadDim * 4));
  return std::make_unique<HashModelImpl>(options, std::move(states), std::move(qkv),
                                         std::move(out));
}

}  // namespace sluice::sim
