#include "src/bench/serve/kv_source.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/e4m3.h"
#include "kernels/latent_params.h"
#include "src/base/crc32c.h"
#include "src/base/dtype.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"
#include "src/model/safetensors.h"
#include "src/service/wire/chunking.h"
#include "src/service/wire/proto_conversion.h"

namespace sluice::bench {
namespace {

absl::StatusOr<std::vector<CacheKind>> KindsOf(const v1::ModelInfo& model) {
  std::vector<CacheKind> kinds;
  for (const v1::CacheKind& kind : model.cache_kinds()) {
    SLUICE_ASSIGN_OR_RETURN(kinds.emplace_back(), FromProto("cache_kinds", kind));
  }
  if (kinds.empty()) return absl::InvalidArgumentError("the node's model names no cache kinds");
  return kinds;
}

// Plans the chunks of a prompt and fills in the common part of their messages.
class ChunkedKv : public KvSource {
 public:
  ChunkedKv(const v1::ModelInfo& model, std::vector<CacheKind> kinds)
      : layers_(model.layers()), kinds_(std::move(kinds)) {}

  absl::StatusOr<size_t> ChunkCount(int64_t tokens, uint64_t max_chunk_bytes) override {
    const auto key = std::pair(tokens, max_chunk_bytes);
    if (const auto found = plans_.find(key); found != plans_.end()) {
      return found->second.size() * layers_;
    }
    std::vector<Planned> plan;
    for (size_t kind = 0; kind < kinds_.size(); ++kind) {
      SLUICE_ASSIGN_OR_RETURN(
          const std::vector<ChunkPlan> chunks,
          PlanChunks(kinds_[kind], 0, static_cast<int>(tokens), max_chunk_bytes));
      for (const ChunkPlan& chunk : chunks) plan.push_back({kind, chunk});
    }
    return plans_.emplace(key, std::move(plan)).first->second.size() * layers_;
  }

  v1::WriteRequest& Chunk(int64_t tokens, uint64_t max_chunk_bytes, size_t index) override {
    const std::vector<Planned>& plan = plans_.at({tokens, max_chunk_bytes});
    const Planned& p = plan[index % plan.size()];
    const auto layer = static_cast<uint32_t>(index / plan.size());
    v1::WriteRequest& chunk = Fill(layer, p.kind, p.chunk);
    v1::ChunkHeader* header = chunk.mutable_header();
    header->set_layer(layer);
    header->set_kind(kinds_[p.kind].name);
    header->set_head_begin(p.chunk.head_begin);
    header->set_head_end(p.chunk.head_end);
    header->set_token_begin(p.chunk.token_begin);
    header->set_token_end(p.chunk.token_end);
    return chunk;
  }

 protected:
  const CacheKind& kind(size_t index) const { return kinds_[index]; }

 private:
  struct Planned {
    size_t kind;
    ChunkPlan chunk;
  };
  // Returns a message with the chunk's payload and checksum.
  virtual v1::WriteRequest& Fill(uint32_t layer, size_t kind, const ChunkPlan& chunk) = 0;

  const uint32_t layers_;
  const std::vector<CacheKind> kinds_;
  std::map<std::pair<int64_t, uint64_t>, std::vector<Planned>> plans_;
};

void SetPayload(std::string payload, v1::WriteRequest* out) {
  out->mutable_header()->set_crc32c(
      Crc32c({reinterpret_cast<const uint8_t*>(payload.data()), payload.size()}));
  *out->mutable_payload() = std::move(payload);
}

class RandomKv : public ChunkedKv {
 public:
  RandomKv(const v1::ModelInfo& model, std::vector<CacheKind> kinds)
      : ChunkedKv(model, std::move(kinds)), vocab_(model.vocab_size()) {}

  std::vector<int32_t> Prompt(uint64_t seed, int64_t tokens) const override {
    SplitMix64 random(seed);
    std::vector<int32_t> prompt(static_cast<size_t>(tokens));
    for (int32_t& id : prompt) id = static_cast<int32_t>(random.Below(vocab_));
    return prompt;
  }
  const std::vector<int32_t>& Known() const override { return none_; }

 private:
  v1::WriteRequest& Fill(uint32_t, size_t index, const ChunkPlan& chunk) override {
    v1::WriteRequest& message = messages_[{index, chunk.bytes}];
    if (message.payload().empty()) SetPayload(RandomPayload(index, chunk), &message);
    return message;
  }
  std::string RandomPayload(size_t index, const ChunkPlan& chunk) const {
    const CacheKind& of = kind(index);
    SplitMix64 random(index + 1);
    std::string out;
    out.reserve(chunk.bytes);
    if (of.element_type != DType::kFloat8E4M3) {
      while (out.size() < chunk.bytes) AppendValues(of.element_type, 1, random, &out);
      return out;
    }
    // Fills block by block, in the order of the kind's parts: entries one after the other; or the
    // values of all index keys, then their scales.
    const auto block = static_cast<uint32_t>(of.block_tokens);
    for (uint32_t first = chunk.token_begin; first < chunk.token_end; first += block) {
      const uint32_t tokens = std::min(block, chunk.token_end - first);
      for (const int64_t part : of.part_bytes) {
        for (uint32_t t = 0; t < tokens; ++t) AppendPacked(part, random, &out);
      }
    }
    return out;
  }
  // Appends one token's part of a packed cache.
  static void AppendPacked(int64_t bytes, SplitMix64& random, std::string* out) {
    if (bytes == kernels::kPackedEntryBytes) {
      AppendValues(DType::kFloat8E4M3, kernels::kPackedRank, random, out);
      for (int i = 0; i < kernels::kPackedRank / kernels::kPackedScaleTokens; ++i) {
        AppendScale(out);
      }
      AppendValues(DType::kBFloat16, kernels::kPackedRope, random, out);
    } else if (bytes == kernels::kIndexDim) {
      AppendValues(DType::kFloat8E4M3, kernels::kIndexDim, random, out);
    } else {
      AppendScale(out);
    }
  }
  static void AppendScale(std::string* out) {
    out->append(reinterpret_cast<const char*>(&kScale), sizeof(kScale));
  }
  // Appends sums of four uniform values, scaled to a variance of 1: normal enough for a cache.
  static void AppendValues(DType type, int count, SplitMix64& random, std::string* out) {
    for (int v = 0; v < count; ++v) {
      const uint64_t bits = random();
      double sum = -2.0 * 65535;
      for (int i = 0; i < 4; ++i) sum += static_cast<double>(bits >> (16 * i) & 0xFFFF);
      const auto value = static_cast<float>(sum / 65535 * std::sqrt(3.0));
      if (type == DType::kFloat32) {
        out->append(reinterpret_cast<const char*>(&value), sizeof(value));
      } else if (type == DType::kBFloat16) {
        const uint16_t narrow = FloatToBFloat16(value);
        out->append(reinterpret_cast<const char*>(&narrow), sizeof(narrow));
      } else {
        out->push_back(static_cast<char>(kernels::FloatToE4M3(value / kScale)));
      }
    }
  }

  // The scale of packed values, none of which is above 3.5.
  static constexpr float kScale = 3.5f / kernels::kE4M3Max;

  const uint32_t vocab_;
  const std::vector<int32_t> none_;
  std::map<std::pair<size_t, uint64_t>, v1::WriteRequest> messages_;
};

class RecordedKv : public ChunkedKv {
 public:
  RecordedKv(const v1::ModelInfo& model, std::vector<CacheKind> kinds,
             std::unique_ptr<SafetensorsFile> file, std::string name)
      : ChunkedKv(model, std::move(kinds)), file_(std::move(file)), name_(std::move(name)) {}

  absl::Status Load(const v1::ModelInfo& model) {
    SLUICE_ASSIGN_OR_RETURN(prompt_, Ids("prompt"));
    SLUICE_ASSIGN_OR_RETURN(known_, Ids("tokens"));
    const CacheKind& kv = kind(0);
    if (kv.element_type != DType::kBFloat16 || kv.part_bytes.size() != 2) {
      return absl::FailedPreconditionError(
          "recorded caches are bf16 keys and values, but the node keeps other kinds: use --kv "
          "random");
    }
    const std::vector<int64_t> shape = {static_cast<int64_t>(prompt_.size()), model.kv_heads(),
                                        model.head_dim()};
    for (uint32_t layer = 0; layer < model.layers(); ++layer) {
      for (const char* part : {".k.", ".v."}) {
        const std::string tensor = absl::StrCat(name_, part, layer);
        const TensorInfo* info = file_->Find(tensor);
        if (info == nullptr || info->type != TensorType::kBF16 || info->shape != shape) {
          return absl::FailedPreconditionError(
              absl::StrCat(file_->path(), ": ", tensor, " must be BF16 of ", ShapeText(shape),
                           " for the node's model, but is ",
                           info == nullptr ? "missing" : ShapeText(info->shape)));
        }
      }
    }
    return absl::OkStatus();
  }

  std::vector<int32_t> Prompt(uint64_t, int64_t) const override { return prompt_; }
  const std::vector<int32_t>& Known() const override { return known_; }

 private:
  absl::StatusOr<std::vector<int32_t>> Ids(const char* what) const {
    const std::string tensor = absl::StrCat(name_, ".", what);
    const TensorInfo* info = file_->Find(tensor);
    if (info == nullptr || info->type != TensorType::kI32 || info->elements() == 0) {
      return absl::NotFoundError(absl::StrCat(file_->path(), " has no ", tensor, " of I32"));
    }
    std::vector<int32_t> ids(static_cast<size_t>(info->elements()));
    std::memcpy(ids.data(), file_->Data(*info), info->bytes);
    return ids;
  }

  // A block has, for each head, the keys of its tokens and then the values.
  v1::WriteRequest& Fill(uint32_t layer, size_t index, const ChunkPlan& chunk) override {
    const CacheKind& kv = kind(index);
    // Elements of one head's keys or values.
    const auto row = static_cast<size_t>(kv.bytes_per_token) / 2;
    const auto block = static_cast<uint32_t>(kv.block_tokens);
    std::string payload;
    payload.reserve(chunk.bytes);
    for (uint32_t first = chunk.token_begin; first < chunk.token_end; first += block) {
      const uint32_t last = std::min(first + block, chunk.token_end);
      for (uint32_t head = chunk.head_begin; head < chunk.head_end; ++head) {
        for (const char* part : {".k.", ".v."}) {
          const TensorInfo& info = *file_->Find(absl::StrCat(name_, part, layer));
          const auto* data = reinterpret_cast<const char*>(file_->Data(info));
          for (uint32_t token = first; token < last; ++token) {
            const size_t at = (size_t{token} * static_cast<size_t>(kv.heads) + head) * row;
            payload.append(data + at, row);
          }
        }
      }
    }
    SetPayload(std::move(payload), &message_);
    return message_;
  }

  const std::unique_ptr<SafetensorsFile> file_;
  const std::string name_;
  std::vector<int32_t> prompt_, known_;
  v1::WriteRequest message_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<KvSource>> NewRandomKv(const v1::ModelInfo& model) {
  SLUICE_ASSIGN_OR_RETURN(std::vector<CacheKind> kinds, KindsOf(model));
  return std::make_unique<RandomKv>(model, std::move(kinds));
}

absl::StatusOr<std::unique_ptr<KvSource>> NewRecordedKv(const v1::ModelInfo& model,
                                                        const std::string& path, int number) {
  SLUICE_ASSIGN_OR_RETURN(std::vector<CacheKind> kinds, KindsOf(model));
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<SafetensorsFile> file, SafetensorsFile::Open(path));
  auto kv = std::make_unique<RecordedKv>(model, std::move(kinds), std::move(file),
                                         absl::StrCat("case", number));
  SLUICE_RETURN_IF_ERROR(kv->Load(model));
  return kv;
}

}  // namespace sluice::bench
