#include "src/device/planning_device.h"

#include <sys/mman.h>

#include <array>
#include <cstdint>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"
#include "src/device/kernel_set.h"
#include "src/device/mailbox.h"
#include "src/device/worker_team.h"

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
  int64_t PreparedBytes(absl::Span<const MatrixPart> parts, int32_t k) const override {
    return real_->PreparedBytes(parts, k);
  }
  absl::StatusOr<Weight> Prepare(absl::Span<const MatrixPart> parts, int32_t k) override {
    Weight weight;
    auto storage =
        device_->Allocate(MemoryKind::kDevice, size_t(PreparedBytes(parts, k)), "weights");
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
  void Digest(Stream&, const kernels::DigestParams&) override {}
  void DigestScores(Stream&, const kernels::DigestScoresParams&) override {}
  void RefineScores(Stream&, const kernels::RefineScoresParams&) override {}
  void ExactScores(Stream&, const kernels::ExactScoresParams&) override {}
  void PartialKeys(Stream&, const kernels::PartialKeysParams&) override {}
  void PartialScores(Stream&, const kernels::PartialScoresParams&) override {}
  void KeyCentres(Stream&, const kernels::KeyCentresParams&) override {}
  void HashKeys(Stream&, const kernels::HashKeysParams&) override {}
  void HashQueries(Stream&, const kernels::HashQueriesParams&) override {}
  void HashScores(Stream&, const kernels::HashScoresParams&) override {}
  void LabelLookup(Stream&, const kernels::LabelLookupParams&) override {}
  void TopK(Stream&, const kernels::TopKParams&) override {}
  void Split(Stream&, const kernels::SplitParams&) override {}
  void RecallDue(Stream&, const kernels::RecallDueParams&) override {}
  void Recall(Stream&, const kernels::RecallParams&) override {}
  void Bring(Stream&, const kernels::BringParams&) override {}
  void Retain(Stream&, const kernels::RetainParams&) override {}
  void WriteThrough(Stream&, const kernels::WriteThroughParams&) override {}
  void SparseAttention(Stream&, const kernels::SparseAttentionParams&) override {}
  void MovingAverage(Stream&, const kernels::MovingAverageParams&) override {}
  void CopyRows(Stream&, const kernels::CopyRowsParams&) override {}
  void TakeRing(Stream&, const kernels::TakeRingParams&) override {}
  void LevelDigests(Stream&, const kernels::LevelDigestsParams&) override {}
  void AnchorStatistics(Stream&, const kernels::AnchorStatisticsParams&) override {}
  void PredictBudgets(Stream&, const kernels::PredictBudgetsParams&) override {}
  void PlanRetrieval(Stream&, const kernels::PlanRetrievalParams&) override {}
  void LevelScores(Stream&, const kernels::LevelScoresParams&) override {}
  void SelectUnion(Stream&, const kernels::SelectUnionParams&) override {}
  void SegmentLists(Stream&, const kernels::SegmentListsParams&) override {}
  void DivideLists(Stream&, const kernels::DivideListsParams&) override {}
  void PullAttention(Stream&, const kernels::PullAttentionParams&) override {}
  void MergeParts(Stream&, const kernels::MergePartsParams&) override {}
  void LatentAppend(Stream&, const kernels::LatentAppendParams&) override {}
  void IndexAppend(Stream&, const kernels::IndexAppendParams&) override {}
  void IndexQuery(Stream&, const kernels::IndexQueryParams&) override {}
  void IndexLogits(Stream&, const kernels::IndexLogitsParams&) override {}
  void MlaQuery(Stream&, const kernels::MlaQueryParams&) override {}
  void HeadLinear(Stream&, const kernels::HeadLinearParams&) override {}
  void SparseMla(Stream&, const kernels::SparseMlaParams&) override {}
  void UpdateResidency(Stream&, const kernels::UpdateResidencyParams&) override {}
  void TakeBackResidency(Stream&, const kernels::TakeBackResidencyParams&) override {}
  void Route(Stream&, const kernels::RouteParams&) override {}
  void ExpertLinear(Stream&, const kernels::ExpertLinearParams&) override {}
  void Combine(Stream&, const kernels::CombineParams&) override {}
  void PackRows(Stream&, const kernels::PackRowsParams&) override {}
  void UnpackRows(Stream&, const kernels::UnpackRowsParams&) override {}
  void AddParts(Stream&, const kernels::AddPartsParams&) override {}
  void SettleDrafts(Stream&, const kernels::SettleDraftsParams&) override {}
  void NewestLists(Stream&, const kernels::NewestListsParams&) override {}
  int32_t MaxRecallPlaces() const override { return real_->MaxRecallPlaces(); }
  int32_t MaxBringPlaces() const override { return real_->MaxBringPlaces(); }
  int64_t SparseMlaScratchBytes(int32_t decode_rows, int32_t heads, int32_t rank,
                                int64_t capacity) const override {
    return real_->SparseMlaScratchBytes(decode_rows, heads, rank, capacity);
  }

 private:
  KernelSet* const real_;
  Device* const device_;
};

class NoWorkers : public WorkerTeam {
 public:
  explicit NoWorkers(Buffer pinned) : pinned_(std::move(pinned)) {}
  void Raise(Stream&, int) override {}
  void Await(Stream&, int) override {}
  const uint32_t* open_word(int /*channel*/) const override { return nullptr; }
  const uint32_t* errors() const override { return pinned_.as<uint32_t>(); }
  bool Hold(int) override { return false; }
  void LetGo(int) override {}
  bool Owes(int) const override { return false; }
  void SetServers(int, uint64_t) override {}
  MailboxError error(int) const override { return MailboxError::kNone; }
  void Reset(int) override {}
  int64_t failures(MailboxError) const override { return 0; }
  uint64_t gone() const override { return 0; }

 private:
  const Buffer pinned_;
};

// Maps memory whose pages the system gives once they are touched.
absl::StatusOr<Buffer> MapUntouched(size_t bytes, const std::string& what) {
  void* const data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("no addresses for ", what, ": ", bytes, " bytes were asked for"));
  }
  return Buffer(data, bytes, [](void* begin, size_t size) { munmap(begin, size); });
}

class PlanningDeviceImpl : public PlanningDevice {
 public:
  explicit PlanningDeviceImpl(Device* real) : real_(real), kernels_(&real->kernels(), this) {}

  const std::string& name() const override { return real_->name(); }
  absl::StatusOr<Buffer> Allocate(MemoryKind kind, size_t bytes, const std::string& what) override {
    asked_[kind == MemoryKind::kDevice ? 0 : 1] += static_cast<int64_t>(bytes);
    if (bytes == 0) return Buffer();
    if (kind == MemoryKind::kPinned) return MapUntouched(bytes, what);
    // Nothing is at this address, which is aligned as any memory of a device.
    return Buffer(reinterpret_cast<void*>(uintptr_t{1} << 21), bytes, [](void*, size_t) {});
  }
  std::unique_ptr<Stream> NewStream(StreamKind) override { return std::make_unique<NoStream>(); }
  std::unique_ptr<Event> NewEvent() override { return std::make_unique<NoEvent>(); }
  std::unique_ptr<TimedEvent> NewTimedEvent() override { return std::make_unique<NoEvent>(); }
  KernelSet& kernels() override { return kernels_; }
  absl::StatusOr<std::unique_ptr<Mailbox>> NewMailbox(const MailboxOptions&) override {
    return absl::UnimplementedError("a planning device has no workers that answer a mailbox");
  }
  absl::StatusOr<std::unique_ptr<WorkerTeam>> NewWorkerTeam(
      const WorkerTeamOptions& options, std::function<absl::Status(int, int)>) override {
    SLUICE_RETURN_IF_ERROR(Mailbox::CheckOptions(options.mailbox));
    SLUICE_ASSIGN_OR_RETURN(
        Buffer pinned,
        Allocate(MemoryKind::kPinned, Mailbox::PinnedBytes(options.mailbox), "a mailbox"));
    return std::make_unique<NoWorkers>(std::move(pinned));
  }
  int RowBucket(int rows) const override { return real_->RowBucket(rows); }
  bool WorkersRunBesideStreams() const override { return real_->WorkersRunBesideStreams(); }
  int Processors() const override { return real_->Processors(); }
  DeviceMemory Memory() const override { return real_->Memory(); }
  HostPlacement Placement() const override { return real_->Placement(); }
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
