// What sluice-profile measures of a model under policy ess: how many entries a sequence misses in a
// step, by layer, and how long the stages of a layer take on a device. A part of the policies'
// profile (policy_profile.h), from which ess chooses its schedules (policies/ess/schedule.h).
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "src/base/config_reader.h"

namespace sluice {

// Microseconds of work on `count` things: what it takes at all, and for each of them.
struct LinearTime {
  double fixed_us = 0;
  double each_us = 0;
  double At(double count) const { return fixed_us + each_us * count; }
};

// A layer's stages on one device, for decode rows.
struct StageRates {
  std::string device;           // "cpu", "cuda"; empty: none were measured
  LinearTime transfer;          // by entries fetched, of all rows
  LinearTime prepare;           // PreAttn: q_b, absorption, RoPE; by rows
  LinearTime attend;            // Attn0 and Attn1; by entries attended to, of all rows
  LinearTime index;             // logits and top-k; by keys, of all rows
  LinearTime update_residency;  // by rows
  double branch_us = 0;         // a fork and a join of a step's stream
  // Of the processors, those that attention leaves a transfer beside it: of the policy's options,
  // not of a profile.
  double spared_share = 0;
};

struct MissProfile {
  // Sequences in steady state, decoded together.
  struct Point {
    int64_t context = 0;  // tokens of a sequence
    double ratio = 0;     // of its places in HBM to its tokens, in (0, 1]
    int64_t batch = 0;
    std::vector<double> by_layer;  // entries that a sequence misses in a step
  };
  std::vector<Point> points;
  StageRates rates;

  bool empty() const { return points.empty() && rates.device.empty(); }
  // The point that is nearest to a load, all three counted by their quotients, batch least (what a
  // sequence misses is its own affair; only its mean over sequences depends on how many there are);
  // null where there is none.
  const Point* Nearest(int64_t context, double ratio, int64_t batch) const;
};

// Its keys in a profile's JSON, "misses" and "stages"; either may be absent.
void WriteMissProfile(const MissProfile& profile, nlohmann::json* root);
// INVALID_ARGUMENT names the file, the key, what was expected and what was found.
absl::Status ReadMissProfile(const ConfigReader& root, const std::string& path,
                             MissProfile* profile);

}  // namespace sluice
