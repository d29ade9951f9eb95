#include "src/service/access/access_log.h"

#include <grpcpp/server_context.h>

#include <catch2/catch.hpp>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "absl/time/clock.h"
#include "tests/support/eventually.h"

namespace sluice {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

class Folder {
 public:
  Folder() : path_(fs::temp_directory_path() / ("access-log-" + std::to_string(getpid()))) {
    fs::create_directories(path_);
  }
  ~Folder() { fs::remove_all(path_); }
  std::string File(const std::string& name) const { return path_ / name; }

 private:
  const fs::path path_;
};

std::vector<json> LinesOf(const std::string& path) {
  std::vector<json> out;
  std::ifstream in(path);
  for (std::string line; std::getline(in, line);) out.push_back(json::parse(line));
  return out;
}

CallFields Call(const std::string& id) {
  CallFields call;
  call.method = "/sluice.v1.Decode/Generate";
  call.request_id = id;
  call.begin = absl::Now();
  return call;
}

TEST_CASE("a line says what is known of a call, and stays one line") {
  CallFields call = Call("a\n\"b\x1b");
  call.peer = "ipv4:127.0.0.1:9";
  call.identity = "router";
  call.tenant = "t";
  call.trace.request_id = "x-1";
  call.trace.traceparent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
  call.transfer_id = "5f";
  call.status = "OK";
  call.reason = "MAX_TOKENS";
  call.queued = absl::Milliseconds(250);
  call.first_token = absl::Milliseconds(500);
  call.total = absl::Seconds(2);
  call.prompt_tokens = 33;
  call.cached_tokens = 32;
  call.output_tokens = 7;
  call.bytes = 4096;
  const std::string line = AccessLine(call, 3);
  CHECK(line.find('\n') == std::string::npos);
  json parsed = json::parse(line);
  CHECK(parsed.erase("time") == 1);
  CHECK(parsed == json({{"level", "info"},
                        {"message", "call"},
                        {"method", "/sluice.v1.Decode/Generate"},
                        {"peer", "ipv4:127.0.0.1:9"},
                        {"identity", "router"},
                        {"tenant", "t"},
                        {"request_id", "a\n\"b\x1b"},
                        {"x_request_id", "x-1"},
                        {"trace_id", "0af7651916cd43dd8448eb211c80319c"},
                        {"transfer_id", "5f"},
                        {"status", "OK"},
                        {"reason", "MAX_TOKENS"},
                        {"queue_seconds", 0.25},
                        {"first_token_seconds", 0.5},
                        {"total_seconds", 2.0},
                        {"prompt_tokens", 33},
                        {"cached_tokens", 32},
                        {"output_tokens", 7},
                        {"bytes", 4096},
                        {"dropped", 3}}));
}

TEST_CASE("every line is in the file once the log is gone, behind what was there") {
  const Folder folder;
  const std::string file = folder.File("log");
  std::ofstream(file) << "{}\n";
  {
    auto log = *AccessLog::Open(file);
    for (int i = 0; i < 3; ++i) log->Write(Call(std::to_string(i)));
  }
  const std::vector<json> lines = LinesOf(file);
  REQUIRE(lines.size() == 4);
  for (size_t i = 0; i < 3; ++i) CHECK(lines[i + 1]["request_id"] == std::to_string(i));
}

TEST_CASE("a renamed file keeps what it has, and its name gets a new one") {
  const Folder folder;
  const std::string file = folder.File("log"), old = folder.File("log.1");
  auto log = *AccessLog::Open(file);
  log->Write(Call("before"));
  CHECK(testing::Eventually(absl::Seconds(10), [&] { return !LinesOf(file).empty(); }));
  fs::rename(file, old);
  absl::SleepFor(AccessLog::kLookEvery);
  log->Write(Call("after"));
  CHECK(testing::Eventually(absl::Seconds(10),
                            [&] { return fs::exists(file) && !LinesOf(file).empty(); }));
  CHECK(LinesOf(file).front()["request_id"] == "after");
  CHECK(LinesOf(old).size() == 1);
}

TEST_CASE("what does not fit in the queue is dropped and counted") {
  const Folder folder;
  const std::string file = folder.File("log");
  constexpr uint64_t kCalls = 20 * AccessLog::kMaxQueued;
  uint64_t dropped = 0;
  {
    auto log = *AccessLog::Open(file);
    for (uint64_t i = 0; i < kCalls; ++i) log->Write(Call("x"));
    dropped = log->dropped();
  }
  CHECK(dropped > 0);
  CHECK(LinesOf(file).size() + dropped == kCalls);
}

TEST_CASE("a file that cannot be written drops lines, one that cannot be opened is named") {
  auto full = *AccessLog::Open("/dev/full");
  full->Write(Call("x"));
  CHECK(testing::Eventually(absl::Seconds(10), [&] { return full->dropped() == 1; }));
  const absl::Status status = AccessLog::Open("/no/such/folder/log").status();
  CHECK(absl::IsUnavailable(status));
  CHECK(std::string(status.message()).find("access_log: cannot append to /no/such/folder/log") ==
        0);
}

TEST_CASE("what a line costs its call and the thread that writes it", "[.][benchmark]") {
  const Folder folder;
  constexpr int kCalls = AccessLog::kMaxQueued - 1;
  const grpc::CallbackServerContext context;
  auto log = *AccessLog::Open(folder.File("log"));
  absl::Time begin = absl::Now();
  for (int i = 0; i < kCalls; ++i) {
    auto record = std::make_shared<CallRecord>(Call("a request's id of 32 characters"));
    KeepRecord(&context, record);
    NoteCall(context, [](CallFields& call) { call.output_tokens = 24; });
    ForgetRecord(&context);
    log->Write(record->Fields());
  }
  const absl::Duration in_call = (absl::Now() - begin) / kCalls;
  CHECK(log->dropped() == 0);
  begin = absl::Now();
  for (int i = 0; i < kCalls; ++i) CHECK(!AccessLine(Call("x"), 0).empty());
  const absl::Duration line = (absl::Now() - begin) / kCalls;
  WARN("in the call: " << absl::FormatDuration(in_call)
                       << ", its line: " << absl::FormatDuration(line));
  CHECK(in_call < absl::Milliseconds(1));
}

}  // namespace
}  // namespace sluice
