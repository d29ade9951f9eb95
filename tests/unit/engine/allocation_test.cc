// Tests that a steady decode step allocates nothing, neither on the engine's thread nor on the
// device's.
//
// This is a program of its own because it counts every operator new of the process.
#include <atomic>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <new>

#include "src/engine/engine.h"
#include "src/engine/mtp_drafter.h"
#include "tests/fixtures/fixtures.h"
#include "tests/support/node.h"
#include "tests/test_main.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SLUICE_UNCOUNTED 1  // a sanitizer has operators of its own
#endif

namespace {

std::atomic<bool> counting{false};
std::atomic<int64_t> allocations{0};

[[maybe_unused]] void* Counted(std::size_t bytes, std::size_t alignment) {
  if (counting.load(std::memory_order_relaxed)) allocations.fetch_add(1);
  void* memory =
      alignment <= alignof(std::max_align_t)
          ? std::malloc(bytes)
          : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

#ifndef SLUICE_UNCOUNTED
void* operator new(std::size_t bytes) { return Counted(bytes, 1); }
void* operator new[](std::size_t bytes) { return Counted(bytes, 1); }
void* operator new(std::size_t bytes, std::align_val_t alignment) {
  return Counted(bytes, static_cast<std::size_t>(alignment));
}
void* operator new[](std::size_t bytes, std::align_val_t alignment) {
  return Counted(bytes, static_cast<std::size_t>(alignment));
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
#endif

namespace sluice {
namespace {

using testing::GreedyRequest;
using testing::Node;
using testing::NodeOptions;

TEST_CASE("a steady step allocates nothing, growth and log-probabilities included") {
#ifdef SLUICE_UNCOUNTED
  SkipTest("a sanitizer counts allocations itself");
  return;
#endif
  const double overcommit = GENERATE(1.0, 2.0);
  const int row_bucket = GENERATE(0, 8);  // 8: a step is a recorded program, padded
  const auto mtp = NewMtpDrafter();
  const bool drafts = GENERATE(false, true);
  NodeOptions options;
  options.model_dir = fixtures::ModelDir(drafts ? "tiny-deepseek-mtp" : "tiny-llama");
  options.drafter = drafts ? mtp.get() : nullptr;
  options.draft_tokens = drafts ? 3 : 0;
  options.max_context = 1024;
  options.run_engine = false;
  options.overcommit = overcommit;
  options.row_bucket = row_bucket;
  Node node(options);
  std::vector<std::shared_ptr<TokenStream>> streams;
  for (int i = 0; i < 4; ++i) {
    Request request = GreedyRequest({1, 7, 9}, 1000);
    request.sampling.logprobs = i % 2 == 0 ? 5 : 0;
    if (i % 2 == 1) {
      request.sampling.temperature = 0.8f;
      request.sampling.repetition_penalty = 1.1f;
    }
    request.deadline = options.clock->Now() + absl::Hours(1);
    streams.push_back(node.Start(std::move(request)));
  }
  const auto turn = [&] {
    const Engine::Next next = node.engine().Turn();
    if (next.kind == Engine::Next::Kind::kEvent) next.event->Wait();
  };
  size_t tokens = 0;
  const auto read = [&] {
    for (const auto& stream : streams) tokens += stream->Read().tokens.size();
  };
  // Runs until buffers have reached their size.
  while (tokens < 4 * 100) {
    for (int i = 0; i < 40; ++i) turn();
    read();
  }
  // Runs past token 512, where a sequence takes further pages. With drafts some sequences are far
  // ahead of others, and none may end.
  const size_t until = drafts ? 4 * 450 : 4 * 800;
  const size_t before = tokens;
  const uint64_t steps = node.engine().times().steps;
  allocations = 0;
  while (tokens < until) {
    counting = true;
    for (int i = 0; i < 20; ++i) turn();
    counting = false;
    read();
  }
  INFO(node.engine().times().steps - steps << " steps, " << tokens - before << " tokens");
  // A step with drafts may give a sequence four tokens.
  CHECK(node.engine().times().steps - steps >= (drafts ? 90 : 600));
  CHECK(allocations == 0);
  node.engine().CancelAll(absl::CancelledError("test"));
  for (int i = 0; i < 40; ++i) turn();
  CHECK(node.Quiescent());
}

TEST_CASE("what is counted is what allocates") {
#ifdef SLUICE_UNCOUNTED
  SkipTest("a sanitizer counts allocations itself");
  return;
#endif
  allocations = 0;
  counting = true;
  int* volatile made = new int(1);  // without it the compiler may leave out both
  delete made;
  counting = false;
  CHECK(allocations >= 1);
}

}  // namespace
}  // namespace sluice
