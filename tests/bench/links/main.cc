// Times caches on their way from one process to another, over a link between their devices
// (src/device/peer_link.h), beside the bare sends and receives of a group of ranks, and a whole
// pull and a whole push over that link beside those over gRPC. Messages of --message-mib are those
// of a link alone; pulls and pushes have a node's:
//
//   sluice-link-bench [--device cpu|cuda] [--tokens N] [--message-mib N] [--devices A,B]
//                     [--rounds N] [--part link|pull|push] [--ranks N]
//
// The caches are those of N tokens of Llama-3-8B in bf16: 128 KiB a token. With --devices the
// sender has GPU A and the receiver GPU B (CUDA_VISIBLE_DEVICES); where both are one, or none are
// given, two processes share a GPU, NCCL goes by sockets, and the figures say nothing but that it
// works. With --ranks the reader's DRAM is that of N ranks, which divide the heads, as on a decode
// node whose rank 0 has the link's end; the ranks' memory is all of one process here.
#include <sys/mman.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "src/base/status_macros.h"
#include "tests/bench/links/link_bench.h"
#include "tests/support/device.h"
#include "tests/support/ranks.h"

namespace sluice::bench {
namespace {

bool Parse(int argc, char** argv, Flags* flags) {
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string name = argv[i], value = argv[i + 1];
    if (name == "--device") {
      flags->device = value;
    } else if (name == "--tokens" && absl::SimpleAtoi(value, &flags->tokens)) {
      flags->tokens = std::max(flags->tokens / 32 * 32, 32);
    } else if (name == "--message-mib" && absl::SimpleAtoi(value, &flags->message_mib)) {
      flags->message_mib = std::clamp(flags->message_mib, 1, 256);
    } else if (name == "--devices") {
      flags->devices = absl::StrSplit(value, ',');
    } else if (name == "--rounds" && absl::SimpleAtoi(value, &flags->rounds)) {
      flags->rounds = std::max(flags->rounds, 1);
    } else if (name == "--part") {
      flags->part = value;
    } else if (name == "--ranks" && absl::SimpleAtoi(value, &flags->ranks)) {
      if (flags->ranks < 1 || kHeads % flags->ranks != 0) return false;
    } else {
      return false;
    }
  }
  return argc % 2 == 1 && (flags->devices.empty() || flags->devices.size() == 2);
}

// Runs the wanted parts in one of the two processes. Returns what was wrong.
std::string Run(const Flags& flags, const RankGroupOptions& options, Box* box) {
  if (!flags.devices.empty()) {
    setenv("CUDA_VISIBLE_DEVICES", flags.devices[options.rank == kSource ? 0 : 1].c_str(), 1);
  }
  const auto device = testing::TestDevice(flags.device == "cpu" ? "auto" : flags.device);
  if (!device.ok()) return std::string(device.status().message());
  Process process(&flags, options, device->get(), box);
  absl::Status status;
  const auto wants = [&](const char* part) {
    return status.ok() && (flags.part.empty() || flags.part == part);
  };
  if (wants("link")) status = TimeLink(process);
  if (wants("pull")) status = TimePulls(process);
  if (wants("push")) status = TimePushes(process);
  return status.ok() ? "" : status.ToString();
}

int Main(int argc, char** argv) {
  Flags flags;
  if (!Parse(argc, argv, &flags)) {
    std::fprintf(stderr,
                 "sluice-link-bench [--device cpu|cuda] [--tokens N] [--message-mib N] "
                 "[--devices A,B] [--rounds N] [--part link|pull|push] [--ranks 1|2|4|8]\n");
    return 2;
  }
  const bool share =
      flags.device == "cuda" && (flags.devices.empty() || flags.devices[0] == flags.devices[1]);
  std::printf(
      "%s, %d tokens of Llama-3-8B's caches (%.2f GB), messages of %d MiB on a link alone, %d "
      "rounds%s%s\n",
      flags.device.c_str(), flags.tokens,
      static_cast<double>(Layout().BytesFor(flags.tokens)) / 1e9, flags.message_mib, flags.rounds,
      flags.ranks > 1 ? absl::StrCat(", to ", flags.ranks, " ranks").c_str() : "",
      share ? "; two processes share one GPU: a rehearsal" : "");
  std::fflush(stdout);
  void* const shared =
      mmap(nullptr, sizeof(Box), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  SLUICE_CHECK(shared != MAP_FAILED);
  auto* const box = new (shared) Box{};
  const auto wrong = testing::RunRankProcesses(
      testing::RankOptions(2),
      [&](const RankGroupOptions& options) { return Run(flags, options, box); }, share);
  const std::string said = testing::Joined(wrong);
  if (!said.empty()) std::fprintf(stderr, "%s\n", said.c_str());
  return said.empty() ? 0 : 1;
}

}  // namespace
}  // namespace sluice::bench

int main(int argc, char** argv) { return sluice::bench::Main(argc, argv); }
