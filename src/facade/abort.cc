#include "src/facade/abort.h"

#include <atomic>
#include <memory>
#include <utility>

#include "src/base/error.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"
#include "src/service/wire/proto_conversion.h"

namespace sluice {

absl::Status CheckAbortName(const std::string& field, const std::string& request_id) {
  SLUICE_RETURN_IF_ERROR(CheckName(field, request_id));
  return request_id.empty() ? InvalidField(field, "is empty") : absl::OkStatus();
}

void AbortAll(Generator* generator, const std::vector<std::string>& request_ids,
              std::function<void(int)> done) {
  if (request_ids.empty()) return done(0);
  struct Pending {
    std::atomic<size_t> left;
    std::atomic<int> found{0};
    std::function<void(int)> done;
  };
  auto pending = std::make_shared<Pending>();
  pending->left = request_ids.size();
  pending->done = std::move(done);
  for (const std::string& id : request_ids) {
    generator->CancelRequest(
        id, WithReason(absl::CancelledError("aborted by Abort"), reasons::kCancelCall),
        [pending](bool found) {
          if (found) ++pending->found;
          if (--pending->left == 0) pending->done(pending->found);
        });
  }
}

}  // namespace sluice
