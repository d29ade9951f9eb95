#include "src/device/cpu/cpu_mailbox.h"

#include <chrono>
#include <thread>
#include <utility>

#include "src/device/cpu/host_stream.h"
#include "src/device/cpu/spin_wait.h"

namespace sluice {
namespace {

class CpuMailbox : public Mailbox {
 public:
  CpuMailbox(Buffer pinned, const MailboxOptions& options) : Mailbox(std::move(pinned), options) {}

  void Raise(Stream& stream, int channel) override {
    static_cast<HostStream&>(stream).Enqueue<Work>(
        [](const Work& work, CpuTeam*) {
          std::atomic_ref<uint32_t>(*work.word).store(kAsked, std::memory_order_release);
        },
        Work{word(channel)});
  }

  void Await(Stream& stream, int channel) override {
    static_cast<HostStream&>(stream).Enqueue<Work>(
        [](const Work& work, CpuTeam*) {
          const std::atomic_ref<uint32_t> answer(*work.word);
          const auto patience = std::chrono::steady_clock::now() + kSpin;
          while (answer.load(std::memory_order_acquire) != kAnswered) {
            CpuRelax();
            // Workers may need this very core.
            if (std::chrono::steady_clock::now() > patience) std::this_thread::yield();
          }
        },
        Work{word(channel)});
  }

 private:
  struct Work {
    uint32_t* word;
  };
};

}  // namespace

std::unique_ptr<Mailbox> NewCpuMailbox(Buffer pinned, const MailboxOptions& options) {
  return std::make_unique<CpuMailbox>(std::move(pinned), options);
}

}  // namespace sluice
