// The promises of src/device/device.h, on every device in memory that a host can test.
#include <algorithm>
#include <atomic>
#include <catch2/catch.hpp>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "src/base/error.h"
#include "src/base/failpoint.h"
#include "src/device/device.h"
#include "src/device/kernel_set.h"
#include "tests/support/device.h"
#include "tests/test_main.h"
#include "tests/unit/device/devices.h"

namespace sluice {
namespace {

using StreamKind = Device::StreamKind;

Buffer Allocate(Device& device, MemoryKind kind, size_t bytes) {
  auto buffer = device.Allocate(kind, bytes, "a test");
  REQUIRE(buffer.ok());
  REQUIRE(buffer->bytes() == bytes);
  return *std::move(buffer);
}

void Finish(Device& device, Stream& stream) {
  const auto done = device.NewEvent();
  stream.Record(*done);
  done->Wait();
  CHECK(done->Ready());
}

std::vector<uint8_t> Random(size_t bytes) {
  static std::mt19937_64 random(TestSeed());
  std::vector<uint8_t> out(bytes);
  for (uint8_t& b : out) b = static_cast<uint8_t>(random());
  return out;
}

std::vector<uint8_t> Read(Device& device, const void* from, size_t bytes) {
  const Buffer host = Allocate(device, MemoryKind::kPinned, bytes);
  const auto stream = device.NewStream(StreamKind::kCopy);
  stream->Copy(host.data(), from, bytes);
  Finish(device, *stream);
  return {host.as<uint8_t>(), host.as<uint8_t>() + bytes};
}

void MemoryIsZeroed(Device& device) {
  for (const size_t bytes : {size_t{1}, size_t{4096}, (size_t{5} << 20) + 3}) {
    for (const MemoryKind kind : {MemoryKind::kDevice, MemoryKind::kPinned}) {
      const Buffer buffer = Allocate(device, kind, bytes);
      const std::vector<uint8_t> seen = Read(device, buffer.data(), bytes);
      CHECK(std::all_of(seen.begin(), seen.end(), [](uint8_t b) { return b == 0; }));
    }
  }
  CHECK(Allocate(device, MemoryKind::kDevice, 0).data() == nullptr);
}
SLUICE_TEST_ON_EVERY_DEVICE("memory is zeroed, of either kind and any size", MemoryIsZeroed)

void RefusalSaysWhy(Device& device) {
  for (const MemoryKind kind : {MemoryKind::kDevice, MemoryKind::kPinned}) {
    const auto refused = device.Allocate(kind, size_t{1} << 55, "the caches");
    REQUIRE(absl::IsResourceExhausted(refused.status()));
    const std::string message(refused.status().message());
    CHECK(message.find("the caches") != std::string::npos);
    CHECK(message.find(std::to_string(size_t{1} << 55)) != std::string::npos);
  }
  Allocate(device, MemoryKind::kDevice, 1 << 20);  // the device works on
}
SLUICE_TEST_ON_EVERY_DEVICE("a refusal says for what, and how much, memory was asked",
                            RefusalSaysWhy)

void CopiesAreOrdered(Device& device) {
  constexpr size_t kBytes = 300'001;
  const Buffer from = Allocate(device, MemoryKind::kPinned, kBytes);
  const Buffer to = Allocate(device, MemoryKind::kPinned, kBytes);
  const Buffer a = Allocate(device, MemoryKind::kDevice, kBytes);
  const Buffer b = Allocate(device, MemoryKind::kDevice, kBytes);
  for (const StreamKind kind : {StreamKind::kCopy, StreamKind::kCompute}) {
    const auto stream = device.NewStream(kind);
    for (int round = 0; round < 50; ++round) {
      const std::vector<uint8_t> bytes = Random(kBytes);
      std::memcpy(from.data(), bytes.data(), kBytes);
      stream->Copy(a.data(), from.data(), kBytes);
      stream->Copy(b.data(), a.data(), kBytes);
      stream->Fill(a.data(), 0x5A, kBytes);
      stream->Copy(to.data(), b.data(), kBytes);
      stream->Fill(b.data(), 0xA5, kBytes);
      Finish(device, *stream);
      REQUIRE(std::memcmp(to.data(), bytes.data(), kBytes) == 0);
    }
    CHECK(Read(device, a.data(), kBytes) == std::vector<uint8_t>(kBytes, 0x5A));
    CHECK(Read(device, b.data(), kBytes) == std::vector<uint8_t>(kBytes, 0xA5));
  }
}
SLUICE_TEST_ON_EVERY_DEVICE("copies and fills of a stream happen in order", CopiesAreOrdered)

void BatchesCopyEveryPiece(Device& device) {
  constexpr size_t kBytes = 4 << 20;
  const Buffer from = Allocate(device, MemoryKind::kPinned, kBytes);
  const Buffer to = Allocate(device, MemoryKind::kDevice, kBytes);
  const std::vector<uint8_t> bytes = Random(kBytes);
  std::memcpy(from.data(), bytes.data(), kBytes);
  const auto stream = device.NewStream(StreamKind::kCopy);
  // The pieces are few and many, large and small, of odd sizes and empty; all other memory stays as
  // it was.
  for (const size_t pieces : {1, 3, 10, 10'000}) {
    std::vector<uint8_t> want(kBytes, 0);
    stream->Fill(to.data(), 0, kBytes);
    std::vector<Stream::CopyOp> ops;
    const size_t place = kBytes / pieces;
    for (size_t i = 0; i < pieces; ++i) {
      const size_t target = i * place, source = (pieces - 1 - i) * place;
      const size_t size = i % 7 == 6 ? 0 : place - i % std::min<size_t>(place, 13);
      ops.push_back({to.as<uint8_t>() + target, from.as<uint8_t>() + source, size});
      std::copy_n(bytes.begin() + static_cast<ptrdiff_t>(source), size,
                  want.begin() + static_cast<ptrdiff_t>(target));
    }
    stream->CopyBatch(ops.data(), ops.size());
    Finish(device, *stream);
    CHECK(Read(device, to.data(), kBytes) == want);
  }
}
SLUICE_TEST_ON_EVERY_DEVICE("a batch copies every piece and nothing else", BatchesCopyEveryPiece)

void StreamsWaitForEvents(Device& device) {
  constexpr size_t kBytes = 1 << 20;
  const Buffer from = Allocate(device, MemoryKind::kPinned, kBytes);
  const Buffer middle = Allocate(device, MemoryKind::kDevice, kBytes);
  const Buffer to = Allocate(device, MemoryKind::kPinned, kBytes);
  const auto first = device.NewStream(StreamKind::kCopy);
  const auto second = device.NewStream(StreamKind::kCompute);
  const auto filled = device.NewEvent(), taken = device.NewEvent();
  for (int round = 0; round < 200; ++round) {
    const auto value = static_cast<uint8_t>(round + 1);
    std::memset(from.data(), value, kBytes);
    first->WaitFor(*taken);  // it was never recorded, so nothing waits
    first->Copy(middle.data(), from.data(), kBytes);
    first->Record(*filled);
    second->WaitFor(*filled);
    second->Copy(to.data(), middle.data(), kBytes);
    second->Record(*taken);
    taken->Wait();
    REQUIRE(filled->Ready());
    const auto* seen = to.as<uint8_t>();
    REQUIRE(std::all_of(seen, seen + kBytes, [value](uint8_t b) { return b == value; }));
  }
}
SLUICE_TEST_ON_EVERY_DEVICE("a stream that waits for another's event sees everything before it",
                            StreamsWaitForEvents)

void EventsFromManyThreads(Device& device) {
  const auto fresh = device.NewEvent();
  CHECK(fresh->Ready());
  fresh->Wait();
  constexpr size_t kBytes = 8 << 20;
  const Buffer from = Allocate(device, MemoryKind::kPinned, kBytes);
  const Buffer to = Allocate(device, MemoryKind::kDevice, kBytes);
  const auto stream = device.NewStream(StreamKind::kCopy);
  const auto done = device.NewEvent();
  for (int round = 0; round < 20; ++round) {
    for (int i = 0; i < 4; ++i) stream->Copy(to.data(), from.data(), kBytes);
    stream->Record(*done);
    std::atomic<int> ready{0};
    std::vector<std::thread> waiters;
    for (int i = 0; i < 8; ++i) {
      waiters.emplace_back([&, i] {
        while (i % 2 == 0 && !done->Ready()) std::this_thread::yield();
        done->Wait();
        ready += done->Ready() ? 1 : 0;
      });
    }
    for (std::thread& waiter : waiters) waiter.join();
    CHECK(ready == 8);
  }
}
SLUICE_TEST_ON_EVERY_DEVICE("any thread may ask an event or wait for it", EventsFromManyThreads)

void TimedEventsTell(Device& device) {
  constexpr size_t kBytes = 16 << 20;
  const Buffer from = Allocate(device, MemoryKind::kPinned, kBytes);
  const Buffer to = Allocate(device, MemoryKind::kDevice, kBytes);
  const auto stream = device.NewStream(StreamKind::kCopy);
  const auto before = device.NewTimedEvent(), after = device.NewTimedEvent();
  for (int round = 0; round < 3; ++round) {
    const auto start = std::chrono::steady_clock::now();
    stream->Record(*before);
    for (int i = 0; i < 4; ++i) stream->Copy(to.data(), from.data(), kBytes);
    stream->Record(*after);
    after->Wait();
    const auto outside = absl::FromChrono(std::chrono::steady_clock::now() - start);
    CHECK(after->Since(*before) > absl::Microseconds(1));
    CHECK(after->Since(*before) <= outside);
  }
}
SLUICE_TEST_ON_EVERY_DEVICE("timed events tell how long what lies between them took",
                            TimedEventsTell)

void ProgramsRunAgain(Device& device) {
  constexpr size_t kBytes = 10'000;
  const Buffer in = Allocate(device, MemoryKind::kPinned, kBytes);
  const Buffer middle = Allocate(device, MemoryKind::kDevice, kBytes);
  const Buffer out = Allocate(device, MemoryKind::kPinned, kBytes);
  const auto stream = device.NewStream(StreamKind::kCompute);
  const std::vector<Stream::CopyOp> ops = {
      {out.data(), middle.data(), 5000},
      {out.as<uint8_t>() + 5000, middle.as<uint8_t>() + 5000, 5000}};
  auto program = device.Record(*stream, [&](Stream& s) {
    s.Copy(middle.data(), in.data(), kBytes);
    s.Fill(middle.as<uint8_t>() + 7, 0xEE, 1);
    s.CopyBatch(ops.data(), ops.size());
  });
  REQUIRE(program.ok());
  Finish(device, *stream);
  const auto* seen = out.as<uint8_t>();
  CHECK(std::all_of(seen, seen + kBytes, [](uint8_t b) { return b == 0; }));
  for (int round = 0; round < 100; ++round) {
    std::vector<uint8_t> want = Random(kBytes);
    std::memcpy(in.data(), want.data(), kBytes);
    want[7] = 0xEE;
    (*program)->Run(*stream);
    Finish(device, *stream);
    REQUIRE(std::memcmp(seen, want.data(), kBytes) == 0);
  }
}
SLUICE_TEST_ON_EVERY_DEVICE("a program runs as often as wanted, and not while it is recorded",
                            ProgramsRunAgain)

// Halves of `state` change places by way of two branches, which have another layer's work under way
// meanwhile: every missing order shows, also that of a read before the next write.
struct Branches {
  static constexpr int kUnits = 512, kUnitBytes = 1024, kLayers = 9;

  explicit Branches(Device& device)
      : kernels(device.kernels()),
        state(Allocate(device, MemoryKind::kDevice, 2 * kUnits * kUnitBytes)),
        low(Allocate(device, MemoryKind::kDevice, kUnits * kUnitBytes)),
        high(Allocate(device, MemoryKind::kDevice, kUnits * kUnitBytes)),
        log(Allocate(device, MemoryKind::kDevice, kLayers * kUnitBytes)),
        count(Allocate(device, MemoryKind::kPinned, sizeof(int32_t))) {
    *count.as<int32_t>() = kUnits;
  }

  // An operator makes the change: on a GPU it may begin before the one before it is done
  // (kernels/cuda/common/launch.cuh).
  void Move(Stream& stream, const void* source, void* target) {
    kernels::TransferParams move{};
    move.source = source;
    move.target = target;
    move.source_pitch = move.target_pitch = move.unit_bytes = kUnitBytes;
    move.counts = count.as<int32_t>();
    move.lists = 1;
    move.capacity = kUnits;
    kernels.Transfer(stream, move);
  }

  void Enqueue(Stream& stream) {
    auto* const upper = state.as<uint8_t>() + kUnits * kUnitBytes;
    Stream &first = stream.Branch(0), &second = stream.Branch(3), &third = first.Branch(1);
    CHECK(&stream.Branch(1) == &third);
    for (int layer = 0; layer < kLayers; ++layer) {
      first.After(stream);
      Move(first, upper, high.data());
      second.After(stream);
      Move(second, state.data(), low.data());
      first.After(second);  // one branch may wait for another
      Move(first, low.data(), upper);
      second.After(first);
      Move(second, high.data(), state.data());
      stream.After(second);
      // This runs beside the next layer: nobody waits for it before the end.
      third.After(stream);
      third.Fill(log.as<uint8_t>() + layer * kUnitBytes, static_cast<uint8_t>(layer + 1),
                 kUnitBytes);
      stream.Fill(state.as<uint8_t>() + layer, static_cast<uint8_t>(layer), 1);
    }
    for (int i = 0; i < Stream::kBranches; ++i) stream.After(stream.Branch(i));  // 2 was not used
  }

  static std::vector<uint8_t> Expect(std::vector<uint8_t> bytes) {
    for (int layer = 0; layer < kLayers; ++layer) {
      std::rotate(bytes.begin(), bytes.begin() + kUnits * kUnitBytes, bytes.end());
      bytes[static_cast<size_t>(layer)] = static_cast<uint8_t>(layer);
    }
    return bytes;
  }

  KernelSet& kernels;
  const Buffer state, low, high, log, count;
};

void BranchesKeepTheirOrder(Device& device) {
  Branches branches(device);
  const auto stream = device.NewStream(StreamKind::kCompute);
  const size_t bytes = branches.state.bytes();
  const Buffer in = Allocate(device, MemoryKind::kPinned, bytes);
  const Buffer out = Allocate(device, MemoryKind::kPinned, bytes);
  const auto whole = [&](Stream& s) {
    s.Copy(branches.state.data(), in.data(), bytes);
    branches.Enqueue(s);
    s.Copy(out.data(), branches.state.data(), bytes);
  };
  const auto program = device.Record(*stream, whole);
  REQUIRE(program.ok());
  for (int round = 0; round < 60; ++round) {
    const std::vector<uint8_t> want = Random(bytes);
    std::memcpy(in.data(), want.data(), bytes);
    std::memset(out.data(), 0, bytes);
    stream->Fill(branches.log.data(), 0, branches.log.bytes());
    if (round % 3 == 0) {
      whole(*stream);
    } else {
      (*program)->Run(*stream);
    }
    Finish(device, *stream);
    REQUIRE(std::memcmp(out.data(), Branches::Expect(want).data(), bytes) == 0);
    const std::vector<uint8_t> log = Read(device, branches.log.data(), branches.log.bytes());
    for (int layer = 0; layer < Branches::kLayers; ++layer) {
      REQUIRE(log[static_cast<size_t>(layer + 1) * Branches::kUnitBytes - 1] == layer + 1);
    }
  }
}
SLUICE_TEST_ON_EVERY_DEVICE("branches keep the order that After() gives them, also in a program",
                            BranchesKeepTheirOrder)

void BucketsHold(Device& device) {
  int last = 0;
  for (int rows = 1; rows <= 4096; ++rows) {
    const int bucket = device.RowBucket(rows);
    if (bucket == 0) continue;
    REQUIRE(bucket >= rows);
    REQUIRE(bucket >= last);
    REQUIRE(device.RowBucket(bucket) == bucket);
    last = bucket;
  }
}
SLUICE_TEST_ON_EVERY_DEVICE("a bucket holds its rows, and is its own", BucketsHold)

void Fails(Device& device) {
  const Buffer memory = Allocate(device, MemoryKind::kDevice, 64 << 20);
  const Buffer host = Allocate(device, MemoryKind::kPinned, 64 << 20);
  const auto stream = device.NewStream(StreamKind::kCopy);
  const auto before = device.NewTimedEvent(), after = device.NewTimedEvent();
  stream->Record(*before);
  for (int i = 0; i < 8; ++i) stream->Copy(host.data(), memory.data(), memory.bytes());
  stream->Record(*after);
  {
    const ScopedFailpoints armed("device.failure=error*1");
    CHECK(absl::IsInternal(device.Health()));
  }
  CHECK(ReasonOf(device.Health()) == "GPU_FAILED");  // the failure stays
  before->Wait();
  after->Wait();
  CHECK(after->Since(*before) >= absl::ZeroDuration());
  stream->Copy(host.data(), memory.data(), 64);
  stream->Record(*after);
  after->Wait();
}
TEST_CASE("on a failed device no wait hangs (cpu)", "[device]") {
  if (!kFailpointsCompiledIn) return SkipTest("this build has no failpoints");
  Fails(**testing::TestDevice("auto"));
}
TEST_CASE("on a failed device no wait hangs (cuda)", "[device][cuda]") {
  const auto device = testing::TestDevice("cuda");
  if (absl::IsNotFound(device.status())) {
    return SkipTest(std::string(device.status().message()));
  }
  REQUIRE(device.ok());
  if (!kFailpointsCompiledIn) return SkipTest("this build has no failpoints");
  Fails(**device);
}

// Only row-major kernel sets: what Prepare makes can be compared byte for byte.
void WeightsAreWhatTheyWere(Device& device) {
  std::mt19937 random(static_cast<unsigned>(TestSeed()));
  for (const int32_t k : {5, 64, 4096}) {
    std::vector<uint16_t> want, first(size_t(700) * size_t(k));
    for (uint16_t& w : first) w = static_cast<uint16_t>(random());
    const std::vector<uint16_t> last(first.begin(), first.begin() + 33 * k);
    const kernels::WeightFormula formula{0x1234567890ABCDEFull, 0.125f, 1.0f};
    std::vector<uint16_t> made(size_t(301) * size_t(k));
    kernels::FillWeights(formula, 0, static_cast<int64_t>(made.size()), made.data());
    for (const std::vector<uint16_t>& part : {first, made, last}) {
      want.insert(want.end(), part.begin(), part.end());
    }
    const MatrixPart parts[] = {{first.data(), 700}, {nullptr, 301, formula}, {last.data(), 33}};
    const auto weight = device.kernels().Prepare(parts, k);
    REQUIRE(weight.ok());
    REQUIRE(weight->matrix.n == 1034);
    REQUIRE(weight->matrix.k == k);
    REQUIRE(weight->matrix.layout == kernels::WeightLayout::kRowMajor);
    const std::vector<uint8_t> seen = Read(device, weight->matrix.data, want.size() * 2);
    CHECK(std::memcmp(seen.data(), want.data(), seen.size()) == 0);
  }
}
TEST_CASE("weights read or made by formula are one below the other (cpu)", "[device]") {
  OnDevice("reference", WeightsAreWhatTheyWere);
}
TEST_CASE("weights read or made by formula are one below the other (cuda)", "[device][cuda]") {
  OnDevice("cuda", WeightsAreWhatTheyWere);
}

}  // namespace
}  // namespace sluice
