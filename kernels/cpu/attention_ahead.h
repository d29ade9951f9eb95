// Asks for the keys and values of attention before they are used, line by line, spread over all the
// work on the data at hand: a core reads as fast as memory allows only if it always has requests
// under way. Internal linkage only: included where instruction flags differ.
#pragma once

#include <immintrin.h>

#include "kernels/cpu/attention_items.h"

namespace sluice::kernels::cpu {
namespace {

// The pieces of 16 tokens of a bf16 cache that one worker uses, in order: keys, then values, of a
// split; then those of the next one. Up to `kBeyond` more pieces may be read past the last, which
// is repeated. Where tokens lie scattered a piece is 16 rows of one token each; past the split's
// end its last token is repeated.
template <int64_t kBeyond>
class Ahead {
 public:
  // Makes `place` the current split, keeping what was already asked for of it, and `next` the next
  // one.
  void Advance(const PagedCache& c, const SplitPlace& place, const SplitPlace& next) {
    if (SamePlace(place, next_)) {
      const int64_t gone = next_begin_;
      for (int64_t i = gone; i < count_; ++i) pieces_[i - gone] = pieces_[i];
      count_ -= gone;
      line_ = piece_ < gone ? 0 : line_;
      piece_ = Max(piece_ - gone, 0);
    } else {
      count_ = piece_ = line_ = 0;
      Append(c, place);
    }
    // All the places of one call are of one kind.
    per_piece_ = place.Scattered() ? kPieceTokens : 1;
    piece_lines_ = c.head_dim * kPieceTokens * 2 / 64 / per_piece_;
    next_begin_ = count_;
    next_ = next;
    if (next.begin < next.end) Append(c, next);
    for (int64_t i = 0; i < kBeyond; ++i) pieces_[count_ + i] = pieces_[count_ - 1];
  }

  // Returns the addresses of piece i of the current split: one address, or those of its 16 rows.
  const uint16_t* const* piece(int64_t i) const { return pieces_ + i * per_piece_; }

  // Spreads the lines that are still to be asked for over `planned` lines of Issue, so that at the
  // end of this split kLead lines of the next one are under way. With fewer, lines come late; with
  // all of the next split (256 KiB at head_dim 128) decode took 4/3 of the time on Sapphire Rapids.
  void Plan(int64_t planned) {
    const int64_t end = Min(count_ * piece_lines_, next_begin_ * piece_lines_ + kLead);
    share_ = (Max(0, end - piece_ * piece_lines_ - line_) << 16) / planned + 1;
    owed_ = 0;
  }

  // Asks for the share of n planned lines.
  void Issue(int64_t n) {
    owed_ += n * share_;
    n = owed_ >> 16;
    owed_ &= 0xFFFF;
    while (n > 0 && piece_ < count_) {
      const char* at = reinterpret_cast<const char*>(pieces_[piece_]) + line_ * 64;
      const int64_t here = Min(n, piece_lines_ - line_);
      for (int64_t i = 0; i < here; ++i) _mm_prefetch(at + i * 64, _MM_HINT_T1);
      n -= here;
      line_ += here;
      if (line_ < piece_lines_) return;
      line_ = 0;
      ++piece_;
    }
  }

  // Goes on after piece `used` if it is behind: a piece that is being read need not be asked for.
  void SkipTo(int64_t used) {
    used *= per_piece_;
    if (piece_ >= used) return;
    piece_ = used;
    line_ = 0;
  }

 private:
  static constexpr int64_t kLead = 512;  // lines of 64 bytes asked for before their split begins
  static constexpr int64_t kSplitRows = 2 * kAttentionSplitTokens;

  // Appends the pieces, or rows, of a split.
  void Append(const PagedCache& c, const SplitPlace& place) {
    const int64_t values = int64_t{c.block_tokens} * c.head_dim;
    const auto* base = static_cast<const uint16_t*>(c.base);
    const bool scattered = place.Scattered();
    const int64_t per_entry = scattered ? 1 : kPieceTokens;
    const int64_t entries =
        CeilDiv(place.end - place.begin, kPieceTokens) * kPieceTokens / per_entry;
    const uint16_t** out = pieces_ + count_;
    for (int64_t i = 0; i < entries;) {
      const Location at = Locate(c, place, Min(place.begin + i * per_entry, place.end - 1));
      const int64_t run = scattered ? 1 : Min(at.tokens / per_entry, entries - i);
      for (int64_t j = 0; j < run; ++j, ++i) {
        out[i] = base + at.key + j * per_entry * c.head_dim;
        out[entries + i] = out[i] + values;
      }
    }
    count_ += 2 * entries;
  }

  const uint16_t* pieces_[2 * kSplitRows + kBeyond];
  int64_t count_ = 0;        // number of entries: pieces, or rows
  int64_t next_begin_ = 0;   // index of the next split's first entry
  int64_t per_piece_ = 1;    // entries of a piece
  int64_t piece_ = 0;        // first entry that is not yet asked for as a whole
  int64_t line_ = 0;         // first line of it that is not yet asked for
  int64_t piece_lines_ = 0;  // lines of an entry
  int64_t share_ = 0;        // lines to ask for, in 1/65536 of a planned one
  int64_t owed_ = 0;         // lines that are due, in the same unit
  SplitPlace next_;
};

}  // namespace
}  // namespace sluice::kernels::cpu
