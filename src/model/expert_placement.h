// ExpertPlacement says which ranks have which routed experts of a layer, where ranks divide them
// (ExpertShard in shard.h). Every rank has as many. With redundancy a rank has some more than its
// share, so busy experts are on several ranks, as DeepSeek's EPLB and vLLM have it. These are pure
// values and functions, for any thread. They give the same on every machine.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "src/model/model_config.h"

namespace sluice {

struct ExpertPlacement {
  int ranks = 1;
  int each = 0;  // experts on a rank
  // [ranks][each] The experts, which differ on a rank. The index into this list is the number of a
  // *physical expert*: one copy of an expert on one rank.
  std::vector<int32_t> experts;

  absl::Span<const int32_t> OfRank(int rank) const {
    return absl::MakeConstSpan(experts).subspan(static_cast<size_t>(rank) * size_t(each),
                                                static_cast<size_t>(each));
  }
};

// How often each expert was chosen: by number of the layer, [routed], or empty where nothing is
// known of the layer.
using ExpertLoad = std::vector<std::vector<int64_t>>;

// Places `routed` experts, of which nothing more is known: rank r has its share, those from
// r * routed / ranks on, and `redundancy` copies of those that follow, with expert 0 behind the
// last. REQUIRES: `ranks` divides `routed`, and a rank has at most `routed` experts.
ExpertPlacement PlaceExperts(int routed, int ranks, int redundancy);

// Places experts by their load, the numbers of choices [routed], in two greedy passes. Each of the
// ranks * redundancy copies is of the expert with the most load for each copy that it has. Then the
// copies go, those of the most load first, each to the rank with the least load that has room and
// not the expert. Where there is none, a full rank takes it, and gives its lightest expert that can
// go there to a rank with room. REQUIRES: as above, and no number is negative.
ExpertPlacement PlaceExperts(absl::Span<const int64_t> load, int ranks, int redundancy);

// Returns for each expert the physical one to which rank `source` sends its rows, [routed]: its
// own, if it has the expert. The other ranks take the copies in turn, so that a copy serves as many
// ranks as any other of the expert, or one more or less.
std::vector<int32_t> PhysicalExpertsFrom(const ExpertPlacement& placement, int routed, int source);

// Returns the load that each rank would have, if the rows of every rank chose alike, [ranks].
std::vector<double> LoadOfRanks(const ExpertPlacement& placement, absl::Span<const int64_t> load);

// Reads files of load, whose paths stand in `paths` with commas between them, and adds them up.
// Such a file is JSON: {"choices": {"3": [number for each routed expert], ...}}, by layer, with
// every layer that has experts. INVALID_ARGUMENT names the file and what is wrong.
absl::StatusOr<ExpertLoad> ReadExpertLoad(const std::string& paths, const ModelConfig& config);

// Writes such a file, of the layers that have numbers; it appears whole. INVALID_ARGUMENT, which
// names expert_load_out: it cannot be written.
absl::Status WriteExpertLoad(const ExpertLoad& load, const std::string& path);
// Returns the same error, before there is anything to write.
absl::Status CheckExpertLoadPath(const std::string& path);

}  // namespace sluice
