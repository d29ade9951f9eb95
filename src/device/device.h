// The seam between the engine and the hardware. A Device gives memory, ordered streams, events and
// the operators (KernelSet). Models and policies are written once, against this interface.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "src/device/host_placement.h"

namespace sluice {

class DeviceTrace;
class KernelSet;
class Mailbox;
class RankGroup;
class WorkerTeam;
struct MailboxOptions;
struct RankGroupOptions;
struct WorkerTeamOptions;

enum class MemoryKind {
  kDevice,  // HBM; on the CPU device ordinary memory with huge pages
  kPinned,  // DRAM that the device can read and write, with huge pages
};

// Owns a piece of device or pinned memory, which begins zeroed. Move-only.
class Buffer {
 public:
  using Deleter = std::function<void(void* data, size_t bytes)>;
  Buffer() = default;
  Buffer(void* data, size_t bytes, Deleter deleter)
      : data_(data), bytes_(bytes), deleter_(std::move(deleter)) {}
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    std::swap(deleter_, other.deleter_);
    return *this;
  }
  ~Buffer() {
    if (data_ != nullptr) deleter_(data_, bytes_);
  }

  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  template <typename T>
  T* as() const {
    return static_cast<T*>(data_);
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
  Deleter deleter_;
};

// Marks a point of a stream. Any thread may ask or wait. An event may be recorded again only when
// it is ready.
class Event {
 public:
  virtual ~Event() = default;
  // Returns whether everything before the last Record is done; true if it was never recorded.
  virtual bool Ready() const = 0;
  virtual void Wait() const = 0;
};

// An event that also notes when its stream reached it, by the device's own clock, so that the time
// between two events is known without a wait. (On CUDA: an event with timing enabled.)
class TimedEvent : public Event {
 public:
  // Returns the time from `earlier` to this event. REQUIRES: both belong to one device, were
  // recorded and are ready.
  virtual absl::Duration Since(const TimedEvent& earlier) const = 0;
};

// An ordered queue of work. One thread at a time may enqueue. A call waits only where the queue is
// full.
class Stream {
 public:
  virtual ~Stream() = default;
  // Copies between any two memories of the device. Both must stay valid until the copy is done.
  virtual void Copy(void* target, const void* source, size_t bytes) = 0;
  // Copies many pieces, in no particular order. `ops` too must stay valid until the copy is done.
  struct CopyOp {
    void* target;
    const void* source;
    size_t bytes;
  };
  virtual void CopyBatch(const CopyOp* ops, size_t count) = 0;
  virtual void Fill(void* target, uint8_t value, size_t bytes) = 0;
  virtual void Record(Event& event) = 0;
  // Work that is enqueued later starts after `event`.
  virtual void WaitFor(Event& event) = 0;

  // Returns a *branch*: a queue beside this one, for work that runs while this queue goes on. The
  // same number, 0 <= number < kBranches, gives the same queue. A device without branches returns
  // this very stream. A branch's branches are its stream's. After() orders the two, one way each
  // time, also inside a recording. Whatever ends a step or a recording must come After() every
  // branch that was used in it. On a stream without branches the enqueued order is the order, so
  // code must be right both in that order and in every order that After() allows.
  static constexpr int kBranches = 5;
  virtual Stream& Branch(int /*number*/) { return *this; }
  // Work that is enqueued here later starts after all that `other` has now. `other` is a branch of
  // this stream, the stream that this is a branch of, or another branch of that.
  virtual void After(Stream& /*other*/) {}
};

// Work that was recorded once and runs as often as wanted, with the addresses and shapes of its
// recording. (On CUDA: an instantiated graph.)
class Program {
 public:
  virtual ~Program() = default;
  // Enqueues all of it. REQUIRES: a stream of the device and kind that it was recorded for.
  virtual void Run(Stream& stream) = 0;
};

class Device {
 public:
  virtual ~Device() = default;
  virtual const std::string& name() const = 0;  // "cpu"
  // Returns zeroed memory. RESOURCE_EXHAUSTED names `what` and the bytes asked for.
  virtual absl::StatusOr<Buffer> Allocate(MemoryKind kind, size_t bytes,
                                          const std::string& what) = 0;
  // Makes memory that the caller has mapped, and that outlives the result, as good as kPinned. The
  // default leaves it as it is. RESOURCE_EXHAUSTED names `what`.
  virtual absl::StatusOr<Buffer> Pin(void* data, size_t bytes, const std::string& what);
  // A compute stream runs kernels; a copy stream only copies, beside it.
  enum class StreamKind { kCompute, kCopy };
  virtual std::unique_ptr<Stream> NewStream(StreamKind kind) = 0;
  virtual std::unique_ptr<Event> NewEvent() = 0;
  virtual std::unique_ptr<TimedEvent> NewTimedEvent() = 0;
  virtual KernelSet& kernels() = 0;

  // Records what `enqueue` puts on the stream that it is given: operators, copies and fills, on its
  // branches too, but no events. None of it runs. The default keeps the closure and calls it at
  // each Run.
  virtual absl::StatusOr<std::unique_ptr<Program>> Record(Stream& stream,
                                                          std::function<void(Stream&)> enqueue);
  // Makes a mailbox between streams of this device and CPU threads (src/device/mailbox.h).
  // INVALID_ARGUMENT: options out of range; RESOURCE_EXHAUSTED: no pinned memory for its words;
  // FAILED_PRECONDITION: the driver has no memory operations of streams; UNIMPLEMENTED: the
  // device's streams and workers share one thread.
  virtual absl::StatusOr<std::unique_ptr<Mailbox>> NewMailbox(const MailboxOptions& options) = 0;
  // Makes CPU workers that streams of this device hand work to (src/device/worker_team.h); a worker
  // runs work(worker, channel). Returns the errors of NewMailbox except UNIMPLEMENTED.
  virtual absl::StatusOr<std::unique_ptr<WorkerTeam>> NewWorkerTeam(
      const WorkerTeamOptions& options,
      std::function<absl::Status(int worker, int channel)> work) = 0;
  // Joins the ranks of a group, and waits until all have come (src/device/rank_group.h). The group
  // must end before the device. Returns CheckRankGroupOptions' error; HostRanks::Join's errors;
  // UNAVAILABLE names the rank that did not come; UNIMPLEMENTED: the device computes nothing.
  virtual absl::StatusOr<std::unique_ptr<RankGroup>> JoinRanks(const RankGroupOptions& options);
  // Returns whether workers and streams of this device run at the same time. Where they do not, an
  // operator must not wait for what a worker has yet to write.
  virtual bool WorkersRunBesideStreams() const { return true; }
  // Returns how many host threads a step keeps busy, at least the one that enqueues. Workers leave
  // a cpu to each of them.
  virtual int HostThreads() const { return 1; }
  // Returns the host's memory and cpus that are near the device. Pinned memory and workers go
  // there.
  virtual HostPlacement Placement() const { return {}; }
  // Returns the number of rows that a step of `rows` decode rows is padded to, so that one Program
  // serves all steps of a bucket. 0: such a step is enqueued operator by operator, unpadded.
  virtual int RowBucket(int rows) const;

  // Traces all that runs on the streams until the result's Stop (src/device/trace.h).
  // UNIMPLEMENTED: the device keeps no trace; FAILED_PRECONDITION names what is lacking.
  virtual absl::StatusOr<std::unique_ptr<DeviceTrace>> StartTrace();

  // Returns the number of multiprocessors, of which blocks of transfers take some from those that
  // compute. 0: transfers take none.
  virtual int Processors() const { return 0; }

  // Returns the size of memory of kind kDevice and how much of it is free now. total_bytes 0:
  // device memory is the host's.
  struct DeviceMemory {
    int64_t free_bytes = 0;
    int64_t total_bytes = 0;
  };
  virtual DeviceMemory Memory() const { return {}; }

  // Returns whether the device works. Once it is not OK nothing more runs: every event is ready,
  // and results mean nothing. Any thread may call it.
  virtual absl::Status Health() const { return absl::OkStatus(); }
};

}  // namespace sluice
