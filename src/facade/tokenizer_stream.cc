#include "src/facade/tokenizer_stream.h"

#include <algorithm>

#include "src/base/status_macros.h"
#include "src/service/wire/guarded.h"
#include "src/service/wire/status_mapping.h"

namespace sluice {
namespace {

using Chunk = smg::grpc::common::GetTokenizerChunk;

constexpr size_t kChunkBytes = 1 << 20;  // clients take 4 MiB by default

class Reactor final : public grpc::ServerWriteReactor<Chunk> {
 public:
  explicit Reactor(absl::StatusOr<std::shared_ptr<const TokenizerArchive>> archive) {
    if (!archive.ok()) {
      Finish(ToGrpcStatus(archive.status()));
      return;
    }
    archive_ = *std::move(archive);
    Next();
  }
  void OnWriteDone(bool ok) override {
    if (ok) {
      Next();
    } else {
      Finish(grpc::Status::CANCELLED);
    }
  }
  void OnDone() override { delete this; }

 private:
  void Next() {
    const size_t count = std::min(kChunkBytes, archive_->zip.size() - sent_);
    chunk_.set_data(archive_->zip.data() + sent_, count);
    sent_ += count;
    if (sent_ < archive_->zip.size()) {
      StartWrite(&chunk_);
      return;
    }
    chunk_.set_sha256(archive_->sha256);
    StartWriteAndFinish(&chunk_, grpc::WriteOptions(), grpc::Status::OK);
  }

  std::shared_ptr<const TokenizerArchive> archive_;
  size_t sent_ = 0;
  Chunk chunk_;
};

}  // namespace

grpc::ServerWriteReactor<Chunk>* TokenizerStreams::Stream() {
  absl::StatusOr<std::shared_ptr<const TokenizerArchive>> archive =
      absl::InternalError("nothing was read");
  const absl::Status status = Guarded("GetTokenizer", [&] {
    archive = Archive();
    return archive.status();
  });
  if (!status.ok()) archive = status;
  return new Reactor(std::move(archive));
}

absl::StatusOr<std::shared_ptr<const TokenizerArchive>> TokenizerStreams::Archive() {
  absl::MutexLock lock(&mutex_);
  if (auto archive = archive_.lock()) return archive;
  SLUICE_ASSIGN_OR_RETURN(TokenizerArchive made, MakeTokenizerArchive(directory_));
  auto archive = std::make_shared<const TokenizerArchive>(std::move(made));
  archive_ = archive;
  return archive;
}

}  // namespace sluice
