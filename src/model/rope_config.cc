#include "src/model/rope_config.h"

#include "src/base/status_macros.h"

namespace sluice {
namespace {

constexpr char kKinds[] = "default, linear, llama3 and yarn";
constexpr double kDefaultTheta = 10000.0;
constexpr double kMaxTheta = 1e15;
constexpr double kMaxFactor = 1e6;
constexpr int64_t kMaxPositions = int64_t{1} << 30;

// The fallbacks, which stand outside the object of settings.
struct Outer {
  double theta;
  int64_t original;  // if the settings do not say it
  bool original_wins;
};

absl::StatusOr<RopeKind> ReadKind(const ConfigReader& settings) {
  const char* key = settings.Has("rope_type") ? "rope_type" : "type";
  SLUICE_ASSIGN_OR_RETURN(const std::string name, settings.StringOr(key, "default"));
  for (const RopeKind kind :
       {RopeKind::kDefault, RopeKind::kLinear, RopeKind::kLlama3, RopeKind::kYarn}) {
    if (name == RopeKindName(kind)) return kind;
  }
  return settings.Unsupported(key, kKinds);
}

absl::Status ReadYarn(const ConfigReader& settings, RopeConfig* out) {
  std::optional<double> mscale, mscale_all_dim;
  if (settings.Has("mscale")) {
    SLUICE_ASSIGN_OR_RETURN(mscale, settings.Number("mscale", 0, 100));
  }
  if (settings.Has("mscale_all_dim")) {
    SLUICE_ASSIGN_OR_RETURN(mscale_all_dim, settings.Number("mscale_all_dim", 0, 100));
  }
  out->mscale_all_dim = mscale_all_dim.value_or(0);
  SLUICE_ASSIGN_OR_RETURN(
      out->attention_factor,
      settings.NumberOr("attention_factor", 1e-3, 1e3,
                        YarnAttentionFactor(out->factor, mscale, mscale_all_dim)));
  SLUICE_ASSIGN_OR_RETURN(out->beta_fast, settings.NumberOr("beta_fast", 0, 1e6, 32));
  SLUICE_ASSIGN_OR_RETURN(out->beta_slow, settings.NumberOr("beta_slow", 0, 1e6, 1));
  if (out->beta_fast == 0) out->beta_fast = 32;  // transformers takes 0 as "not given"
  if (out->beta_slow == 0) out->beta_slow = 1;
  if (out->beta_fast < out->beta_slow) return settings.Wrong("beta_fast", "at least beta_slow");
  SLUICE_ASSIGN_OR_RETURN(out->truncate, settings.BoolOr("truncate", true));
  return absl::OkStatus();
}

absl::StatusOr<RopeConfig> ReadSettings(const ConfigReader& settings, const Outer& outer,
                                        int64_t max_positions) {
  for (const char* layer_type : {"full_attention", "sliding_attention"}) {
    if (settings.Has(layer_type)) {
      return settings.Unsupported(layer_type, "one RoPE setting for all layers");
    }
  }
  RopeConfig out;
  SLUICE_ASSIGN_OR_RETURN(out.kind, ReadKind(settings));
  SLUICE_ASSIGN_OR_RETURN(const double rotary, settings.NumberOr("partial_rotary_factor", 0, 1, 1));
  if (rotary != 1) return settings.Unsupported("partial_rotary_factor", "1");
  SLUICE_ASSIGN_OR_RETURN(out.theta,
                          settings.NumberOr("rope_theta", 1.001, kMaxTheta, outer.theta));
  if (out.kind == RopeKind::kDefault) return out;

  if (out.kind != RopeKind::kLinear) {
    SLUICE_ASSIGN_OR_RETURN(
        out.original_max_position_embeddings,
        settings.IntOr("original_max_position_embeddings", 1, kMaxPositions, outer.original));
    if (outer.original_wins) out.original_max_position_embeddings = outer.original;
  }
  if (out.kind == RopeKind::kYarn && settings.IsNull("factor")) {
    out.factor = static_cast<double>(max_positions) /
                 static_cast<double>(out.original_max_position_embeddings);
  } else {
    SLUICE_ASSIGN_OR_RETURN(out.factor, settings.Number("factor", 1, kMaxFactor));
  }
  if (out.kind == RopeKind::kLlama3) {
    SLUICE_ASSIGN_OR_RETURN(out.low_freq_factor, settings.Number("low_freq_factor", 1e-3, 1e6));
    SLUICE_ASSIGN_OR_RETURN(out.high_freq_factor, settings.Number("high_freq_factor", 1e-3, 1e6));
    if (out.high_freq_factor <= out.low_freq_factor) {
      return settings.Wrong("high_freq_factor", "more than low_freq_factor");
    }
  }
  if (out.kind == RopeKind::kYarn) SLUICE_RETURN_IF_ERROR(ReadYarn(settings, &out));
  return out;
}

}  // namespace

absl::StatusOr<RopeConfig> ReadRopeConfig(const ConfigReader& config,
                                          int64_t max_position_embeddings) {
  SLUICE_ASSIGN_OR_RETURN(const double rotary, config.NumberOr("partial_rotary_factor", 0, 1, 1));
  if (rotary != 1) return config.Unsupported("partial_rotary_factor", "1");

  Outer outer{};
  SLUICE_ASSIGN_OR_RETURN(outer.theta,
                          config.NumberOr("rope_theta", 1.001, kMaxTheta, kDefaultTheta));
  outer.original_wins = config.Has("original_max_position_embeddings");
  SLUICE_ASSIGN_OR_RETURN(outer.original, config.IntOr("original_max_position_embeddings", 1,
                                                       kMaxPositions, max_position_embeddings));

  std::optional<RopeConfig> found;
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    if (!config.Has(key)) continue;
    SLUICE_ASSIGN_OR_RETURN(const ConfigReader settings, config.Object(key));
    SLUICE_ASSIGN_OR_RETURN(const RopeConfig read,
                            ReadSettings(settings, outer, max_position_embeddings));
    if (found.has_value() && *found != read) {
      return config.Wrong(key, "the same settings as in rope_parameters, or only one of the two");
    }
    found = read;
  }
  if (!found.has_value()) {
    found.emplace();
    found->theta = outer.theta;
  } else if (config.Has("rope_theta") && found->theta != outer.theta) {
    return config.Wrong("rope_theta", "the same as in rope_parameters, or only one of the two");
  }
  return *found;
}

}  // namespace sluice
