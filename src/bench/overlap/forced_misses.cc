#include "src/bench/overlap/forced_misses.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace sluice::bench {
namespace {

// Returns a number that is coprime to top_k and near its golden section, so that consecutive turns
// lie far apart.
int64_t TurnOf(int top_k) {
  auto turn = std::max<int64_t>(1, static_cast<int64_t>(0.618 * top_k));
  while (std::gcd<int64_t>(turn, top_k) != 1) ++turn;
  return turn;
}

}  // namespace

std::vector<int32_t> ForcedMisses::ListAt(int64_t phase, int top_k, int64_t stride) {
  const int64_t turn = TurnOf(top_k);
  std::vector<int32_t> list;
  for (int64_t i = 0; i < top_k; ++i) {
    list.push_back(static_cast<int32_t>(i * stride + (phase + i * turn % top_k) / top_k % stride));
  }
  return list;
}

absl::StatusOr<std::unique_ptr<ForcedMisses>> ForcedMisses::Create(const Options& o) {
  SLUICE_CHECK(o.rows > 0 && o.top_k > 0 && !o.misses.empty());
  const int64_t stride = o.tokens / o.top_k;
  const int64_t moved = std::accumulate(o.misses.begin() + 1, o.misses.end(), int64_t{0});
  const int64_t others = std::max<int64_t>(stride - 1, 0) * o.top_k;
  // Either no position comes back, or the pool has seen at least as many others since as it has
  // slots.
  if (stride < 1 || (moved > others && others < o.places)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--misses: ", moved, " misses of a sequence need more than ", o.tokens,
                     " tokens outside of its pool of ", o.places,
                     " slots: use longer contexts, a lower ratio or fewer steps"));
  }
  for (const int32_t misses : o.misses) {
    if (misses >= 0 && misses <= o.top_k) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "--misses: expected 0 to ", o.top_k, " (the tokens that a row selects), found ", misses));
  }
  const auto list_bytes = static_cast<size_t>(o.top_k) * sizeof(int32_t);
  const size_t bytes = o.misses.size() * list_bytes;
  SLUICE_ASSIGN_OR_RETURN(Buffer staged,
                          o.device->Allocate(MemoryKind::kPinned, bytes, "forced selections"));
  SLUICE_ASSIGN_OR_RETURN(Buffer lists,
                          o.device->Allocate(MemoryKind::kDevice, bytes, "forced selections"));
  SLUICE_ASSIGN_OR_RETURN(
      Buffer current,
      o.device->Allocate(MemoryKind::kDevice, static_cast<size_t>(o.rows) * list_bytes,
                         "forced selections"));
  int64_t phase = 0;
  for (size_t step = 0; step < o.misses.size(); ++step) {
    if (step > 0) phase += o.misses[step];
    const std::vector<int32_t> list = ListAt(phase, o.top_k, stride);
    std::memcpy(staged.as<uint8_t>() + step * list_bytes, list.data(), list_bytes);
  }
  const std::unique_ptr<Stream> stream = o.device->NewStream(Device::StreamKind::kCopy);
  const std::unique_ptr<Event> done = o.device->NewEvent();
  stream->Copy(lists.data(), staged.data(), bytes);
  stream->Record(*done);
  done->Wait();
  SLUICE_RETURN_IF_ERROR(o.device->Health());
  return std::unique_ptr<ForcedMisses>(new ForcedMisses(o, std::move(lists), std::move(current)));
}

SelectionObserver ForcedMisses::Observer() {
  return [this](Stream& stream, int, const kernels::UnitLists& selected, int32_t first_row,
                int32_t rows) {
    SLUICE_CHECK(selected.capacity == options_.top_k && first_row + rows <= options_.rows);
    const int64_t at = int64_t{first_row} * options_.top_k;
    stream.Copy(selected.units + at, current_.as<int32_t>() + at,
                static_cast<size_t>(rows) * static_cast<size_t>(options_.top_k) * sizeof(int32_t));
  };
}

void ForcedMisses::BeginStep(Stream& stream, absl::Span<const int64_t> steps) {
  SLUICE_CHECK(static_cast<int>(steps.size()) <= options_.rows);
  const auto last = static_cast<int64_t>(options_.misses.size()) - 1;
  std::vector<Stream::CopyOp>& copies = copies_[next_];
  next_ = (next_ + 1) % kSteps;
  copies.clear();
  for (size_t row = 0; row < steps.size(); ++row) {
    const int64_t step = std::clamp<int64_t>(steps[row], 0, last);
    copies.push_back({current_.as<int32_t>() + static_cast<int64_t>(row) * options_.top_k,
                      lists_.as<int32_t>() + step * options_.top_k,
                      static_cast<size_t>(options_.top_k) * sizeof(int32_t)});
  }
  stream.CopyBatch(copies.data(), copies.size());
}

}  // namespace sluice::bench
