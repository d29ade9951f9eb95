// These tests are of rows to other ranks' experts and back: PackRows, UnpackRows, AddParts.
#include "tests/kernels/latent_support.h"

namespace sluice::kernels {
namespace {

struct ExchangeCase {
  int32_t rows;
  int32_t dim;
  int32_t choices;
  int32_t ranks;
  int32_t experts_each;
  int32_t capacity;
};

const ExchangeCase kCases[] = {
    {0, 64, 2, 2, 4, 3},      {1, 192, 2, 4, 2, 1},  {37, 256, 8, 8, 32, 40},
    {64, 7168, 8, 4, 64, 64}, {5, 136, 6, 3, 2, 16}, {300, 72, 3, 64, 4, 301},
};

std::string NameOf(const ExchangeCase& c) {
  return std::to_string(c.rows) + " rows of " + std::to_string(c.dim) + " to " +
         std::to_string(c.ranks) + " ranks";
}

// This is all that a path makes of rows, as it lies in memory.
struct Packed {
  Packed(const ExchangeCase& c, DType type)
      : units(int64_t{c.ranks} * c.capacity * RowUnitOf(c.dim, c.choices, type).bytes),
        counts(c.ranks),
        places(int64_t{c.rows} * c.ranks),
        load(int64_t{c.ranks} * c.experts_each) {
    std::fill_n(units.data(), units.size(), uint8_t{0xA5});
    std::iota(load.begin(), load.end(), 100);
  }
  Guarded<uint8_t> units;
  Guarded<int32_t> counts, places;
  Guarded<int64_t> load;
};

// Rows whose choices are all on one rank, on several, or none. Some columns are all zeros. With
// `copies` there are fewer experts than physical ones, and those of this rank are a random choice.
class Rows {
 public:
  Rows(const ExchangeCase& c, DType x_type, Random& random, bool copies = false)
      : shape(c),
        type(x_type),
        x(RandomElements(int64_t{c.rows} * c.dim, type, random)),
        chosen(int64_t{c.rows} * c.choices),
        weights(NormalBuffer<float>(int64_t{c.rows} * c.choices, random)),
        physical(copies ? std::max(c.ranks * (c.experts_each - 1), c.choices) : 0) {
    std::vector<int32_t> order(static_cast<size_t>(c.ranks * c.experts_each));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), random);
    std::copy_n(order.begin(), physical.size(), physical.data());
    const auto experts = static_cast<int32_t>(copies ? physical.size() : std::ssize(order));
    order.resize(static_cast<size_t>(experts));
    for (int32_t r = 0; r < c.rows; ++r) {
      std::iota(order.begin(), order.end(), 0);
      std::shuffle(order.begin(), order.end(), random);
      std::sort(order.begin(), order.begin() + c.choices);
      for (int32_t j = 0; j < c.choices; ++j) {
        // Row 1 goes to the last rank alone, as far as that has experts; row 3 nowhere.
        const int32_t last = std::max(0, experts - c.choices) + j;
        chosen[int64_t{r} * c.choices + j] = r % 7 == 3   ? -1
                                             : r % 7 == 1 ? last
                                                          : order[static_cast<size_t>(j)];
      }
      if (r % 5 == 2)
        std::fill_n(x.data() + int64_t{r} * c.dim * SizeOf(type), 64 * SizeOf(type), 0);
    }
  }

  Packed Pack(const KernelTable& table, DType unit_type, int workers) {
    Packed out(shape, unit_type);
    const PackRowsParams p = {.x = x.data(),
                              .chosen = chosen.data(),
                              .weights = weights.data(),
                              .physical = physical.size() > 0 ? physical.data() : nullptr,
                              .units = out.units.data(),
                              .counts = out.counts.data(),
                              .load = physical.size() > 0 ? out.load.data() : nullptr,
                              .places = out.places.data(),
                              .rows = shape.rows,
                              .dim = shape.dim,
                              .choices = shape.choices,
                              .ranks = shape.ranks,
                              .capacity = shape.capacity,
                              .experts_each = shape.experts_each,
                              .x_type = type,
                              .type = unit_type};
    RunWorkers(table.pack_places, p, workers);
    RunWorkers(table.pack_rows, p, workers);
    CHECK(out.units.Damage() + out.counts.Damage() + out.places.Damage() + out.load.Damage() == "");
    return out;
  }

  const ExchangeCase shape;
  const DType type;
  Guarded<uint8_t> x;
  Guarded<int32_t> chosen;
  Guarded<float> weights;
  Guarded<int32_t> physical;
};

bool SameBytes(const Guarded<uint8_t>& a, const Guarded<uint8_t>& b) {
  return std::memcmp(a.data(), b.data(), static_cast<size_t>(a.size())) == 0;
}

// Returns what is wrong with the parts of units that count; the others must be as they were.
std::string UnitsWrong(const ExchangeCase& c, DType type, const Packed& got, const Packed& want) {
  const RowUnit unit = RowUnitOf(c.dim, c.choices, type);
  for (int64_t u = 0; u < int64_t{c.ranks} * c.capacity; ++u) {
    // The bytes that fill the unit up are of no account.
    const int64_t used = unit.weights + int64_t{c.choices} * 4;
    const int64_t bytes = u % c.capacity < got.counts[u / c.capacity] ? used : unit.bytes;
    if (std::memcmp(got.units.data() + u * unit.bytes, want.units.data() + u * unit.bytes,
                    static_cast<size_t>(bytes)) != 0) {
      return "unit " + std::to_string(u) + " differs";
    }
  }
  return "";
}

void CheckPack(const KernelTable& table, Random& random, bool copies) {
  for (const ExchangeCase& c : kCases) {
    INFO(NameOf(c));
    Rows rows(c, table.activation_type, random, copies);
    for (const DType type : {table.activation_type, DType::kFloat8E4M3}) {
      INFO(NameOf(type));
      const Packed got = rows.Pack(table, type, 3), want = rows.Pack(Reference(), type, 1);
      for (int32_t rank = 0; rank < c.ranks; ++rank) REQUIRE(got.counts[rank] == want.counts[rank]);
      for (int64_t i = 0; i < got.places.size(); ++i) REQUIRE(got.places[i] == want.places[i]);
      CHECK(UnitsWrong(c, type, got, want) == "");
      // Every choice counts once, with a table.
      for (int64_t e = 0; e < got.load.size(); ++e) {
        const auto chosen = std::count(rows.chosen.begin(), rows.chosen.end(), e);
        REQUIRE(got.load[e] == 100 + e + (copies ? chosen : 0));
        REQUIRE(want.load[e] == got.load[e]);
      }
    }
  }
}

void TestPackRows(const KernelTable& table, Random& random) { CheckPack(table, random, false); }
SLUICE_TEST_ON_EVERY_PATH("pack_rows agrees with the reference", TestPackRows)

void TestPackRowsToCopies(const KernelTable& table, Random& random) {
  CheckPack(table, random, true);
  // A unit says which of its rank's own experts works for a choice.
  const ExchangeCase c = {3, 64, 2, 2, 3, 3};
  Rows rows(c, table.activation_type, random, true);
  const int32_t physical[] = {5, 1, 0, 3}, chosen[] = {0, 1, 2, 1, -1, 3};
  REQUIRE(rows.physical.size() == 4);
  std::copy_n(physical, 4, rows.physical.data());
  std::copy_n(chosen, 6, rows.chosen.data());
  const Packed packed = rows.Pack(table, rows.type, 2);
  CHECK(packed.counts[0] == 2);
  CHECK(packed.counts[1] == 2);
  const int32_t places[] = {0, 3, 1, -1, -1, 4};
  const int32_t choices[2][3][2] = {{{-1, 1}, {0, 1}, {}}, {{2, -1}, {}, {-1, 0}}};
  const RowUnit unit = RowUnitOf(c.dim, c.choices, rows.type);
  for (int64_t row = 0; row < c.rows; ++row) {
    for (int64_t rank = 0; rank < c.ranks; ++rank) {
      const int64_t place = packed.places[row * c.ranks + rank];
      CHECK(place == places[row * c.ranks + rank]);
      if (place < 0) continue;
      CHECK(std::memcmp(packed.units.data() + place * unit.bytes + unit.choices, choices[rank][row],
                        8) == 0);
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("pack_rows goes by the table of copies, and counts choices",
                          TestPackRowsToCopies)

struct Unpacked {
  Unpacked(const ExchangeCase& c, DType type)
      : x(int64_t{c.ranks} * c.capacity * c.dim * SizeOf(type)),
        sums(int64_t{c.ranks} * c.capacity * c.dim),
        chosen(int64_t{c.ranks} * c.capacity * c.choices),
        weights(chosen.size()),
        pairs(chosen.size()),
        begins(c.experts_each + 1) {
    std::fill_n(x.data(), x.size(), uint8_t{0xA5});
    std::fill_n(sums.data(), sums.size(), 7.0f);
    std::fill_n(pairs.data(), pairs.size(), -7);
  }
  Guarded<uint8_t> x;
  Guarded<float> sums;
  Guarded<int32_t> chosen;
  Guarded<float> weights;
  Guarded<int32_t> pairs, begins;
};

Unpacked Unpack(const KernelTable& table, const ExchangeCase& c, DType x_type, DType type,
                const Packed& packed, int workers) {
  Unpacked out(c, x_type);
  const UnpackRowsParams p = {.units = packed.units.data(),
                              .counts = packed.counts.data(),
                              .x = out.x.data(),
                              .sums = out.sums.data(),
                              .chosen = out.chosen.data(),
                              .weights = out.weights.data(),
                              .pairs = out.pairs.data(),
                              .begins = out.begins.data(),
                              .dim = c.dim,
                              .choices = c.choices,
                              .ranks = c.ranks,
                              .capacity = c.capacity,
                              .experts_each = c.experts_each,
                              .x_type = x_type,
                              .type = type};
  RunWorkers(table.unpack_rows, p, workers);
  RunWorkers(table.unpack_pairs, p, workers);
  CHECK(out.x.Damage() + out.sums.Damage() + out.chosen.Damage() + out.weights.Damage() +
            out.pairs.Damage() + out.begins.Damage() ==
        "");
  return out;
}

// The units of all ranks are unpacked as if every block had come from another rank, so that their
// choices are of the same experts.
void TestUnpackRows(const KernelTable& table, Random& random) {
  for (const ExchangeCase& c : kCases) {
    INFO(NameOf(c));
    Rows rows(c, table.activation_type, random);
    for (const DType type : {table.activation_type, DType::kFloat8E4M3}) {
      INFO(NameOf(type));
      const Packed packed = rows.Pack(Reference(), type, 1);
      const Unpacked got = Unpack(table, c, rows.type, type, packed, 3);
      const Unpacked want = Unpack(Reference(), c, rows.type, type, packed, 1);
      CHECK(SameBytes(got.x, want.x));
      CHECK(BitDifference(got.sums.span(), want.sums.span(), c.dim) == "");
      CHECK(BitDifference(got.weights.span(), want.weights.span(), c.choices) == "");
      int64_t pairs = 0;
      for (int64_t i = 0; i < got.chosen.size(); ++i) {
        REQUIRE(got.chosen[i] == want.chosen[i]);
        pairs += got.chosen[i] >= 0 ? 1 : 0;
      }
      for (int64_t e = 0; e <= c.experts_each; ++e) REQUIRE(got.begins[e] == want.begins[e]);
      REQUIRE(got.begins[c.experts_each] == pairs);
      for (int64_t i = 0; i < got.pairs.size(); ++i) REQUIRE(got.pairs[i] == want.pairs[i]);
      // Every choice of every row arrives once.
      CHECK(pairs == std::count_if(rows.chosen.data(), rows.chosen.data() + rows.chosen.size(),
                                   [](int32_t e) { return e >= 0; }));
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("unpack_rows agrees with the reference", TestUnpackRows)

// A row that travels as e4m3 comes within half a step of e4m3 of what it was.
void TestFp8Rows(const KernelTable& table, Random& random) {
  const ExchangeCase c = {9, 320, 2, 2, 4, 9};
  Rows rows(c, table.activation_type, random);
  const Packed packed = rows.Pack(table, DType::kFloat8E4M3, 2);
  const Unpacked got = Unpack(table, c, rows.type, DType::kFloat8E4M3, packed, 2);
  for (int64_t r = 0; r < c.rows; ++r) {
    const std::vector<float> want = FloatsOf(rows.x.data(), rows.type, r * c.dim, c.dim);
    for (int32_t rank = 0; rank < c.ranks; ++rank) {
      const int64_t place = packed.places[r * c.ranks + rank];
      if (place < 0) continue;
      const std::vector<float> row = FloatsOf(got.x.data(), rows.type, place * c.dim, c.dim);
      for (size_t i = 0; i < row.size(); ++i) {
        const auto block = want.begin() + static_cast<ptrdiff_t>(i / 128 * 128);
        const auto end = want.begin() + std::min<ptrdiff_t>(c.dim, (block - want.begin()) + 128);
        const float largest = std::abs(*std::max_element(
            block, end, [](float a, float b) { return std::abs(a) < std::abs(b); }));
        REQUIRE(std::abs(row[i] - want[i]) <=
                std::max(std::abs(want[i]) / 15, largest / 448 / 512));
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("rows travel as e4m3 with little loss", TestFp8Rows)

void TestAddParts(const KernelTable& table, Random& random) {
  for (const auto& [rows, ranks, dim] : {std::tuple{0, 2, 64}, std::tuple{1, 4, 7168},
                                         std::tuple{13, 3, 256}, std::tuple{40, 64, 72}}) {
    INFO(rows << " rows, " << ranks << " ranks, " << dim);
    auto parts = NormalBuffer<float>(int64_t{rows} * ranks * dim, random);
    const auto start = NormalBuffer<float>(int64_t{rows} * dim, random);
    Guarded<int32_t> places(int64_t{rows} * ranks);
    for (int64_t i = 0; i < places.size(); ++i) {
      // The blocks of ranks, in the order of rows. What no row has is NaN.
      const int64_t place = i % ranks * rows + i / ranks;
      places[i] = random() % 3 == 0 ? -1 : static_cast<int32_t>(place);
      if (places[i] < 0) std::fill_n(parts.data() + place * dim, dim, std::nanf(""));
    }
    const auto run = [&, of_row = ranks, width = dim](const KernelTable& path, int64_t first,
                                                      int32_t count, int workers) {
      Guarded<float> out(int64_t{count} * width);
      std::copy_n(start.data() + first * width, out.size(), out.data());
      const AddPartsParams p = {.parts = parts.data(),
                                .places = places.data() + first * of_row,
                                .out = out.data(),
                                .rows = count,
                                .ranks = of_row,
                                .dim = width};
      RunWorkers(path.add_parts, p, workers);
      CHECK(out.Damage() == "");
      return out;
    };
    const auto got = run(table, 0, rows, 3), want = run(Reference(), 0, rows, 1);
    CHECK(Difference(got.span(), want.span(), 1e-6, dim) == "");
    if (rows == 0) continue;
    const auto alone = run(table, rows - 1, 1, 2);
    CHECK(BitDifference(alone.span(), got.span().last(static_cast<size_t>(dim)), dim) == "");
  }
}
SLUICE_TEST_ON_EVERY_PATH("add_parts agrees with the reference", TestAddParts)

}  // namespace
}  // namespace sluice::kernels
