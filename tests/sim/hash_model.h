// The simulated model and its operators. They go through the real policy's block tables to the real
// pages, and read every byte of a sequence's caches for every token.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/kernel_table.h"
#include "src/device/device.h"
#include "src/model/model.h"

namespace sluice::sim {

// Returns the portable operators with replacements: those that append, attend and merge move, hash
// and add up bytes, and those that score keys are the reference's.
const kernels::KernelTable& HashKernels();

struct HashModelOptions {
  int max_context = 0;
  int block_tokens = 0;
  int max_rows = 0;
  int max_logits = 0;
  bool drafts = false;  // whether it has a next-token layer, which drafts by DraftBehind
  int top_k = 0;  // > 0: the model has latent caches and an indexer that selects this many entries
};

class HashModel : public Model {
 public:
  // Returns the largest number of steps that were launched and not yet run at one time.
  virtual int deepest() const = 0;
};

// RESOURCE_EXHAUSTED: the device has no memory.
absl::StatusOr<std::unique_ptr<HashModel>> NewHashModel(const HashModelOptions& options,
                                                        Device* device);

}  // namespace sluice::sim
