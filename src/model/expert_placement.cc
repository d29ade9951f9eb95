#include "src/model/expert_placement.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "src/base/json_file.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

using nlohmann::json;

constexpr int64_t kMaxLoadBytes = int64_t{16} << 20;  // 58 layers of 256 numbers: 0.3 MiB
// Sums over files, and over the experts of a layer, stay within int64_t.
constexpr int64_t kMostChoices = int64_t{1} << 48;
constexpr size_t kMostFiles = 64;  // one for each rank

// Returns how many copies each expert has.
std::vector<int> CopiesOf(absl::Span<const int64_t> load, int ranks, int redundancy) {
  std::vector<int> copies(load.size(), 1);
  const auto each = [&](size_t e) { return static_cast<double>(load[e]) / copies[e]; };
  for (int i = 0; i < ranks * redundancy; ++i) {
    size_t busiest = load.size();
    for (size_t e = 0; e < load.size(); ++e) {
      if (copies[e] == ranks) continue;
      if (busiest == load.size() || each(e) > each(busiest) ||
          (each(e) == each(busiest) && copies[e] < copies[busiest])) {
        busiest = e;
      }
    }
    ++copies[busiest];
  }
  return copies;
}

// The ranks while experts are placed on them.
class Ranks {
 public:
  Ranks(int ranks, int each) : each_(static_cast<size_t>(each)), ranks_(size_t(ranks)) {}

  // Places a copy of `expert` on a rank that does not have it.
  void Place(int32_t expert, double load) {
    Rank* to = nullptr;
    for (Rank& rank : ranks_) {
      if (Full(rank) || Has(rank, expert)) continue;
      if (to == nullptr || Before(rank, *to)) to = &rank;
    }
    if (to == nullptr) to = MakeRoom(expert);
    Add(to, {expert, load});
  }

  std::vector<int32_t> Experts() const {
    std::vector<int32_t> experts;
    for (const Rank& rank : ranks_) {
      std::vector<int32_t> own;
      for (const Copy& copy : rank.copies) own.push_back(copy.expert);
      std::sort(own.begin(), own.end());
      experts.insert(experts.end(), own.begin(), own.end());
    }
    return experts;
  }

 private:
  struct Copy {
    int32_t expert;
    double load;
  };
  struct Rank {
    std::vector<Copy> copies;
    double load = 0;
  };

  bool Full(const Rank& rank) const { return rank.copies.size() == each_; }
  static bool Has(const Rank& rank, int32_t expert) {
    return std::any_of(rank.copies.begin(), rank.copies.end(),
                       [expert](const Copy& copy) { return copy.expert == expert; });
  }
  static bool Before(const Rank& a, const Rank& b) {
    return a.load != b.load ? a.load < b.load : a.copies.size() < b.copies.size();
  }
  static void Add(Rank* rank, Copy copy) {
    rank->copies.push_back(copy);
    rank->load += copy.load;
  }

  // Makes room on a full rank without `expert`, where all ranks with room have it. The full rank
  // has more experts than one with room, so there is one that can move there.
  Rank* MakeRoom(int32_t expert) {
    Rank *full = nullptr, *room = nullptr;
    for (Rank& rank : ranks_) {
      Rank*& least = Full(rank) ? full : room;
      if (Full(rank) && Has(rank, expert)) continue;
      if (least == nullptr || Before(rank, *least)) least = &rank;
    }
    // Those placed last are the lightest.
    const auto moved = std::find_if(full->copies.rbegin(), full->copies.rend(),
                                    [&](const Copy& copy) { return !Has(*room, copy.expert); });
    Add(room, *moved);
    full->load -= moved->load;
    full->copies.erase(std::next(moved).base());
    return full;
  }

  const size_t each_;
  std::vector<Rank> ranks_;
};

absl::Status WrongFile(const std::string& path, const std::string& what) {
  return absl::InvalidArgumentError(absl::StrCat("expert_load: ", path, ": ", what));
}

std::string TemporaryOf(const std::string& path) { return absl::StrCat(path, ".tmp"); }

absl::Status CannotWrite(const std::string& path) {
  const std::string why = std::strerror(errno);
  std::remove(TemporaryOf(path).c_str());
  return absl::InvalidArgumentError(
      absl::StrCat("expert_load_out: cannot write ", path, ": ", why));
}

// Adds the numbers of a file.
absl::Status AddFile(const std::string& path, const ModelConfig& config, ExpertLoad* load) {
  auto file = ReadJsonFile(path, kMaxLoadBytes);
  if (!file.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("expert_load: ", file.status().message()));
  }
  const auto layers = file->find("choices");
  if (layers == file->end() || !layers->is_object()) {
    return WrongFile(path, "choices: expected an object with a list for each layer");
  }
  const auto routed = static_cast<size_t>(config.latent->experts.routed);
  const int first = config.latent->dense_layers;
  for (int layer = first; layer < config.layers; ++layer) {
    const std::string key = absl::StrCat(layer);
    const auto counts = layers->find(key);
    if (counts == layers->end() || !counts->is_array() || counts->size() != routed) {
      return WrongFile(path, absl::StrCat("choices: ", key, ": expected a list of ", routed,
                                          " numbers, one for each expert of the layer"));
    }
    std::vector<int64_t>& sums = (*load)[static_cast<size_t>(layer)];
    sums.resize(routed);
    for (size_t e = 0; e < routed; ++e) {
      const json& count = (*counts)[e];
      if (!count.is_number_integer() || count < 0 || count > kMostChoices) {
        return WrongFile(path, absl::StrCat("choices: ", key, ": expected whole numbers from 0 to ",
                                            kMostChoices, ", found ", ShownJson(count)));
      }
      sums[e] += count.get<int64_t>();
    }
  }
  const auto expected = static_cast<size_t>(config.layers - first);
  if (layers->size() == expected) return absl::OkStatus();
  return WrongFile(path, absl::StrCat("choices: expected the ", expected, " layers from ", first,
                                      " on alone, found ", layers->size()));
}

}  // namespace

ExpertPlacement PlaceExperts(int routed, int ranks, int redundancy) {
  const int share = routed / ranks;
  ExpertPlacement placement{ranks, share + redundancy, {}};
  for (int rank = 0; rank < ranks; ++rank) {
    for (int i = 0; i < placement.each; ++i) {
      placement.experts.push_back((rank * share + i) % routed);
    }
  }
  return placement;
}

ExpertPlacement PlaceExperts(absl::Span<const int64_t> load, int ranks, int redundancy) {
  const std::vector<int> copies = CopiesOf(load, ranks, redundancy);
  const auto each = [&](int32_t e) {
    return static_cast<double>(load[static_cast<size_t>(e)]) / copies[static_cast<size_t>(e)];
  };
  std::vector<int32_t> order(load.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return each(a) > each(b); });
  ExpertPlacement placement{ranks, static_cast<int>(load.size()) / ranks + redundancy, {}};
  Ranks places(ranks, placement.each);
  for (const int32_t e : order) {
    for (int i = 0; i < copies[static_cast<size_t>(e)]; ++i) places.Place(e, each(e));
  }
  placement.experts = places.Experts();
  return placement;
}

std::vector<int32_t> PhysicalExpertsFrom(const ExpertPlacement& placement, int routed, int source) {
  std::vector<std::vector<int32_t>> copies(static_cast<size_t>(routed));
  for (size_t i = 0; i < placement.experts.size(); ++i) {
    copies[static_cast<size_t>(placement.experts[i])].push_back(static_cast<int32_t>(i));
  }
  std::vector<int32_t> from;
  for (size_t e = 0; e < copies.size(); ++e) {
    // The number of ranks before this one that have no copy of their own. Experts begin with
    // different copies, so that no rank has more than its share of what is left over.
    size_t turn = static_cast<size_t>(source);
    int32_t own = -1;
    for (const int32_t copy : copies[e]) {
      if (copy / placement.each < source) --turn;
      if (copy / placement.each == source) own = copy;
    }
    from.push_back(own >= 0 ? own : copies[e][(turn + e) % copies[e].size()]);
  }
  return from;
}

std::vector<double> LoadOfRanks(const ExpertPlacement& placement, absl::Span<const int64_t> load) {
  std::vector<double> of(static_cast<size_t>(placement.ranks));
  for (int source = 0; source < placement.ranks; ++source) {
    const std::vector<int32_t> from =
        PhysicalExpertsFrom(placement, static_cast<int>(load.size()), source);
    for (size_t e = 0; e < load.size(); ++e) {
      of[static_cast<size_t>(from[e] / placement.each)] +=
          static_cast<double>(load[e]) / placement.ranks;
    }
  }
  return of;
}

absl::StatusOr<ExpertLoad> ReadExpertLoad(const std::string& paths, const ModelConfig& config) {
  ExpertLoad load;
  if (paths.empty()) return load;
  if (!config.latent.has_value()) {
    return absl::InvalidArgumentError(
        absl::StrCat("expert_load: ", config.name, " has no experts: leave it out"));
  }
  const std::vector<std::string> files = absl::StrSplit(paths, ',');
  if (files.size() > kMostFiles) {
    return absl::InvalidArgumentError(
        absl::StrCat("expert_load: expected at most ", kMostFiles, " files, found ", files.size()));
  }
  load.resize(static_cast<size_t>(config.layers));
  for (const std::string& path : files) SLUICE_RETURN_IF_ERROR(AddFile(path, config, &load));
  return load;
}

absl::Status WriteExpertLoad(const ExpertLoad& load, const std::string& path) {
  nlohmann::ordered_json choices = nlohmann::ordered_json::object();
  for (size_t layer = 0; layer < load.size(); ++layer) {
    if (!load[layer].empty()) choices[absl::StrCat(layer)] = load[layer];
  }
  const std::string temporary = TemporaryOf(path);
  std::ofstream out(temporary, std::ios::trunc);
  out << nlohmann::ordered_json{{"choices", choices}}.dump() << "\n";
  out.close();
  if (out && std::rename(temporary.c_str(), path.c_str()) == 0) return absl::OkStatus();
  return CannotWrite(path);
}

absl::Status CheckExpertLoadPath(const std::string& path) {
  if (!std::ofstream(TemporaryOf(path), std::ios::trunc)) return CannotWrite(path);
  std::remove(TemporaryOf(path).c_str());
  return absl::OkStatus();
}

}  // namespace sluice
