#include "src/model/safetensors.h"

#include <sys/stat.h>

#include <catch2/catch.hpp>
#include <cstring>

#include "src/model/checkpoint.h"
#include "tests/fixtures/fixtures.h"

namespace sluice {
namespace {

using fixtures::RawTensor;

// Returns a file with this header and that many bytes of data.
std::string FileText(const std::string& header, size_t data_bytes) {
  const uint64_t size = header.size();
  std::string out(reinterpret_cast<const char*>(&size), 8);
  return out + header + std::string(data_bytes, '\1');
}

void CheckFails(const std::string& text, const std::vector<std::string>& words) {
  const fixtures::TempDir dir;
  const std::string path = dir.File("model.safetensors");
  REQUIRE(fixtures::WriteFile(path, text).ok());
  const absl::Status status = SafetensorsFile::Open(path).status();
  const std::string message(status.message());
  INFO(message);
  CHECK(absl::IsInvalidArgument(status));
  CHECK(message.find(path) == 0);
  for (const std::string& word : words) {
    INFO("expected in it: " << word);
    CHECK(message.find(word) != std::string::npos);
  }
}

// Checks that a BF16 tensor "w" of shape [2, 2] with these offsets is refused, in a file with that
// much data.
void CheckOffsetsFail(const std::string& offsets, size_t data_bytes,
                      const std::vector<std::string>& words) {
  CheckFails(FileText(R"({"w":{"dtype":"BF16","shape":[2,2],"data_offsets":)" + offsets + "}}",
                      data_bytes),
             words);
}

TEST_CASE("what was written is read back") {
  const fixtures::TempDir dir;
  const std::string path = dir.File("a.safetensors");
  REQUIRE(fixtures::WriteSafetensors(
              path, {{"x", TensorType::kF32, {2}, std::string("\0\0\x80?\0\0\0@", 8)},
                     {"empty", TensorType::kI64, {0, 3}, ""},
                     {"y", TensorType::kU8, {3}, "abc"}})
              .ok());
  const auto file = SafetensorsFile::Open(path);
  INFO(file.status());
  REQUIRE(file.ok());
  CHECK((*file)->tensors().size() == 3);
  CHECK((*file)->Find("z") == nullptr);
  const TensorInfo* x = (*file)->Find("x");
  REQUIRE(x != nullptr);
  CHECK(x->shape == std::vector<int64_t>{2});
  float values[2];
  std::memcpy(values, (*file)->Data(*x), 8);
  CHECK(values[0] == 1.0f);
  CHECK(values[1] == 2.0f);
  CHECK((*file)->Find("empty")->elements() == 0);
  char c = 0;
  REQUIRE((*file)->Read(*(*file)->Find("y"), 2, 1, &c).ok());
  CHECK(c == 'c');
}

TEST_CASE("pages that were given up are read again when touched") {
  const fixtures::TempDir dir;
  const std::string path = dir.File("a.safetensors");
  REQUIRE(fixtures::WriteSafetensors(path,
                                     {{"x", TensorType::kU8, {1 << 20}, std::string(1 << 20, 'q')}})
              .ok());
  const auto file = SafetensorsFile::Open(path);
  REQUIRE(file.ok());
  const TensorInfo& x = *(*file)->Find("x");
  const auto all_q = [&] {
    const uint8_t* p = (*file)->Data(x);
    return std::all_of(p, p + x.bytes, [](uint8_t b) { return b == 'q'; });
  };
  (*file)->WillNeed(x);
  CHECK(all_q());
  (*file)->DontNeed(x);
  CHECK(all_q());
}

TEST_CASE("a file that is no file, or too short, is refused") {
  const fixtures::TempDir dir;
  CHECK(absl::IsNotFound(SafetensorsFile::Open(dir.File("absent")).status()));
  CHECK(absl::IsInvalidArgument(SafetensorsFile::Open(dir.path()).status()));
  CheckFails("", {"truncated", "0 bytes"});
  CheckFails("1234567", {"truncated", "7 bytes"});
}

TEST_CASE("a header that does not fit is refused") {
  CheckFails(std::string("\x10\0\0\0\0\0\0\0{}", 10), {"header", "16", "only 2"});
  CheckFails(std::string("\xFF\xFF\xFF\xFF\xFF\xFF\xFF\xFF{}", 10), {"header", "at most"});
  CheckFails(std::string("\0\0\0\x10\0\0\0\0{}", 10), {"header", "268435456", "at most"});
  CheckFails(FileText("not JSON", 4), {"header", "JSON"});
  CheckFails(FileText("", 4), {"header", "JSON"});
  CheckFails(FileText("[]", 0), {"header", "JSON object", "array"});
  CheckFails(FileText(std::string("{\"\xFF\":1}"), 0), {"header", "JSON"});
  const std::string w = R"("w":{"dtype":"U8","shape":[1],"data_offsets":[0,1]})";
  CheckFails(FileText("{" + w + "," + w + "}", 1), {"\"w\"", "twice"});
}

TEST_CASE("a tensor's entry that makes no sense is refused by the tensor's name") {
  CheckFails(FileText(R"({"w":3})", 0), {"tensor w", "number"});
  CheckFails(FileText(R"({"w":{"dtype":"BF16","shape":[1]}})", 0), {"tensor w", "data_offsets"});
  CheckFails(FileText(R"({"w":{"dtype":"F4","shape":[1],"data_offsets":[0,1]}})", 1),
             {"tensor w", "dtype", "F4"});
  CheckFails(FileText(R"({"w":{"dtype":7,"shape":[1],"data_offsets":[0,1]}})", 1), {"tensor w"});
  for (const char* shape : {"3", "[-1]", "[1.5]", "[\"a\"]", "[18446744073709551615]"}) {
    CheckFails(FileText(std::string(R"({"w":{"dtype":"U8","shape":)") + shape +
                            R"(,"data_offsets":[0,1]}})",
                        1),
               {"tensor w", "shape"});
  }
  CheckFails(FileText(R"({"w":{"dtype":"F32","shape":[4294967296,4294967296],)"
                      R"("data_offsets":[0,0]}})",
                      0),
             {"tensor w", "shape", "too large"});
}

TEST_CASE("offsets outside the file, reversed, or of another size are refused") {
  CheckOffsetsFail("[0,8]", 6, {"tensor w", "outside the file", "6 bytes", "truncated"});
  CheckOffsetsFail("[8,16]", 8, {"tensor w", "outside the file"});
  CheckOffsetsFail("[8,0]", 8, {"tensor w", "begin <= end"});
  CheckOffsetsFail("[-8,0]", 8, {"tensor w", "data_offsets"});
  CheckOffsetsFail("[0]", 8, {"tensor w", "data_offsets"});
  CheckOffsetsFail("[0,18446744073709551615]", 8, {"tensor w", "data_offsets"});
  CheckOffsetsFail("[0,6]", 6, {"tensor w", "6 bytes", "[2, 2]", "needs 8"});
  CheckOffsetsFail("[0,8]", 9, {"last 1 bytes", "no tensor"});
  CheckOffsetsFail("[1,9]", 9, {"tensor w", "no tensor"});
}

TEST_CASE("tensors that overlap are refused by both names") {
  CheckFails(FileText(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                      R"("b":{"dtype":"U8","shape":[4],"data_offsets":[3,7]}})",
                      7),
             {"a and b overlap"});
  CheckFails(FileText(R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},)"
                      R"("b":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
                      4),
             {"overlap"});
}

// A checkpoint in two shards, with this index.
absl::Status OpenShards(const std::string& index, bool second = true,
                        const std::string& second_name = "b") {
  const fixtures::TempDir dir;
  const auto write = [&](const char* file, const std::string& tensor) {
    REQUIRE(fixtures::WriteSafetensors(dir.File(file), {{tensor, TensorType::kU8, {1}, "x"}}).ok());
  };
  write("1.safetensors", "a");
  if (second) write("2.safetensors", second_name);
  REQUIRE(fixtures::WriteFile(dir.File("model.safetensors.index.json"), index).ok());
  return Checkpoint::Open(dir.path()).status();
}

TEST_CASE("shards open as one checkpoint, and a broken index is refused by what is wrong") {
  const auto fails = [](const absl::Status& status, absl::StatusCode code,
                        const std::vector<std::string>& words) {
    const std::string message(status.message());
    INFO(message);
    CHECK(status.code() == code);
    for (const std::string& word : words) CHECK(message.find(word) != std::string::npos);
  };
  const auto kInvalid = absl::StatusCode::kInvalidArgument;
  const std::string good = R"({"weight_map":{"a":"1.safetensors","b":"2.safetensors"}})";
  CHECK(OpenShards(good).ok());
  fails(OpenShards(good, false), absl::StatusCode::kNotFound, {"index.json", "2.safetensors"});
  fails(OpenShards(good, true, "c"), kInvalid, {"tensor b", "2.safetensors"});
  fails(OpenShards(good, true, "a"), kInvalid, {"tensor a", "two shards"});
  fails(OpenShards(R"({"weight_map":{"a":"2.safetensors","b":"1.safetensors"}})"), kInvalid,
        {"tensor a", "2.safetensors"});
  for (const char* path : {"../1.safetensors", "/etc/1.safetensors", "sub/1.safetensors", "..", "",
                           "1.bin", "1.safetensors\\u0000"}) {
    fails(OpenShards(std::string(R"({"weight_map":{"a":")") + path + R"("}})"), kInvalid,
          {"weight_map[\"a\"]", "same directory"});
  }
  fails(OpenShards("{"), kInvalid, {"index.json", "JSON"});
  fails(OpenShards("{}"), kInvalid, {"weight_map"});
  fails(OpenShards(R"({"weight_map":{}})"), kInvalid, {"weight_map"});
  fails(OpenShards(R"({"weight_map":{"a":1}})"), kInvalid, {"weight_map[\"a\"]"});
}

TEST_CASE("a directory without weights is refused") {
  const fixtures::TempDir dir;
  const absl::Status status = Checkpoint::Open(dir.path()).status();
  CHECK(absl::IsNotFound(status));
  CHECK(std::string(status.message()).find("no weights") != std::string::npos);
  REQUIRE(fixtures::WriteFile(dir.File("pytorch_model.bin"), "x").ok());
  CHECK(std::string(Checkpoint::Open(dir.path()).status().message()).find("converted") !=
        std::string::npos);
}

TEST_CASE("the golden outputs are whole") {
  for (const std::string& name : fixtures::TinyModels()) {
    const auto cases = fixtures::LoadGolden(name);
    INFO(cases.status());
    REQUIRE(cases.ok());
    REQUIRE(cases->size() == 3);
    for (const fixtures::GoldenCase& c : *cases) {
      CHECK(c.tokens.size() == 24);
      CHECK(c.margin.size() == 24);
      REQUIRE(c.logits.size() == 24 * 512);
      CHECK(c.k.size() == 3);
      CHECK(c.v.size() == 3);
      CHECK(c.k[0].size() % c.prompt.size() == 0);
      // Row i's best logit is tokens[i].
      for (size_t i = 0; i < c.tokens.size(); ++i) {
        const auto row = c.logits.begin() + static_cast<ptrdiff_t>(i * 512);
        CHECK(std::max_element(row, row + 512) - row == c.tokens[i]);
      }
    }
  }
}

}  // namespace
}  // namespace sluice
