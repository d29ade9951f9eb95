// Threads that answer a mailbox.
#pragma once

#include <atomic>
#include <functional>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "src/device/mailbox.h"

namespace sluice {

class MailboxTeam {
 public:
  // One worker's share of one round. Not OK, or an exception: every sequence that this worker
  // serves has failed; the worker goes on.
  using Work = std::function<absl::Status(int worker, int channel)>;

  // One thread per worker of the mailbox, which outlives the team.
  MailboxTeam(Mailbox* mailbox, Work work);
  // The workers answer what they have taken up, and leave.
  ~MailboxTeam();
  MailboxTeam(const MailboxTeam&) = delete;
  MailboxTeam& operator=(const MailboxTeam&) = delete;

 private:
  void Loop(int worker);

  Mailbox* const mailbox_;
  const Work work_;
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

}  // namespace sluice
