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
  // One thread per worker of the mailbox, which outlives the team. `cpus`: where each stays; empty:
  // wherever the system puts them.
  MailboxTeam(Mailbox* mailbox, WorkerFn work, std::vector<int> cpus = {});
  // The workers answer what they have taken up, and leave.
  ~MailboxTeam();
  MailboxTeam(const MailboxTeam&) = delete;
  MailboxTeam& operator=(const MailboxTeam&) = delete;

 private:
  void Loop(int worker);

  Mailbox* const mailbox_;
  const WorkerFn work_;
  const std::vector<int> cpus_;  // [workers] or empty
  std::atomic<bool> stop_{false};
  std::vector<std::thread> threads_;
};

}  // namespace sluice
