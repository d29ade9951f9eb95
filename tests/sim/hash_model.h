// The simulated model and its operators: they go through the real policy's block tables to the real
// pages, and read every byte of a sequence's caches for every token.
#pragma once

#include <cstdint>
#include <memory>

#include "kernels/kernel_table.h"
#include "src/device/device.h"
#include "src/model/model.h"

namespace sluice::sim {

// The portable operators, with those that append, attend and merge replaced by ones that move, hash
// and add up bytes, and those that score keys by the reference.
const kernels::KernelTable& HashKernels();

struct HashModelOptions {
  int max_context = 0;
  int max_rows = 0;
  int max_logits = 0;
  int top_k = 0;  // > 0: the model has latent caches, and an indexer that selects so many
};

class HashModel : public Model {
 public:
  // Most steps that were launched and not yet run at the same time.
  virtual int deepest() const = 0;
};

// RESOURCE_EXHAUSTED as the device says it.
absl::StatusOr<std::unique_ptr<HashModel>> NewHashModel(const HashModelOptions& options,
                                                        Device* device);

}  // namespace sluice::sim
