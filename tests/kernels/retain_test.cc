// Retain: the unit that leaves the ring moves behind it, as the reference moves it, tables and
// bytes.
#include "tests/kernels/sparse_support.h"

namespace sluice::kernels {
namespace {

constexpr int32_t kSlots = 4, kKvHeads = 2, kBlockTokens = 16, kBlocks = 40;

struct RetainCase {
  const char* name;
  bool tokens;                        // units are tokens, not blocks
  int32_t ring_blocks, place_blocks;  // place_blocks: places, the ring's included
  int32_t head_dim;
  int32_t free_of_8, none_of_8, now_of_8;  // places without a unit; not there; stamped in this step
};

const RetainCase kCases[] = {
    {"blocks, some free", false, 2, 12, 64, 2, 1, 1},
    {"blocks, none free", false, 2, 9, 32, 0, 0, 2},
    {"blocks, a ring of one", false, 1, 30, 16, 1, 0, 0},
    {"blocks, all stamped in this step", false, 2, 7, 32, 0, 1, 7},
    {"blocks, the ring alone", false, 2, 2, 32, 0, 0, 0},
    {"tokens, some free", true, 1, 20, 64, 1, 1, 1},
    {"tokens, none free", true, 1, 25, 128, 0, 0, 0},
    {"tokens, none to give", true, 1, 5, 32, 0, 8, 0},
    {"tokens, two blocks in the ring", true, 2, 7, 32, 3, 0, 2},
};

template <typename T>
struct State {
  State(const RetainCase& c, const std::vector<int32_t>& positions, uint64_t seed)
      : random(seed),
        per_block(c.tokens ? kBlockTokens : 1),
        ring(c.ring_blocks * per_block),
        count(c.place_blocks * per_block),
        cache(kSlots, c.place_blocks, kBlockTokens, kKvHeads, c.head_dim, random),
        place_of(kSlots, kBlocks * per_block, 7 * per_block, 1, kKvHeads, random),
        places(kSlots, count, 5 * per_block, 2, kKvHeads, random) {
    cache.Fill(random);
    for (int32_t slot = 0; slot < kSlots; ++slot) {
      for (int32_t head = 0; head < kKvHeads; ++head) Draw(c, positions, slot, head);
    }
  }

  void Draw(const RetainCase& c, const std::vector<int32_t>& positions, int32_t slot,
            int32_t head) {
    const int32_t unit_tokens = kBlockTokens / per_block;
    const int32_t position = positions[static_cast<size_t>(slot)];
    // Units older than the ring may have places; now and then the one that leaves it has one, too.
    const int32_t leaving = (position + 1) / unit_tokens - ring;
    std::vector<int32_t> units(static_cast<size_t>(std::max(leaving, 0)));
    std::iota(units.begin(), units.end(), 0);
    if (leaving >= 0 && random() % 4 == 0) units.push_back(leaving);
    std::shuffle(units.begin(), units.end(), random);
    for (int32_t u = 0; u < kBlocks * per_block; ++u) *place_of.Row(slot, u, head) = -1;
    for (int32_t p = ring; p < count; ++p) {
      int32_t* row = places.Row(slot, p, head);
      const auto kind = static_cast<int32_t>(random() % 8);
      const bool none = kind >= c.free_of_8 && kind < c.free_of_8 + c.none_of_8;
      row[0] = none ? kNoPlace : kind < c.free_of_8 || units.empty() ? -1 : units.back();
      row[1] = static_cast<int32_t>(random() % 8) < c.now_of_8
                   ? position
                   : static_cast<int32_t>(random() % static_cast<uint64_t>(position + 1));
      if (row[0] < 0) continue;
      *place_of.Row(slot, row[0], head) = p;
      units.pop_back();
    }
  }

  RetainParams Params(const Guarded<int32_t>& slots, const Guarded<int32_t>& positions) {
    RetainParams p{};
    p.residency = {place_of.view, places.view, ring, count};
    p.slots = slots.data();
    p.positions = positions.data();
    p.resident = cache.view;
    p.rows = static_cast<int32_t>(slots.size());
    p.unit_tokens = kBlockTokens / per_block;
    p.only_free = only_free;
    return p;
  }

  Random random;
  bool only_free = false;
  int32_t per_block, ring, count;
  TestCache<T> cache;
  TestRows<int32_t> place_of, places;
};

template <typename T>
void TestCase(const KernelTable& table, const RetainCase& c, Random& random) {
  // Rows whose next position begins a block, rows inside a block and rows of short sequences.
  std::vector<int32_t> of_slot(kSlots);
  for (int32_t& position : of_slot) {
    position = static_cast<int32_t>(random() % (kBlocks * kBlockTokens));
    if (random() % 4 != 0) position |= kBlockTokens - 1;
    if (random() % 6 == 0) position %= 3 * kBlockTokens;
  }
  const std::vector<int32_t> rows = {2, -1, 0, 3};
  std::vector<int32_t> of_row;
  for (const int32_t slot : rows) {
    of_row.push_back(slot < 0 ? kBlockTokens - 1 : of_slot[static_cast<size_t>(slot)]);
  }
  const Guarded<int32_t> slots = BufferOf(rows), positions = BufferOf(of_row);
  const uint64_t seed = random();
  State<T> got(c, of_slot, seed), want(c, of_slot, seed);
  got.only_free = want.only_free = random() % 2 == 0;
  RunThreads(table.retain, got.Params(slots, positions), 3);
  RunWorkers(Reference().retain, want.Params(slots, positions), 1);
  CHECK(got.place_of.data.Damage() + got.places.data.Damage() + got.cache.data.Damage() == "");
  CHECK(std::ranges::equal(got.place_of.data.span(), want.place_of.data.span()));
  CHECK(std::ranges::equal(got.places.data.span(), want.places.data.span()));
  CHECK(std::ranges::equal(got.cache.data.span(), want.cache.data.span()));
}

void TestRetain(const KernelTable& table, Random& random) {
  for (const RetainCase& c : kCases) {
    INFO(c.name);
    for (int i = 0; i < 8; ++i) {
      TestCase<uint16_t>(table, c, random);
      TestCase<float>(table, c, random);
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("retain moves what leaves the ring to the place that the reference gives",
                          TestRetain)

TEST_CASE("what leaves the ring is found behind it, and takes the place used longest ago") {
  Random random(7);
  const RetainCase c = {"", false, 2, 5, 8, 0, 0, 0};
  State<float> state(c, {95, 0, 0, 0}, 3);  // three places behind the ring
  // Blocks 0, 1 and 2 have them, and block 1 was selected longest ago.
  for (int32_t p = 2; p < 5; ++p) {
    state.places.Row(0, p, 0)[0] = p - 2;
    state.places.Row(0, p, 0)[1] = p == 3 ? 50 : 60;
    *state.place_of.Row(0, p - 2, 0) = p;
  }
  for (int32_t u = 3; u < 6; ++u) *state.place_of.Row(0, u, 0) = -1;
  const Guarded<int32_t> slots = BufferOf({0}), at_end = BufferOf({95}), inside = BufferOf({94});
  const KernelTable& table = *FindKernelTable("portable");
  RunWorkers(table.retain, state.Params(slots, inside), 1);
  CHECK(*state.place_of.Row(0, 1, 0) == 3);  // nothing has left the ring yet
  state.only_free = true;
  RunWorkers(table.retain, state.Params(slots, at_end), 1);
  CHECK(*state.place_of.Row(0, 1, 0) == 3);  // no place is free
  state.only_free = false;
  RunWorkers(table.retain, state.Params(slots, at_end), 1);
  CHECK(*state.place_of.Row(0, 4, 0) == 3);
  CHECK(*state.place_of.Row(0, 1, 0) == -1);
  CHECK(state.places.Row(0, 3, 0)[0] == 4);
  CHECK(state.places.Row(0, 3, 0)[1] == 95);
  // Block 4 was at place 0 of the ring.
  for (int32_t t = 0; t < kBlockTokens; ++t) {
    for (int32_t d = 0; d < 8; ++d) {
      CHECK(state.cache.Key(0, 3 * kBlockTokens + t, 0)[d] == state.cache.Key(0, t, 0)[d]);
    }
  }
  // A second call finds it there and changes nothing.
  const Guarded<int32_t> before = CopyOf(state.places.data);
  RunWorkers(table.retain, state.Params(slots, at_end), 1);
  CHECK(std::ranges::equal(before.span(), state.places.data.span()));
}

}  // namespace
}  // namespace sluice::kernels
