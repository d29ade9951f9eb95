// Threads that answer a mailbox.
#pragma once

#include <atomic>
#include <thread>
#include <vector>

#include "src/device/mailbox.h"
#include "src/device/worker_team.h"

namespace sluice {

class MailboxTeam {
 public:
  // One thread per worker of the mailbox, which outlives the team.
  MailboxTeam(Mailbox* mailbox, WorkerFn work);
  // The workers answer what they have taken up, and leave.
  ~MailboxTeam();
  MailboxTeam(const MailboxTeam&) = delete;
  MailboxTeam& operator=(const MailboxTeam&) = delete;

 private:
  void Loop(int worker);

  Mailbox* const mailbox_;
  const WorkerFn work_;
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

}  // namespace sluice
