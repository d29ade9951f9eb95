// Makes the publisher of KV events out of the settings.
#include "src/server/events.h"

#include <utility>

#include "src/base/logging.h"
#include "src/base/status_macros.h"

namespace sluice {

absl::StatusOr<std::unique_ptr<EventPublisher>> NewEventPublisher(const Config& config,
                                                                  const Metrics* metrics) {
  if (config.kv_events_endpoint().empty()) {
    if (config.kv_events_replay_endpoint().empty()) return nullptr;
    return absl::InvalidArgumentError(
        "kv_events_replay_endpoint: nothing is published that could be sent again: give "
        "kv_events_endpoint too");
  }
  if (!config.prefix_cache()) {
    return absl::InvalidArgumentError(
        "kv_events_endpoint: without a prefix cache there are no events: set prefix_cache to true, "
        "or leave the endpoint out");
  }
  EventPublisher::Options options;
  options.endpoint = config.kv_events_endpoint();
  options.replay_endpoint = config.kv_events_replay_endpoint();
  options.topic = config.kv_events_topic();
  options.schema =
      config.kv_events_schema() == "arrays" ? EventSchema::kArrays : EventSchema::kMaps;
  options.buffer_steps = config.kv_events_buffer_steps();
  options.metrics = metrics;
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<EventPublisher> publisher,
                          EventPublisher::Create(std::move(options)));
  Log(LogLevel::kInfo, "KV events are published, with the tokens of all tenants",
      {{"kv_events_endpoint", publisher->endpoint()},
       {"kv_events_replay_endpoint", publisher->replay_endpoint()},
       {"kv_events_schema", config.kv_events_schema()}});
  return publisher;
}

}  // namespace sluice
