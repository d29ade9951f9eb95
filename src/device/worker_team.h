// CPU workers at the side of a device's streams: a stream raises a request on a channel, every
// worker does its share of it, and the stream waits for the last answer. The words and the rules
// (channels, rounds, errors, servers) are the mailbox's, src/device/mailbox.h.
//
// Device::NewWorkerTeam makes one: threads that answer a mailbox, or, on a device that has a single
// thread, happenings of its virtual time.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "src/device/device.h"
#include "src/device/mailbox.h"

namespace sluice {

// One worker's share of one round. Not OK, or an exception: every sequence that this worker serves
// has failed; the worker goes on, but with ABORTED it dies on the spot, its share undone.
using WorkerFn = std::function<absl::Status(int worker, int channel)>;

struct WorkerTeamOptions {
  MailboxOptions mailbox;
  // Whether each worker stays on one cpu: cpus[worker], or, where that is empty, what PlaceWorkers
  // (src/device/cpu_topology.h) chooses. A host with too few cores pins nothing.
  bool pin = true;
  std::vector<int> cpus;
};

// REQUIRES, when it is destroyed: no stream has anything of it to do.
class WorkerTeam {
 public:
  virtual ~WorkerTeam() = default;

  // The device's side, as Mailbox has it.
  virtual void Raise(Stream& stream, int channel) = 0;
  virtual void Await(Stream& stream, int channel) = 0;
  virtual const uint32_t* errors() const = 0;  // [slots] of MailboxError, in pinned memory

  // A worker's side, from within its share, as Mailbox has it: what the round asks for is read, and
  // results are written, between a true Hold and LetGo.
  virtual bool Hold(int worker) = 0;
  virtual void LetGo(int worker) = 0;
  virtual bool Owes(int worker) const = 0;

  // The host's side, any thread.
  virtual void SetServers(int slot, uint32_t workers) = 0;
  virtual MailboxError error(int slot) const = 0;
  virtual void Reset(int slot) = 0;
  // Times that a worker failed, left or was late, since the team was made.
  virtual int64_t failures(MailboxError error) const = 0;
  // Workers that have left for good, as bits.
  virtual uint32_t gone() const = 0;

  WorkerTeam(const WorkerTeam&) = delete;
  WorkerTeam& operator=(const WorkerTeam&) = delete;

 protected:
  WorkerTeam() = default;
};

// Threads that answer a mailbox of `device`. The errors of Device::NewMailbox.
absl::StatusOr<std::unique_ptr<WorkerTeam>> NewMailboxWorkers(Device& device,
                                                              const WorkerTeamOptions& options,
                                                              WorkerFn work);

}  // namespace sluice
