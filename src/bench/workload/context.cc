#include "src/bench/workload/context.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "src/base/clock.h"
#include "src/base/crc32c.h"
#include "src/base/status_macros.h"
#include "src/prefill/prefiller.h"

namespace sluice::bench {
namespace {

constexpr size_t kPieceBytes = size_t{8} << 20;

class KeepingSink : public LayerSink {
 public:
  KeepingSink(const CacheLayout& layout, Context* context, Device* device)
      : layout_(layout),
        context_(context),
        stream_(device->NewStream(Device::StreamKind::kCopy)),
        copied_(device->NewEvent()),
        filled_(context->payloads.size()) {}
  absl::Status Begin() override { return absl::OkStatus(); }
  absl::Status Layer(int layer, const CacheKind& kind, int, int,
                     absl::Span<const absl::Span<const uint8_t>> pieces) override {
    // Chunks come in order and begin on block boundaries, so that the payloads of the chunks joined
    // are the payload of the context.
    const auto index = static_cast<size_t>(layer) * context_->kinds +
                       static_cast<size_t>(layout_.FindKind(kind.name));
    Context::Payload& payload = context_->payloads[index];
    for (const auto piece : pieces) {
      SLUICE_CHECK(filled_[index] + piece.size() <= payload.bytes);
      stream_->Copy(context_->memory.as<uint8_t>() + payload.offset + filled_[index], piece.data(),
                    piece.size());
      filled_[index] += piece.size();
      payload.crc32c = ExtendCrc32c(payload.crc32c, piece);
    }
    stream_->Record(*copied_);
    copied_->Wait();  // The prefiller reuses the pieces.
    return absl::OkStatus();
  }

 private:
  const CacheLayout& layout_;
  Context* const context_;
  const std::unique_ptr<Stream> stream_;
  const std::unique_ptr<Event> copied_;
  std::vector<size_t> filled_;  // Bytes filled so far, by payload.
};

class ContextMakerImpl : public ContextMaker {
 public:
  ContextMakerImpl(std::unique_ptr<Prefiller> prefiller, Device* device, const Model* model)
      : prefiller_(std::move(prefiller)), device_(device), model_(model) {}

  absl::StatusOr<Context> Compute(const std::vector<int32_t>& tokens) override {
    const CacheLayout& layout = model_->cache_layout();
    Context context = EmptyContext(tokens, layout);
    SLUICE_ASSIGN_OR_RETURN(context.memory,
                            device_->Allocate(MemoryKind::kDevice, context.bytes(), "a context"));
    KeepingSink sink(layout, &context, device_);
    SamplingParams greedy;
    greedy.temperature = 0;
    SLUICE_RETURN_IF_ERROR(
        prefiller_->Run(tokens, greedy, /*want_first_token=*/false, sink, [] { return false; })
            .status());
    return context;
  }

 private:
  const std::unique_ptr<Prefiller> prefiller_;
  Device* const device_;
  const Model* const model_;
};

void WritePayload(const Context& context, const HomeRange& range, ContextReader& reader,
                  SequenceCache& cache) {
  std::vector<HomePiece> pieces;
  cache.ForEachPiece(range, [&](const HomePiece& piece) { pieces.push_back(piece); });
  size_t at = 0;    // Index of the current piece.
  size_t used = 0;  // Bytes already written to it.
  reader.Read(context, range.layer, range.kind, [&](absl::Span<const uint8_t> bytes) {
    while (!bytes.empty()) {
      const size_t size = std::min(bytes.size(), pieces[at].bytes - used);
      std::memcpy(static_cast<uint8_t*>(pieces[at].data) + used, bytes.data(), size);
      bytes.remove_prefix(size);
      used += size;
      if (used < pieces[at].bytes) continue;
      ++at;
      used = 0;
    }
  });
  SLUICE_CHECK(at == pieces.size());
}

}  // namespace

int64_t ArenaBytes(const CacheLayout& layout, int64_t tokens) {
  constexpr int64_t kAlignment = 64 << 10;  // At least the alignment of each kind's part.
  int64_t bytes = layout.BytesFor(tokens);
  for (const CacheKind& kind : layout.kinds)
    bytes += 2 * layout.layers * kind.page_bytes() + kAlignment;
  return bytes;
}

Context EmptyContext(const std::vector<int32_t>& tokens, const CacheLayout& layout) {
  Context context;
  context.tokens = tokens;
  context.kinds = layout.kinds.size();
  size_t bytes = 0;
  for (int layer = 0; layer < layout.layers; ++layer) {
    for (const CacheKind& kind : layout.kinds) {
      const size_t size = static_cast<size_t>(kind.bytes_per_token * kind.heads) * tokens.size();
      context.payloads.push_back({bytes, size, 0});
      bytes += size;
    }
  }
  return context;
}

ContextReader::ContextReader(Device* device)
    : stream_(device->NewStream(Device::StreamKind::kCopy)) {
  for (Piece& piece : pieces_) piece.copied = device->NewEvent();
}

absl::StatusOr<std::unique_ptr<ContextReader>> ContextReader::Create(Device* device) {
  std::unique_ptr<ContextReader> reader(new ContextReader(device));
  for (Piece& piece : reader->pieces_) {
    SLUICE_ASSIGN_OR_RETURN(
        piece.memory, device->Allocate(MemoryKind::kPinned, kPieceBytes, "a piece of a context"));
  }
  return reader;
}

void ContextReader::Read(const Context& context, int layer, size_t kind,
                         const std::function<void(absl::Span<const uint8_t>)>& take) {
  const Context::Payload& payload = context.payload(layer, kind);
  const uint8_t* const from = context.memory.as<uint8_t>() + payload.offset;
  const size_t count = (payload.bytes + kPieceBytes - 1) / kPieceBytes;
  const auto size = [&](size_t i) {
    return std::min(kPieceBytes, payload.bytes - i * kPieceBytes);
  };
  // While `take` handles one piece, the next one is being copied.
  for (size_t i = 0; i <= count; ++i) {
    if (i < count) {
      Piece& next = pieces_[i % 2];
      stream_->Copy(next.memory.data(), from + i * kPieceBytes, size(i));
      stream_->Record(*next.copied);
    }
    if (i == 0) continue;
    const Piece& piece = pieces_[(i - 1) % 2];
    piece.copied->Wait();
    take({piece.memory.as<uint8_t>(), size(i - 1)});
  }
}

absl::StatusOr<std::unique_ptr<ContextMaker>> ContextMaker::Create(int max_context, Device* device,
                                                                   Model* model) {
  const CacheLayout& layout = model->cache_layout();
  const int block = layout.kinds[0].block_tokens;
  Prefiller::Options options;
  options.max_context = static_cast<uint32_t>(max_context) + 1;
  options.chunk_tokens = static_cast<uint32_t>(std::min(512, model->max_rows() / block * block));
  options.hbm_bytes = ArenaBytes(layout, max_context);
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<Prefiller> prefiller,
                          Prefiller::Create(options, device, model, RealClock()));
  return std::make_unique<ContextMakerImpl>(std::move(prefiller), device, model);
}

void WriteContext(const Context& context, const CacheLayout& layout, ContextReader& reader,
                  SequenceCache& cache) {
  HomeRange range;
  range.token_end = static_cast<int64_t>(context.tokens.size());
  for (range.layer = 0; range.layer < layout.layers; ++range.layer) {
    for (range.kind = 0; range.kind < layout.kinds.size(); ++range.kind) {
      range.head_end = layout.kinds[range.kind].heads;
      WritePayload(context, range, reader, cache);
    }
  }
}

}  // namespace sluice::bench
