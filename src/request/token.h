// One output token, as the engine hands it to the reader of the stream.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <utility>

#include "kernels/params.h"
#include "src/base/status_macros.h"

namespace sluice {

// The alternatives of one token as (id, natural log of its probability), best first. They are
// inside the token so that a step allocates nothing.
class TopLogprobs {
 public:
  using Entry = std::pair<int32_t, float>;
  TopLogprobs() = default;
  TopLogprobs(std::initializer_list<Entry> entries) {
    for (const Entry& entry : entries) emplace_back(entry.first, entry.second);
  }
  // REQUIRES: size() < kernels::kMaxTopLogprobs.
  void emplace_back(int32_t id, float logprob) {
    SLUICE_CHECK(size_ < entries_.size());
    entries_[size_++] = {id, logprob};
  }
  void clear() { size_ = 0; }
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  const Entry* begin() const { return entries_.data(); }
  const Entry* end() const { return entries_.data() + size_; }
  Entry& operator[](size_t i) { return entries_[i]; }
  const Entry& operator[](size_t i) const { return entries_[i]; }
  friend bool operator==(const TopLogprobs& a, const TopLogprobs& b) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end());
  }

 private:
  std::array<Entry, kernels::kMaxTopLogprobs> entries_;
  size_t size_ = 0;
};

struct OutputToken {
  int32_t id = 0;
  std::optional<float> logprob;  // natural log, from raw logits
  TopLogprobs top_logprobs;
};

}  // namespace sluice
