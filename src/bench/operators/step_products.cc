// Products of a decode step, and its small operators.
#include <algorithm>
#include <cmath>
#include <numeric>

#include "kernels/fp8.h"
#include "src/base/status_macros.h"
#include "src/bench/operators/device_operands.h"
#include "src/bench/operators/step_points.h"
#include "src/device/kernel_set.h"

namespace sluice::bench {
namespace {

using namespace kernels;  // NOLINT: a file about them

constexpr int32_t kExperts = 8;  // Experts whose products are timed together.

// Matrices of the same shape, so that a launch does not find its weights in a cache.
class Matrices {
 public:
  Matrices(Device& device, const StepPointShape& shape, int64_t n, int64_t k, bool fp8) {
    const double bytes = static_cast<double>(n * k) * (fp8 ? 1 : 2);
    const auto copies = std::clamp(std::ceil(shape.cold_bytes / bytes), 2.0, 24.0);
    for (int i = 0; i < static_cast<int>(copies) && status_.ok(); ++i) {
      const MatrixPart part{
          .data = nullptr,
          .rows = static_cast<int32_t>(n),
          .formula = {.state = static_cast<uint64_t>(i), .scale = 0.02f, .offset = 0},
          .fp8_formula = fp8};
      absl::StatusOr<Weight> weight = device.kernels().Prepare({&part, 1}, static_cast<int32_t>(k));
      status_ = weight.status();
      if (status_.ok()) weights_.push_back(*std::move(weight));
    }
  }
  const absl::Status& status() const { return status_; }
  int count() const { return static_cast<int>(weights_.size()); }
  const WeightMatrix& at(int number) const {
    return weights_[static_cast<size_t>(number % count())].matrix;
  }

 private:
  std::vector<Weight> weights_;
  absl::Status status_;
};

int LaunchesOf(const Matrices& matrices) { return std::max(matrices.count(), 4); }

// Times a product whose matrix and rows it sets in `p`, which `launch` reads.
template <typename Params, typename Launch>
absl::Status TimeByRows(const StepPointShape& shape, const char* name, const Matrices& matrices,
                        Params& p, const TimePoint& time, const Launch& launch) {
  for (const int64_t rows : shape.rows) {
    p.rows = p.decode_rows = static_cast<int32_t>(rows);
    StepPoint point{name, "rows", static_cast<double>(rows), LaunchesOf(matrices)};
    point.launch = [&](Stream& stream, int number) {
      p.w = matrices.at(number);
      launch(stream);
    };
    SLUICE_RETURN_IF_ERROR(time(point));
  }
  return absl::OkStatus();
}

absl::Status TimeDense(Device& device, const StepPointShape& shape, const char* name, int64_t n,
                       int64_t k, bool fp8, bool accumulates, const TimePoint& time) {
  const Matrices matrices(device, shape, n, k, fp8);
  SLUICE_RETURN_IF_ERROR(matrices.status());
  DeviceOperands operands(device);
  const int64_t most = shape.rows.back();
  LinearParams p{};
  p.x = operands.Activations(most * k);
  p.y = operands.Room<float>(most * n);
  p.x_type = device.kernels().activation_type();
  p.accumulate = accumulates;
  SLUICE_RETURN_IF_ERROR(operands.status());
  return TimeByRows(shape, name, matrices, p, time,
                    [&](Stream& stream) { device.kernels().Linear(stream, p); });
}

absl::Status TimeHeads(Device& device, const StepPointShape& shape, const char* name, int64_t n,
                       int64_t k, const TimePoint& time) {
  const int64_t heads = shape.config.heads, most = shape.rows.back();
  const Matrices matrices(device, shape, heads * n, k, /*fp8=*/false);
  SLUICE_RETURN_IF_ERROR(matrices.status());
  DeviceOperands operands(device);
  HeadLinearParams p{};
  p.x = operands.Activations(most * heads * k);
  p.x_head_stride = k;
  p.x_stride = heads * k;
  p.y = operands.Activations(most * heads * n);
  p.y_head_stride = n;
  p.y_stride = heads * n;
  p.x_type = p.y_type = device.kernels().activation_type();
  p.heads = static_cast<int32_t>(heads);
  p.n = static_cast<int32_t>(n);
  SLUICE_RETURN_IF_ERROR(operands.status());
  return TimeByRows(shape, name, matrices, p, time,
                    [&](Stream& stream) { device.kernels().HeadLinear(stream, p); });
}

// Every row chooses all of the experts.
absl::Status TimeExperts(Device& device, const StepPointShape& shape, const char* name, int64_t n,
                         int64_t k, bool fp8, bool is_first, const TimePoint& time) {
  const Matrices matrices(device, shape, kExperts * n, k, fp8);
  SLUICE_RETURN_IF_ERROR(matrices.status());
  DeviceOperands operands(device);
  const int64_t most = shape.rows.back() * kExperts;
  ExpertLinearParams p{};
  p.x = operands.Activations(most * k);
  p.y = operands.Room<float>(most * n);
  p.pairs_per_row = is_first ? kExperts : 1;
  p.experts = kExperts;
  p.n = static_cast<int32_t>(n);
  p.x_type = device.kernels().activation_type();
  for (const int64_t rows : shape.rows) {
    std::vector<int32_t> pairs, begins;
    for (int32_t expert = 0; expert <= kExperts; ++expert) {
      begins.push_back(static_cast<int32_t>(expert * rows));
      for (int64_t row = 0; row < rows && expert < kExperts; ++row) {
        pairs.push_back(static_cast<int32_t>(row * kExperts + expert));
      }
    }
    p.pairs = operands.Put(pairs);
    p.begins = operands.Put(begins);
    p.max_pairs = static_cast<int32_t>(rows * kExperts);
    SLUICE_RETURN_IF_ERROR(operands.status());
    StepPoint point{name, "rows of an expert, 8 experts", static_cast<double>(rows),
                    LaunchesOf(matrices)};
    point.launch = [&](Stream& stream, int number) {
      p.w = matrices.at(number);
      device.kernels().ExpertLinear(stream, p);
    };
    SLUICE_RETURN_IF_ERROR(time(point));
  }
  return absl::OkStatus();
}

// Times a launch with each number of rows.
absl::Status TimeByRows(const StepPointShape& shape, const char* name, const char* axis,
                        double each, double parts, const TimePoint& time,
                        const std::function<void(Stream&, int32_t rows)>& launch) {
  for (const int64_t rows : shape.rows) {
    StepPoint point{name, axis, static_cast<double>(rows) * each, 24, parts};
    point.launch = [&](Stream& stream, int) { launch(stream, static_cast<int32_t>(rows)); };
    SLUICE_RETURN_IF_ERROR(time(point));
  }
  return absl::OkStatus();
}

std::vector<int32_t> Counted(int64_t count) {
  std::vector<int32_t> values(static_cast<size_t>(count));
  std::iota(values.begin(), values.end(), 0);
  return values;
}

absl::Status TimeNormsAndSums(Device& device, const StepPointShape& shape, const TimePoint& time) {
  const ModelConfig& c = shape.config;
  const ExpertConfig& e = c.latent->experts;
  const int64_t most = shape.rows.back();
  const DType type = device.kernels().activation_type();
  DeviceOperands operands(device);
  const int64_t widest = std::max<int64_t>({2 * c.intermediate_size, e.per_token * c.hidden_size,
                                            2 * int64_t{e.per_token} * e.intermediate});
  float* const values = operands.Room<float>(most * widest);
  const std::vector<float> zeros(1 << 16, 0.0f);
  operands.Fill(values, most * widest * 4, zeros.data(), std::ssize(zeros) * 4);
  float* const sums = operands.Put(std::vector<float>(static_cast<size_t>(most * c.hidden_size)));
  const float* const ones = operands.Put(std::vector<float>(static_cast<size_t>(c.hidden_size), 1));
  void* const out = operands.Activations(most * widest);
  const int32_t* const chosen =
      operands.Put(std::vector<int32_t>(static_cast<size_t>(most * e.per_token), 0));
  SLUICE_RETURN_IF_ERROR(operands.status());
  KernelSet& kernels = device.kernels();
  SLUICE_RETURN_IF_ERROR(
      TimeByRows(shape, "rms_norm", "rows", 1, 1, time, [&](Stream& stream, int32_t rows) {
        RmsNormParams p{};
        p.x = sums;
        p.weight = ones;
        p.out = out;
        p.x_stride = p.dim = c.hidden_size;
        p.rows = rows;
        p.epsilon = 1e-6f;
        p.out_type = type;
        kernels.RmsNorm(stream, p);
      }));
  const int32_t dim = e.per_token * e.intermediate;
  SLUICE_RETURN_IF_ERROR(
      TimeByRows(shape, "silu_mul", "values", dim, 1, time, [&](Stream& stream, int32_t rows) {
        kernels.SiluMul(stream, {values, out, rows, dim, type});
      }));
  return TimeByRows(shape, "combine", "rows", 1, 1, time, [&](Stream& stream, int32_t rows) {
    kernels.Combine(stream, {values, chosen, values, sums, rows, e.per_token, c.hidden_size});
  });
}

absl::Status TimeQueries(Device& device, const StepPointShape& shape, const TimePoint& time) {
  const ModelConfig& c = shape.config;
  const LatentConfig& l = *c.latent;
  const int64_t most = shape.rows.back(), heads = c.heads, index_heads = l.indexer->heads;
  DeviceOperands operands(device);
  const auto floats = [&](int64_t count) {
    return operands.Put(std::vector<float>(static_cast<size_t>(count), 0.5f));
  };
  MlaQueryParams query{};
  query.q = floats(most * heads * l.qk_dim());
  query.cos_sin = floats(most * l.rope_dim);
  query.nope = operands.Activations(most * heads * l.nope_dim);
  query.out = operands.Activations(most * heads * l.entry_dim());
  query.type = device.kernels().activation_type();
  query.heads = static_cast<int32_t>(heads);
  query.nope_dim = l.nope_dim;
  query.rope = l.rope_dim;
  query.rank = l.rank;
  IndexQueryParams index{};
  index.q = floats(most * index_heads * kIndexDim);
  index.weights = floats(most * index_heads);
  index.weights_stride = index_heads;
  index.cos_sin = query.cos_sin;
  index.out = operands.Room<uint8_t>(most * index_heads * kIndexDim);
  index.out_weights = operands.Room<float>(most * index_heads);
  index.type = DType::kFloat8E4M3;
  index.heads = static_cast<int32_t>(index_heads);
  index.rope_dim = l.rope_dim;
  index.weight_scale = 0.01f;
  SLUICE_RETURN_IF_ERROR(operands.status());
  SLUICE_RETURN_IF_ERROR(
      TimeByRows(shape, "rope", "rows", 1, 2, time, [&](Stream& stream, int32_t rows) {
        query.rows = index.rows = rows;
        device.kernels().IndexQuery(stream, index);
        device.kernels().MlaQuery(stream, query);
      }));

  LatentAppendParams append{};
  append.kv = query.q;
  append.kv_stride = l.entry_dim();
  append.norm = floats(l.rank);
  append.cos_sin = query.cos_sin;
  append.slots = operands.Put(Counted(most));
  append.positions = operands.Put(std::vector<int32_t>(static_cast<size_t>(most), 0));
  append.cache.rank = l.rank;
  append.cache.rope = l.rope_dim;
  append.cache.type = DType::kFloat8E4M3;
  append.cache.block_tokens = 64;
  append.written = operands.Room<uint8_t>(most * kPackedEntryBytes);
  append.epsilon = 1e-6f;
  SLUICE_RETURN_IF_ERROR(operands.status());
  return TimeByRows(shape, "append", "rows", 1, 1, time, [&](Stream& stream, int32_t rows) {
    append.rows = append.decode_rows = rows;
    device.kernels().LatentAppend(stream, append);
  });
}

absl::Status TimeSampling(Device& device, const StepPointShape& shape, const TimePoint& time) {
  const int64_t most = shape.rows.back(), vocab = shape.config.vocab_size;
  const auto count = static_cast<size_t>(most);
  DeviceOperands operands(device);
  SampleParams p{};
  std::vector<float> logits(static_cast<size_t>(vocab));
  for (float& logit : logits) logit = static_cast<float>(operands.random()() % 4096) * 1e-3f;
  p.logits = operands.Room<float>(most * vocab);
  operands.Fill(p.logits, most * vocab * 4, logits.data(), vocab * 4);
  p.slots = operands.Put(Counted(most));
  p.positions = operands.Put(std::vector<int32_t>(count, 0));
  SamplingSlot greedy{};
  greedy.top_p = greedy.repetition_penalty = 1;
  p.sampling = operands.Put(std::vector<SamplingSlot>(count, greedy));
  p.stop_ids = operands.Put(std::vector<int32_t>(count * kMaxStopIds));
  p.bias_ids = operands.Put(std::vector<int32_t>(count * kMaxLogitBias));
  p.bias_values = operands.Put(std::vector<float>(count * kMaxLogitBias));
  p.token_stride = 4;
  p.tokens = operands.Put(std::vector<int32_t>(count * 4));
  p.out_tokens = operands.Room<int32_t>(most);
  p.out_logprobs = operands.Room<float>(most);
  p.out_top_ids = operands.Room<int32_t>(most * kMaxTopLogprobs);
  p.out_top_logprobs = operands.Room<float>(most * kMaxTopLogprobs);
  p.scratch = operands.Room(MemoryKind::kDevice,
                            device.kernels().SampleScratchBytes(static_cast<int32_t>(vocab)));
  p.vocab = static_cast<int32_t>(vocab);
  SLUICE_RETURN_IF_ERROR(operands.status());
  return TimeByRows(shape, "sample", "rows", 1, 1, time, [&](Stream& stream, int32_t rows) {
    p.rows = rows;
    device.kernels().Sample(stream, p);
  });
}

}  // namespace

absl::Status TimeProducts(Device& device, const StepPointShape& shape, const TimePoint& time) {
  const ModelConfig& c = shape.config;
  const LatentConfig& l = *c.latent;
  const ExpertConfig& e = l.experts;
  const bool fp8 = l.fp8_weights;
  struct Dense {
    const char* name;
    int64_t n, k;
    bool accumulates = false;
  };
  const int64_t input = l.q_rank + l.entry_dim() + kIndexDim;
  for (const Dense& p : {Dense{"product.input", input, c.hidden_size},
                         Dense{"product.index_q", int64_t{l.indexer->heads} * kIndexDim, l.q_rank},
                         Dense{"product.q_b", int64_t{c.heads} * l.qk_dim(), l.q_rank},
                         Dense{"product.o", c.hidden_size, int64_t{c.heads} * l.v_dim, true},
                         Dense{"product.dense_up", 2 * int64_t{c.intermediate_size}, c.hidden_size},
                         Dense{"product.dense_down", c.hidden_size, c.intermediate_size, true},
                         Dense{"product.shared_up", 2 * int64_t{e.shared_size()}, c.hidden_size},
                         Dense{"product.shared_down", c.hidden_size, e.shared_size(), true}}) {
    SLUICE_RETURN_IF_ERROR(TimeDense(device, shape, p.name, p.n, p.k, fp8, p.accumulates, time));
  }
  SLUICE_RETURN_IF_ERROR(TimeDense(device, shape, "product.head", c.vocab_size, c.hidden_size,
                                   /*fp8=*/false, /*accumulates=*/false, time));
  SLUICE_RETURN_IF_ERROR(TimeExperts(device, shape, "product.expert_up", 2 * e.intermediate,
                                     c.hidden_size, fp8, /*is_first=*/true, time));
  SLUICE_RETURN_IF_ERROR(TimeExperts(device, shape, "product.expert_down", c.hidden_size,
                                     e.intermediate, fp8, /*is_first=*/false, time));
  SLUICE_RETURN_IF_ERROR(TimeHeads(device, shape, "heads.absorb_k", l.rank, l.nope_dim, time));
  return TimeHeads(device, shape, "heads.absorb_v", l.v_dim, l.rank, time);
}

absl::Status TimeSmallOperators(Device& device, const StepPointShape& shape,
                                const TimePoint& time) {
  SLUICE_RETURN_IF_ERROR(TimeNormsAndSums(device, shape, time));
  SLUICE_RETURN_IF_ERROR(TimeQueries(device, shape, time));
  return TimeSampling(device, shape, time);
}

}  // namespace sluice::bench
