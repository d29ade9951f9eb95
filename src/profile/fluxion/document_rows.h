// Rows of real documents as policy fluxion would meet them: an anchor, where a prompt would have
// ended, and rows some steps behind it. For each row, layer and query head it has the features that
// a server would have, and the least budgets with which attention keeps to tau.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "src/device/device.h"
#include "src/model/model.h"
#include "src/profile/fluxion/group_attention.h"
#include "src/profile/fluxion/predictor_training.h"
#include "src/profile/query_capture.h"
#include "src/profile/traffic.h"

namespace sluice {

struct DocumentRowsOptions {
  int64_t anchor_stride = 1024;  // tokens between anchors; the first is at this position
  int64_t rows = 8;              // of an anchor
  int64_t distance = 256;        // from an anchor to its farthest row
  double tau = 0.1;              // equation 2
  uint64_t seed = 1;             // draws the distances
  bool all_levels = false;       // digests have no spread, as where all levels have some
};
// INVALID_ARGUMENT: an option is out of range; the message names it.
absl::Status CheckDocumentRowsOptions(const DocumentRowsOptions& options);

// A layer's query heads at one row. FluxionSample says what a head's entries are; budgets of heads
// that stream count for nothing.
struct LayerRow {
  int64_t layer = 0;
  int64_t position = 0;
  double largest = 0;                  // |o| of the layer's heads
  double bound = 0;                    // the error that keeps to tau: tau times `largest`
  std::vector<GroupAttention> groups;  // by KV head
  std::vector<FluxionSample> heads;    // by query head
  // By query head: whether the head streamed at the anchor.
  std::vector<uint8_t> anchor_streaming;
};

// Measures one document, whose number is `document`. `visit` is called once for each row and layer,
// on up to `threads` threads at the same time. A row whose anchor has no cpu segment is left out.
// REQUIRES: captured has values and every token of the document.
void MeasureDocument(const DocumentRowsOptions& options, const CapturedQueries& captured,
                     int32_t document, int threads,
                     const std::function<void(const LayerRow&)>& visit);

// Measures documents one after the other; document i has the number first_document + i.
// `progress(done, all)` gets numbers of documents. Memory holds a whole document's queries, keys
// and values of all layers in float32. INVALID_ARGUMENT: no document is long enough for an anchor.
// REQUIRES, errors: CaptureQueries, CheckDocumentRowsOptions.
absl::Status MeasureDocuments(const DocumentRowsOptions& options, Device* device, Model* model,
                              absl::Span<const Prompt> documents, int32_t first_document,
                              int threads, const std::function<void(int64_t, int64_t)>& progress,
                              const std::function<void(const LayerRow&)>& visit);

}  // namespace sluice
