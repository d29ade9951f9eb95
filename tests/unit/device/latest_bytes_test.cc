// These tests hold LatestBytes to what its readers may see while it is written.
#include "src/device/latest_bytes.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

namespace sluice {
namespace {

using Bytes = std::vector<uint8_t>;

// Returns a post that says which one it is: all of its words are the number, which also gives their
// count.
Bytes Post(uint32_t number) {
  const std::vector<uint32_t> words(1 + number % 700, number);
  Bytes bytes(words.size() * sizeof(uint32_t));
  std::memcpy(bytes.data(), words.data(), bytes.size());
  return bytes;
}
uint32_t NumberOf(const Bytes& bytes) {
  uint32_t number = 0;
  std::memcpy(&number, bytes.data(), sizeof(number));
  return number;
}
bool IsWhole(const Bytes& bytes) {
  return bytes.size() >= sizeof(uint32_t) && bytes == Post(NumberOf(bytes));
}

TEST_CASE("what was posted last is read, of every length", "[device]") {
  const auto latest = std::make_unique<LatestBytes>();
  CHECK_FALSE(latest->Read().has_value());
  for (const size_t size : {size_t{5}, LatestBytes::kMostBytes, size_t{8}, size_t{0}, size_t{17}}) {
    Bytes bytes(size);
    for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<uint8_t>(i * 7 + size);
    latest->Post(bytes);
    REQUIRE(latest->Read().has_value());
    CHECK(*latest->Read() == bytes);
  }
}

TEST_CASE("readers see one post whole, and never an older one after a newer one", "[device]") {
  const auto latest = std::make_unique<LatestBytes>();
  constexpr uint32_t kPosts = 20000;
  std::atomic<bool> over = false;
  std::atomic<int> wrong = 0, seen = 0;
  std::vector<std::thread> readers;
  for (int i = 0; i < 2; ++i) {
    readers.emplace_back([&] {
      uint32_t before = 0;
      while (!over) {
        const auto bytes = latest->Read();
        if (!bytes.has_value()) continue;
        ++seen;
        if (!IsWhole(*bytes) || NumberOf(*bytes) < before) ++wrong;
        before = NumberOf(*bytes);
      }
    });
  }
  for (uint32_t number = 1; number <= kPosts; ++number) {
    latest->Post(Post(number));
    if (number % 100 == 0) std::this_thread::yield();
  }
  over = true;
  for (std::thread& reader : readers) reader.join();
  CHECK(wrong == 0);
  CHECK(seen > 0);
  CHECK(*latest->Read() == Post(kPosts));
}

TEST_CASE("a writer that is killed, in a write or not, keeps no reader waiting",
          "[device][processes]") {
  void* memory =
      mmap(nullptr, sizeof(LatestBytes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(memory != MAP_FAILED);
  auto* const latest = static_cast<LatestBytes*>(memory);  // zeros are an empty one
  CHECK_FALSE(latest->Read().has_value());
  for (int round = 0; round < 20; ++round) {
    const pid_t writer = fork();
    if (writer == 0) {
      for (uint32_t number = 1;; ++number) latest->Post(Post(number));
    }
    usleep(2000);
    kill(writer, SIGKILL);
    waitpid(writer, nullptr, 0);
    const auto bytes = latest->Read();  // nothing, if it was killed in a write
    if (bytes.has_value()) CHECK(IsWhole(*bytes));
    std::memset(memory, 0, sizeof(LatestBytes));
  }
  munmap(memory, sizeof(LatestBytes));
}

}  // namespace
}  // namespace sluice
