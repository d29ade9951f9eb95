#include "tests/unit/service/ranks/rank_link_support.h"

#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

#include <catch2/catch.hpp>
#include <random>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "src/base/error.h"

namespace sluice::testing {

std::string FreeAddress() {
  // The system gives ports above 32767 to connections, so that another test might take one of those
  // before its owner listens.
  std::random_device seed;
  std::uniform_int_distribution<int> ports(10'000, 32'000);
  for (int tries = 0; tries < 100; ++tries) {
    const int port = ports(seed);
    const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    at.sin_port = htons(static_cast<uint16_t>(port));
    const bool is_free = bind(fd, reinterpret_cast<sockaddr*>(&at), sizeof(at)) == 0;
    close(fd);
    if (is_free) return absl::StrCat("127.0.0.1:", port);
  }
  FAIL("no port is free");
  return "";
}

RankLink::Options LinkOptions(const RankGroupOptions& rank) {
  RankLink::Options options;
  options.leader = rank.name;
  options.rank = rank.rank;
  options.size = rank.size;
  options.version = "test";
  options.join_timeout = rank.join_timeout;
  options.deadline = absl::Seconds(5);
  options.still_limit = rank.still_limit;
  return options;
}

RankGroupOptions MeetingRanks(int size) {
  RankGroupOptions options = RankOptions(size);
  options.name = FreeAddress();
  return options;
}

std::vector<std::string> RunLinks(const RankGroupOptions& ranks,
                                  const std::function<std::string(RankLink& link)>& body) {
  return RunRankProcesses(ranks, [&](const RankGroupOptions& own) {
    const auto link = RankLink::Join(LinkOptions(own));
    return link.ok() ? body(**link) : "no link: " + link.status().ToString();
  });
}

std::string NotBlamed(const absl::Status& status, int rank) {
  const bool named = absl::StrContains(status.message(), absl::StrCat("rank ", rank, " "));
  return absl::IsUnavailable(status) && ReasonOf(status) == "RANK_LOST" && named
             ? ""
             : "ended with " + status.ToString();
}

}  // namespace sluice::testing
