#include "src/server/planning_device.h"

#include <array>
#include <cstdint>

#include "src/device/kernel_set.h"
#include "src/device/mailbox.h"

namespace sluice {
namespace {

class NoEvent : public TimedEvent {
 public:
  bool Ready() const override { return true; }
  void Wait() const override {}
  absl::Duration Since(const TimedEvent&) const override { return absl::ZeroDuration(); }
};

class NoStream : public Stream {
 public:
  void Copy(void*, const void*, size_t) override {}
  void CopyBatch(const CopyOp*, size_t) override {}
  void Fill(void*, uint8_t, size_t) override {}
  void Record(Event&) override {}
  void WaitFor(Event&) override {}
};

class NoKernels : public KernelSet {
 public:
  NoKernels(KernelSet* real, Device* device) : real_(real), device_(device) {}

  const std::string& name() const override { return real_->name(); }
  DType activation_type() const override { return real_->activation_type(); }
  int64_t WeightBytes(int32_t n, int32_t k) const override { return real_->WeightBytes(n, k); }
  absl::StatusOr<Weight> Prepare(absl::Span<const MatrixPart> parts, int32_t k) override {
    int32_t n = 0;
    for (const MatrixPart& part : parts) n += part.rows;
    Weight weight;
    auto storage = device_->Allocate(MemoryKind::kDevice, size_t(WeightBytes(n, k)), "weights");
    if (!storage.ok()) return storage.status();
    weight.storage = *std::move(storage);
    return weight;
  }
  absl::Status Check(const ModelShape& shape) const override { return real_->Check(shape); }
  int64_t SampleScratchBytes(int32_t vocab) const override {
    return real_->SampleScratchBytes(vocab);
  }
  int64_t AttentionScratchBytes(const AttentionShape& shape) const override {
    return real_->AttentionScratchBytes(shape);
  }
  void Embedding(Stream&, const kernels::EmbeddingParams&) override {}
  void RmsNorm(Stream&, const kernels::RmsNormParams&) override {}
  void Linear(Stream&, const kernels::LinearParams&) override {}
  void RopeTable(Stream&, const kernels::RopeTableParams&) override {}
  void RopeAppend(Stream&, const kernels::RopeAppendParams&) override {}
  void Attention(Stream&, const kernels::AttentionParams&) override {}
  void Merge(Stream&, const kernels::MergeParams&) override {}
  void SiluMul(Stream&, const kernels::SiluMulParams&) override {}
  void Sample(Stream&, const kernels::SampleParams&) override {}
  void Transfer(Stream&, const kernels::TransferParams&) override {}

 private:
  KernelSet* const real_;
  Device* const device_;
};

class PlanningDeviceImpl : public PlanningDevice {
 public:
  explicit PlanningDeviceImpl(Device* real) : real_(real), kernels_(&real->kernels(), this) {}

  const std::string& name() const override { return real_->name(); }
  absl::StatusOr<Buffer> Allocate(MemoryKind kind, size_t bytes, const std::string&) override {
    asked_[kind == MemoryKind::kDevice ? 0 : 1] += static_cast<int64_t>(bytes);
    if (bytes == 0) return Buffer();
    // The address of nothing, aligned as any would be.
    return Buffer(reinterpret_cast<void*>(uintptr_t{1} << 21), bytes, [](void*, size_t) {});
  }
  std::unique_ptr<Stream> NewStream(StreamKind) override { return std::make_unique<NoStream>(); }
  std::unique_ptr<Event> NewEvent() override { return std::make_unique<NoEvent>(); }
  std::unique_ptr<TimedEvent> NewTimedEvent() override { return std::make_unique<NoEvent>(); }
  KernelSet& kernels() override { return kernels_; }
  absl::StatusOr<std::unique_ptr<Mailbox>> NewMailbox(const MailboxOptions&) override {
    return absl::UnimplementedError("a plan has nobody to answer a mailbox");
  }
  int RowBucket(int rows) const override { return real_->RowBucket(rows); }
  DeviceMemory Memory() const override { return real_->Memory(); }
  int64_t asked(MemoryKind kind) const override {
    return asked_[kind == MemoryKind::kDevice ? 0 : 1];
  }

 private:
  Device* const real_;
  NoKernels kernels_;
  std::array<int64_t, 2> asked_{};
};

}  // namespace

std::unique_ptr<PlanningDevice> NewPlanningDevice(Device* real) {
  return std::make_unique<PlanningDeviceImpl>(real);
}

}  // namespace sluice
