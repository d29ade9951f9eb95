#include "src/prefill/last_selections.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <set>
#include <vector>

#include "src/base/rng.h"
#include "src/device/cpu/cpu_device.h"
#include "tests/test_main.h"

namespace sluice {
namespace {

constexpr int kLayers = 3, kTopK = 8;

// Selections of every row of a prompt: [layer][position] sorted tokens, at most kTopK.
class Prompt {
 public:
  Prompt(int64_t tokens, SplitMix64& random) : tokens_(tokens) {
    for (int layer = 0; layer < kLayers; ++layer) {
      for (int64_t position = 0; position < tokens; ++position) {
        std::set<int32_t> chosen;
        const int64_t count = std::min<int64_t>(position + 1, kTopK);
        while (static_cast<int64_t>(chosen.size()) < count) {
          chosen.insert(static_cast<int32_t>(random() % static_cast<uint64_t>(position + 1)));
        }
        rows_.emplace_back(chosen.begin(), chosen.end());
      }
    }
  }
  int64_t tokens() const { return tokens_; }
  const std::vector<int32_t>& Row(int layer, int64_t position) const {
    return rows_[static_cast<size_t>(layer * tokens_ + position)];
  }

  // The prompt in chunks, the lists of each in pieces of `piece` rows and of `capacity`.
  void Run(LastSelections& last, Stream& stream, Device& device, int64_t chunk, int64_t piece,
           int32_t capacity) const {
    std::vector<Buffer> lists;  // until the stream has passed them
    last.Begin(tokens_);
    for (int64_t begin = 0; begin < tokens_; begin += chunk) {
      const int64_t end = std::min(begin + chunk, tokens_);
      for (int layer = 0; layer < kLayers; ++layer) {
        for (int64_t first = begin; first < end; first += piece) {
          const int64_t rows = std::min(piece, end - first);
          Buffer buffer = *device.Allocate(MemoryKind::kDevice,
                                           static_cast<size_t>(rows * (capacity + 1)) * 4, "test");
          kernels::UnitLists units{buffer.as<int32_t>(), buffer.as<int32_t>() + rows * capacity,
                                   capacity};
          std::fill_n(units.units, rows * capacity, -1);
          for (int64_t row = 0; row < rows; ++row) {
            const std::vector<int32_t>& of_row = Row(layer, first + row);
            std::copy(of_row.begin(), of_row.end(), units.units + row * capacity);
            units.counts[row] = static_cast<int32_t>(of_row.size());
          }
          last.Keep(stream, layer, units, first, static_cast<int>(rows));
          lists.push_back(std::move(buffer));
        }
      }
    }
    const auto done = device.NewEvent();
    stream.Record(*done);
    done->Wait();
  }

  // By definition: of each layer, each token with the newest of the last rows that selected it.
  std::vector<SelectionHints::Entry> Want(int64_t most) const {
    std::vector<SelectionHints::Entry> entries;
    for (int layer = 0; layer < kLayers; ++layer) {
      std::set<int32_t> named;
      for (int64_t p = tokens_ - 1; p >= std::max<int64_t>(tokens_ - kLastSelections, 0); --p) {
        SelectionHints::Entry entry;
        entry.layer = static_cast<uint32_t>(layer);
        entry.position = static_cast<uint32_t>(p);
        for (const int32_t token : Row(layer, p)) {
          if (static_cast<int64_t>(named.size()) == most || !named.insert(token).second) continue;
          entry.units.push_back(static_cast<uint32_t>(token));
        }
        if (!entry.units.empty()) entries.push_back(entry);
      }
    }
    return entries;
  }

 private:
  const int64_t tokens_;
  std::vector<std::vector<int32_t>> rows_;
};

TEST_CASE("each token is hinted once, by the newest of the last rows that selected it") {
  const std::unique_ptr<Device> device = *NewCpuDevice({"auto", 2});
  const auto made = LastSelections::Create(device.get(), kLayers, kTopK);
  REQUIRE(made.ok());
  const auto stream = device->NewStream(Device::StreamKind::kCompute);
  SplitMix64 random(TestSeed());
  // Prompts shorter than the rows that are kept, and last chunks that are.
  for (const int64_t tokens : {1, 5, 31, 32, 33, 100, 257}) {
    const Prompt prompt(tokens, random);
    for (const int64_t chunk : {16, 48, 512}) {
      for (const int32_t capacity : {kTopK, kTopK - 2}) {
        if (capacity < kTopK && tokens >= kTopK) continue;  // lists must fit
        for (const int64_t most : {1, 20, 100000}) {
          INFO(tokens << " tokens in chunks of " << chunk << ", at most " << most);
          prompt.Run(**made, *stream, *device, chunk, chunk == 48 ? 5 : chunk, capacity);
          const SelectionHints hints = (*made)->Read(*stream, most);
          CHECK(hints.unit_tokens == 1);
          const std::vector<SelectionHints::Entry> want = prompt.Want(most);
          REQUIRE(hints.entries.size() == want.size());
          for (size_t i = 0; i < want.size(); ++i) {
            INFO("entry " << i);
            CHECK(hints.entries[i].layer == want[i].layer);
            CHECK_FALSE(hints.entries[i].kv_head.has_value());
            CHECK(hints.entries[i].position == want[i].position);
            CHECK(hints.entries[i].units == want[i].units);
          }
          CHECK(CheckHints(hints, {kLayers, 1, 32, static_cast<uint32_t>(tokens), most}).ok());
        }
      }
    }
  }
}

}  // namespace
}  // namespace sluice
