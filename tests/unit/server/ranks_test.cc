// These tests say how ranks of one host divide its cpus and its memory.
#include "src/server/ranks.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "src/device/cpu_topology.h"

namespace sluice {
namespace {

// Returns two nodes of `cores` cores with two cpus each, numbered as Linux does: the second cpus of
// all cores come after the first ones.
std::vector<Cpu> Host(int cores) {
  std::vector<Cpu> cpus;
  for (int id = 0; id < 4 * cores; ++id) {
    const int core = id % (2 * cores);
    cpus.push_back({id, core / cores, core});
  }
  return cpus;
}

TEST_CASE("ranks divide a host's cpus, nodes and cores whole") {
  const std::vector<Cpu> host = Host(4);
  CHECK(CpusOfRank(host, 0, 2) == std::vector<int>{0, 1, 2, 3, 8, 9, 10, 11});
  CHECK(CpusOfRank(host, 1, 2) == std::vector<int>{4, 5, 6, 7, 12, 13, 14, 15});
  CHECK(CpusOfRank(host, 1, 4) == std::vector<int>{2, 3, 10, 11});
  for (const int ranks : {1, 2, 3, 5, 7, 8, 11, 16}) {
    std::vector<int> all;
    for (int rank = 0; rank < ranks; ++rank) {
      const std::vector<int> own = CpusOfRank(host, rank, ranks);
      CHECK(!own.empty());
      CHECK(std::is_sorted(own.begin(), own.end()));
      all.insert(all.end(), own.begin(), own.end());
    }
    std::sort(all.begin(), all.end());
    CHECK(std::adjacent_find(all.begin(), all.end()) == all.end());
    CHECK(all.size() == host.size());
  }
  CHECK(CpusOfRank(host, 0, 17).empty());
}

TEST_CASE("ranks divide the host's memory") {
  Config config;
  config.set_tensor_parallel(4);
  MemoryFound found;
  found.host.total_bytes = 4000;
  found.host.available_bytes = 2000;
  DivideMemory(config, &found);
  CHECK(found.host.total_bytes == 1000);
  CHECK(found.host.available_bytes == 500);
  CHECK(found.shared_bytes.has_value());
  config.set_tensor_parallel(1);
  config.set_expert_parallel(4);
  MemoryFound experts;
  DivideMemory(config, &experts);
  CHECK(experts.shared_bytes.has_value());
  // Ranks that meet by gRPC have no memory in common, and each has its host to itself.
  config.set_rank_transport("grpc");
  MemoryFound apart;
  apart.host.total_bytes = 4000;
  DivideMemory(config, &apart);
  CHECK(apart.host.total_bytes == 4000);
  CHECK(!apart.shared_bytes.has_value());
}

TEST_CASE("ranks share prefixes, and draft nothing where that is left to them") {
  Config config = DefaultConfig();
  config.set_model("m");
  config.set_speculation("auto");
  REQUIRE(CheckRanks(&config).ok());
  CHECK(config.prefix_cache());
  config.set_tensor_parallel(2);
  config.set_leader("localhost:7100");
  config.set_overcommit(2);
  CHECK(CheckRanks(&config).ToString() == "OK");
  CHECK(config.prefix_cache());
  CHECK(config.speculation() == "none");
}

TEST_CASE("a rank takes caches itself only where senders can reach it") {
  Config config = DefaultConfig();
  config.set_model("m");
  config.set_tensor_parallel(2);
  config.set_leader("decode-0:7900");
  config.set_rank(1);
  const auto refused = [&](const char* setting) {
    Config copy = config;
    const absl::Status status = CheckRanks(&copy);
    INFO(status);
    return absl::IsInvalidArgument(status) && status.message().find(setting) == 0;
  };
  CHECK_FALSE(refused(""));
  config.set_rank_ingest_advertise("decode-1:7000");
  CHECK(refused("rank_ingest_advertise: needs rank_ingest_listen"));
  config.set_rank_ingest_listen("127.0.0.1:7000");
  CHECK_FALSE(refused(""));
  config.set_rank_ingest_advertise("");
  CHECK(refused("rank_ingest_listen: is a loopback address"));
  config.set_rank_ingest_listen("0.0.0.0:7000");
  CHECK_FALSE(refused(""));
  CHECK(AddressOfRank(config, "0.0.0.0:7000").value() == "0.0.0.0:7000");
  config.set_leader("127.0.0.1:7900");
  CHECK(refused("rank_ingest_listen: ranks that share memory"));
  config.set_rank_transport("grpc");  // ranks of one host
  CHECK_FALSE(refused(""));
  CHECK(AddressOfRank(config, "[::1]:7000").value() == "[::1]:7001");
  CHECK(AddressOfRank(config, "127.0.0.1:0").value() == "127.0.0.1:0");
  CHECK_FALSE(AddressOfRank(config, "nothing").ok());
}

TEST_CASE("ranks of experts run full and ess, and divide nothing else") {
  Config config = DefaultConfig();
  config.set_model("m");
  config.set_expert_parallel(4);
  config.set_leader("localhost:7100");
  config.set_local_prefill("always");
  CHECK(RanksOf(config) == 4);
  for (const char* policy : {"full", "ess"}) {
    config.set_policy(policy);
    CHECK(CheckRanks(&config).ToString() == "OK");
  }
  const auto refused = [](Config other, const char* names) {
    const absl::Status status = CheckRanks(&other);
    INFO(status);
    CHECK(status.message().find("expert_parallel: 4 ranks") == 0);
    CHECK(status.message().find(names) != std::string::npos);
  };
  config.set_policy("scout");
  refused(config, "policy is scout");
  config.set_policy("full");
  for (const char* prefill : {"never", "on_failure", "always"}) {
    config.set_local_prefill(prefill);
    CHECK(CheckRanks(&config).ToString() == "OK");
  }
  config.set_kv_events_endpoint("tcp://*:5557");
  CHECK(CheckRanks(&config).ToString() == "OK");
  config.set_kv_transport("nccl");
  CHECK(CheckRanks(&config).ToString() == "OK");
  config.set_rank_transport("grpc");
  refused(config, "kv_transport to grpc");
  config.set_rank_transport("auto");
  config.set_kv_transport("grpc");
  config.set_tensor_parallel(2);
  refused(config, "tensor_parallel to 1");
}

TEST_CASE("copies of experts and their load are for ranks of experts") {
  for (const std::string name : {"expert_redundancy", "expert_load", "expert_load_out"}) {
    Config config = DefaultConfig();
    config.set_model("m");
    config.set_leader("localhost:7100");
    REQUIRE(FindSetting(name)->Parse("1", &config).ok());
    for (const uint32_t tensors : {1u, 2u}) {
      config.set_tensor_parallel(tensors);
      const absl::Status status = CheckRanks(&config);
      INFO(status);
      CHECK(absl::IsInvalidArgument(status));
      CHECK(status.message().find(absl::StrCat(name, ": it is for ranks")) == 0);
      CHECK(status.message().find("set expert_parallel") != std::string::npos);
    }
    config.set_tensor_parallel(1);
    config.set_expert_parallel(2);
    CHECK(CheckRanks(&config).ToString() == "OK");
  }
}

}  // namespace
}  // namespace sluice
