#include "src/device/worker_team.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/device/cpu_topology.h"
#include "src/device/mailbox_team.h"

namespace sluice {
namespace {

class MailboxWorkers : public WorkerTeam {
 public:
  MailboxWorkers(std::unique_ptr<Mailbox> mailbox, WorkerFn work, std::vector<int> cpus)
      : mailbox_(std::move(mailbox)), team_(mailbox_.get(), std::move(work), std::move(cpus)) {}

  void Raise(Stream& stream, int channel) override { mailbox_->Raise(stream, channel); }
  void Await(Stream& stream, int channel) override { mailbox_->Await(stream, channel); }
  const uint32_t* open_word(int channel) const override { return mailbox_->open_word(channel); }
  const uint32_t* errors() const override { return mailbox_->errors(); }
  bool Hold(int worker) override { return mailbox_->Hold(worker); }
  void LetGo(int worker) override { mailbox_->LetGo(worker); }
  bool Owes(int worker) const override { return mailbox_->Owes(worker); }
  void SetServers(int slot, uint64_t workers) override { mailbox_->SetServers(slot, workers); }
  MailboxError error(int slot) const override { return mailbox_->error(slot); }
  void Reset(int slot) override { mailbox_->Reset(slot); }
  int64_t failures(MailboxError error) const override { return mailbox_->failures(error); }
  uint64_t gone() const override { return mailbox_->gone(); }
  uint64_t late() const override { return mailbox_->late(); }

 private:
  const std::unique_ptr<Mailbox> mailbox_;
  MailboxTeam team_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<WorkerTeam>> NewMailboxWorkers(Device& device,
                                                              const WorkerTeamOptions& options,
                                                              WorkerFn work) {
  const int workers = options.mailbox.workers;
  std::vector<int> cpus = options.cpus;
  if (!cpus.empty() && static_cast<int>(cpus.size()) != workers) {
    return absl::InvalidArgumentError(absl::StrCat("a worker team: ", cpus.size(), " cpus for ",
                                                   workers,
                                                   " workers; give one for each, or none"));
  }
  if (!options.pin) {
    cpus.clear();
  } else if (cpus.empty()) {
    cpus = PlaceWorkers(UsableCpus(), device.HostThreads(), workers, device.Placement().node);
  }
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<Mailbox> mailbox, device.NewMailbox(options.mailbox));
  return std::make_unique<MailboxWorkers>(std::move(mailbox), std::move(work), std::move(cpus));
}

}  // namespace sluice
