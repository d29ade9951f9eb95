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
  // Starts one thread per worker of the mailbox, which outlives the team. Thread i stays on
  // cpus[i]; with no cpus the system places the threads.
  MailboxTeam(Mailbox* mailbox, WorkerFn work, std::vector<int> cpus = {});
  // Lets the workers answer what they have taken up, and joins them.
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
