// Drafts by multi-token prediction: the checkpoint's next-token layer drafts on the device, behind
// the sampling of every step (src/engine/device_drafts.h), and this hands its drafts on.
#pragma once

#include <memory>

#include "src/engine/drafter.h"

namespace sluice {

// Each sequence has the drafts that came with the newest step's results. While too few of the first
// ones were right (guess_score.h) it offers none; the device goes on to make them.
std::unique_ptr<Drafter> NewMtpDrafter();

}  // namespace sluice
