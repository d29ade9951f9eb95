// Placement by KV head: caches whose heads have tables of their own (PagedCache::head_tables), and
// heads that are persistent (ResidencyTable::persistent). With such tables an operator must do what
// it does with a table that all heads share, to the bit.
#include "tests/kernels/sparse_support.h"

namespace sluice::kernels {
namespace {

constexpr int32_t kSlots = 3, kBlocks = 6, kBlockTokens = 16, kKvHeads = 3, kHeadDim = 64;
constexpr int32_t kTokens = kBlocks * kBlockTokens, kGroup = 2, kHeads = kGroup * kKvHeads;
constexpr int32_t kRows = 4;

// A cache of bf16 and one with the same content in tables by head. Heads have tables of different
// lengths, and blocks in any order.
struct Twins {
  explicit Twins(Random& random, int32_t head_dim = kHeadDim)
      : dim(head_dim),
        shared(kSlots, kBlocks, kBlockTokens, kKvHeads, head_dim, random),
        starts(BufferOf({0, kBlocks + 2, 2 * kBlocks + 3})),
        table(ShuffledPages(kSlots, 3 * kBlocks + 4, 5, random)),
        data((kSlots * int64_t{3 * kBlocks + 4} + 5) * 2 * kBlockTokens * head_dim),
        by_head(shared.view) {
    by_head.base = data.data();
    by_head.block_table = table.data();
    by_head.table_stride = 3 * kBlocks + 4;
    by_head.head_tables = starts.data();
    shared.Fill(random);
    Each([&](uint16_t* of_shared, uint16_t* of_head) {
      std::copy_n(of_shared, dim, of_head);
      return true;
    });
  }
  // Calls check(row in `shared`, row in `by_head`) for every K and V until it returns false.
  template <typename Check>
  bool Each(const Check& check) {
    for (int32_t slot = 0; slot < kSlots; ++slot) {
      for (int32_t token = 0; token < kTokens; ++token) {
        for (int32_t head = 0; head < kKvHeads; ++head) {
          for (const int64_t part : {int64_t{0}, int64_t{kBlockTokens} * dim}) {
            uint16_t* const other = data.data() + KeyIndex(by_head, slot, token, head) + part;
            if (!check(shared.Key(slot, token, head) + part, other)) return false;
          }
        }
      }
    }
    return true;
  }
  bool AreEqual() {
    return Each([this](const uint16_t* a, const uint16_t* b) { return std::equal(a, a + dim, b); });
  }

  int32_t dim;
  TestCache<uint16_t> shared;
  Guarded<int32_t> starts, table;
  Guarded<uint16_t> data;
  PagedCache by_head;
};

struct Rows {
  Guarded<int32_t> slots = BufferOf({2, -1, 0, 1});
  Guarded<int32_t> positions = BufferOf({63, 5, 79, 40});
};

void TestAppend(const KernelTable& path, Random& random) {
  Twins twins(random);
  const Rows rows;
  const Guarded<float> cos_sin = NormalBuffer<float>(kRows * kHeadDim, random);
  const Guarded<float> qkv =
      NormalBuffer<float>(kRows * (kHeads + 2 * kKvHeads) * kHeadDim, random);
  for (const int32_t ring : {0, 4}) {
    for (PagedCache cache : {twins.shared.view, twins.by_head}) {
      Guarded<float> own = CopyOf(qkv);
      cache.ring_blocks = ring;
      RopeAppendParams p{};
      p.qkv = own.data();
      p.cos_sin = cos_sin.data();
      p.slots = rows.slots.data();
      p.positions = rows.positions.data();
      p.cache = cache;
      p.rows = kRows;
      p.heads = kHeads;
      RunThreads(path.rope_append, p, 2);
    }
    CHECK(twins.data.Damage() == "");
    CHECK(twins.AreEqual());
  }
}
SLUICE_TEST_ON_EVERY_PATH("tables by head: rows are appended to the blocks of their head",
                          TestAppend)

void TestHashKeys(const KernelTable& path, Random& random) {
  constexpr int32_t kWords = 4;
  Twins twins(random);
  const Rows rows;
  const Guarded<int32_t> firsts = BufferOf({0, 0, 17, 40});
  const Guarded<float> hash = NormalBuffer<float>(kKvHeads * kHeadDim * kWords * 32, random);
  std::vector<TestRows<int32_t>> codes;
  std::vector<TestRows<float>> lengths;
  const uint64_t seed = random();
  for (const PagedCache& cache : {twins.shared.view, twins.by_head}) {
    Random same(seed);
    codes.emplace_back(kSlots, kTokens, 7, kWords, kKvHeads, same);
    lengths.emplace_back(kSlots, kTokens, 9, 1, kKvHeads, same);
    const HashKeysParams p = {cache,
                              hash.data(),
                              codes.back().view,
                              lengths.back().view,
                              rows.slots.data(),
                              firsts.data(),
                              rows.positions.data(),
                              kRows};
    RunThreads(path.hash_keys, p, 2);
  }
  CHECK(std::ranges::equal(codes[0].data.span(), codes[1].data.span()));
  for (int32_t token = 0; token <= 63; ++token) {
    REQUIRE(*lengths[0].Row(2, token, 1) == *lengths[1].Row(2, token, 1));
  }
}
SLUICE_TEST_ON_EVERY_PATH("tables by head: keys are read from the blocks of their head",
                          TestHashKeys)

void CheckAttention(const KernelTable& path, int32_t dim, Random& random) {
  Twins twins(random, dim);
  const Rows rows;
  const Guarded<float> q = NormalBuffer<float>(kRows * kHeads * dim, random);
  for (const int32_t unit_tokens : {1, kBlockTokens}) {
    TestLists lists(kRows * kKvHeads, kTokens);
    for (int64_t list = 0; list < kRows * kKvHeads; ++list) {
      std::vector<int32_t> units;
      for (int32_t unit = 0; unit * unit_tokens <= rows.positions[list / kKvHeads]; ++unit) {
        if (random() % 3 != 0) units.push_back(unit);
      }
      lists.Put(list, units);
    }
    std::vector<Guarded<float>> results;
    for (const PagedCache& cache : {twins.shared.view, twins.by_head}) {
      Guarded<float>& o = results.emplace_back(kRows * kHeads * dim);
      Guarded<float> lse(kRows * kHeads);
      SparseAttentionParams p{};
      p.q = q.data();
      p.q_stride = kHeads * dim;
      p.slots = rows.slots.data();
      p.positions = rows.positions.data();
      p.cache = cache;
      p.units = lists.units.data();
      p.counts = lists.counts.data();
      p.capacity = kTokens;
      p.o = o.data();
      p.lse = lse.data();
      p.unit_tokens = unit_tokens;
      p.rows = kRows;
      p.heads = kHeads;
      p.kv_head_end = kKvHeads;
      p.scale = 0.125f;
      RunThreads(path.sparse_attention, p, 3);
    }
    CHECK(BitDifference(results[0].span(), results[1].span(), kHeads * dim) == "");
    CHECK(std::isfinite(results[0][0]));
  }
}
void TestAttention(const KernelTable& path, Random& random) {
  for (const int32_t dim : {32, 64, 128}) CheckAttention(path, dim, random);
}
SLUICE_TEST_ON_EVERY_PATH("tables by head: attention reads the blocks of its head", TestAttention)

// Residency of random sequences, some of whose heads are persistent: a ring of one block, and
// places for two more, in units of one token.
struct Tables {
  static constexpr int32_t kRing = kBlockTokens, kCount = 3 * kBlockTokens;

  Tables(const Rows& rows, uint64_t seed)
      : random(seed),
        place_of(kSlots, kTokens, 11, 1, kKvHeads, random),
        places(kSlots, kCount, 7, 2, kKvHeads, random) {
    for (int32_t r = 0; r < kRows; ++r) {
      if (rows.slots[r] < 0) continue;
      for (int32_t head = 0; head < kKvHeads; ++head) {
        Draw(rows.slots[r], head, rows.positions[r]);
      }
    }
  }
  void Draw(int32_t slot, int32_t head, int32_t position) {
    for (int32_t unit = 0; unit < kTokens; ++unit) *place_of.Row(slot, unit, head) = -1;
    for (int32_t place = kRing; place < kCount; ++place) {
      int32_t* const row = places.Row(slot, place, head);
      row[0] = place > kCount - 4 ? kNoPlace : -1;
      row[1] = static_cast<int32_t>(random() % 30);
      const auto unit = static_cast<int32_t>(random() % static_cast<uint64_t>(position + 1));
      if (row[0] == kNoPlace || unit > position - kRing || *place_of.Row(slot, unit, head) >= 0 ||
          random() % 3 == 0) {
        continue;
      }
      row[0] = unit;
      *place_of.Row(slot, unit, head) = place;
    }
  }
  ResidencyTable view() { return {place_of.view, places.view, kRing, kCount, persistent.data()}; }

  Random random;
  TestRows<int32_t> place_of, places;
  const Guarded<int32_t> persistent = BufferOf({0, 1, 0});
};

void TestRetain(const KernelTable& path, Random& random) {
  for (int trial = 0; trial < 8; ++trial) {
    const Rows rows;
    const uint64_t seed = random();
    Twins got(random);
    Guarded<uint16_t> before = CopyOf(got.data);
    Tables tables(rows, seed), reference(rows, seed);
    const auto params = [&](Tables& of, const PagedCache& cache) {
      RetainParams p{};
      p.residency = of.view();
      p.slots = rows.slots.data();
      p.positions = rows.positions.data();
      p.resident = cache;
      p.rows = kRows;
      p.unit_tokens = 1;
      p.only_free = trial % 2 == 0;
      return p;
    };
    RunThreads(path.retain, params(tables, got.by_head), 3);
    RunWorkers(Reference().retain, params(reference, got.shared.view), 1);
    CHECK(got.data.Damage() == "");
    CHECK(got.AreEqual());
    CHECK(std::ranges::equal(tables.places.data.span(), reference.places.data.span()));
    // What left the ring of a persistent head lies at its position behind it.
    for (int32_t r = 0; r < kRows; ++r) {
      const int32_t unit = rows.positions[r] + 1 - Tables::kRing;
      if (rows.slots[r] < 0) continue;
      const auto at = [&](const Guarded<uint16_t>& data, int32_t token) {
        return data.data() + KeyIndex(got.by_head, rows.slots[r], token, 1);
      };
      const uint16_t* const from = at(before, unit % Tables::kRing);
      CHECK(std::equal(from, from + kHeadDim, at(got.data, Tables::kRing + unit)));
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("retain moves what leaves a persistent head's ring to its position",
                          TestRetain)

}  // namespace
}  // namespace sluice::kernels
