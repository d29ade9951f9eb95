// Ranks that meet by gRPC. Every rank is a process of its own, since a process that has used gRPC
// cannot fork.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "src/device/rank_group.h"
#include "src/service/ranks/rank_link.h"
#include "tests/support/ranks.h"

namespace sluice::testing {

// Returns an address of this host at which nobody listens.
std::string FreeAddress();

// Returns options of `size` ranks that meet at a free address.
RankGroupOptions MeetingRanks(int size);
RankLink::Options LinkOptions(const RankGroupOptions& rank);

// Joins every rank in a process of its own, and lets it do this. Returns what was wrong with each,
// as RunRankProcesses does.
std::vector<std::string> RunLinks(const RankGroupOptions& ranks,
                                  const std::function<std::string(RankLink& link)>& body);

// Returns what is wrong with an end that names rank `rank`.
std::string NotBlamed(const absl::Status& status, int rank);

}  // namespace sluice::testing
