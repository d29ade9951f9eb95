#include "src/profile/query_capture.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "src/attention/forwarding_policy.h"
#include "src/attention/policies/full/full_policy.h"
#include "src/base/dtype.h"
#include "src/base/status_macros.h"
#include "src/engine/batch_state.h"
#include "src/kv/page_pool.h"

namespace sluice {
namespace {

constexpr int kSlot = 0;
// Tokens whose queries of all layers are in memory at the same time.
constexpr int kChunkTokens = 128;

// The shape of one row of a layer.
struct RowShape {
  int64_t heads, kv_heads, head_dim;
  DType kv_dtype;
  int64_t qkv_bytes() const { return (heads + 2 * kv_heads) * head_dim * 4; }
  int64_t written_bytes() const { return 2 * kv_heads * head_dim * SizeOf(kv_dtype); }
};

// Policy `full`, which also copies every layer's queries, keys and values of a step to the host.
class CapturingPolicy : public ForwardingPolicy {
 public:
  CapturingPolicy(AttentionPolicy* full, const RowShape& shape, Buffer written, Buffer host)
      : ForwardingPolicy(full),
        shape_(shape),
        written_(std::move(written)),
        host_(std::move(host)) {}

  void Append(Stream& stream, int layer, kernels::RopeAppendParams params) override {
    params.written = written_.data();
    ForwardingPolicy::Append(stream, layer, params);
    stream.Copy(At(layer), params.qkv, static_cast<size_t>(params.rows * shape_.qkv_bytes()));
    stream.Copy(At(layer) + kChunkTokens * shape_.qkv_bytes(), written_.data(),
                static_cast<size_t>(params.rows * shape_.written_bytes()));
  }

  // Returns a query of a row of the last step. REQUIRES: that step is done.
  const float* Query(int layer, int64_t row, int64_t head) const {
    return reinterpret_cast<const float*>(At(layer) + row * shape_.qkv_bytes()) +
           head * shape_.head_dim;
  }
  // Appends the key (part 0) or the value (part 1) that a row of the last step wrote.
  void AddWritten(int layer, int64_t row, int64_t kv_head, int64_t part,
                  std::vector<float>* to) const {
    const uint8_t* at = At(layer) + kChunkTokens * shape_.qkv_bytes() +
                        row * shape_.written_bytes() +
                        (kv_head * 2 + part) * shape_.head_dim * SizeOf(shape_.kv_dtype);
    AppendFloats(at, shape_.head_dim, shape_.kv_dtype, to);
  }

  static int64_t LayerBytes(const RowShape& shape) {
    return kChunkTokens * (shape.qkv_bytes() + shape.written_bytes());
  }

 private:
  uint8_t* At(int layer) const { return host_.as<uint8_t>() + layer * LayerBytes(shape_); }

  const RowShape shape_;
  const Buffer written_, host_;  // [rows][written_bytes]; [layers][LayerBytes].
};

class Capture {
 public:
  Capture(Device* device, Model* model, bool values)
      : device_(device), model_(model), values_(values) {
    const ModelConfig& config = model->config();
    shape_ = {config.heads, config.kv_heads, config.head_dim,
              model->cache_layout().kinds[0].element_type};
    captured_.layers = model->cache_layout().layers;
    captured_.kv_heads = config.kv_heads;
    captured_.head_dim = config.head_dim;
    captured_.heads.resize(static_cast<size_t>(captured_.layers * captured_.kv_heads));
  }

  absl::Status Start(int64_t longest) {
    const CacheLayout& layout = model_->cache_layout();
    const auto bytes = static_cast<size_t>(layout.BytesFor(longest) + 65536);
    SLUICE_ASSIGN_OR_RETURN(Buffer arena,
                            device_->Allocate(MemoryKind::kDevice, bytes, "the caches"));
    SLUICE_ASSIGN_OR_RETURN(pool_, PagePool::Create("hbm", layout, std::move(arena)));
    SLUICE_ASSIGN_OR_RETURN(
        full_, NewFullPolicy(PolicyOver(device_, pool_.get(), 1, model_->max_context())));
    SLUICE_ASSIGN_OR_RETURN(batch_,
                            BatchState::Create({1, model_->max_context()}, device_, *model_));
    SLUICE_ASSIGN_OR_RETURN(
        Buffer written,
        device_->Allocate(MemoryKind::kDevice,
                          static_cast<size_t>(kChunkTokens * shape_.written_bytes()), "keys"));
    SLUICE_ASSIGN_OR_RETURN(
        Buffer host,
        device_->Allocate(MemoryKind::kPinned,
                          static_cast<size_t>(layout.layers * CapturingPolicy::LayerBytes(shape_)),
                          "queries"));
    policy_ =
        std::make_unique<CapturingPolicy>(full_.get(), shape_, std::move(written), std::move(host));
    stream_ = device_->NewStream(Device::StreamKind::kCompute);
    return absl::OkStatus();
  }

  // Keeps every `stride`-th token, counted over all prompts.
  absl::Status Run(const Prompt& prompt, int64_t stride) {
    const auto tokens = static_cast<int64_t>(prompt.size());
    std::unique_ptr<SequenceCache> none;
    SLUICE_CHECK(policy_->Admit(kSlot, 0, tokens, Promise::kFirm, none));
    policy_->WarmEvent(kSlot).Wait();
    SamplingParams greedy;
    greedy.temperature = 0;
    batch_->Join(*stream_, kSlot, prompt, greedy, 1, static_cast<int32_t>(tokens), {});
    const int64_t chunk = std::min<int64_t>(kChunkTokens, model_->max_rows());
    for (int64_t at = 0; at < tokens; at += chunk) {
      const auto count = static_cast<int32_t>(std::min(chunk, tokens - at));
      policy_->Grow(kSlot, at + count);
      const StepPlan plan = {{{kSlot, at, count, false}}, count, 0, 0};
      batch_->Launch(*stream_, 0, plan, *model_, *policy_);
      batch_->event(0).Wait();
      SLUICE_RETURN_IF_ERROR(device_->Health());
      for (int32_t row = 0; row < count; ++row) {
        if (seen_++ % stride == 0) Keep(row);
      }
    }
    batch_->joined(kSlot).Wait();
    policy_->Release(kSlot);
    return absl::OkStatus();
  }

  CapturedQueries Take() { return std::move(captured_); }

 private:
  void Keep(int64_t row) {
    const int64_t group = shape_.heads / shape_.kv_heads;
    for (int layer = 0; layer < captured_.layers; ++layer) {
      for (int64_t head = 0; head < shape_.kv_heads; ++head) {
        HeadQueries& to = captured_.heads[static_cast<size_t>(layer * captured_.kv_heads + head)];
        const float* q = policy_->Query(layer, row, head * group);
        to.q.insert(to.q.end(), q, q + group * shape_.head_dim);
        policy_->AddWritten(layer, row, head, 0, &to.k);
        if (values_) policy_->AddWritten(layer, row, head, 1, &to.v);
      }
    }
  }

  Device* const device_;
  Model* const model_;
  const bool values_;
  RowShape shape_;
  CapturedQueries captured_;
  int64_t seen_ = 0;
  std::unique_ptr<PagePool> pool_;
  std::unique_ptr<FullPolicy> full_;
  std::unique_ptr<CapturingPolicy> policy_;
  std::unique_ptr<BatchState> batch_;
  std::unique_ptr<Stream> stream_;
};

}  // namespace

void AppendFloats(const void* elements, int64_t count, DType type, std::vector<float>* to) {
  for (int64_t i = 0; i < count; ++i) {
    to->push_back(type == DType::kFloat32
                      ? static_cast<const float*>(elements)[i]
                      : BFloat16ToFloat(static_cast<const uint16_t*>(elements)[i]));
  }
}

absl::StatusOr<CapturedQueries> CaptureQueries(
    Device* device, Model* model, const std::vector<Prompt>& prompts, int64_t tokens,
    const std::function<void(int64_t, int64_t)>& progress, bool values) {
  int64_t all = 0, longest = 0, done = 0;
  for (const Prompt& prompt : prompts) {
    all += static_cast<int64_t>(prompt.size());
    longest = std::max(longest, static_cast<int64_t>(prompt.size()));
  }
  SLUICE_CHECK(longest > 0 && longest <= model->max_context());
  const int64_t stride = std::max<int64_t>(1, all / std::max<int64_t>(tokens, 1));
  Capture capture(device, model, values);
  SLUICE_RETURN_IF_ERROR(capture.Start(longest));
  for (const Prompt& prompt : prompts) {
    SLUICE_RETURN_IF_ERROR(capture.Run(prompt, stride));
    progress(done += static_cast<int64_t>(prompt.size()), all);
  }
  return capture.Take();
}

}  // namespace sluice
