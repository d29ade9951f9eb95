#include "tests/parity/teacher.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstring>

#include "src/attention/policy_factory.h"
#include "src/base/status_macros.h"
#include "src/device/trace.h"
#include "src/model/policy_model.h"
#include "tests/support/device.h"
#include "tests/support/or_fail.h"

namespace sluice::testing {
namespace {

constexpr int kMaxRows = 512;
constexpr int kMaxContext = 1024;
constexpr size_t kPoolBytes = size_t{32} << 20;

}  // namespace

Teacher::Teacher(const std::string& model_dir, const std::string& kernels, DType kv_dtype,
                 const Choose& choose, const RankGroupOptions* ranks, Divided divided,
                 const Experts& experts) {
  device_ = OrFail(TestDevice(kernels));
  Model::Options options;
  if (ranks != nullptr) {
    ranks_ = OrFail(device_->JoinRanks(*ranks));
    const bool tensors = divided == Divided::kTensors;
    (tensors ? options.tensor_parallel : options.expert_parallel) = ranks->size;
    options.fp8_dispatch = divided == Divided::kExpertsByFp8;
    options.expert_redundancy = experts.redundancy;
    options.expert_load = experts.load;
    options.count_expert_load = experts.count;
    options.rank = ranks->rank;
    options.ranks = ranks_.get();
  }
  options.directory = model_dir;
  options.kv_dtype = kv_dtype;
  options.max_context = kMaxContext;
  options.max_rows = kMaxRows;
  options.max_logits = 1;
  model_ = OrFail(Model::Load(options, device_.get()));
  placed_ = Place(choose);
  front_ = placed_.policy.get();
  stream_ = device_->NewStream(Device::StreamKind::kCompute);
  done_ = device_->NewEvent();
  const BufferAllocator allocator(device_.get(), "test");
  const auto allocate = [&allocator](MirroredBuffer* both, int64_t words) {
    REQUIRE(allocator.MirroredWords(words, both).ok());
  };
  allocate(&tokens_, kMaxContext);
  allocate(&rows_, 3 * kMaxRows + 1);
  allocate(&logits_, model_->config().vocab_size);
}

PlacedPolicy Teacher::Place(const Choose& choose) {
  PolicyOptions options;
  DescribeModel(*model_, &options);
  options.slots = 1;
  options.hbm_bytes = options.dram_bytes = kPoolBytes;
  if (choose != nullptr) choose(options);
  const TierShapes shapes = TierShapesOf(options, model_->cache_layout());
  const auto pool = [this](const char* name, const TierShape& shape, MemoryKind kind) {
    return OrFail(
        PagePool::Create(name, shape, OrFail(device_->Allocate(kind, kPoolBytes, "test"))));
  };
  PlacedPolicy placed;
  placed.hbm = pool("hbm", shapes.hbm, MemoryKind::kDevice);
  placed.dram = pool("dram", shapes.dram, MemoryKind::kPinned);
  options.device = device_.get();
  options.hbm = placed.hbm.get();
  options.dram = placed.dram.get();
  placed.policy = OrFail(NewPolicy(options));
  return placed;
}

void Teacher::ToDevice(const MirroredBuffer& both) {
  stream_->Copy(both.device.data(), both.host.data(), both.host.bytes());
}

void Teacher::Finish() {
  stream_->Record(*done_);
  done_->Wait();
  REQUIRE(device_->Health().ok());
}

void Teacher::End() {
  if (admitted_) front_->Release(0);
  admitted_ = false;
}

void Teacher::Admit(const std::vector<int32_t>& tokens, int context,
                    std::unique_ptr<SequenceCache> home) {
  std::copy(tokens.begin(), tokens.end(), tokens_.host.as<int32_t>());
  ToDevice(tokens_);
  Finish();
  REQUIRE(front_->Admit(0, context, static_cast<int64_t>(tokens.size()), Promise::kFirm, home));
  AwaitWarm();
  admitted_ = true;
  prompt_ended_ = false;
}

void Teacher::AwaitWarm() {
  while (!front_->Warm(0)) front_->WarmEvent(0).Wait();
}

void Teacher::Begin(const std::vector<int32_t>& tokens) {
  End();
  Admit(tokens, 0, nullptr);
}

void Teacher::BeginWithCache(const std::vector<int32_t>& tokens, int context,
                             const std::vector<std::vector<uint16_t>>& k,
                             const std::vector<std::vector<uint16_t>>& v) {
  End();
  const auto total = static_cast<int64_t>(tokens.size());
  auto home = std::make_unique<SequenceCache>(
      placed_.dram.get(),
      placed_.dram->TryReserve(front_->FootprintOf(context, total).dram_tokens));
  home->EnsureTokens(context);
  const CacheKind& kind = model_->cache_layout().kinds[0];
  const int dim = model_->config().head_dim;
  for (int layer = 0; layer < model_->cache_layout().layers; ++layer) {
    for (int token = 0; token < context; ++token) {
      for (int head = 0; head < kind.heads; ++head) {
        uint8_t* block = home->BlockAddress(layer, 0, head, token / kind.block_tokens);
        for (int part = 0; part < 2; ++part) {
          const auto& source = (part == 0 ? k : v)[static_cast<size_t>(layer)];
          const size_t from = (static_cast<size_t>(token) * static_cast<size_t>(kind.heads) +
                               static_cast<size_t>(head)) *
                              static_cast<size_t>(dim);
          const int at = (part * kind.block_tokens + token % kind.block_tokens) * dim;
          for (int d = 0; d < dim; ++d) {
            const uint16_t bits = source[from + static_cast<size_t>(d)];
            if (kind.element_type == DType::kBFloat16) {
              reinterpret_cast<uint16_t*>(block)[at + d] = bits;
            } else {
              reinterpret_cast<float*>(block)[at + d] = BFloat16ToFloat(bits);
            }
          }
        }
      }
    }
  }
  Admit(tokens, context, std::move(home));
}

void Teacher::SetToken(int position, int32_t token) {
  tokens_.host.as<int32_t>()[position] = token;
  ToDevice(tokens_);
  Finish();
}

StepInputs Teacher::InputsOf(int count, int decode_rows, int most_rows) {
  StepInputs in;
  in.tokens = tokens_.device.as<int32_t>();
  in.token_stride = kMaxContext;
  in.slots = rows_.device.as<int32_t>();
  in.positions = in.slots + kMaxRows;
  in.rows = count;
  in.decode_rows = decode_rows;
  in.numbers = in.positions + kMaxRows;
  in.logit_rows = in.numbers + kMaxRows;
  in.logits = logits_.device.as<float>();
  in.most_rows = most_rows;
  return in;
}

void Teacher::IdleStep(int most_rows) {
  auto* const slots = rows_.host.as<int32_t>();
  slots[0] = -1;
  slots[kMaxRows] = slots[2 * kMaxRows] = 0;
  front_->BeginStep(*stream_, {}, {});
  ToDevice(rows_);
  model_->Forward(*stream_, InputsOf(1, 1, most_rows), *front_);
  Finish();
}

std::vector<float> Teacher::Step(int position, int count, bool generates, int most_rows) {
  if (generates && !prompt_ended_) {
    front_->EndPrompt(0, position, {});
    AwaitWarm();
    prompt_ended_ = true;
    decoded_ = 0;
  }
  int32_t* slots = rows_.host.as<int32_t>();
  int32_t* positions = slots + kMaxRows;
  int32_t* numbers = positions + kMaxRows;
  int32_t* logit_row = numbers + kMaxRows;
  for (int i = 0; i < count; ++i) {
    slots[i] = 0;
    positions[i] = position + i;
    numbers[i] = generates ? decoded_++ : 0;
  }
  *logit_row = count - 1;
  front_->Grow(0, position + count);
  front_->BeginStep(*stream_, {slots, static_cast<size_t>(count)},
                    {positions, static_cast<size_t>(count)});
  ToDevice(rows_);
  StepInputs in = InputsOf(count, generates ? count : 0, most_rows);
  in.logit_count = 1;
  model_->Forward(*stream_, in, *front_);
  stream_->Copy(logits_.host.data(), logits_.device.data(), logits_.host.bytes());
  Finish();
  const auto* logits = logits_.host.as<float>();
  return {logits, logits + model_->config().vocab_size};
}

std::vector<float> Teacher::Read(const float* at, size_t count) {
  const Buffer host = OrFail(device_->Allocate(MemoryKind::kPinned, count * 4, "test"));
  stream_->Copy(host.data(), at, count * 4);
  Finish();
  return {host.as<float>(), host.as<float>() + count};
}

std::map<std::string, int> Teacher::LaunchesOfStep(const std::vector<int32_t>& prompt) {
  std::vector<int32_t> tokens = prompt;
  tokens.push_back(1);
  Begin(tokens);
  const int n = static_cast<int>(prompt.size());
  Step(0, n, /*generates=*/false);
  auto trace = device_->StartTrace();
  SLUICE_CHECK(trace.ok());
  Step(n, 1, /*generates=*/true);
  std::map<std::string, int> launches;
  const auto slices = (*trace)->Stop();
  SLUICE_CHECK(slices.ok());
  for (const TraceSlice& slice : *slices) {
    if (slice.kind == TraceSlice::Kind::kKernel) ++launches[slice.name];
  }
  return launches;
}

}  // namespace sluice::testing
