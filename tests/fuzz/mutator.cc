#include "tests/fuzz/mutator.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace sluice::fuzz {
namespace {

constexpr const char* kNumbers[] = {"0",
                                    "-1",
                                    "1",
                                    "2147483647",
                                    "4294967295",
                                    "4294967296",
                                    "1e308",
                                    "-0.0",
                                    "1e-400",
                                    "1e999",
                                    "0.5",
                                    "9223372036854775807",
                                    "16777217",
                                    "1844674407",
                                    "18446744073709551615",
                                    "18446744073709551616",
                                    "null",
                                    "true",
                                    "[]",
                                    "{}",
                                    "\"\"",
                                    "\"x\""};
// Bytes that open, close, end or escape something in some format.
constexpr unsigned char kBytes[] = {0x00, 0x01, 0x0a, 0x12, 0x7f, 0x80, 0xc0, 0xed, 0xfe, 0xff, '"',
                                    '\\', '[',  ']',  '{',  '}',  ':',  ',',  '-',  '&',  '*',  '#',
                                    '|',  '>',  '\'', '\n', '\t', ' ',  '0',  '9',  'e',  'u'};

}  // namespace

Mutator::Mutator(uint64_t seed, std::vector<std::string> corpus)
    : random_(seed), corpus_(std::move(corpus)) {}

std::string Mutator::Next(size_t max_bytes) {
  std::string text = corpus_[Below(corpus_.size())];
  for (size_t left = 1 + Below(8); left > 0; --left) Mutate(text);
  if (text.size() > max_bytes) text.resize(max_bytes);
  return text;
}

void Mutator::Mutate(std::string& text) {
  const size_t at = Below(text.size() + 1);
  const size_t length = std::min(text.size() - at, 1 + Below(32));
  switch (Below(9)) {
    case 0:
      if (at < text.size()) text[at] = static_cast<char>(text[at] ^ (1 << Below(8)));
      break;
    case 1:
      if (at < text.size()) text[at] = static_cast<char>(kBytes[Below(std::size(kBytes))]);
      break;
    case 2:
      text.insert(at, 1, static_cast<char>(kBytes[Below(std::size(kBytes))]));
      break;
    case 3:
      text.erase(at, length);
      break;
    case 4:
      text.resize(at);
      break;
    case 5: {  // repeats a piece, now and then very often: nesting and lists
      const std::string piece = text.substr(at, length);
      for (size_t times = Below(8) == 0 ? Below(2000) : 1; times > 0; --times)
        text.insert(at, piece);
      break;
    }
    case 6: {  // inserts a piece of another input
      const std::string& other = corpus_[Below(corpus_.size())];
      text.insert(at, other.substr(Below(other.size() + 1), 1 + Below(64)));
      break;
    }
    case 7:
      text.insert(at,
                  std::string(1 + Below(300), static_cast<char>(kBytes[Below(std::size(kBytes))])));
      break;
    default:
      ReplaceNumber(text, at);
  }
}

void Mutator::ReplaceNumber(std::string& text, size_t at) {
  constexpr char kDigits[] = "0123456789";
  const size_t begin = text.find_first_of(kDigits, at);
  if (begin == std::string::npos) return;
  const size_t end = std::min(text.find_first_not_of(kDigits, begin), text.size());
  text.replace(begin, end - begin, kNumbers[Below(std::size(kNumbers))]);
}

}  // namespace sluice::fuzz
