#include "src/request/request_trace.h"

#include <catch2/catch.hpp>

#include "absl/strings/str_cat.h"

namespace sluice {
namespace {

const std::string kTraceId = "0af7651916cd43dd8448eb211c80319c";
const std::string kParent = "b7ad6b7169203331";

std::string Header(const std::string& version, const std::string& trace, const std::string& parent,
                   const std::string& rest) {
  return absl::StrCat(version, "-", trace, "-", parent, "-", rest);
}

TEST_CASE("a traceparent that W3C allows is taken, and its trace id read") {
  CHECK(IsTraceparent(Header("00", kTraceId, kParent, "01")));
  CHECK(IsTraceparent(Header("00", kTraceId, kParent, "ff")));  // flags that are not known yet
  CHECK(IsTraceparent(Header("01", kTraceId, kParent, "00")));
  CHECK(IsTraceparent(Header("cc", kTraceId, kParent, "00-what-comes")));
  RequestTrace trace;
  CHECK(trace.trace_id().empty());
  trace.traceparent = Header("00", kTraceId, kParent, "01");
  CHECK(trace.trace_id() == kTraceId);
}

TEST_CASE("a traceparent that W3C does not allow is refused") {
  const std::string upper = "0AF7651916CD43DD8448EB211C80319C";
  for (const std::string& header : {
           std::string(),
           std::string("00"),
           std::string(55, '0'),
           std::string(55, '-'),
           Header("ff", kTraceId, kParent, "01"),       // forbidden version
           Header("00", kTraceId, kParent, "01-more"),  // version 00 ends there
           Header("00", kTraceId, kParent, "01."),      //
           Header("cc", kTraceId, kParent, "00.more"),  // no dash
           Header("00", std::string(32, '0'), kParent, "01"),
           Header("00", kTraceId, std::string(16, '0'), "01"),
           Header("00", upper, kParent, "01"),
           Header("00", kTraceId, kParent, "0G"),
           Header("00", kTraceId, kParent, "0"),
           Header("00", kTraceId.substr(1), kParent, "001"),
           Header("00", kTraceId.substr(1) + "é", kParent, "01"),
           " " + Header("00", kTraceId, kParent, "01"),
           Header("0x", kTraceId, kParent, "01"),
       }) {
    INFO(header);
    CHECK_FALSE(IsTraceparent(header));
  }
}

TEST_CASE("a tracestate is a list of distinct keys with values") {
  CHECK(IsTracestate("congo=t61rcWkgMzE"));
  CHECK(IsTracestate("rojo=00f067aa0ba902b7, congo=t61,, 1tenant@vendor=a b"));
  std::string many;
  for (int i = 0; i < 32; ++i) absl::StrAppend(&many, i == 0 ? "" : ",", "k", i, "=v");
  CHECK(IsTracestate(many));
  CHECK_FALSE(IsTracestate(many + ",one=more"));
  for (const std::string header : {"", ",", "congo", "congo=", "=x", "Congo=x", "a=1,a=2",
                                   "a@b@c=1", "a@=1", "a=b=c", "a=\x01", "-a=1"}) {
    INFO(header);
    CHECK_FALSE(IsTracestate(header));
  }
  CHECK(IsTracestate("a=" + std::string(256, 'x')));
  CHECK_FALSE(IsTracestate("a=" + std::string(257, 'x')));
  CHECK_FALSE(IsTracestate("a=" + std::string(256, 'x') + ",b=" + std::string(256, 'x')));
}

TEST_CASE("a router's id is short and printable") {
  CHECK(IsExternalId("chatcmpl-0199"));
  CHECK(IsExternalId(std::string(kMaxExternalIdBytes, 'x')));
  CHECK_FALSE(IsExternalId(std::string(kMaxExternalIdBytes + 1, 'x')));
  CHECK_FALSE(IsExternalId(""));
  CHECK_FALSE(IsExternalId("a b"));
  CHECK_FALSE(IsExternalId("a\n"));
  CHECK_FALSE(IsExternalId("\xC3\xA9"));
}

}  // namespace
}  // namespace sluice
