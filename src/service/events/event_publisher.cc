// The sockets of events and the thread that owns them.
#include "src/service/events/event_publisher.h"

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>
#include <zmq.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "src/base/logging.h"
#include "src/kv/prefix_union.h"
#include "src/metrics/metrics.h"
#include "src/service/events/event_queue.h"
#include "src/service/events/replays.h"

namespace sluice {
namespace {

// Requests and subscriptions are short; a longer message closes its sender's connection.
constexpr int64_t kMaxIncomingBytes = 4096;
// Messages of one replay client that wait to be sent.
constexpr int kReplayMessages = 100;
// How soon a replay client that was full is tried again.
constexpr std::chrono::milliseconds kRetry(20);

// As vLLM has it: such endpoints are this node's, others are of somebody who listens.
bool IsBound(const std::string& endpoint) {
  return absl::StrContains(endpoint, "*") || absl::StrContains(endpoint, "::") ||
         absl::StartsWith(endpoint, "ipc://");
}

absl::Status EndpointError(const std::string& setting, const std::string& endpoint, int error) {
  std::string remedy =
      "give one such as tcp://*:5557, ipc:///run/sluice/events or tcp://ROUTER:5557";
  if (error == EADDRINUSE) remedy = "give a free port, or end the program that has it";
  if (error == EACCES) remedy = "give a port or a file that this user may open";
  return absl::InvalidArgumentError(absl::StrCat(setting, ": ", endpoint, " cannot be used (",
                                                 zmq_strerror(error), "): ", remedy));
}

absl::Status Open(zmq::socket_t& socket, const std::string& setting, const std::string& endpoint,
                  bool bind) {
  if (!absl::StartsWith(endpoint, "tcp://") && !absl::StartsWith(endpoint, "ipc://")) {
    return EndpointError(setting, endpoint, EPROTONOSUPPORT);
  }
  try {
    if (bind) {
      socket.bind(endpoint);
    } else {
      socket.connect(endpoint);
    }
  } catch (const zmq::error_t& error) {
    return EndpointError(setting, endpoint, error.num());
  }
  return absl::OkStatus();
}

}  // namespace

// The thread and what only it uses once it runs.
class EventPublisher::Worker {
 public:
  explicit Worker(Options options)
      : options_(std::move(options)),
        wake_fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)),
        events_(context_, zmq::socket_type::pub),
        requests_(context_, zmq::socket_type::router),
        queue_(options_.max_queued, [this] { Wake(); }),
        replays_({options_.schema, options_.topic, options_.buffer_steps},
                 options_.replay_endpoint.empty() ? nullptr : &requests_) {}
  ~Worker() {
    if (thread_.joinable()) {
      ending_ = true;
      Wake();
      thread_.join();
    }
    caches_.reset();  // they wake the thread no more
    close(wake_fd_);
  }

  absl::Status OpenSockets();
  void Start(std::vector<PrefixCache*> caches, const std::string& model) {
    caches_ = std::make_unique<PrefixUnion>(std::move(caches), &queue_, model);
    thread_ = std::thread([this] { Loop(); });
  }
  std::string EndpointOf(const zmq::socket_t& socket) const {
    return socket.get(zmq::sockopt::last_endpoint);
  }
  const zmq::socket_t& events() const { return events_; }
  const zmq::socket_t& requests() const { return requests_; }

 private:
  void Wake() {
    const uint64_t one = 1;
    // It fails only where the thread was woken very often and did not look yet.
    [[maybe_unused]] const ssize_t written = write(wake_fd_, &one, sizeof(one));
  }
  void Loop();
  void Wait();
  // One round of what there is to do.
  void Work();
  // Says all that the caches have, in place of all that was said.
  void BeginAnew();
  void Publish(std::vector<KvEvent> events);

  const Options options_;
  const int wake_fd_;
  zmq::context_t context_;
  zmq::socket_t events_;
  zmq::socket_t requests_;
  EventQueue queue_;
  Replays replays_;
  std::unique_ptr<PrefixUnion> caches_;
  uint64_t sequence_ = 0;
  std::atomic<bool> ending_ = false;
  std::thread thread_;  // last
};

absl::Status EventPublisher::Worker::OpenSockets() {
  const auto stall = static_cast<int>(absl::ToInt64Milliseconds(options_.stall));
  for (zmq::socket_t* const socket : {&events_, &requests_}) {
    socket->set(zmq::sockopt::linger, static_cast<int>(absl::ToInt64Milliseconds(options_.flush)));
    socket->set(zmq::sockopt::maxmsgsize, kMaxIncomingBytes);
    socket->set(zmq::sockopt::tcp_maxrt, stall);
    socket->set(zmq::sockopt::ipv6, true);
  }
  events_.set(zmq::sockopt::sndhwm, options_.max_messages);
  requests_.set(zmq::sockopt::sndhwm, kReplayMessages);
  requests_.set(zmq::sockopt::router_mandatory, true);
  absl::Status status =
      Open(events_, "kv_events_endpoint", options_.endpoint, IsBound(options_.endpoint));
  if (status.ok() && !options_.replay_endpoint.empty()) {
    status = Open(requests_, "kv_events_replay_endpoint", options_.replay_endpoint, true);
  }
  return status;
}

void EventPublisher::Worker::Loop() {
  pthread_setname_np(pthread_self(), "kv-events");
  try {
    BeginAnew();
    while (!ending_) {
      Wait();
      Work();
    }
    Work();
  } catch (const zmq::error_t& error) {
    Log(LogLevel::kError, "KV events are published no more", {{"error", error.what()}});
  }
}

void EventPublisher::Worker::Wait() {
  std::vector<zmq::pollitem_t> items = {{nullptr, wake_fd_, ZMQ_POLLIN, 0}};
  // A full list of clients leaves further requests where they are.
  if (!options_.replay_endpoint.empty() && !replays_.busy()) {
    items.push_back({requests_.handle(), 0, ZMQ_POLLIN, 0});
  }
  try {
    zmq::poll(items, replays_.busy() ? kRetry : std::chrono::milliseconds(-1));
  } catch (const zmq::error_t& error) {
    if (error.num() != EINTR) throw;
  }
  uint64_t woken = 0;
  [[maybe_unused]] const ssize_t got = read(wake_fd_, &woken, sizeof(woken));
}

void EventPublisher::Worker::Work() {
  if (queue_.overflowed()) BeginAnew();
  Publish(queue_.Take());
  replays_.Serve();
  options_.metrics->kv_events_dropped.Add(static_cast<double>(queue_.TakeDropped()));
}

void EventPublisher::Worker::BeginAnew() {
  std::vector<KvEvent> events = {KvEvent{}};
  caches_->AnnounceAll([this] { queue_.Restart(); },
                       [&](std::optional<uint64_t> parent, absl::Span<const int32_t> tokens,
                           absl::Span<const uint64_t> hashes) {
                         events.push_back({KvEvent::Kind::kStored,
                                           {hashes.begin(), hashes.end()},
                                           parent,
                                           {tokens.begin(), tokens.end()}});
                       });
  options_.metrics->kv_events_begun_anew.Add(1);
  Publish(std::move(events));
}

void EventPublisher::Worker::Publish(std::vector<KvEvent> events) {
  const int64_t unit = caches_->unit_tokens();
  const size_t max_units =
      std::max<size_t>(options_.max_batch_tokens / static_cast<size_t>(unit), 1);
  for (const std::vector<KvEvent>& batch : CutIntoBatches(std::move(events), unit, max_units)) {
    zmq::message_t payload(EncodeBatch(absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()),
                                       batch, unit, options_.schema));
    replays_.Keep(sequence_, payload);
    // A subscriber that is full is left out: PUB sockets never wait.
    events_.send(zmq::message_t(options_.topic), zmq::send_flags::sndmore);
    events_.send(zmq::message_t(EncodeSequence(sequence_)), zmq::send_flags::sndmore);
    events_.send(std::move(payload), zmq::send_flags::none);
    ++sequence_;
    options_.metrics->kv_event_batches.Add(1);
  }
}

EventPublisher::EventPublisher(std::unique_ptr<Worker> worker) : worker_(std::move(worker)) {}

absl::StatusOr<std::unique_ptr<EventPublisher>> EventPublisher::Create(Options options) {
  auto worker = std::make_unique<Worker>(std::move(options));
  if (absl::Status status = worker->OpenSockets(); !status.ok()) return status;
  return std::unique_ptr<EventPublisher>(new EventPublisher(std::move(worker)));
}

EventPublisher::~EventPublisher() = default;

void EventPublisher::Follow(std::vector<PrefixCache*> caches, const std::string& model) {
  worker_->Start(std::move(caches), model);
}

std::string EventPublisher::endpoint() const { return worker_->EndpointOf(worker_->events()); }

std::string EventPublisher::replay_endpoint() const {
  return worker_->EndpointOf(worker_->requests());
}

}  // namespace sluice
