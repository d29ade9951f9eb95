// The common part of the streams of devices in host memory: a queue of small commands, run one
// after the other. CpuKernelSet enqueues operators on any of them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <new>
#include <type_traits>

#include "src/device/cpu/cpu_team.h"
#include "src/device/device.h"
#include "src/device/trace.h"

namespace sluice {

// The command's name in a trace; a command without a name is not traced.
struct CommandLabel {
  const char* name = nullptr;  // a string literal
  TraceSlice::Kind kind = TraceSlice::Kind::kKernel;
  size_t bytes = 0;
};

class HostStream : public Stream {
 public:
  void Copy(void* target, const void* source, size_t bytes) override;
  void CopyBatch(const CopyOp* ops, size_t count) override;
  void Fill(void* target, uint8_t value, size_t bytes) override;

  // Queues run(work, team). `work` is copied bytewise.
  template <typename Work>
  void Enqueue(void (*run)(const Work& work, CpuTeam* team), const Work& work,
               const CommandLabel& label = {}) {
    static_assert(std::is_trivially_copyable_v<Work> &&
                  sizeof(Work) + sizeof(run) <= kPayloadBytes);
    struct Packed {
      void (*run)(const Work&, CpuTeam*);
      Work work;
    };
    Command& slot = NextSlot();
    slot.label = label;
    new (slot.payload) Packed{run, work};
    slot.run = [](const std::byte* payload, CpuTeam* team) {
      const auto* packed = std::launder(reinterpret_cast<const Packed*>(payload));
      packed->run(packed->work, team);
    };
    Publish();
  }

 protected:
  static constexpr size_t kPayloadBytes = 496;  // bytes; BringParams is the largest
  struct Command {
    void (*run)(const std::byte* payload, CpuTeam* team);
    CommandLabel label;
    alignas(16) std::byte payload[kPayloadBytes];
  };
  // Return where the next command is to be written, and publish it.
  virtual Command& NextSlot() = 0;
  virtual void Publish() = 0;
};

}  // namespace sluice
