#include "tests/kernels/kernel_test_support.h"

namespace sluice::kernels {
namespace {

// Lists of random entries: distinct targets, any sources, some entries skipped, counts out of range
// on either side. Copied units are random bytes, and all other memory must stay as it was.
struct TransferCase {
  const char* name;
  int32_t unit_bytes;
  int32_t lists;
  int32_t capacity;
  int64_t spare_bytes;      // behind each unit, on both sides
  int64_t misalignment;     // misalignment of both bases
  bool offsets;             // lists lie by a table of offsets, else by a stride
  bool source_is_identity;  // source_units is null
  bool target_is_identity;
  int32_t max_workers;
  int32_t parts = 1;
};

struct Input {
  Input(const TransferCase& test_case, Random& random)
      : c(test_case),
        part_pitch(c.unit_bytes + c.spare_bytes),
        pitch(c.parts * part_pitch),
        list_bytes(pitch * (2 * c.capacity + 1)),
        source(c.lists * list_bytes + c.misalignment),
        offsets(c.lists),
        target_offsets(c.lists),
        source_units(int64_t{c.lists} * c.capacity),
        target_units(int64_t{c.lists} * c.capacity),
        counts(c.lists) {
    for (unsigned char& byte : std::span(source.data(), static_cast<size_t>(source.size()))) {
      byte = static_cast<unsigned char>(random());
    }
    for (int32_t list = 0; list < c.lists; ++list) {
      offsets[list] = (c.lists - 1 - list) * list_bytes;
      target_offsets[list] = (list + 1) % c.lists * list_bytes;
      const int32_t kinds[] = {0, -5, c.capacity, c.capacity + 7, c.capacity / 2, 1};
      counts[list] = kinds[(static_cast<uint64_t>(list) + random() % 2) % std::size(kinds)];
      std::vector<int32_t> units(static_cast<size_t>(2 * c.capacity + 1));
      for (size_t i = 0; i < units.size(); ++i) units[i] = static_cast<int32_t>(i);
      std::shuffle(units.begin(), units.end(), random);
      for (int32_t i = 0; i < c.capacity; ++i) {
        const int64_t entry = int64_t{list} * c.capacity + i;
        source_units[entry] = static_cast<int32_t>(random() % units.size());
        target_units[entry] = units[static_cast<size_t>(i)];
        if (random() % 7 == 0) source_units[entry] = -1;
        if (random() % 7 == 0) target_units[entry] = -1;
      }
    }
  }

  Guarded<unsigned char> Run(const KernelTable& table, int workers) const {
    Guarded<unsigned char> target(source.size());
    const TransferParams p = {
        .source = source.data() + c.misalignment,
        .target = target.data() + c.misalignment,
        .source_offsets = c.offsets ? offsets.data() : nullptr,
        .target_offsets = c.offsets ? target_offsets.data() : nullptr,
        .source_stride = list_bytes,
        .target_stride = list_bytes,
        .source_pitch = pitch,
        .target_pitch = pitch,
        .source_units = c.source_is_identity ? nullptr : source_units.data(),
        .target_units = c.target_is_identity ? nullptr : target_units.data(),
        .counts = counts.data(),
        .lists = c.lists,
        .capacity = c.capacity,
        .unit_bytes = c.unit_bytes,
        .max_workers = c.max_workers,
        .parts = c.parts,
        .part_pitch = part_pitch,
    };
    RunThreads(table.transfer, p, workers);
    CHECK(target.Damage() == "");
    return target;
  }

  const TransferCase c;
  const int64_t part_pitch, pitch, list_bytes;
  Guarded<unsigned char> source;
  Guarded<int64_t> offsets, target_offsets;
  Guarded<int32_t> source_units, target_units, counts;
};

// Returns the first byte that differs, or -1.
int64_t FirstDifference(const Guarded<unsigned char>& a, const Guarded<unsigned char>& b) {
  const auto at = std::mismatch(a.span().begin(), a.span().end(), b.span().begin());
  return at.first == a.span().end() ? -1 : at.first - a.span().begin();
}

void TestTransfer(const KernelTable& table, Random& random) {
  const TransferCase cases[] = {
      {"latent rows", 656, 5, 37, 0, 0, true, false, false, 0},
      {"latent rows, padded, capped", 656, 7, 64, 112, 0, true, false, false, 2},
      {"index keys", 132, 6, 50, 0, 0, true, false, false, 0},
      {"blocks of 16 KiB", 16384, 6, 5, 0, 0, true, false, false, 16},
      {"pages of 64 KiB of which one head is taken", 4096, 6, 3, 61440, 0, false, false, false, 0},
      {"pieces of 64 KiB", 65536, 6, 2, 0, 0, false, false, false, 1},
      {"a unit of one word and a half of a piece", 4100, 6, 3, 0, 0, true, false, false, 0},
      {"words", 4, 6, 1000, 0, 0, true, false, false, 0},
      {"words apart", 4, 6, 33, 12, 4, false, false, false, 0},
      {"eight bytes, off by four", 8, 6, 100, 0, 4, true, false, false, 3},
      {"rows, off by eight", 656, 6, 20, 0, 8, false, false, false, 0},
      {"rows of 16 with a pitch of 20", 16, 6, 70, 4, 0, true, false, false, 0},
      {"dense rows to scattered places", 656, 6, 20, 0, 0, true, true, false, 0},
      {"scattered rows to dense places", 656, 6, 20, 0, 0, true, false, true, 0},
      {"dense to dense", 160, 6, 20, 0, 0, false, true, true, 0},
      {"many short lists", 64, 211, 3, 0, 0, true, false, false, 4},
      {"one long list", 272, 1, 3000, 0, 0, false, false, false, 4},
      {"K and V of tokens", 256, 6, 50, 7936, 0, false, false, false, 4, 2},
      {"three parts of a word, apart", 4, 6, 41, 8, 4, true, false, false, 0, 3},
      {"parts that fill an item", 1024, 5, 9, 0, 0, true, false, false, 0, 4},
      {"no lists", 656, 0, 4, 0, 0, false, false, false, 0},
      {"no capacity", 656, 4, 0, 0, 0, false, false, false, 0},
  };
  for (const TransferCase& c : cases) {
    INFO(c.name);
    const Input in(c, random);
    const Guarded<unsigned char> want = in.Run(*FindKernelTable("reference"), 1);
    CHECK(FirstDifference(in.Run(table, 1), want) == -1);
    CHECK(FirstDifference(in.Run(table, 3), want) == -1);
  }
}
SLUICE_TEST_ON_EVERY_PATH("transfer moves what its lists say, and nothing else", TestTransfer)

}  // namespace
}  // namespace sluice::kernels
