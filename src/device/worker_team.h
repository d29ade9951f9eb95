// CPU workers at the side of a device's streams: a stream raises a request on a channel, every
// worker does its share of it, and the stream waits for the last answer. The words and the rules
// (channels, rounds, errors, servers) are the mailbox's, src/device/mailbox.h.
//
// Device::NewWorkerTeam makes one: threads that answer a mailbox, or, on a device that has a single
// thread, events of its virtual time.
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

// Does one worker's share of one round. If it returns an error or throws, every sequence that this
// worker serves has failed. The worker goes on, except after ABORTED: then it dies on the spot, its
// share undone.
using WorkerFn = std::function<absl::Status(int worker, int channel)>;

struct WorkerTeamOptions {
  MailboxOptions mailbox;
  // Whether each worker stays on one cpu: cpus[worker], or, if `cpus` is empty, the one that
  // PlaceWorkers (src/device/cpu_topology.h) chooses. On a host with too few cores no worker is
  // pinned.
  bool pin = true;
  std::vector<int> cpus;
};

// REQUIRES, when it is destroyed: no stream has anything of it to do.
class WorkerTeam {
 public:
  virtual ~WorkerTeam() = default;

  // The device's side, as in Mailbox.
  virtual void Raise(Stream& stream, int channel) = 0;
  virtual void Await(Stream& stream, int channel) = 0;
  // Null where workers do not run beside streams (Device::WorkersRunBesideStreams).
  virtual const uint32_t* open_word(int channel) const = 0;
  virtual const uint32_t* errors() const = 0;  // [slots] of MailboxError, in pinned memory

  // A worker's side, from within its share, as in Mailbox: the request is read, and results are
  // written, between a true Hold and LetGo.
  virtual bool Hold(int worker) = 0;
  virtual void LetGo(int worker) = 0;
  virtual bool Owes(int worker) const = 0;

  // The host's side. Any thread may call these functions.
  virtual void SetServers(int slot, uint64_t workers) = 0;
  virtual MailboxError error(int slot) const = 0;
  virtual void Reset(int slot) = 0;
  // Returns how many times a worker failed, left or was late, since the team was made.
  virtual int64_t failures(MailboxError error) const = 0;
  // Returns the workers that have left for good, as bits.
  virtual uint64_t gone() const = 0;
  // Returns the workers that are late, as in Mailbox; on a device that has a single thread none is.
  virtual uint64_t late() const { return 0; }

  WorkerTeam(const WorkerTeam&) = delete;
  WorkerTeam& operator=(const WorkerTeam&) = delete;

 protected:
  WorkerTeam() = default;
};

// Makes threads that answer a mailbox of `device`. Returns the errors of Device::NewMailbox.
absl::StatusOr<std::unique_ptr<WorkerTeam>> NewMailboxWorkers(Device& device,
                                                              const WorkerTeamOptions& options,
                                                              WorkerFn work);

}  // namespace sluice
