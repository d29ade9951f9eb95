#include "src/bench/simulate/step_model.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace sluice::bench {
namespace {

constexpr double kEntryBytes = 656;
// Address space of the host that one translation of the GPU covers.
constexpr double kTranslatedBytes = 65536;

// The parts into which a step's time is divided.
constexpr char kProducts[] = "products", kExperts[] = "experts", kAttention[] = "attention",
               kIndexer[] = "indexer", kResidency[] = "residency", kTransfer[] = "transfer",
               kSmall[] = "small operators", kForks[] = "forks and gaps", kHead[] = "head",
               kDrafts[] = "drafts", kAllToAll[] = "all-to-all";

using Parts = std::map<std::string, double>;

double Sum(const Parts& parts) {
  double sum = 0;
  for (const auto& [name, us] : parts) sum += us;
  return sum;
}

void Add(const Parts& more, double factor, Parts* parts) {
  for (const auto& [name, us] : more) (*parts)[name] += factor * us;
}

class StepSum {
 public:
  StepSum(const ModelConfig& config, const OperatorTimes& times, bool extrapolate,
          const StepShape& shape)
      : config_(config), look_(&times, extrapolate), shape_(shape) {}

  absl::StatusOr<StepForecast> Run() {
    for (int layer = 0; layer < config_.layers; ++layer) AddLayer(layer);
    const double rows = shape_.rows();
    out_.parts[kHead] += look_.Us("product.head", rows) + look_.Us("sample", rows);
    out_.parts[kForks] += look_.Constant("step_gap_us");
    AddDrafts();
    SLUICE_RETURN_IF_ERROR(look_.status());
    out_.us = Sum(out_.parts);
    out_.extrapolated = look_.extrapolated();
    return out_;
  }

 private:
  bool IsDense(int layer) const { return layer < config_.latent->dense_layers; }

  // Adds a layer. With two-batch overlap each half's exchange runs while the other half computes.
  void AddLayer(int layer) {
    const bool halved = shape_.parallel.two_batch && shape_.sequences > 1;
    halves_ = halved ? 2 : 1;
    const double sequences = halved ? shape_.sequences / 2.0 : shape_.sequences;
    Parts half;
    AddAttention(layer, sequences, shape_.ess, &half);
    if (IsDense(layer)) {
      AddDense(RowsOf(sequences), &half);
    } else {
      AddExperts(RowsOf(sequences), &half);
    }
    half[kForks] += look_.Constant("layer_overhead_us");
    const double exchange =
        IsDense(layer)
            ? 0
            : shape_.parallel.all_to_all_us + shape_.parallel.all_to_all_row_us * RowsOf(sequences);
    if (!halved) {
      Add(half, 1, &out_.parts);
      out_.parts[kAllToAll] += exchange;
      return;
    }
    Add(half, 2, &out_.parts);
    out_.parts[kAllToAll] += std::max(0.0, exchange - Sum(half));
  }

  double RowsOf(double sequences) const { return sequences * (1 + shape_.drafts); }

  double Norms(double rows) { return 2 * look_.Us("rms_norm", rows); }

  void AddAttention(int layer, double sequences, bool ess, Parts* parts) {
    const double rows = RowsOf(sequences);
    (*parts)[kProducts] += look_.Us("product.input", rows) + look_.Us("product.index_q", rows) +
                           look_.Us("heads.absorb_v", rows) + look_.Us("product.o", rows);
    (*parts)[kSmall] += Norms(rows) + look_.Us("rms_norm", rows) + look_.Us("rope", rows);
    (*parts)[kForks] += look_.Constant("fork_join_us");  // Appends lie beside the products.
    if (ess) {
      (*parts)[kSmall] += look_.Us("append", rows);
      AddPool(layer, sequences, parts);
    } else {
      AddResident(rows, parts);
    }
  }

  // The indexer's logits, then top-k beside the queries, then attention.
  void AddResident(double rows, Parts* parts) {
    const double queries = Queries(rows), top_k = look_.Us("top_k", Keys(rows));
    (*parts)[kIndexer] += look_.Us("index_logits", Keys(rows)) + top_k;
    (*parts)[kProducts] += std::max(queries - top_k, 0.0);
    (*parts)[kForks] += look_.Constant("fork_join_us");
    (*parts)[kAttention] += look_.Us("attention", rows);
  }

  double Keys(double rows) const { return rows * static_cast<double>(shape_.context); }
  double Queries(double rows) {
    return look_.Us("product.q_b", rows) + look_.Us("rope", rows) +
           look_.Us("heads.absorb_k", rows);
  }

  double Misses(int layer) const {
    if (shape_.whole || shape_.misses.empty()) return 0;
    return shape_.misses[static_cast<size_t>(layer) % shape_.misses.size()];
  }

  double UpdateResidency(double sequences, double misses) {
    if (shape_.whole) return look_.Us("update_residency.whole", sequences);
    constexpr char kPlaces[] = "update_residency.places";
    const double least = look_.Us(kPlaces, 0);
    return look_.Us("update_residency", misses) +
           look_.Us(kPlaces, static_cast<double>(shape_.places)) - least;
  }

  // Returns a transfer's time with the link to itself.
  double Transfer(double sequences, double misses) {
    const double entries = sequences * misses;
    if (entries == 0 || shape_.whole || shape_.skip_transfers) return 0;
    const double pages =
        std::max(static_cast<double>(shape_.context) * kEntryBytes / kTranslatedBytes, 1.0);
    const double touched = sequences * pages * (1 - std::pow(1 - 1 / pages, misses));
    double us = look_.Us("transfer", entries) + touched * look_.Constant("translation_us");
    if (shape_.link_bytes_per_s > 0) {
      us = std::max(us, entries * kEntryBytes / shape_.link_bytes_per_s * 1e6);
    }
    return us;
  }

  // The stages of policy ess's layer, for the arithmetic of schedule.h.
  StageTimes Stages(int layer, double sequences) {
    const double rows = RowsOf(sequences), misses = Misses(layer);
    const auto index = [&](double of) {
      return look_.Us("index_logits", Keys(RowsOf(of))) + look_.Us("top_k", Keys(RowsOf(of)));
    };
    const double update = UpdateResidency(sequences, misses);
    StageTimes t;
    t.transfer = Transfer(sequences, misses);
    t.prepare = Queries(rows);
    t.attend = look_.Us("attention.two_lists", rows);
    t.index = index(sequences);
    t.branch = look_.Constant("fork_join_us");
    t.halves =
        2 * (index(sequences / 2) + UpdateResidency(sequences / 2, misses)) - t.index - update;
    if (t.transfer > 0) {
      t.spared = t.attend * look_.Constant("transfer_processors") / look_.Constant("processors");
    }
    t.beside = look_.Us("top_k", Keys(rows)) + update;
    return t;
  }

  void AddPool(int layer, double sequences, Parts* parts) {
    const StageTimes times = Stages(layer, sequences);
    if (!look_.status().ok()) return;
    const int rows = static_cast<int>(std::ceil(RowsOf(sequences)));
    // Beneath attention a transfer is slower, until attention ends.
    StageTimes slowed = times;
    const double share = look_.Constant("beside_attention");
    slowed.transfer = std::min(times.transfer / share, times.transfer + (1 - share) * times.attend);
    const Overlap overlap = shape_.schedule.value_or(ChooseOverlap(slowed, rows));
    ++out_.schedules[static_cast<size_t>(overlap)];
    out_.transfer_us += halves_ * times.transfer;
    if (times.transfer > 0) out_.link_bytes += halves_ * sequences * Misses(layer) * kEntryBytes;

    const double logits = times.index - look_.Us("top_k", Keys(RowsOf(sequences)));
    const double all = logits + times.beside + times.prepare + times.attend +
                       AddedTime(overlap, overlap == Overlap::kNone ? times : slowed);
    const double queries =
        overlap == Overlap::kNone ? times.prepare : std::max(times.prepare - times.beside, 0.0);
    const double update = times.beside - (times.index - logits);
    const double forks = overlap == Overlap::kNone ? 0
                         : overlap == Overlap::kDa ? times.branch
                                                   : 2 * times.branch;
    (*parts)[kIndexer] += times.index;
    (*parts)[kResidency] += update;
    (*parts)[kProducts] += queries;
    (*parts)[kAttention] += times.attend;
    (*parts)[kForks] += forks;
    // This is what no schedule hides, and what halves and spared processors cost.
    (*parts)[kTransfer] += all - times.index - update - queries - times.attend - forks;
  }

  void AddDense(double rows, Parts* parts) {
    (*parts)[kProducts] +=
        look_.Us("product.dense_up", rows) + look_.Us("product.dense_down", rows);
    (*parts)[kSmall] += look_.Us("silu_mul", rows * config_.intermediate_size);
  }

  // Experts' products are bound by the weights of the experts that are read, and were measured with
  // eight of them.
  void AddExperts(double rows, Parts* parts) {
    constexpr double kMeasured = 8;
    const ExpertConfig& e = config_.latent->experts;
    const double read = ExpertsRead(e.routed, e.per_token, rows);
    const double each = rows * e.per_token / read;
    (*parts)[kExperts] +=
        (look_.Us("product.expert_up", each) + look_.Us("product.expert_down", each)) * read /
        kMeasured;
    (*parts)[kSmall] +=
        look_.Us("silu_mul", rows * e.per_token * e.intermediate) + look_.Us("combine", rows);
    if (e.shared > 0) {
      (*parts)[kProducts] +=
          look_.Us("product.shared_up", rows) + look_.Us("product.shared_down", rows);
      (*parts)[kSmall] += look_.Us("silu_mul", rows * e.shared_size());
    }
    (*parts)[kForks] +=
        look_.Constant("fork_join_us");  // The router lies beside the shared expert.
  }

  // Each draft takes a layer with experts, whose caches lie in HBM, and the head, for one row of
  // each sequence.
  void AddDrafts() {
    if (shape_.drafts == 0) return;
    StepShape one = shape_;
    one.drafts = 0;
    const StepShape all = shape_;
    shape_ = one;
    Parts draft;
    const double rows = one.sequences;
    AddAttention(config_.layers, rows, /*ess=*/false, &draft);
    AddExperts(rows, &draft);
    draft[kHead] += look_.Us("product.head", rows) + look_.Us("sample", rows);
    draft[kAllToAll] += one.parallel.all_to_all_us + one.parallel.all_to_all_row_us * rows;
    shape_ = all;
    out_.parts[kDrafts] += shape_.drafts * (Sum(draft) + look_.Constant("layer_overhead_us"));
  }

  const ModelConfig& config_;
  TimeLookup look_;
  StepShape shape_;
  StepForecast out_;
  double halves_ = 1;  // Parts of the batch that go through a layer one by one.
};

}  // namespace

std::string StepForecast::longest() const {
  const auto most = std::max_element(
      parts.begin(), parts.end(), [](const auto& a, const auto& b) { return a.second < b.second; });
  return most == parts.end() ? "" : most->first;
}

double TokensOfStep(int drafts, double acceptance) {
  double tokens = 0, accepted = 1;
  for (int i = 0; i <= drafts; ++i, accepted *= acceptance) tokens += accepted;
  return tokens;
}

double ExpertsRead(int experts, int k, double rows) {
  return experts * (1 - std::pow(1 - static_cast<double>(k) / experts, rows));
}

absl::StatusOr<StepForecast> SimulateStep(const ModelConfig& config, const OperatorTimes& times,
                                          bool extrapolate, const StepShape& shape) {
  if (shape.sequences < 1 || shape.drafts < 0) {
    return absl::InvalidArgumentError("a step needs one sequence or more");
  }
  const int top_k = config.latent->indexer->top_k;
  if (shape.context < top_k) {
    return absl::InvalidArgumentError(
        absl::StrCat("a context of ", shape.context, " tokens is below the ", top_k,
                     " that a row selects, and attention to fewer was not measured"));
  }
  return StepSum(config, times, extrapolate, shape).Run();
}

}  // namespace sluice::bench
