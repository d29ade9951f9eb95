// GetTokenizer of every dialect. Thread-safe.
#pragma once

#include <grpcpp/support/server_callback.h>

#include <memory>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/synchronization/mutex.h"
#include "facade/smg_common.pb.h"
#include "src/facade/tokenizer_archive.h"

namespace sluice {

class TokenizerStreams {
 public:
  explicit TokenizerStreams(std::string directory) : directory_(std::move(directory)) {}
  // Answers one call with the archive, or with the error of MakeTokenizerArchive. The reactor
  // deletes itself.
  grpc::ServerWriteReactor<smg::grpc::common::GetTokenizerChunk>* Stream();

 private:
  absl::StatusOr<std::shared_ptr<const TokenizerArchive>> Archive();

  const std::string directory_;
  absl::Mutex mutex_;
  // Made for the first of several calls that overlap, and gone with the last.
  std::weak_ptr<const TokenizerArchive> archive_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace sluice
