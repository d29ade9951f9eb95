#include "src/device/worker_team.h"

#include <utility>

#include "src/base/status_macros.h"
#include "src/device/mailbox_team.h"

namespace sluice {
namespace {

class MailboxWorkers : public WorkerTeam {
 public:
  MailboxWorkers(std::unique_ptr<Mailbox> mailbox, WorkerFn work)
      : mailbox_(std::move(mailbox)), team_(mailbox_.get(), std::move(work)) {}

  void Raise(Stream& stream, int channel) override { mailbox_->Raise(stream, channel); }
  void Await(Stream& stream, int channel) override { mailbox_->Await(stream, channel); }
  const uint32_t* errors() const override { return mailbox_->errors(); }
  bool Owes(int worker) const override { return mailbox_->Owes(worker); }
  void SetServers(int slot, uint32_t workers) override { mailbox_->SetServers(slot, workers); }
  MailboxError error(int slot) const override { return mailbox_->error(slot); }
  void Reset(int slot) override { mailbox_->Reset(slot); }
  uint32_t gone() const override { return mailbox_->gone(); }

 private:
  const std::unique_ptr<Mailbox> mailbox_;
  MailboxTeam team_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<WorkerTeam>> NewMailboxWorkers(Device& device,
                                                              const WorkerTeamOptions& options,
                                                              WorkerFn work) {
  SLUICE_ASSIGN_OR_RETURN(std::unique_ptr<Mailbox> mailbox, device.NewMailbox(options.mailbox));
  return std::make_unique<MailboxWorkers>(std::move(mailbox), std::move(work));
}

}  // namespace sluice
