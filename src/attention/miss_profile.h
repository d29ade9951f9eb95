// A miss profile: what sluice-profile measures of a model under policy ess, namely how many entries
// a sequence misses in a step, by layer, and how long the stages of a layer take on a device. It is
// a part of the policies' profile (policy_profile.h), and ess chooses its schedules from it
// (policies/ess/schedule.h).
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "src/base/config_reader.h"

namespace sluice {

// Microseconds that work on `count` items takes: a fixed part, and a part per item.
struct LinearTime {
  double fixed_us = 0;
  double each_us = 0;
  double At(double count) const { return fixed_us + each_us * count; }
};

// Times of a layer's stages on one device, for decode rows.
struct StageRates {
  std::string device;           // "cpu" or "cuda"; empty: nothing was measured
  LinearTime transfer;          // per entry fetched, all rows together
  LinearTime prepare;           // PreAttn (q_b, absorption, RoPE), per row
  LinearTime attend;            // Attn0 and Attn1, per entry attended to, all rows together
  LinearTime index;             // logits and top-k, per key, all rows together
  LinearTime update_residency;  // per row
  double branch_us = 0;         // a fork and a join of a step's stream
  // Share of the processors that attention leaves to a transfer beside it. It comes from the
  // policy's options, not from a profile.
  double spared_share = 0;
};

struct MissProfile {
  // Sequences in steady state, decoded together.
  struct Point {
    int64_t context = 0;  // tokens of a sequence
    double ratio = 0;     // KV slots in HBM per token, in (0, 1]
    int64_t batch = 0;
    std::vector<double> by_layer;  // entries that a sequence misses in a step
  };
  std::vector<Point> points;
  StageRates rates;

  bool empty() const { return points.empty() && rates.device.empty(); }
  // Returns the point that is nearest to a load, or null if there is no point. The distance counts
  // all three values by their quotients, and the batch least: what a sequence misses does not
  // depend on the others, only its mean over sequences depends on how many there are.
  const Point* Nearest(int64_t context, double ratio, int64_t batch) const;
};

// Writes the keys of a profile's JSON, "misses" and "stages". Either may be absent.
void WriteMissProfile(const MissProfile& profile, nlohmann::json* root);
// Reads them. INVALID_ARGUMENT: the message names the file, the key, what was expected and what was
// found.
absl::Status ReadMissProfile(const ConfigReader& root, const std::string& path,
                             MissProfile* profile);

}  // namespace sluice
