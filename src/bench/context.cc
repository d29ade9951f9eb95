#include "src/bench/context.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "src/base/clock.h"
#include "src/base/status_macros.h"
#include "src/prefill/prefiller.h"

namespace sluice {
namespace {

class KeepingSink : public LayerSink {
 public:
  explicit KeepingSink(Context* context) : context_(context) {}
  absl::Status Begin() override { return absl::OkStatus(); }
  absl::Status Layer(int layer, const CacheKind&, int, int,
                     absl::Span<const absl::Span<const uint8_t>> pieces) override {
    // Chunks come in order and begin on blocks, so that their payloads joined are one payload.
    std::vector<uint8_t>& bytes = context_->layers[static_cast<size_t>(layer)];
    for (const auto piece : pieces) bytes.insert(bytes.end(), piece.begin(), piece.end());
    return absl::OkStatus();
  }

 private:
  Context* const context_;
};

class ContextMakerImpl : public ContextMaker {
 public:
  ContextMakerImpl(std::unique_ptr<Prefiller> prefiller, const Model* model)
      : prefiller_(std::move(prefiller)), model_(model) {}

  absl::StatusOr<Context> Compute(const std::vector<int32_t>& tokens) override {
    Context context;
    context.tokens = tokens;
    context.layers.resize(static_cast<size_t>(model_->cache_layout().layers));
    KeepingSink sink(&context);
    SamplingParams greedy;
    greedy.temperature = 0;
    SLUICE_RETURN_IF_ERROR(
        prefiller_->Run(tokens, greedy, /*want_first_token=*/false, sink, [] { return false; })
            .status());
    return context;
  }

 private:
  const std::unique_ptr<Prefiller> prefiller_;
  const Model* const model_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<ContextMaker>> ContextMaker::Create(int max_context, Device* device,
                                                                   Model* model) {
  const CacheLayout& layout = model->cache_layout();
  SLUICE_CHECK(layout.kinds.size() == 1);
  const int block = layout.kinds[0].block_tokens;
  Prefiller::Options options;
  options.max_context = static_cast<uint32_t>(max_context) + 1;
  options.chunk_tokens = static_cast<uint32_t>(std::min(512, model->max_rows() / block * block));
  options.hbm_bytes = layout.BytesFor(max_context) + 4096;
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<Prefiller> prefiller,
                          Prefiller::Create(options, device, model, RealClock()));
  return std::make_unique<ContextMakerImpl>(std::move(prefiller), model);
}

void WriteContext(const Context& context, const CacheLayout& layout, SequenceCache& cache) {
  for (int layer = 0; layer < layout.layers; ++layer) {
    const std::vector<uint8_t>& bytes = context.layers[static_cast<size_t>(layer)];
    HomeRange range;
    range.layer = layer;
    range.head_end = layout.kinds[0].heads;
    range.token_end = static_cast<int64_t>(context.tokens.size());
    size_t at = 0;
    cache.ForEachPiece(range, [&](const HomePiece& piece) {
      std::memcpy(piece.data, bytes.data() + at, piece.bytes);
      at += piece.bytes;
    });
    SLUICE_CHECK(at == bytes.size());
  }
}

}  // namespace sluice
