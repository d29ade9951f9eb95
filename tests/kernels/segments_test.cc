// SegmentLists and DivideLists. Their results are integers, the same on every path.
#include "tests/kernels/sparse_support.h"

namespace sluice::kernels {
namespace {

constexpr int32_t kSlots = 5, kKvHeads = 3;

// The residency of sequences whose units outside the ring have a place in the order of a shuffle.
struct Places {
  Places(int32_t unit_tokens, int32_t max_tokens, uint64_t seed)
      : random(seed),
        units(max_tokens / unit_tokens + 1),
        ring((kFluxionLocalTokens + kFluxionLargestBlock) / unit_tokens),
        place_of(kSlots, units, 7, 1, kKvHeads, random),
        places(kSlots, ring + units, 5, 2, kKvHeads, random) {
    for (int32_t slot = 0; slot < kSlots; ++slot) {
      for (int32_t head = 0; head < kKvHeads; ++head) Fill(slot, head);
    }
  }
  void Fill(int32_t slot, int32_t head) {
    std::vector<int32_t> order(static_cast<size_t>(units));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    for (int32_t unit = 0; unit < units; ++unit) {
      const int32_t place = ring + order[static_cast<size_t>(unit)];
      *place_of.Row(slot, unit, head) = place;
      places.Row(slot, place, head)[0] = unit;
      places.Row(slot, place, head)[1] = 7;
    }
  }
  ResidencyTable table() { return {place_of.view, places.view, ring, ring + units}; }

  Random random;
  int32_t units, ring;
  TestRows<int32_t> place_of, places;
};

struct Segments {
  Segments(int32_t rows, int32_t unit_tokens)
      : sink(int64_t{rows} * kKvHeads, kFluxionSinkTokens / unit_tokens),
        local(int64_t{rows} * kKvHeads, (kFluxionLocalTokens + kFluxionLargestBlock) / unit_tokens),
        sink_places(sink.units.size()),
        local_places(local.units.size()) {}

  TestLists sink, local;
  Guarded<int32_t> sink_places, local_places;
};

SegmentListsParams ParamsOf(Places& world, Segments& out, const Guarded<int32_t>& slots,
                            const Guarded<int32_t>& positions, int32_t unit_tokens) {
  SegmentListsParams p{};
  p.residency = world.table();
  p.slots = slots.data();
  p.positions = positions.data();
  p.sink = out.sink.view;
  p.local = out.local.view;
  p.sink_places = out.sink_places.data();
  p.local_places = out.local_places.data();
  p.rows = static_cast<int32_t>(slots.size());
  p.kv_heads = kKvHeads;
  p.unit_tokens = unit_tokens;
  return p;
}

void TestByHand(const KernelTable& table, Random&) {
  Places world(16, 1024, 1);
  Segments out(3, 16);
  const Guarded<int32_t> slots = BufferOf({0, -1, 2}), positions = BufferOf({40, 3, 500});
  RunWorkers(table.segment_lists, ParamsOf(world, out, slots, positions, 16), 1);
  CHECK(out.sink.List(0) == std::vector<int32_t>{0, 1, 2});
  CHECK(out.local.List(0).empty());
  CHECK(out.sink.List(kKvHeads).empty());
  CHECK(out.local.List(kKvHeads).empty());
  // There are 501 tokens: 64 are the sink's, and 373 from 128 on are local.
  CHECK(out.sink.List(2 * kKvHeads) == std::vector<int32_t>{0, 1, 2, 3});
  const std::vector<int32_t> local = out.local.List(2 * kKvHeads);
  CHECK(local.front() == 8);
  CHECK(local.back() == 31);
  CHECK(out.local_places[2 * kKvHeads * out.local.view.capacity] == 8 % world.ring);
}
SLUICE_TEST_ON_EVERY_PATH("the segments of a row are its sink and its local tokens", TestByHand)

void TestSegments(const KernelTable& table, Random& random) {
  constexpr int32_t kRows = 6, kMaxTokens = 2048;
  for (const int32_t unit_tokens : {16, 32, 64}) {
    const uint64_t seed = random();
    std::vector<int32_t> order = {0, 1, 2, 3, 4, -1};
    std::shuffle(order.begin(), order.end(), random);
    const Guarded<int32_t> slots = BufferOf(order);
    Guarded<int32_t> positions(kRows);
    for (int32_t r = 0; r < kRows; ++r) {
      positions[r] = static_cast<int32_t>(random() % (r % 2 == 0 ? 600u : kMaxTokens));
    }
    Places want_world(unit_tokens, kMaxTokens, seed);
    Segments want(kRows, unit_tokens);
    RunWorkers(Reference().segment_lists, ParamsOf(want_world, want, slots, positions, unit_tokens),
               1);
    for (const int workers : {1, 3}) {
      Places world(unit_tokens, kMaxTokens, seed);
      Segments got(kRows, unit_tokens);
      RunWorkers(table.segment_lists, ParamsOf(world, got, slots, positions, unit_tokens), workers);
      CHECK(std::ranges::equal(got.sink.units.span(), want.sink.units.span()));
      CHECK(std::ranges::equal(got.sink.counts.span(), want.sink.counts.span()));
      CHECK(std::ranges::equal(got.local.units.span(), want.local.units.span()));
      CHECK(std::ranges::equal(got.local.counts.span(), want.local.counts.span()));
      CHECK(std::ranges::equal(got.sink_places.span(), want.sink_places.span()));
      CHECK(std::ranges::equal(got.local_places.span(), want.local_places.span()));
      CHECK(std::ranges::equal(world.places.data.span(), want_world.places.data.span()));
      CHECK(got.sink.Damage() + got.local.Damage() + got.sink_places.Damage() +
                got.local_places.Damage() + world.places.data.Damage() ==
            "");
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("lists of segments, their places and stamps are the reference's",
                          TestSegments)

void TestDivision(const KernelTable& table, Random& random) {
  constexpr int32_t kRows = 4, kCapacity = 700;
  constexpr int64_t kLists = int64_t{kRows} * kKvHeads;
  const Guarded<int32_t> slots = BufferOf({3, 0, -1, 4});
  constexpr float kByList = -1;  // each list has a share of its own
  Guarded<float> shares(int64_t{kSlots} * kKvHeads);
  for (float& share : shares) {
    const float some[] = {0, 1, 0.3f, static_cast<float>(random() % 1000) / 1000};
    share = some[random() % std::size(some)];
  }
  for (const float share : {0.0f, 0.3f, 0.875f, 1.0f, kByList}) {
    TestLists from(kLists, kCapacity);
    for (int64_t list = 0; list < kLists; ++list) {
      if (slots[list / kKvHeads] < 0) continue;  // not to be read
      std::vector<int32_t> units(list % 4 == 0 ? list : random() % (kCapacity + 1));
      for (size_t i = 0; i < units.size(); ++i) {
        units[i] = static_cast<int32_t>(3 * i + random() % 3);
      }
      from.Put(list, units);
    }
    for (const int workers : {1, 3}) {
      TestLists first(kLists, kCapacity), rest(kLists, kCapacity);
      Guarded<SparseCounters> counters(kSlots);
      for (SparseCounters& counter : counters) counter = {};
      DivideListsParams p{};
      p.from = from.view;
      p.first = first.view;
      p.rest = rest.view;
      p.slots = slots.data();
      p.counters = counters.data();
      p.rows = kRows;
      p.kv_heads = kKvHeads;
      p.unit_tokens = 32;
      p.share = std::max(share, 0.0f);
      p.shares = share == kByList ? shares.data() : nullptr;
      RunWorkers(table.divide_lists, p, workers);
      int64_t missing[kSlots] = {}, read[kSlots] = {};
      for (int64_t list = 0; list < kLists; ++list) {
        const int32_t slot = slots[list / kKvHeads];
        if (slot < 0) {
          CHECK(first.counts[list] + rest.counts[list] == 0);
          continue;
        }
        const std::vector<int32_t> units = from.List(list);
        const float mine =
            share == kByList ? shares[int64_t{slot} * kKvHeads + list % kKvHeads] : share;
        const auto cut =
            static_cast<int64_t>(std::ceil(double{static_cast<float>(units.size()) * mine}));
        CHECK(first.List(list) == std::vector<int32_t>(units.begin(), units.begin() + cut));
        CHECK(rest.List(list) == std::vector<int32_t>(units.begin() + cut, units.end()));
        missing[slot] += std::ssize(units) * 32;
        read[slot] += cut * 32;
      }
      for (int32_t slot = 0; slot < kSlots; ++slot) {
        CHECK(counters[slot].missing == missing[slot]);
        CHECK(counters[slot].read == read[slot]);
      }
      CHECK(first.Damage() + rest.Damage() + counters.Damage() + shares.Damage() == "");
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("a list is divided after its first share, or after its own", TestDivision)

}  // namespace
}  // namespace sluice::kernels
