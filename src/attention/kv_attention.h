// Attention over caches of keys and values: how a layer of a step writes to the caches of its rows
// and attends to them.
//
// A model calls it while it enqueues a step, on the thread that enqueues steps (the engine's).
// Every function only enqueues work. The calls of a step may be recorded once and run in many steps
// (Device::Record), so they must not depend on what the host knows of the batch: what they need of
// a sequence they read from device tables, by slot.
#pragma once

#include <cstdint>

#include "kernels/params.h"
#include "src/device/device.h"

namespace sluice {

class KvAttention {
 public:
  virtual ~KvAttention() = default;

  // Queries of decode rows, after q_norm and RoPE.
  struct Queries {
    const float* q = nullptr;  // [rows][stride], heads * head_dim used; padded rows: anything
    int64_t stride = 0;
    const int32_t* slots = nullptr;      // [rows]
    const int32_t* positions = nullptr;  // [rows]
    int32_t rows = 0;
    int32_t heads = 0;
    float scale = 0;
  };

  // Returns whether Ahead is to be called for a layer.
  virtual bool LooksAhead(int /*layer*/) const { return false; }
  // Returns whether these queries are predicted from the residual at their source and a sequence's
  // drift from there to the layer (kernels::AheadNormParams), or from that residual alone, as
  // published.
  virtual bool FollowsDrift() const { return true; }
  // Returns the source of predicted queries. False: the input of the layer before. True: the
  // residual before the FFN of the layer before that one, so that an FFN more hides what Ahead
  // enqueues. Layer 1's are always predicted from the input of layer 0.
  virtual bool LooksEarly() const { return false; }

  // Announces predicted queries of layer `layer`: the norm and the projection of `layer`, applied
  // to the residual at their source (and the drift). For layer 0 they are the real queries. The
  // model calls it before it enqueues the products that follow the source (for layer 0, those of
  // layer 0 itself). The next Ahead overwrites the queries.
  //
  // `stream` is branch AttentionPolicy::kAheadBranch of the step's stream, which the model has
  // forked there: what is enqueued on it runs beside layer `layer` - 1, in order with what other
  // calls of Ahead enqueued. When Attend(layer) returns it has made the step's stream come After()
  // everything that Ahead(layer) enqueued on the branch. It does so through another branch that
  // came After() this one here, because by then this one has the next layer's Ahead too, which must
  // not be waited for. What the model reads or writes on behalf of layer + 2 and later relies on
  // that; layer + 1's Ahead may run beside all of Attend(layer).
  virtual void Ahead(Stream& /*stream*/, int /*layer*/, const Queries& /*predicted*/) {}

  // Enqueues RoPE of layer `layer` and writes its keys and values to the caches. `params` is
  // complete but for its cache.
  virtual void Append(Stream& stream, int layer, kernels::RopeAppendParams params) = 0;

  // Enqueues attention of the rows of layer `layer` over their caches. `params` is complete but for
  // its cache.
  virtual void Attend(Stream& stream, int layer, kernels::AttentionParams params) = 0;
};

}  // namespace sluice
