#include "src/bench/workload/latent_context.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"
#include "src/attention/forwarding_policy.h"
#include "src/attention/policies/full/full_policy.h"
#include "src/base/crc32c.h"
#include "src/base/json_file.h"
#include "src/base/status_macros.h"
#include "src/kv/page_pool.h"
#include "src/kv/sequence_cache.h"
#include "src/model/policy_model.h"

namespace sluice::bench {
namespace {

constexpr int kSlot = 0;
constexpr int kChunkTokens = 512;
constexpr int kTwinFfn = 128;

// Appends to the caches and does not attend: the results stay zero.
class AppendOnly : public ForwardingPolicy {
 public:
  using ForwardingPolicy::ForwardingPolicy;
  void AttendLatent(Stream&, int, const Params&) override {}
};

class TwinContextMaker : public ContextMaker {
 public:
  TwinContextMaker(Device* device, Model* twin) : device_(device), twin_(twin) {}

  absl::Status Init(int max_context) {
    const CacheLayout& layout = twin_->cache_layout();
    SLUICE_ASSIGN_OR_RETURN(
        Buffer arena,
        device_->Allocate(MemoryKind::kDevice, static_cast<size_t>(ArenaBytes(layout, max_context)),
                          "a context"));
    SLUICE_ASSIGN_OR_RETURN(pool_, PagePool::Create("hbm", layout, std::move(arena)));
    PolicyOptions of = PolicyOver(device_, pool_.get(), 1, 0);
    DescribeModel(*twin_, &of);
    of.max_context = max_context;
    SLUICE_ASSIGN_OR_RETURN(full_, NewFullPolicy(of));
    policy_ = std::make_unique<AppendOnly>(full_.get());
    stream_ = device_->NewStream(Device::StreamKind::kCompute);
    done_ = device_->NewEvent();
    SLUICE_ASSIGN_OR_RETURN(
        rows_, device_->Allocate(MemoryKind::kPinned, 3 * kChunkTokens * 4, "rows of a chunk"));
    return absl::OkStatus();
  }

  absl::StatusOr<Context> Compute(const std::vector<int32_t>& tokens) override {
    const auto count = static_cast<int64_t>(tokens.size());
    std::unique_ptr<SequenceCache> no_home;
    SLUICE_CHECK(policy_->Admit(kSlot, 0, count, Promise::kFirm, no_home), "it was made to fit");
    policy_->WarmEvent(kSlot).Wait();
    SLUICE_CHECK(policy_->Warm(kSlot));
    for (int64_t begin = 0; begin < count; begin += kChunkTokens) {
      Chunk(tokens, begin, std::min<int64_t>(kChunkTokens, count - begin));
    }
    absl::StatusOr<Context> context = Read(tokens);
    policy_->Release(kSlot);
    SLUICE_RETURN_IF_ERROR(device_->Health());
    return context;
  }

 private:
  void Chunk(const std::vector<int32_t>& tokens, int64_t begin, int64_t count) {
    // The embedding reads tokens[position], so the base pointer is shifted: only this chunk's
    // tokens exist.
    auto* const ids = rows_.as<int32_t>();
    int32_t* const slots = ids + kChunkTokens;
    int32_t* const positions = slots + kChunkTokens;
    for (int64_t i = 0; i < count; ++i) {
      ids[i] = tokens[static_cast<size_t>(begin + i)];
      slots[i] = kSlot;
      positions[i] = static_cast<int32_t>(begin + i);
    }
    SLUICE_CHECK(policy_->Grow(kSlot, begin + count));
    const auto rows = static_cast<size_t>(count);
    policy_->BeginStep(*stream_, {slots, rows}, {positions, rows});
    StepInputs in;
    in.tokens = ids - begin;
    in.token_stride = 0;
    in.slots = slots;
    in.positions = positions;
    in.rows = static_cast<int32_t>(count);
    twin_->Forward(*stream_, in, *policy_);
    stream_->Record(*done_);
    done_->Wait();
  }

  // Returns the caches of the slot, in the form of chunks on the wire.
  absl::StatusOr<Context> Read(const std::vector<int32_t>& tokens) {
    const CacheLayout& layout = twin_->cache_layout();
    Context context = EmptyContext(tokens, layout);
    SLUICE_ASSIGN_OR_RETURN(context.memory,
                            device_->Allocate(MemoryKind::kDevice, context.bytes(), "a context"));
    std::vector<Stream::CopyOp> copies;
    HomeRange range;
    range.token_end = static_cast<int64_t>(tokens.size());
    auto* target = context.memory.as<uint8_t>();
    for (range.layer = 0; range.layer < layout.layers; ++range.layer) {
      for (range.kind = 0; range.kind < layout.kinds.size(); ++range.kind) {
        range.head_end = layout.kinds[range.kind].heads;
        full_->resident(kSlot).ForEachPiece(range, [&](const HomePiece& piece) {
          copies.push_back({target, piece.data, static_cast<size_t>(piece.bytes)});
          target += piece.bytes;
        });
      }
    }
    stream_->CopyBatch(copies.data(), copies.size());
    stream_->Record(*done_);
    done_->Wait();
    SLUICE_ASSIGN_OR_RETURN(const auto reader, ContextReader::Create(device_));
    for (int layer = 0; layer < layout.layers; ++layer) {
      for (size_t kind = 0; kind < layout.kinds.size(); ++kind) {
        uint32_t& crc32c = context.payload(layer, kind).crc32c;
        reader->Read(context, layer, kind, [&](absl::Span<const uint8_t> piece) {
          crc32c = ExtendCrc32c(crc32c, piece);
        });
      }
    }
    return context;
  }

  Device* const device_;
  Model* const twin_;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<FullPolicy> full_;
  std::unique_ptr<AppendOnly> policy_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> done_;
  Buffer rows_;  // int32 [3][kChunkTokens]: tokens, slots, positions
};

// A temporary folder that the destructor removes.
class TemporaryFolder {
 public:
  // INTERNAL: the folder cannot be created.
  static absl::StatusOr<std::unique_ptr<TemporaryFolder>> Create() {
    std::error_code error;
    std::string name = std::filesystem::temp_directory_path(error) / "sluice-twin-XXXXXX";
    if (error || mkdtemp(name.data()) == nullptr) {
      return absl::InternalError(absl::StrCat("cannot create a folder ", name, ": ",
                                              error ? error.message() : std::strerror(errno),
                                              ": set TMPDIR to a folder that is writable"));
    }
    return std::unique_ptr<TemporaryFolder>(new TemporaryFolder(name));
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::filesystem::path& path() const { return path_; }

 private:
  explicit TemporaryFolder(std::filesystem::path path) : path_(std::move(path)) {}
  const std::filesystem::path path_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> LoadTwin(const Model::Options& model,
                                                const LatentDrift& drift, Device* device) {
  SLUICE_ASSIGN_OR_RETURN(nlohmann::json config,
                          ReadJsonFile(model.directory + "/config.json", kMaxConfigBytes));
  config["num_attention_heads"] = config["num_key_value_heads"] = 1;
  config["index_n_heads"] = 1;
  config["first_k_dense_replace"] = config["num_hidden_layers"];
  config["intermediate_size"] = kTwinFfn;
  config.erase("mlp_layer_types");
  SLUICE_ASSIGN_OR_RETURN(const auto folder, TemporaryFolder::Create());
  std::ofstream file(folder->path() / "config.json");
  file << config.dump();
  file.close();
  if (!file) {
    return absl::InternalError(
        absl::StrCat("cannot write ", folder->path().string(),
                     "/config.json: set TMPDIR to a folder with free space"));
  }
  Model::Options twin = model;
  twin.directory = folder->path();
  twin.max_rows = kChunkTokens;
  twin.max_logits = 1;
  twin.weights = [&](const ModelConfig& of) { return LatentDriftWeights(of, drift); };
  return Model::Load(twin, device);
}

absl::StatusOr<std::unique_ptr<ContextMaker>> NewTwinContextMaker(int max_context, Device* device,
                                                                  Model* twin) {
  auto maker = std::make_unique<TwinContextMaker>(device, twin);
  SLUICE_RETURN_IF_ERROR(maker->Init(max_context));
  return maker;
}

}  // namespace sluice::bench
