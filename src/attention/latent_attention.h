// Attention over latent caches (kernels/latent_params.h): how a layer of a step writes entries and
// index keys to the caches of its rows and attends to them.
//
// A model calls it while it enqueues a step, under the rules of kv_attention.h: on the thread that
// enqueues steps, and only to enqueue work, which may be recorded and run in many steps.
//
// A step of decode rows may come in parts, each of some of its rows, in order of rows. Then a
// layer's calls come for one part after the other, on one stream.
#pragma once

#include <cstdint>

#include "absl/functional/function_ref.h"
#include "kernels/latent_params.h"
#include "src/device/device.h"

namespace sluice {

class LatentAttention {
 public:
  virtual ~LatentAttention() = default;

  // Enqueues the entries of the rows into the caches. `params` is complete but for its cache and
  // `written`. Its rows are those of the step from `first_row` on.
  virtual void AppendLatent(Stream& stream, int layer, kernels::LatentAppendParams params,
                            int32_t first_row) = 0;

  // Enqueues the index keys of the rows into the caches, after AppendLatent. `params` is complete
  // but for its cache and `written`. Not called where the model has no indexer.
  virtual void AppendIndex(Stream& stream, int layer, kernels::IndexAppendParams params) = 0;

  struct Params {
    // The indexer's; index_q is null where the model has none, and rows attend to everything.
    const void* index_q = nullptr;         // IndexQueryParams::out
    const float* index_weights = nullptr;  // IndexQueryParams::out_weights
    int32_t index_heads = 0;
    int32_t top_k = 0;
    // Makes `q` of all rows (PreAttn: q_b, absorption, RoPE). AttendLatent calls it once, with the
    // step's stream or a branch of it. It needs nothing that the indexer's results decide.
    absl::FunctionRef<void(Stream&)> make_queries;
    const void* q = nullptr;  // [rows][heads][rank + rope] of the activation type
    const int32_t* slots = nullptr;
    const int32_t* positions = nullptr;
    int32_t rows = 0;
    int32_t decode_rows = 0;
    // The call is for `rows` rows from first_row on, of a step of step_rows (0: as many as `rows`).
    // All arrays have the step's rows, from its first one on.
    int32_t first_row = 0;
    int32_t step_rows = 0;
    int32_t heads = 0;
    float scale = 0;
    bool part() const { return rows < step_rows; }
    bool last_part() const { return first_row + rows >= step_rows; }
    void* out = nullptr;  // [rows][heads][rank] of out_type
    kernels::DType out_type = kernels::DType::kFloat32;
  };
  // Enqueues attention of the rows of layer `layer` over their caches.
  virtual void AttendLatent(Stream& stream, int layer, const Params& params) = 0;
};

}  // namespace sluice
