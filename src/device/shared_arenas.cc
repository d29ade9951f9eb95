#include "src/device/shared_arenas.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"
#include "src/base/status_macros.h"

namespace sluice {
namespace {

std::string NameOf(const std::string& name, int rank) { return absl::StrCat("/", name, "-", rank); }

absl::Status NoArena(const std::string& name, size_t bytes, int error) {
  const std::string text =
      absl::StrCat("ranks: ", bytes, " bytes of /dev/shm", name, ": ", std::strerror(error),
                   ": the DRAM of every rank of a host lies there: give /dev/shm more room, or set "
                   "dram_bytes lower");
  return error == ENOSPC || error == ENOMEM ? absl::ResourceExhaustedError(text)
                                            : absl::InternalError(text);
}

}  // namespace

absl::StatusOr<std::unique_ptr<SharedArenas>> SharedArenas::Make(RankChannel& channel,
                                                                 const std::string& name,
                                                                 size_t bytes,
                                                                 absl::Duration timeout) {
  std::unique_ptr<SharedArenas> made(new SharedArenas(channel.rank(), channel.size(), bytes));
  SLUICE_RETURN_IF_ERROR(made->MakeOwn(NameOf(name, channel.rank())));
  absl::Status status = channel.Meet(timeout);
  for (int rank = 1; status.ok() && channel.rank() == 0 && rank < channel.size(); ++rank) {
    status = made->Map(NameOf(name, rank), rank);
  }
  if (status.ok()) status = channel.Meet(timeout);
  // Whoever has mapped it keeps it; the name would outlive a process that is killed.
  shm_unlink(NameOf(name, channel.rank()).c_str());
  if (!status.ok()) return status;
  return made;
}

SharedArenas::~SharedArenas() {
  for (uint8_t* const arena : arenas_) {
    if (arena != nullptr) munmap(arena, bytes_);
  }
}

uint8_t* SharedArenas::Of(int rank) const {
  uint8_t* const arena = arenas_.at(static_cast<size_t>(rank));
  SLUICE_CHECK(arena != nullptr, "rank 0 alone sees the others' arenas");
  return arena;
}

absl::Status SharedArenas::MakeOwn(const std::string& name) {
  shm_unlink(name.c_str());  // one that a killed process left
  const int fd = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) return NoArena(name, bytes_, errno);
  // The pages are taken now, since a write to one that /dev/shm has no room for ends a process.
  const int error = posix_fallocate(fd, 0, static_cast<off_t>(bytes_));
  close(fd);
  absl::Status status = error == 0 ? Map(name, rank_) : NoArena(name, bytes_, error);
  if (!status.ok()) shm_unlink(name.c_str());
  return status;
}

absl::Status SharedArenas::Map(const std::string& name, int rank) {
  const int fd = shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0) return NoArena(name, bytes_, errno);
  void* const memory = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  const int error = errno;
  close(fd);
  if (memory == MAP_FAILED) return NoArena(name, bytes_, error);
  // Not every kernel gives huge pages to shared memory; without them it is as right.
  (void)madvise(memory, bytes_, MADV_HUGEPAGE);
  arenas_[static_cast<size_t>(rank)] = static_cast<uint8_t*>(memory);
  return absl::OkStatus();
}

}  // namespace sluice
