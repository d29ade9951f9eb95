#include "src/service/links/link_server.h"

#include <algorithm>
#include <atomic>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/error.h"
#include "src/base/logging.h"
#include "src/base/status_macros.h"
#include "src/service/wire/worker_queue.h"

namespace sluice {
namespace {

constexpr size_t kMaxPosted = 64;  // uses of one link that wait; the other end has one at a time

}  // namespace

struct LinkServer::Link {
  explicit Link(PeerLinkOptions of) : options(std::move(of)) {}
  ~Link() {
    if (auto now = Get(); now != nullptr) now->Abort("this node gave it up");
    thread.reset();
  }

  // Only the thread sets it. Others may abort it.
  std::shared_ptr<PeerLink> Get() {
    absl::MutexLock lock(&mutex);
    return link;
  }
  void Set(std::shared_ptr<PeerLink> value) {
    {
      absl::MutexLock lock(&mutex);
      std::swap(link, value);
    }
    value.reset();  // ends the old one without the lock
  }
  void End(const absl::Status& why) {
    Set(nullptr);
    ended.store(true);
    Log(LogLevel::kWarn, "a link to another node has ended",
        {{"sends", options.sends}, {"why", why.ToString()}});
  }
  bool Post(std::function<void()> job) {
    ++posted;
    if (thread->TryPost([this, job = std::move(job)] {
          job();
          --posted;
        })) {
      return true;
    }
    --posted;
    return false;
  }

  const PeerLinkOptions options;
  absl::Mutex mutex;
  std::shared_ptr<PeerLink> link ABSL_GUARDED_BY(mutex);  // null: not made yet, or ended
  std::atomic<bool> ended = false;
  std::atomic<int> posted = 0;
  std::unique_ptr<WorkerQueue> thread = std::make_unique<WorkerQueue>("kv-link", 1, kMaxPosted);
};

LinkServer::LinkServer(Options options) : options_(std::move(options)) {}

LinkServer::~LinkServer() {
  absl::MutexLock lock(&mutex_);
  for (const auto& link : links_) {
    if (auto now = link->Get(); now != nullptr) now->Abort("this node ends");
  }
  links_.clear();
}

absl::Status LinkServer::CheckNew(const PeerLinkOptions& options) const {
  SLUICE_RETURN_IF_ERROR(CheckPeerLinkOptions(options));
  if (options.message_bytes > options_.max_link_bytes / static_cast<size_t>(options.depth)) {
    return InvalidField("message_bytes",
                        absl::StrCat("times depth: at most ", options_.max_link_bytes, ", found ",
                                     options.message_bytes, " x ", options.depth));
  }
  return options_.links->CheckId(options.id);
}

absl::Status LinkServer::Make(const PeerLinkOptions& options) {
  PeerLinkOptions own = options;
  own.sends = options_.sends;
  own.deadline = options_.deadline;
  own.join_timeout = 2 * options_.deadline;
  std::vector<std::shared_ptr<Link>> gone;  // end without the lock
  absl::MutexLock lock(&mutex_);
  const auto over = [](const std::shared_ptr<Link>& link) { return link->ended.load(); };
  for (auto it = links_.begin(); it != links_.end();) {
    if (over(*it) && (*it)->posted.load() == 0) {
      gone.push_back(std::move(*it));
      it = links_.erase(it);
    } else {
      ++it;
    }
  }
  if (links_.size() >= options_.max_links) {
    const auto idle = std::find_if(links_.rbegin(), links_.rend(),
                                   [](const auto& link) { return link->posted.load() == 0; });
    if (idle == links_.rend()) {
      return absl::ResourceExhaustedError(
          absl::StrCat("all ", options_.max_links, " links of this node are in use"));
    }
    gone.push_back(*idle);
    links_.erase(std::next(idle).base());
  }
  auto link = std::make_shared<Link>(own);
  links_.insert(links_.begin(), link);
  Link* const made = link.get();
  made->Post([made, links = options_.links.get()] {
    absl::StatusOr<std::unique_ptr<PeerLink>> joined = links->Join(made->options);
    if (!joined.ok()) return made->End(joined.status());
    made->Set(*std::move(joined));
    Log(LogLevel::kInfo, "a link to another node is made",
        {{"sends", made->options.sends}, {"transport", links->transport()}});
  });
  return absl::OkStatus();
}

absl::Status LinkServer::Post(const std::string& id, std::function<absl::Status(PeerLink&)> use,
                              std::function<void()> lost) {
  absl::MutexLock lock(&mutex_);
  const auto found = std::find_if(links_.begin(), links_.end(), [&](const auto& link) {
    return link->options.id == id && !link->ended.load();
  });
  if (found == links_.end()) return absl::NotFoundError("there is no such link here");
  std::rotate(links_.begin(), found, found + 1);
  Link* const link = links_.front().get();
  const bool posted = link->Post([link, use = std::move(use), lost = std::move(lost)] {
    const std::shared_ptr<PeerLink> now = link->Get();
    if (now == nullptr) return lost();
    const absl::Status status = use(*now);
    if (!status.ok()) link->End(status);
  });
  if (posted) return absl::OkStatus();
  return absl::ResourceExhaustedError("too many calls wait for the link");
}

}  // namespace sluice
