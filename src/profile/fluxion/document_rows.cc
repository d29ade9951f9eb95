#include "src/profile/fluxion/document_rows.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <set>
#include <thread>

#include "absl/strings/str_cat.h"
#include "src/base/rng.h"
#include "src/base/status_macros.h"
#include "src/profile/fluxion/head_features.h"

namespace sluice {
namespace {

using kernels::SegmentsOf;

// The smallest position of a row that has a cpu segment.
constexpr int64_t kFirstAnchor = kernels::kFluxionLocalTokens + kernels::kFluxionLargestBlock;

struct Anchor {
  int64_t position = 0;
  std::vector<int64_t> rows;  // positions, ascending
};

// Returns the anchors of a document with distinct rows, at distances from 1 to the farthest.
std::vector<Anchor> AnchorsOf(const DocumentRowsOptions& options, int64_t tokens,
                              SplitMix64 random) {
  std::vector<Anchor> anchors;
  for (int64_t at = options.anchor_stride; at + 1 < tokens; at += options.anchor_stride) {
    const int64_t farthest = std::min(options.distance, tokens - 1 - at);
    std::set<int64_t> rows;
    while (std::ssize(rows) < std::min(options.rows, farthest)) {
      rows.insert(at + 1 + static_cast<int64_t>(random.Below(static_cast<uint64_t>(farthest))));
    }
    anchors.push_back({at, {rows.begin(), rows.end()}});
  }
  return anchors;
}

// One layer of a document.
class DocumentLayer {
 public:
  DocumentLayer(const DocumentRowsOptions& options, const CapturedQueries& captured, int64_t layer,
                int32_t document)
      : options_(options), captured_(captured), layer_(layer), document_(document) {
    for (int64_t head = 0; head < captured.kv_heads; ++head) {
      const HeadQueries& of = captured.of(layer, head);
      caches_.push_back({of.k.data(), of.v.data(), captured.head_dim});
      const int64_t tokens = std::ssize(of.k) / captured.head_dim;
      group_ = std::ssize(of.q) / std::ssize(of.k);
      digests_.push_back(
          std::make_unique<UnitDigests>(caches_.back(), tokens, !options.all_levels));
    }
  }

  void Measure(const Anchor& anchor, const std::function<void(const LayerRow&)>& visit) const {
    const LayerRow at_anchor = Attend(anchor.position);
    std::vector<AnchorCache> caches;
    std::vector<AnchorHead> heads;
    std::vector<uint8_t> streaming;
    for (size_t kv = 0; kv < caches_.size(); ++kv) {
      caches.push_back(
          MeasureCache(caches_[kv], SegmentsOf(static_cast<int32_t>(anchor.position))));
      for (int64_t g = 0; g < group_; ++g) {
        heads.push_back(MeasureAnchor(at_anchor.groups[kv], g, at_anchor.bound));
        streaming.push_back(at_anchor.groups[kv].ResidentError(g) <= at_anchor.bound ? 1 : 0);
      }
    }
    FeatureRow shared{layer_, 0, LargestResident(at_anchor)};
    for (const int64_t position : anchor.rows) {
      LayerRow row = Attend(position);
      shared.resident = LargestResident(row);
      row.anchor_streaming = streaming;
      for (size_t kv = 0; kv < caches_.size(); ++kv) {
        for (int64_t g = 0; g < group_; ++g) {
          const auto head = static_cast<int64_t>(kv) * group_ + g;
          row.heads.push_back(Sample(row, row.groups[kv], g));
          row.heads.back().features = HeadFeatures(shared, head, row.groups[kv], g, caches[kv],
                                                   heads[static_cast<size_t>(head)]);
        }
      }
      visit(row);
    }
  }

 private:
  LayerRow Attend(int64_t position) const {
    LayerRow row;
    row.layer = layer_;
    row.position = position;
    for (size_t kv = 0; kv < caches_.size(); ++kv) {
      const HeadQueries& of = captured_.of(layer_, static_cast<int64_t>(kv));
      row.groups.emplace_back(caches_[kv], *digests_[kv],
                              of.q.data() + position * group_ * captured_.head_dim, group_,
                              SegmentsOf(static_cast<int32_t>(position)));
      for (int64_t g = 0; g < group_; ++g) {
        row.largest = std::max(row.largest, row.groups.back().whole(g).Length());
      }
    }
    row.bound = options_.tau * row.largest;
    return row;
  }

  double LargestResident(const LayerRow& row) const {
    double largest = 0;
    for (const GroupAttention& of : row.groups) {
      for (int64_t g = 0; g < group_; ++g) largest = std::max(largest, of.Resident(g).Length());
    }
    return largest;
  }

  FluxionSample Sample(const LayerRow& row, const GroupAttention& of, int64_t g) const {
    FluxionSample sample = {};
    sample.document = document_;
    sample.streaming = of.ResidentError(g) <= row.bound;
    if (sample.streaming) return sample;
    sample.budgets[0] = static_cast<float>(of.TokenBudget(g, row.bound));
    for (int32_t level = 0; level < kernels::kFluxionLevels; ++level) {
      sample.budgets[static_cast<size_t>(level) + 1] =
          static_cast<float>(of.Budget(g, level, row.bound));
    }
    return sample;
  }

  const DocumentRowsOptions& options_;
  const CapturedQueries& captured_;
  const int64_t layer_;
  const int32_t document_;
  int64_t group_ = 0;
  std::vector<HeadCache> caches_;
  std::vector<std::unique_ptr<UnitDigests>> digests_;
};

}  // namespace

absl::Status CheckDocumentRowsOptions(const DocumentRowsOptions& options) {
  if (options.anchor_stride < kFirstAnchor) {
    return absl::InvalidArgumentError(absl::StrCat(
        "anchor_stride: expected ", kFirstAnchor,
        " or more, so that an anchor has tokens outside HBM, found ", options.anchor_stride));
  }
  if (options.rows < 1 || options.distance < 1) {
    return absl::InvalidArgumentError("rows and distance: expected 1 or more");
  }
  if (!(options.tau > 0 && options.tau < 1)) {
    return absl::InvalidArgumentError(
        absl::StrCat("tau: expected a number between 0 and 1, found ", options.tau));
  }
  return absl::OkStatus();
}

void MeasureDocument(const DocumentRowsOptions& options, const CapturedQueries& captured,
                     int32_t document, int threads,
                     const std::function<void(const LayerRow&)>& visit) {
  const int64_t tokens = std::ssize(captured.of(0, 0).k) / captured.head_dim;
  const std::vector<Anchor> anchors =
      AnchorsOf(options, tokens, SplitMix64(options.seed + static_cast<uint64_t>(document)));
  std::atomic<int64_t> next{0};
  std::vector<std::jthread> team;
  for (int i = 0; i < std::max(threads, 1); ++i) {
    team.emplace_back([&] {
      for (int64_t layer = next++; layer < captured.layers; layer = next++) {
        const DocumentLayer of(options, captured, layer, document);
        for (const Anchor& anchor : anchors) of.Measure(anchor, visit);
      }
    });
  }
}

absl::Status MeasureDocuments(const DocumentRowsOptions& options, Device* device, Model* model,
                              absl::Span<const Prompt> documents, int32_t first_document,
                              int threads, const std::function<void(int64_t, int64_t)>& progress,
                              const std::function<void(const LayerRow&)>& visit) {
  SLUICE_RETURN_IF_ERROR(CheckDocumentRowsOptions(options));
  bool measured = false;
  for (size_t i = 0; i < documents.size(); ++i) {
    const auto tokens = static_cast<int64_t>(documents[i].size());
    if (tokens > options.anchor_stride + 1) {
      SLUICE_ASSIGN_OR_RETURN(
          const CapturedQueries captured,
          CaptureQueries(
              device, model, {documents[i]}, tokens, [](int64_t, int64_t) {}, /*values=*/true));
      MeasureDocument(options, captured, first_document + static_cast<int32_t>(i), threads, visit);
      measured = true;
    }
    progress(static_cast<int64_t>(i + 1), static_cast<int64_t>(documents.size()));
  }
  if (measured) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("no document is longer than ", options.anchor_stride + 1,
                   " tokens, so none has an anchor: take longer ones, or a smaller "
                   "--anchor-stride"));
}

}  // namespace sluice
