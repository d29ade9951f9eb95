#include "src/device/host_ranks.h"

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "src/base/error.h"
#include "src/base/reasons.h"
#include "src/base/status_macros.h"
#include "src/device/cpu/spin_wait.h"
#include "src/device/rank_group.h"

namespace sluice {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kPage = 4096;
// A sleeper sleeps this long before it looks whether the other rank is alive.
constexpr absl::Duration kLook = absl::Milliseconds(20);
constexpr absl::Duration kJoinLook = absl::Milliseconds(5);
constexpr size_t kWhyBytes = 512;

absl::Status SystemError(const std::string& what, int error) {
  const std::string text = absl::StrCat("ranks: ", what, ": ", std::strerror(error));
  return error == ENOSPC || error == ENOMEM ? absl::ResourceExhaustedError(text)
                                            : absl::InternalError(text);
}

// This is the futex of memory that processes share, not the private one that std::atomic waits on.
void FutexWait(std::atomic<uint32_t>& word, uint32_t seen, absl::Duration timeout) {
  const timespec time = absl::ToTimespec(timeout);
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &time, nullptr, 0);
}
void FutexWake(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

bool Reached(uint32_t value, uint32_t wanted) { return static_cast<int32_t>(value - wanted) >= 0; }

// The spin is long enough for a rank that does the same work on a core of its own. The futex comes
// behind it: where ranks share cores, a sleeper that is woken runs sooner than one that yields.
constexpr std::chrono::microseconds kRankSpin{20};

bool SpinFor(const RankWord& word, uint32_t value) {
  const auto give_up = Clock::now() + kRankSpin;
  do {
    for (int i = 0; i < 64; ++i) {
      if (Reached(word.value.load(std::memory_order_acquire), value)) return true;
      CpuRelax();
    }
  } while (Clock::now() < give_up);
  return false;
}

// The lock belongs to the open file: it ends with the process, or with the last descriptor.
struct flock ByteLock(int rank) {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return lock;
}

}  // namespace

struct HostRanks::Header {
  std::atomic<uint32_t> ready;
  int32_t size;
  uint64_t bytes;
  std::atomic<uint32_t> failing;  // whoever sets it first writes the failure
  std::atomic<uint32_t> failed;   // whether the failure is written
  int32_t code;
  char why[kWhyBytes];
  RankWord joined[kMaxRanks];
  std::atomic<uint32_t> left[kMaxRanks];
  std::atomic<uint32_t> beats[kMaxRanks];  // of FindStill
  RankWord shared_there;
  uint8_t shared[kMaxSharedBytes];  // rank 0's
  RankWord parted[kMaxRanks];
};

bool HostRanks::IsFree(int fd, int rank) {
  struct flock lock = ByteLock(rank);
  return fcntl(fd, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

bool HostRanks::IsGone(int rank) const { return rank != options_.rank && IsFree(fd_, rank); }

HostRanks::HostRanks(const Options& options, int fd, Header* header)
    : options_(options), fd_(fd), header_(header), beats_(static_cast<size_t>(options.size)) {}

HostRanks::~HostRanks() {
  header_->left[options_.rank].store(1, std::memory_order_release);
  munmap(header_, (sizeof(Header) + kPage - 1) / kPage * kPage + options_.bytes);
  close(fd_);
}

uint8_t* HostRanks::data() const {
  return reinterpret_cast<uint8_t*>(header_) + (sizeof(Header) + kPage - 1) / kPage * kPage;
}

absl::StatusOr<int> HostRanks::Create(const Options& options) {
  const std::string name = "/" + options.name;
  int fd = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0 && errno == EEXIST) {
    // A leader that was killed before the others came left it, unless that leader lives.
    const int old = shm_open(name.c_str(), O_RDWR | O_CLOEXEC, 0600);
    const bool lives = old >= 0 && !IsFree(old, 0);
    if (old >= 0) close(old);
    if (lives) {
      return absl::AlreadyExistsError(absl::StrCat("ranks: another process is rank 0 of '",
                                                   options.name,
                                                   "': give this group another name"));
    }
    shm_unlink(name.c_str());
    fd = shm_open(name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  }
  if (fd < 0) return SystemError(absl::StrCat("/dev/shm/", options.name), errno);
  return fd;
}

absl::StatusOr<int> HostRanks::Open(const Options& options) {
  const int fd = shm_open(("/" + options.name).c_str(), O_RDWR | O_CLOEXEC, 0600);
  if (fd < 0 && errno == ENOENT) return -1;
  if (fd < 0) return SystemError(absl::StrCat("/dev/shm/", options.name), errno);
  struct stat found {};
  // Rank 0 takes its lock before the memory has a size.
  if (fstat(fd, &found) == 0 && found.st_size > 0 && !IsFree(fd, 0)) return fd;
  close(fd);
  return -1;
}

absl::StatusOr<std::unique_ptr<HostRanks>> HostRanks::Join(const Options& options) {
  const absl::Time give_up = absl::Now() + options.join_timeout;
  const bool leads = options.rank == 0;
  int fd = -1;
  if (leads) {
    SLUICE_ASSIGN_OR_RETURN(fd, Create(options));
  }
  while (fd < 0) {
    SLUICE_ASSIGN_OR_RETURN(fd, Open(options));
    if (fd >= 0) break;
    if (absl::Now() > give_up) {
      return RankLost(0, absl::StrCat("of '", options.name, "' did not start within ",
                                      absl::FormatDuration(options.join_timeout)));
    }
    absl::SleepFor(kJoinLook);
  }
  struct flock lock = ByteLock(options.rank);
  if (fcntl(fd, F_OFD_SETLK, &lock) != 0) {
    close(fd);
    return absl::AlreadyExistsError(
        absl::StrCat("ranks: another process is rank ", options.rank, " of '", options.name, "'"));
  }
  const size_t mapped = (sizeof(Header) + kPage - 1) / kPage * kPage + options.bytes;
  const auto fail = [&](absl::Status status) {
    close(fd);
    if (leads) shm_unlink(("/" + options.name).c_str());
    return status;
  };
  // The pages are taken now, since a write to one that /dev/shm has no room for ends a process.
  if (leads) {
    if (const int error = posix_fallocate(fd, 0, static_cast<off_t>(mapped)); error != 0) {
      return fail(SystemError(absl::StrCat(mapped, " bytes of /dev/shm"), error));
    }
  } else {
    struct stat found {};
    fstat(fd, &found);
    if (static_cast<size_t>(found.st_size) != mapped) {
      return fail(absl::InvalidArgumentError(
          absl::StrCat("ranks: rank 0 of '", options.name, "' has ", found.st_size,
                       " bytes of shared memory, and rank ", options.rank, " expects ", mapped,
                       ": start every rank with the same settings")));
    }
  }
  void* memory = mmap(nullptr, mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return fail(SystemError("mapping shared memory", errno));
  std::unique_ptr<HostRanks> ranks(new HostRanks(options, fd, static_cast<Header*>(memory)));
  Header& header = *ranks->header_;
  if (leads) {
    header.size = options.size;
    header.bytes = options.bytes;
    header.ready.store(1, std::memory_order_release);
  }
  while (header.ready.load(std::memory_order_acquire) == 0 && absl::Now() < give_up) {
    absl::SleepFor(kJoinLook);
  }
  absl::Status status;
  if (header.size != options.size) {
    status = absl::InvalidArgumentError(absl::StrCat("ranks: rank 0 of '", options.name,
                                                     "' expects ", header.size, " ranks, and rank ",
                                                     options.rank, " ", options.size));
  } else {
    Post(header.joined[options.rank], 1);
    status = ranks->AwaitAll();
  }
  if (leads) shm_unlink(("/" + options.name).c_str());
  if (!status.ok()) return status;
  return ranks;
}

absl::Status HostRanks::AwaitAll() {
  const absl::Time give_up = absl::Now() + options_.join_timeout;
  std::vector<int> missing;
  for (int rank = 0; rank < size(); ++rank) {
    RankWord& joined = header_->joined[rank];
    while (joined.value.load(std::memory_order_acquire) == 0 && absl::Now() < give_up) {
      SLUICE_RETURN_IF_ERROR(failure());
      FutexWait(joined.value, 0, kJoinLook);
    }
    if (joined.value.load(std::memory_order_acquire) == 0) missing.push_back(rank);
  }
  if (missing.empty()) return absl::OkStatus();
  return Fail(RankLost(missing[0], absl::StrCat("of '", options_.name, "' did not start within ",
                                                absl::FormatDuration(options_.join_timeout),
                                                "; missing: ", absl::StrJoin(missing, ", "))));
}

void HostRanks::Post(RankWord& word, uint32_t value) {
  // Both are sequentially consistent: a sleeper counts itself before it looks at the value.
  word.value.store(value, std::memory_order_seq_cst);
  if (word.sleepers.load(std::memory_order_seq_cst) > 0) FutexWake(word.value);
}

absl::StatusOr<bool> HostRanks::AwaitFor(RankWord& word, uint32_t value, int who,
                                         absl::Duration timeout) {
  if (Reached(word.value.load(std::memory_order_acquire), value) || SpinFor(word, value)) {
    return true;
  }
  const auto give_up = Clock::now() + absl::ToChronoNanoseconds(timeout);
  for (;;) {
    word.sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t seen = word.value.load(std::memory_order_seq_cst);
    if (!Reached(seen, value)) FutexWait(word.value, seen, std::min(kLook, timeout));
    word.sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (Reached(word.value.load(std::memory_order_acquire), value)) return true;
    SLUICE_RETURN_IF_ERROR(failure());
    // A rank that ends may have done its part before.
    if (IsGone(who) && !Reached(word.value.load(std::memory_order_acquire), value)) {
      return Fail(RankLost(who, absl::StrCat("of '", options_.name, "' has ended")));
    }
    if (Clock::now() >= give_up) return Reached(word.value.load(std::memory_order_acquire), value);
  }
}

absl::Status HostRanks::Await(RankWord& word, uint32_t value, int who, absl::Duration deadline,
                              const char* what) {
  SLUICE_ASSIGN_OR_RETURN(const bool there, AwaitFor(word, value, who, deadline));
  if (there) return absl::OkStatus();
  return Fail(
      RankLost(who, absl::StrCat("of '", options_.name, "' did not come to ", what, " number ",
                                 value, " within ", absl::FormatDuration(deadline))));
}

int HostRanks::Ended() const {
  for (int rank = 0; rank < size(); ++rank) {
    // The mark comes before the lock goes, so it is looked at after it.
    if (IsGone(rank) && header_->left[rank].load(std::memory_order_acquire) == 0) return rank;
  }
  return -1;
}

int HostRanks::Alive() const {
  int alive = 0;
  for (int rank = 0; rank < size(); ++rank) alive += IsGone(rank) ? 0 : 1;
  return failure().ok() ? alive : std::min(alive, size() - 1);
}

absl::Status HostRanks::Share(absl::Span<uint8_t> bytes, absl::Duration timeout) {
  SLUICE_CHECK(bytes.size() <= kMaxSharedBytes);
  if (rank() == 0) {
    std::memcpy(header_->shared, bytes.data(), bytes.size());
    Post(header_->shared_there, 1);
    return absl::OkStatus();
  }
  SLUICE_RETURN_IF_ERROR(Await(header_->shared_there, 1, 0, timeout, "what rank 0 shares"));
  std::memcpy(bytes.data(), header_->shared, bytes.size());
  return absl::OkStatus();
}

void HostRanks::Part(absl::Duration timeout) {
  Post(header_->parted[rank()], 1);
  for (int other = 0; other < size() && failure().ok(); ++other) {
    if (other != rank()) AwaitFor(header_->parted[other], 1, other, timeout).IgnoreError();
  }
}

absl::Status HostRanks::Look(absl::Duration still_limit) {
  const int ended = Ended();
  if (ended >= 0) {
    return Fail(RankLost(ended, absl::StrCat("of '", options_.name, "' has ended")));
  }
  const int still = FindStill(still_limit);
  if (still >= 0) {
    return Fail(RankLost(still, absl::StrCat("of '", options_.name, "' has stood still for ",
                                             absl::FormatDuration(still_limit))));
  }
  return failure();
}

int HostRanks::FindStill(absl::Duration limit) {
  const absl::Time now = absl::Now();
  const bool awake = now - last_look_ < limit / 3;
  last_look_ = now;
  header_->beats[options_.rank].fetch_add(1, std::memory_order_relaxed);
  int still = -1;
  for (int rank = 0; rank < size(); ++rank) {
    Beat& seen = beats_[static_cast<size_t>(rank)];
    const uint32_t value = header_->beats[rank].load(std::memory_order_relaxed);
    if (value != seen.value || value == 0 || !awake) {
      seen = {value, now};
    } else if (rank != options_.rank && now - seen.at > limit &&
               header_->left[rank].load(std::memory_order_acquire) == 0) {
      still = rank;
    }
  }
  return still;
}

absl::Status HostRanks::Fail(const absl::Status& why) {
  if (header_->failing.exchange(1) == 0) {
    header_->code = static_cast<int32_t>(why.code());
    const std::string text(why.message().substr(0, kWhyBytes - 1));
    std::memcpy(header_->why, text.c_str(), text.size() + 1);
    header_->failed.store(1, std::memory_order_release);
  }
  // Another rank may be writing an earlier failure, or have died over it.
  const absl::Status first = failure();
  return first.ok() ? why : first;
}

absl::Status HostRanks::failure() const {
  if (header_->failed.load(std::memory_order_acquire) == 0) return absl::OkStatus();
  return WithReason(absl::Status(static_cast<absl::StatusCode>(header_->code), header_->why),
                    reasons::kRankLost);
}

}  // namespace sluice
