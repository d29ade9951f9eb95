// The publisher of KV events, as the settings want it.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "src/config/setting.h"
#include "src/metrics/metrics.h"
#include "src/service/events/event_publisher.h"

namespace sluice {

// Returns null if kv_events_endpoint is empty. `metrics` outlives the publisher. The error names
// the setting.
absl::StatusOr<std::unique_ptr<EventPublisher>> NewEventPublisher(const Config& config,
                                                                  const Metrics* metrics);

}  // namespace sluice
