// TokensByKind counts tokens for each cache kind, for places where a sequence has more of one kind
// than of another. A plain number converts to it and means the same count for every kind, which is
// what most of the code uses.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

#include "src/base/status_macros.h"

namespace sluice {

class TokensByKind {
 public:
  static constexpr size_t kMaxKinds = 4;  // in a layout

  TokensByKind(int64_t each = 0) { tokens_.fill(each); }  // NOLINT: a number is a short form
  // Kinds that the list does not reach have 0.
  TokensByKind(std::initializer_list<int64_t> tokens) {
    SLUICE_CHECK(tokens.size() <= kMaxKinds);
    tokens_.fill(0);
    std::copy(tokens.begin(), tokens.end(), tokens_.begin());
  }

  int64_t& operator[](size_t kind) { return tokens_.at(kind); }
  int64_t operator[](size_t kind) const { return tokens_.at(kind); }
  int64_t least() const { return *std::min_element(tokens_.begin(), tokens_.end()); }
  int64_t most() const { return *std::max_element(tokens_.begin(), tokens_.end()); }

  // Returns whether no kind has more than in `room`.
  bool Within(const TokensByKind& room) const {
    for (size_t kind = 0; kind < kMaxKinds; ++kind) {
      if (tokens_[kind] > room.tokens_[kind]) return false;
    }
    return true;
  }
  TokensByKind& operator+=(const TokensByKind& other) {
    for (size_t kind = 0; kind < kMaxKinds; ++kind) tokens_[kind] += other.tokens_[kind];
    return *this;
  }
  TokensByKind& operator-=(const TokensByKind& other) {
    for (size_t kind = 0; kind < kMaxKinds; ++kind) tokens_[kind] -= other.tokens_[kind];
    return *this;
  }
  friend TokensByKind operator+(TokensByKind a, const TokensByKind& b) { return a += b; }
  friend TokensByKind operator-(TokensByKind a, const TokensByKind& b) { return a -= b; }
  friend TokensByKind Least(TokensByKind a, const TokensByKind& b) {
    for (size_t kind = 0; kind < kMaxKinds; ++kind) a[kind] = std::min(a[kind], b[kind]);
    return a;
  }
  friend bool operator==(const TokensByKind& a, const TokensByKind& b) = default;

 private:
  std::array<int64_t, kMaxKinds> tokens_;
};

}  // namespace sluice
