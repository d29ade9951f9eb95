// RowExchange takes the rows of a step, or of half a step, to the ranks that have their experts,
// and brings the experts' sums back (kernels/exchange_params.h). Every rank calls Pack, Dispatch,
// Unpack, Return and Add in turn, in each layer of each step, whether or not it has rows. Dispatch
// and Return are operations of the group; they may be on another stream than the others, which the
// caller orders. Internal to src/model.
//
// A rank may send all of its rows to one other, so a block has room for the most rows that any rank
// has. All buffers are there once for max_rows of them.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "src/device/rank_group.h"
#include "src/model/layer_operators.h"

namespace sluice {

class RowExchange {
 public:
  struct Options {
    int dim = 0;      // of a row
    int choices = 0;  // of a row
    int ranks = 1;
    int experts_each = 0;
    DType type = DType::kFloat32;  // of a row's values as they travel
  };
  // `group` may be null where nothing will be computed. It and `ops` outlive this.
  RowExchange(const Options& options, RankGroup* group, const LayerOperators& ops)
      : options_(options), group_(group), ops_(ops) {}

  absl::Status Allocate(Workspace& workspace, int max_rows);

  struct Rows {
    const void* x = nullptr;          // activations [rows][dim]
    const int32_t* chosen = nullptr;  // [rows][choices]
    const float* weights = nullptr;   // [rows][choices]
    // Where this rank's rows find experts, or null (PackRowsParams).
    const int32_t* physical = nullptr;
    int64_t* load = nullptr;  // [experts], in which choices are counted; or null
    float* out = nullptr;     // float32 [rows][dim], to which the sums are added
    int32_t rows = 0;         // may be 0
    int32_t most_rows = 0;    // of any rank, the same on each
  };
  // Enqueues the packing of rows.
  void Pack(Stream& stream, const Rows& rows);
  void Dispatch(Stream& stream);

  // The rows that arrived, as an expert's operators take them. A row without a choice is none.
  struct Arrived {
    const void* x = nullptr;  // activations [rows][dim]
    const int32_t* chosen = nullptr;
    const float* weights = nullptr;
    const int32_t* pairs = nullptr;
    const int32_t* begins = nullptr;
    float* sums = nullptr;  // float32 [rows][dim], zeros: for what Return takes back
    int32_t rows = 0;
  };
  Arrived Unpack(Stream& stream);
  void Return(Stream& stream);
  // Enqueues out += the sums that all ranks made for the packed rows.
  void Add(Stream& stream);

 private:
  // Enqueues an all-to-all of blocks of most_rows units.
  void Move(Stream& stream, const Buffer& send, const Buffer& send_counts, const Buffer& receive,
            const Buffer& receive_counts, int64_t unit_bytes);
  int64_t unit_bytes() const;

  const Options options_;
  RankGroup* const group_;
  const LayerOperators& ops_;
  Rows rows_;                                 // of the newest Pack
  Buffer sent_, arrived_;                     // [ranks][rows] units
  Buffer sent_counts_, arrived_counts_;       // int32 [ranks]
  Buffer returned_counts_;                    // int32 [ranks]: those of sent_counts_ again
  Buffer places_;                             // int32 [rows][ranks]
  Buffer x_;                                  // activation [ranks * rows][dim]
  Buffer chosen_, weights_, pairs_, begins_;  // of rows that arrived
  Buffer sums_, returned_;                    // float32 [ranks * rows][dim]
};

}  // namespace sluice
