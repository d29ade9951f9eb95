#include "src/attention/policy_profile.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "kernels/hash_params.h"
#include "src/attention/policies/clo/head_thresholds.h"
#include "src/attention/policies/recall/projection.h"
#include "src/base/config_reader.h"
#include "src/base/crc32c.h"
#include "src/base/json_file.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

using nlohmann::json;

constexpr char kFormat[] = "sluice-policy-profile";
constexpr int64_t kVersion = 1;
constexpr int64_t kMaxProfileBytes = int64_t{64} << 20;  // 128 layers of 4096 shares: 10 MiB
constexpr int64_t kMaxLayers = 4096;
constexpr int64_t kMaxInterval = 1'000'000;
constexpr size_t kFingerprintDigits = 64;

// Matrices of heads, in a binary file of their own. Float32 values follow the header,
// little-endian like every machine that this runs on.
struct MatricesHeader {
  char magic[8];
  char model_fingerprint[kFingerprintDigits];
  int32_t layers, kv_heads, head_dim, columns;
};
static_assert(sizeof(MatricesHeader) == 88);

struct MatricesKind {
  const char* key;      // of the profile's JSON
  const char* magic;    // the file begins with it
  const char* columns;  // the JSON's name for the number of columns
};
constexpr MatricesKind kProjection = {"projection", "SLUPROJ1", "rank"};
constexpr MatricesKind kHash = {"hash", "SLUHASH1", "bits"};

absl::Status WriteFile(const std::string& path, absl::Span<const std::string> pieces) {
  std::ofstream file(path, std::ios::binary | std::ios::trunc);
  for (const std::string& piece : pieces) file << piece;
  file << std::flush;
  if (file) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(path, ": ", std::strerror(errno)));
}

absl::Span<const uint8_t> Bytes(const std::vector<float>& values) {
  return {reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(float)};
}

MatricesHeader HeaderOf(const MatricesKind& kind, const PolicyProfile& profile,
                        const PolicyProfile::Matrices& matrices) {
  MatricesHeader header{};
  std::memcpy(header.magic, kind.magic, sizeof(header.magic));
  std::memcpy(header.model_fingerprint, profile.model_fingerprint.data(), kFingerprintDigits);
  header.layers = matrices.layers;
  header.kv_heads = matrices.kv_heads;
  header.head_dim = matrices.head_dim;
  header.columns = matrices.columns;
  return header;
}

absl::StatusOr<PolicyProfile::Layer> ParseLayer(const std::string& where, const json& object) {
  PolicyProfile::Layer layer;
  if (!object.is_object()) {
    return absl::InvalidArgumentError(
        absl::StrCat(where, ": expected an object, found ", ShownJson(object)));
  }
  const ConfigReader reader(where, object);
  SLUICE_ASSIGN_OR_RETURN(const int64_t interval, reader.Int("interval", 0, kMaxInterval));
  layer.interval = static_cast<int32_t>(interval);
  if (!reader.Has("shares")) return layer;
  const json& shares = reader.At("shares");
  const auto is_share = [](const json& v) { return v.is_number() && v.get<double>() >= 0; };
  if (!shares.is_array() || !std::all_of(shares.begin(), shares.end(), is_share)) {
    return reader.Wrong("shares", "a list of numbers from 0 up");
  }
  layer.shares = shares.get<std::vector<double>>();
  return layer;
}

absl::Status ParseLayers(const ConfigReader& reader, const std::string& path,
                         PolicyProfile* profile) {
  if (!reader.Has("layers")) return absl::OkStatus();
  SLUICE_ASSIGN_OR_RETURN(const int64_t block_tokens, reader.Int("block_tokens", 1, 1 << 16));
  SLUICE_ASSIGN_OR_RETURN(const int64_t budget_tokens, reader.Int("budget_tokens", 1, 1 << 30));
  SLUICE_ASSIGN_OR_RETURN(profile->share_limit, reader.Number("share_limit", 0, 1));
  profile->block_tokens = static_cast<int32_t>(block_tokens);
  profile->budget_tokens = static_cast<int32_t>(budget_tokens);
  const json& layers = reader.At("layers");
  if (!layers.is_array() || layers.empty() || layers.size() > kMaxLayers) {
    return reader.Wrong("layers", absl::StrCat("a list of 1 to ", kMaxLayers, " layers"));
  }
  for (size_t i = 0; i < layers.size(); ++i) {
    SLUICE_ASSIGN_OR_RETURN(profile->layers.emplace_back(),
                            ParseLayer(absl::StrCat(path, ": layers[", i, "]"), layers[i]));
  }
  return absl::OkStatus();
}

// `bytes` is the payload's size, as the profile's JSON gives it.
absl::Status ReadMatrices(const MatricesKind& kind, const std::string& path, int64_t bytes,
                          int64_t crc, const PolicyProfile& profile,
                          PolicyProfile::Matrices* matrices) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) {
    return absl::NotFoundError(absl::StrCat(path, ": ", std::strerror(errno),
                                            ": keep it beside the profile that it was made with"));
  }
  const int64_t want = static_cast<int64_t>(sizeof(MatricesHeader)) + bytes;
  if (const int64_t found = file.tellg(); found != want) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": expected ", want, " bytes, found ",
                                                   found, ": copy it again, or profile again"));
  }
  MatricesHeader header{};
  file.seekg(0);
  file.read(reinterpret_cast<char*>(&header), sizeof(header));
  matrices->values.resize(static_cast<size_t>(bytes) / sizeof(float));
  file.read(reinterpret_cast<char*>(matrices->values.data()), bytes);
  if (!file) return absl::DataLossError(absl::StrCat(path, ": could not be read"));
  const MatricesHeader expected = HeaderOf(kind, profile, *matrices);
  const bool finite = std::all_of(matrices->values.begin(), matrices->values.end(),
                                  [](float v) { return std::isfinite(v); });
  if (std::memcmp(&header, &expected, sizeof(header)) != 0 || !finite ||
      Crc32c(Bytes(matrices->values)) != crc) {
    return absl::InvalidArgumentError(absl::StrCat(path, ": not the ", kind.key,
                                                   " that was written with the profile beside it: "
                                                   "copy both again, or profile again"));
  }
  return absl::OkStatus();
}

absl::Status ParseMatrices(const MatricesKind& kind, const ConfigReader& reader,
                           const std::string& path, int64_t most_columns,
                           const PolicyProfile& profile, PolicyProfile::Matrices* matrices) {
  if (!reader.Has(kind.key)) return absl::OkStatus();
  SLUICE_ASSIGN_OR_RETURN(const ConfigReader of, reader.Object(kind.key));
  SLUICE_ASSIGN_OR_RETURN(const int64_t layers, of.Int("layers", 1, kMaxLayers));
  SLUICE_ASSIGN_OR_RETURN(const int64_t kv_heads, of.Int("kv_heads", 1, 4096));
  SLUICE_ASSIGN_OR_RETURN(const int64_t head_dim, of.Int("head_dim", 1, 4096));
  SLUICE_ASSIGN_OR_RETURN(const int64_t columns,
                          of.Int(kind.columns, 1, most_columns > 0 ? most_columns : head_dim));
  SLUICE_ASSIGN_OR_RETURN(const int64_t crc, of.Int("crc32c", 0, UINT32_MAX));
  matrices->layers = static_cast<int32_t>(layers);
  matrices->kv_heads = static_cast<int32_t>(kv_heads);
  matrices->head_dim = static_cast<int32_t>(head_dim);
  matrices->columns = static_cast<int32_t>(columns);
  // At most 2^48 elements: no product overflows.
  return ReadMatrices(kind, absl::StrCat(path, ".", kind.key),
                      layers * kv_heads * head_dim * columns * 4, crc, profile, matrices);
}

absl::Status WriteMatrices(const MatricesKind& kind, const std::string& path,
                           const PolicyProfile& profile, const PolicyProfile::Matrices& matrices,
                           json* root) {
  if (matrices.columns == 0) return absl::OkStatus();
  const MatricesHeader header = HeaderOf(kind, profile, matrices);
  const absl::Span<const uint8_t> payload = Bytes(matrices.values);
  SLUICE_CHECK(static_cast<int64_t>(matrices.values.size()) ==
               int64_t{header.layers} * header.kv_heads * header.head_dim * header.columns);
  (*root)[kind.key] = {{"layers", header.layers},
                       {"kv_heads", header.kv_heads},
                       {"head_dim", header.head_dim},
                       {kind.columns, header.columns},
                       {"crc32c", Crc32c(payload)}};
  return WriteFile(absl::StrCat(path, ".", kind.key),
                   {std::string(reinterpret_cast<const char*>(&header), sizeof(header)),
                    std::string(reinterpret_cast<const char*>(payload.data()), payload.size())});
}

absl::Status ParseThresholds(const ConfigReader& reader, PolicyProfile* profile) {
  if (!reader.Has("hgca")) return absl::OkStatus();
  PolicyProfile::Thresholds& to = profile->hgca;
  SLUICE_ASSIGN_OR_RETURN(const ConfigReader of, reader.Object("hgca"));
  SLUICE_ASSIGN_OR_RETURN(to.window_tokens, of.Int("window_tokens", 1, 1 << 30));
  SLUICE_ASSIGN_OR_RETURN(to.share, of.Number("share", 0, 1));
  SLUICE_ASSIGN_OR_RETURN(const int64_t kv_heads, of.Int("kv_heads", 1, 4096));
  to.kv_heads = static_cast<int32_t>(kv_heads);
  const json& betas = of.At("betas");
  const auto is_beta = [](const json& v) { return v.is_number() && v.get<double>() >= 0; };
  if (!betas.is_array() || betas.empty() || betas.size() % static_cast<size_t>(kv_heads) != 0 ||
      betas.size() > static_cast<size_t>(kMaxLayers * kv_heads) ||
      !std::all_of(betas.begin(), betas.end(), is_beta)) {
    return of.Wrong("betas", "a list of numbers from 0 up, one for each layer and KV head");
  }
  to.betas = betas.get<std::vector<float>>();
  return absl::OkStatus();
}

absl::Status ParseMargins(const ConfigReader& reader, PolicyProfile* profile) {
  if (!reader.Has("recall")) return absl::OkStatus();
  PolicyProfile::Margins& to = profile->margins;
  SLUICE_ASSIGN_OR_RETURN(const ConfigReader of, reader.Object("recall"));
  SLUICE_ASSIGN_OR_RETURN(const int64_t rank, of.Int("rank", 1, 4096));
  SLUICE_ASSIGN_OR_RETURN(to.share, of.Number("share", 0, 1));
  to.rank = static_cast<int32_t>(rank);
  const json& margins = of.At("margins");
  const auto is_margin = [](const json& v) { return v.is_number() && v.get<double>() > 0; };
  if (!margins.is_array() || margins.empty() || margins.size() > kMaxLayers ||
      !std::all_of(margins.begin(), margins.end(), is_margin)) {
    return of.Wrong("margins", "a list of numbers above 0, one for each layer");
  }
  to.by_layer = margins.get<std::vector<float>>();
  return absl::OkStatus();
}

absl::Status DoesNotFit(const std::string& what) {
  return absl::FailedPreconditionError(
      absl::StrCat("policy_profile: ", what, ": profile this model again with sluice-profile"));
}

absl::Status ParseNumbers(const ConfigReader& of, const char* name, double least,
                          std::vector<float>* numbers) {
  const json& list = of.At(name);
  const auto fits = [least](const json& v) {
    return v.is_number() && v.get<double>() >= least && v.get<double>() <= 1;
  };
  if (!list.is_array() || list.empty() || list.size() > static_cast<size_t>(kMaxLayers * 4096) ||
      !std::all_of(list.begin(), list.end(), fits)) {
    return of.Wrong(
        name, absl::StrCat("a list of numbers from ", least, " to 1, one for each layer and head"));
  }
  *numbers = list.get<std::vector<float>>();
  return absl::OkStatus();
}

absl::Status ParseSimilarities(const ConfigReader& reader, PolicyProfile* profile) {
  if (!reader.Has("clo")) return absl::OkStatus();
  SLUICE_ASSIGN_OR_RETURN(const ConfigReader of, reader.Object("clo"));
  SLUICE_ASSIGN_OR_RETURN(const int64_t kv_heads, of.Int("kv_heads", 1, 4096));
  profile->clo.kv_heads = static_cast<int32_t>(kv_heads);
  SLUICE_RETURN_IF_ERROR(ParseNumbers(of, "gates", 0, &profile->clo.gates));
  SLUICE_RETURN_IF_ERROR(ParseNumbers(of, "similarities", -1, &profile->clo.similarities));
  SLUICE_RETURN_IF_ERROR(ParseNumbers(of, "misses", 0, &profile->clo.misses));
  if (of.Has("predicted")) {
    SLUICE_RETURN_IF_ERROR(ParseNumbers(of, "predicted", -1, &profile->clo.predicted));
  }
  SLUICE_ASSIGN_OR_RETURN(profile->clo.prefetchable, of.NumberOr("prefetchable", 0, 1e9, 0));
  return absl::OkStatus();
}

// Fills in what policy clo takes.
absl::Status ApplySimilarities(const PolicyProfile::Similarities& profile,
                               const CacheLayout& layout, PolicyOptions* options) {
  if (profile.gates.empty()) return absl::OkStatus();
  const size_t lists = static_cast<size_t>(layout.layers * layout.kinds[0].heads);
  if (profile.kv_heads != layout.kinds[0].heads || profile.similarities.size() != lists ||
      profile.misses.size() != lists || profile.gates.size() % lists != 0 ||
      (!profile.predicted.empty() && std::ssize(profile.predicted) != layout.layers) ||
      (options->heads > 0 &&
       profile.gates.size() != static_cast<size_t>(layout.layers * options->heads))) {
    return DoesNotFit(absl::StrCat("it has ", profile.gates.size(), " gates and ",
                                   profile.similarities.size(), " similarities of ",
                                   profile.kv_heads, " KV heads, the model has ", layout.layers,
                                   " layers of ", options->heads, " and ", layout.kinds[0].heads));
  }
  PolicyOptions::Clo& clo = options->clo;
  clo.importance = profile.gates;
  clo.misses = profile.misses;
  clo.predicted = profile.predicted;
  clo.prefetchable = profile.prefetchable;
  HeadRules rules = RulesOf(profile.gates, profile.similarities, double{clo.similarity});
  clo.thresholds = std::move(rules.thresholds);
  clo.difficulty = std::move(rules.difficulty);
  return absl::OkStatus();
}

// Leaves of `values`, [layers][heads.all][each], those of the heads.
template <typename T>
void KeepHeads(const HeadsOfRank& heads, size_t each, std::vector<T>* values) {
  const size_t layer = static_cast<size_t>(heads.all) * each;
  if (values->empty() || layer == 0 || values->size() % layer != 0) return;
  std::vector<T> kept;
  for (size_t at = static_cast<size_t>(heads.first) * each; at < values->size(); at += layer) {
    const auto from = values->begin() + static_cast<ptrdiff_t>(at);
    kept.insert(kept.end(), from, from + static_cast<ptrdiff_t>(size_t(heads.count) * each));
  }
  *values = std::move(kept);
}

}  // namespace

std::string ProjectionPath(const std::string& path) { return path + ".projection"; }
std::string HashPath(const std::string& path) { return path + ".hash"; }

absl::Status WritePolicyProfile(const PolicyProfile& profile, const std::string& path) {
  SLUICE_CHECK(profile.model_fingerprint.size() == kFingerprintDigits);
  json root = {
      {"format", kFormat}, {"version", kVersion}, {"model_fingerprint", profile.model_fingerprint}};
  if (!profile.layers.empty()) {
    root["block_tokens"] = profile.block_tokens;
    root["budget_tokens"] = profile.budget_tokens;
    root["share_limit"] = profile.share_limit;
    for (const PolicyProfile::Layer& layer : profile.layers) {
      root["layers"].push_back({{"interval", layer.interval}, {"shares", layer.shares}});
    }
  }
  if (!profile.hgca.betas.empty()) {
    root["hgca"] = {{"window_tokens", profile.hgca.window_tokens},
                    {"share", profile.hgca.share},
                    {"kv_heads", profile.hgca.kv_heads},
                    {"betas", profile.hgca.betas}};
  }
  if (!profile.margins.by_layer.empty()) {
    root["recall"] = {{"rank", profile.margins.rank},
                      {"share", profile.margins.share},
                      {"margins", profile.margins.by_layer}};
  }
  if (!profile.clo.gates.empty()) {
    root["clo"] = {{"kv_heads", profile.clo.kv_heads},
                   {"gates", profile.clo.gates},
                   {"similarities", profile.clo.similarities},
                   {"misses", profile.clo.misses},
                   {"label_similarities", profile.clo.label_similarities},
                   {"prefetchable", profile.clo.prefetchable},
                   {"persistence_order", profile.clo.persistence_order}};
    if (!profile.clo.predicted.empty()) root["clo"]["predicted"] = profile.clo.predicted;
  }
  WriteMissProfile(profile.misses, &root);
  SLUICE_RETURN_IF_ERROR(WriteMatrices(kProjection, path, profile, profile.projection, &root));
  SLUICE_RETURN_IF_ERROR(WriteMatrices(kHash, path, profile, profile.hash, &root));
  return WriteFile(path, {root.dump(2), "\n"});
}

absl::StatusOr<PolicyProfile> ReadPolicyProfile(const std::string& path) {
  SLUICE_ASSIGN_OR_RETURN(const json root, ReadJsonFile(path, kMaxProfileBytes));
  const ConfigReader reader(path, root);
  SLUICE_ASSIGN_OR_RETURN(const std::string format, reader.StringOr("format", ""));
  if (format != kFormat) {
    return absl::InvalidArgumentError(absl::StrCat(
        path, ": not a profile of sluice-profile: \"format\" must be \"", kFormat, "\""));
  }
  SLUICE_ASSIGN_OR_RETURN(const int64_t version, reader.Int("version", 0, INT32_MAX));
  if (version != kVersion) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, ": version ", version, " of the format, this build reads ", kVersion,
                     ": profile again with the sluice-profile of this build"));
  }
  PolicyProfile profile;
  SLUICE_ASSIGN_OR_RETURN(profile.model_fingerprint, reader.StringOr("model_fingerprint", ""));
  if (profile.model_fingerprint.size() != kFingerprintDigits) {
    return reader.Wrong("model_fingerprint", absl::StrCat(kFingerprintDigits, " digits"));
  }
  SLUICE_RETURN_IF_ERROR(ParseLayers(reader, path, &profile));
  SLUICE_RETURN_IF_ERROR(
      ParseMatrices(kProjection, reader, path, /*most_columns=*/0, profile, &profile.projection));
  SLUICE_RETURN_IF_ERROR(
      ParseMatrices(kHash, reader, path, kernels::kMaxHashBits, profile, &profile.hash));
  SLUICE_RETURN_IF_ERROR(ParseThresholds(reader, &profile));
  SLUICE_RETURN_IF_ERROR(ParseMargins(reader, &profile));
  SLUICE_RETURN_IF_ERROR(ParseSimilarities(reader, &profile));
  SLUICE_RETURN_IF_ERROR(ReadMissProfile(reader, path, &profile.misses));
  return profile;
}

PolicyProfile ProfileOfRank(PolicyProfile profile, const HeadsOfRank& heads,
                            const HeadsOfRank& kv_heads) {
  if (kv_heads.all == 0) return profile;
  for (PolicyProfile::Matrices* of : {&profile.projection, &profile.hash}) {
    if (of->columns == 0 || of->kv_heads != kv_heads.all) continue;
    KeepHeads(kv_heads, size_t(of->head_dim) * size_t(of->columns), &of->values);
    of->kv_heads = kv_heads.count;
  }
  if (profile.hgca.kv_heads == kv_heads.all) {
    KeepHeads(kv_heads, 1, &profile.hgca.betas);
    profile.hgca.kv_heads = kv_heads.count;
  }
  PolicyProfile::Similarities& clo = profile.clo;
  if (clo.kv_heads != kv_heads.all) return profile;
  KeepHeads(heads, 1, &clo.gates);
  for (auto* of : {&clo.similarities, &clo.misses, &clo.label_similarities}) {
    KeepHeads(kv_heads, 1, of);
  }
  clo.kv_heads = kv_heads.count;
  clo.persistence_order.clear();  // It is of the whole model's heads.
  // A rank computes a layer in its share of the time, and has a link of its own.
  clo.prefetchable *= double{1} * kv_heads.count / kv_heads.all;
  return profile;
}

absl::Status ApplyPolicyProfile(const PolicyProfile& of_model, const std::string& model_fingerprint,
                                const CacheLayout& layout, PolicyOptions* options) {
  const PolicyProfile profile =
      ProfileOfRank(of_model, options->rank_heads, options->rank_kv_heads);
  const CacheKind& kv = layout.kinds[0];
  if (profile.model_fingerprint != model_fingerprint) {
    return DoesNotFit(absl::StrCat("it was made for the model with fingerprint ",
                                   profile.model_fingerprint, ", this one has ",
                                   model_fingerprint));
  }
  if (!profile.layers.empty()) {
    if (static_cast<int>(profile.layers.size()) != layout.layers) {
      return DoesNotFit(absl::StrCat("it has intervals of ", profile.layers.size(),
                                     " layers, the model has ", layout.layers));
    }
    if (profile.block_tokens != kv.block_tokens) {
      return DoesNotFit(absl::StrCat("it was measured with block_tokens ", profile.block_tokens,
                                     ", this node has ", kv.block_tokens));
    }
    if (profile.budget_tokens != options->budget_tokens) {
      return DoesNotFit(absl::StrCat("it was measured with budget_tokens ", profile.budget_tokens,
                                     ", this node has ", options->budget_tokens));
    }
    options->scout.intervals.clear();
    for (int layer = 0; layer < layout.layers; ++layer) {
      const int32_t interval = profile.layers[static_cast<size_t>(layer)].interval;
      if (interval == 0 && layer >= options->dense_layers) {
        return DoesNotFit(absl::StrCat("layer ", layer, " was dense when it was measured, here ",
                                       "dense_layers is ", options->dense_layers));
      }
      options->scout.intervals.push_back(interval);
    }
  }
  const auto fits = [&](const PolicyProfile::Matrices& of) {
    return of.columns == 0 || (of.layers == layout.layers && of.kv_heads == kv.heads &&
                               of.head_dim == kv.part_bytes[0] / SizeOf(kv.element_type));
  };
  for (const auto& [name, of] : {std::pair{"projection is", &profile.projection},
                                 std::pair{"hash matrices are", &profile.hash}}) {
    if (fits(*of)) continue;
    return DoesNotFit(absl::StrCat("its ", name, " for ", of->layers, " layers of ", of->kv_heads,
                                   " KV heads of ", of->head_dim, ", the model has ", layout.layers,
                                   " of ", kv.heads, " of ",
                                   kv.part_bytes[0] / SizeOf(kv.element_type)));
  }
  if (profile.projection.columns > 0) options->recall.projection = profile.projection.values;
  if (profile.hash.columns > 0) {
    options->clo.hash = profile.hash.values;
    options->clo.hash_bits = profile.hash.columns;
  }
  const PolicyProfile::Margins& margins = profile.margins;
  if (!margins.by_layer.empty()) {
    if (std::ssize(margins.by_layer) != layout.layers) {
      return DoesNotFit(absl::StrCat("it has margins of ", margins.by_layer.size(),
                                     " layers, the model has ", layout.layers));
    }
    const auto elements = static_cast<int64_t>(options->recall.projection.size());
    const absl::StatusOr<int32_t> rank =
        ProjectionRank(layout.layers, kv.heads, kv.part_bytes[0] / SizeOf(kv.element_type),
                       elements, options->recall.rank);
    if (rank.ok() && *rank != margins.rank) {
      return DoesNotFit(absl::StrCat("its margins were measured with ", margins.rank,
                                     " columns of a projection, this node has ", *rank));
    }
    if (options->reduction != kernels::GroupReduction::kMax) {
      return DoesNotFit(
          "its margins were measured with score_reduction max, which this node has not");
    }
    options->recall.margins = margins.by_layer;
  }
  const PolicyProfile::Thresholds& hgca = profile.hgca;
  if (!hgca.betas.empty()) {
    const int64_t layers = std::ssize(hgca.betas) / hgca.kv_heads;
    if (layers != layout.layers || hgca.kv_heads != kv.heads) {
      return DoesNotFit(absl::StrCat("it has betas of ", layers, " layers of ", hgca.kv_heads,
                                     " KV heads, the model has ", layout.layers, " of ", kv.heads));
    }
    // Beta 0 asks for exact attention, so thresholds do not replace it.
    if (options->hgca.beta != 0) options->hgca.betas = hgca.betas;
  }
  SLUICE_RETURN_IF_ERROR(ApplySimilarities(profile.clo, layout, options));
  for (const MissProfile::Point& point : profile.misses.points) {
    if (static_cast<int>(point.by_layer.size()) == layout.layers) continue;
    return DoesNotFit(absl::StrCat("it has misses of ", point.by_layer.size(),
                                   " layers, the model has ", layout.layers));
  }
  options->ess.profile = profile.misses;
  return absl::OkStatus();
}

}  // namespace sluice
