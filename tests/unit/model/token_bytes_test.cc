#include "src/model/token_bytes.h"

#include <catch2/catch.hpp>

#include "tests/fixtures/fixtures.h"

namespace sluice {
namespace {

absl::StatusOr<TokenBytes> LoadText(const std::string& json) {
  const fixtures::TempDir dir;
  const std::string path = dir.File("tokenizer.json");
  REQUIRE(fixtures::WriteFile(path, json).ok());
  return TokenBytes::Load(path);
}

TEST_CASE("a byte-level tokenizer's characters stand for bytes") {
  // U+0120 is a space, U+010A a newline, U+00C3 U+00A9 are the two bytes of e acute, and U+0143 is
  // byte 0xAD.
  const auto tokens = LoadText(R"({
    "added_tokens": [{"id": 9, "content": "<|im_end|>", "special": true},
                     {"id": 8, "content": "a b", "special": false}],
    "model": {"type": "BPE",
              "vocab": {"Ġthe": 0, "Ċ": 1, "Ã©": 2, "merges": 3, "Ń": 4, "Ā": 5},
              "merges": ["a b", ["c", "d"]]},
    "decoder": {"type": "ByteLevel", "add_prefix_space": true}})");
  INFO(tokens.status());
  REQUIRE(tokens.ok());
  CHECK(tokens->Bytes(0) == " the");
  CHECK(tokens->Bytes(1) == "\n");
  CHECK(tokens->Bytes(2) == "\xC3\xA9");
  CHECK(tokens->Bytes(3) == "merges");
  CHECK(tokens->Bytes(4) == "\xAD");
  CHECK(tokens->Bytes(5) == std::string(1, '\0'));
  CHECK(tokens->Bytes(6).empty());
  CHECK(tokens->Bytes(8) == "a b");  // a space is not in the alphabet, so it is the text itself
  CHECK(tokens->Bytes(9) == "<|im_end|>");
  CHECK(tokens->Bytes(10).empty());
  CHECK(tokens->Bytes(-1).empty());
  CHECK(tokens->size() == 10);
}

TEST_CASE("a byte-fallback tokenizer's tokens are text, or one byte") {
  const auto tokens = LoadText(R"({
    "added_tokens": [{"id": 0, "content": "<s>", "special": true}],
    "model": {"type": "BPE", "byte_fallback": true,
              "vocab": {"<s>": 0, "<0x0A>": 1, "<0xE2>": 2, "▁the▁": 3, "<0xZZ>": 4}},
    "decoder": {"type": "Sequence", "decoders": [
      {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
      {"type": "ByteFallback"}, {"type": "Fuse"},
      {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}})");
  INFO(tokens.status());
  REQUIRE(tokens.ok());
  CHECK(tokens->Bytes(0) == "<s>");
  CHECK(tokens->Bytes(1) == "\n");
  CHECK(tokens->Bytes(2) == "\xE2");
  CHECK(tokens->Bytes(3) == " the ");
  CHECK(tokens->Bytes(4) == "<0xZZ>");
}

TEST_CASE("a unigram vocabulary is numbered by place") {
  const auto tokens = LoadText(R"({
    "model": {"type": "Unigram", "vocab": [["<unk>", 0.0], ["▁a", -1.5]]},
    "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]}})");
  REQUIRE(tokens.ok());
  CHECK(tokens->Bytes(1) == " a");
}

TEST_CASE("a tokenizer that cannot be turned into bytes is refused by name") {
  const auto fails = [](const std::string& json, const std::string& word) {
    const absl::Status status = LoadText(json).status();
    INFO(status);
    return !status.ok() && status.message().find(word) != absl::string_view::npos;
  };
  CHECK(fails(R"({"model": {"vocab": {}}, "decoder": {"type": "WordPiece"}})", "WordPiece"));
  CHECK(fails(R"({"model": {"vocab": {}}})", "decoder"));
  CHECK(fails(R"({"decoder": {"type": "ByteLevel"}})", "model.vocab"));
  CHECK(fails(R"({"decoder": {"type": "ByteLevel"}, "model": {"vocab": {"a": -1}}})", "\"a\""));
  CHECK(fails(R"({"decoder": {"type": "ByteLevel"}, "model": {"vocab": {"a": 99999999}}})", "id"));
  CHECK(fails(R"({"decoder": {"type": "ByteLevel"}, "model": {"vocab": {}}, "added_tokens": [1]})",
              "added_tokens"));
  CHECK(fails("{", "JSON"));
  CHECK(absl::IsNotFound(TokenBytes::Load("/nonexistent/tokenizer.json").status()));
}

}  // namespace
}  // namespace sluice
