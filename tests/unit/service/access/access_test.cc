// Says who is let in: the table of methods, the access file, and the credentials that a caller
// shows.
#include "src/service/access/access.h"

#include <google/protobuf/descriptor.h>

#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "facade/sglang_scheduler.pb.h"
#include "facade/vllm_engine.pb.h"
#include "sluice/v1/admin.pb.h"
#include "sluice/v1/decode.pb.h"
#include "sluice/v1/ingest.pb.h"
#include "sluice/v1/prefill.pb.h"
#include "sluice/v1/ranks.pb.h"
#include "sluice/v1/source.pb.h"
#include "src/service/access/access_rules.h"
#include "src/service/access/tls_files.h"

namespace sluice {
namespace {

// The SHA-256 of "secret", by sha256sum.
constexpr char kSecretHash[] = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";

TEST_CASE("every method that is served has a line in the table of roles") {
  const google::protobuf::FileDescriptor* const files[] = {
      v1::ReserveRequest::descriptor()->file(),
      v1::GenerateRequest::descriptor()->file(),
      v1::RunRequest::descriptor()->file(),
      v1::GetModelRequest::descriptor()->file(),
      v1::DescribeRequest::descriptor()->file(),
      v1::RankMessage::descriptor()->file(),
      vllm::grpc::engine::SamplingParams::descriptor()->file(),
      sglang::grpc::scheduler::SamplingParams::descriptor()->file()};
  int methods = 0;
  for (const auto* file : files) {
    REQUIRE(file->service_count() == 1);
    const auto* service = file->service(0);
    for (int i = 0; i < service->method_count(); ++i) {
      const std::string name =
          absl::StrCat("/", service->full_name(), "/", service->method(i)->name());
      INFO(name << " needs a line in src/service/access/access_rules.cc");
      const std::optional<Roles> roles = RolesOf(name);
      REQUIRE(roles.has_value());
      CHECK(!roles->empty());
      ++methods;
    }
  }
  CHECK(methods >= 39);
  CHECK(!RolesOf("/sluice.v1.Decode/Nonsense").has_value());
  CHECK(!RolesOf("").has_value());
}

TEST_CASE("a star stands for any characters and nothing else is special") {
  CHECK(MatchesPattern("cn:prefill-*", "cn:prefill-0"));
  CHECK(MatchesPattern("cn:prefill-*", "cn:prefill-"));
  CHECK(MatchesPattern("dns:*.prefill.*.svc", "dns:a.b.prefill.x.svc"));
  CHECK(MatchesPattern("cn:a*b*c", "cn:abbcbc"));
  CHECK(!MatchesPattern("cn:prefill-*", "dns:prefill-0"));
  CHECK(!MatchesPattern("cn:prefill", "cn:prefill-0"));
  CHECK(!MatchesPattern("cn:*-prefill", "cn:x-prefill-0"));
  CHECK(!MatchesPattern("cn:a.c", "cn:abc"));
  CHECK(!MatchesPattern("", "x"));
}

TEST_CASE("a wrong access file is refused by its key, and no token is quoted") {
  const auto error = [](const std::string& text) {
    const auto parsed = ParseAccessRules(text, "f");
    REQUIRE(!parsed.ok());
    return std::string(parsed.status().message());
  };
  const auto token = [&](const std::string& rest) {
    return error(absl::StrCat(R"({"tokens": [{"name": "a", )", rest, "}]}"));
  };
  CHECK(absl::StrContains(error(R"({"tenant": {}})"), "did you mean tenants"));
  CHECK(absl::StrContains(error(R"({"certificates": {}})"), "f: certificates: expected a list"));
  CHECK(absl::StrContains(error(R"({"certificates": [{"identity": "x", "roles": ["router"]}]})"),
                          "certificates[0].identity: expected cn:, dns:"));
  CHECK(absl::StrContains(error(R"({"certificates": [{"identity": "cn:x", "roles": ["king"]}]})"),
                          "certificates[0].roles: a role is one of prefill, decode"));
  CHECK(absl::StrContains(error(R"({"certificates": [{"identity": "cn:x", "roles": []}]})"),
                          "certificates[0].roles: expected a list of"));
  CHECK(absl::StrContains(token(R"("sha256": "abc", "roles": ["router"])"),
                          "tokens[0].sha256: expected 64 hex digits"));
  const std::string open = token(R"("token": "very-secret", "roles": ["router"])");
  CHECK(absl::StrContains(open, "a token itself does not belong here"));
  CHECK(!absl::StrContains(open, "very-secret"));
  CHECK(absl::StrContains(error(R"({"tenants": {"a": {"sequences": 0}}})"),
                          "tenants.a.sequences: expected a whole number above 0"));
  CHECK(absl::StrContains(error(R"({"tenants": {"a": {"dram_bytes": "much"}}})"),
                          "tenants.a.dram_bytes: expected a count of bytes"));
  CHECK(!ParseAccessRules("[]", "f").ok());
}

TEST_CASE("what a caller shows decides what it may do, and a new file counts at once") {
  std::string folder = std::filesystem::temp_directory_path() / "sluice_access_test_XXXXXX";
  REQUIRE(mkdtemp(folder.data()) != nullptr);
  const std::string path = absl::StrCat(folder, "/access.json");
  const auto write = [&](const std::string& text) { std::ofstream(path) << text; };
  write(absl::StrCat(R"({"certificates": [{"identity": "cn:p-*", "roles": ["prefill"]},
      {"identity": "dns:p.svc", "roles": ["monitor"]}, {"identity": "cn:p-9", "roles": ["operator"],
      "tenant": "t"}], "tokens": [{"name": "a", "sha256": ")",
                     kSecretHash, R"(", "roles": ["router"], "tenant": "acme"}]})"));
  auto opened = Access::Open(path, absl::ZeroDuration());
  REQUIRE(opened.ok());
  const Access& access = **opened;
  // The caller has the roles of all entries that it matches, in the first one's tenant.
  const auto both = access.Find({{"cn:p-9", "dns:p.svc"}, ""});
  REQUIRE(both.ok());
  CHECK(both->identity == "cn:p-9");
  CHECK(both->tenant.empty());
  CHECK(both->roles.ToString() == "prefill, monitor");
  const auto token = access.Find({{}, "Bearer secret"});
  REQUIRE(token.ok());
  CHECK(token->identity == "token:a");
  CHECK(token->tenant == "acme");
  CHECK(TenantFor(*token, "").value() == "acme");
  CHECK(absl::IsPermissionDenied(TenantFor(*token, "other").status()));
  CHECK(TenantFor(*both, "any").value() == "any");
  for (const char* wrong :
       {"Bearer Secret", "Basic secret", "secret", "Bearer ", "Bearer secret "}) {
    CHECK(absl::IsUnauthenticated(access.Find({{"cn:p-1"}, wrong}).status()));
  }
  CHECK(access.CheckMethod({{"cn:p-1"}, ""}, "/sluice.v1.KvIngest/Reserve").ok());
  CHECK(absl::IsPermissionDenied(access.CheckMethod({{"cn:p-1"}, ""}, "/sluice.v1.Admin/Drain")));
  CHECK(absl::IsUnauthenticated(access.CheckMethod({}, "/sluice.v1.Decode/Generate")));
  CHECK(absl::IsUnauthenticated(access.CheckMethod({}, "/no.Such/Method")));
  CHECK(absl::IsUnimplemented(access.CheckMethod({{"cn:p-1"}, ""}, "/no.Such/Method")));
  write("{");  // cannot be used: nothing changes
  CHECK(access.Find({{}, "Bearer secret"}).ok());
  write("{}  ");
  CHECK(absl::IsUnauthenticated(access.Find({{}, "Bearer secret"}).status()));
  // A call that was let in a moment ago now belongs to nobody, and not to everybody.
  const auto nobody = access.Find({{"cn:p-1"}, ""});
  CHECK(nobody->roles.empty());
  CHECK(!TenantFor(*nobody, "acme").ok());
  CHECK(TenantFor(*nobody, "").value() == "/");
  std::filesystem::remove_all(folder);
}

TEST_CASE("loopback is what other machines cannot reach") {
  for (const char* host : {"127.0.0.1", "127.9.9.9", "::1", "localhost", "LOCALHOST"}) {
    CHECK(IsLoopback(host));
  }
  for (const char* host : {"0.0.0.0", "::", "128.0.0.1", "example.com", "127.0.0.1.example.com"}) {
    CHECK(!IsLoopback(host));
  }
}

}  // namespace
}  // namespace sluice
