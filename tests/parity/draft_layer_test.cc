// The next-token layer of a model on every kernel path, against float64 arithmetic. The float64
// model is held to transformers' logits first.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <vector>

#include "src/attention/latent/draft_window.h"
#include "src/model/model.h"
#include "tests/fixtures/fixtures.h"
#include "tests/parity/latent_float64.h"
#include "tests/parity/parity_support.h"
#include "tests/parity/plain_latent_policy.h"
#include "tests/support/device.h"
#include "tests/support/or_fail.h"

namespace sluice {
namespace {

using testing::HasPath;
using testing::LatentFloat64;
using testing::PlainLatentPolicy;
using testing::TestDevice;

constexpr int kTokens = 40;
constexpr int kMaxContext = 64;

// Returns |got - want| / |want|.
double Difference(const float* got, const LatentFloat64::Row& want) {
  double off = 0, size = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    off += (got[i] - want[i]) * (got[i] - want[i]);
    size += want[i] * want[i];
  }
  return std::sqrt(off / size);
}

std::vector<int32_t> Tokens(int vocab) {
  std::vector<int32_t> tokens;
  for (int i = 0; i < kTokens; ++i) tokens.push_back((i * 7919 + 13) % vocab);
  return tokens;
}

// One sequence in slot 1 of 2, whose rows a test passes to the model and its next-token layer.
class Rig {
 public:
  Rig(const std::string& dir, const std::string& format, const std::string& kernels, DType type)
      : device_(OrFail(TestDevice(kernels))) {
    Model::Options options;
    options.directory = dir;
    options.load_format = format;
    options.kv_dtype = type;
    options.max_context = kMaxContext;
    options.max_rows = options.max_logits = kTokens;
    options.draft_layer = Model::Options::DraftLayer::kRequired;
    model_ = OrFail(Model::Load(options, device_.get()));
    REQUIRE(model_->drafts());
    const ModelConfig& config = model_->config();
    policy_ = std::make_unique<PlainLatentPolicy>(device_.get(), config, model_->cache_layout(),
                                                  kTokens, kMaxContext);
    DraftWindow::Options window;
    window.device = device_.get();
    window.layout = &model_->cache_layout();
    window.heads = config.heads;
    window.rank = config.latent->rank;
    window.rope = config.latent->rope_dim;
    window.slots = 2;
    window.max_rows = window.decode_rows = kTokens;
    window.max_context = kMaxContext;
    window_ = OrFail(DraftWindow::Create(window));
    stream_ = device_->NewStream(Device::StreamKind::kCompute);
    done_ = device_->NewEvent();
    logits_ = OrFail(device_->Allocate(
        MemoryKind::kDevice, size_t{kTokens} * static_cast<size_t>(config.vocab_size) * 4, "test"));
    window_->Begin(*stream_, 0, 0);
  }

  const ModelConfig& config() const { return model_->config(); }

  // Runs the model over tokens [0, rows) and returns all logits.
  std::vector<float> Forward(const std::vector<int32_t>& tokens, int rows) {
    SetTokens(tokens);
    std::vector<int32_t> slots(static_cast<size_t>(rows), 0), positions(slots.size());
    std::iota(positions.begin(), positions.end(), 0);
    slots_ = Upload(slots);
    positions_ = Upload(positions);
    numbers_ = Upload(positions);
    policy_->BeginStep(*stream_, slots, positions);
    StepInputs in;
    in.tokens = history_.as<int32_t>();
    in.token_stride = kMaxContext;
    in.slots = slots_.as<int32_t>();
    in.positions = positions_.as<int32_t>();
    in.rows = in.logit_count = rows;
    in.logit_rows = numbers_.as<int32_t>();
    in.logits = logits_.as<float>();
    model_->Forward(*stream_, in, *policy_);
    return Read(rows);
  }

  void SetTokens(const std::vector<int32_t>& tokens) {
    std::vector<int32_t> history(kMaxContext, -1);
    std::copy(tokens.begin(), tokens.end(), history.begin());
    history_ = Upload(history);
  }

  // Runs the next-token layer over rows [first, first + rows), behind rows `previous` of the last
  // Draft or, if that is empty, behind Forward. Returns all logits.
  std::vector<float> Draft(int first, int rows, const std::vector<int32_t>& previous = {}) {
    std::vector<int32_t> slots(static_cast<size_t>(rows), 0), positions(slots.size());
    std::iota(positions.begin(), positions.end(), first);
    slots_ = Upload(slots);
    if (first == 0) slots[0] = -1;
    token_slots_ = Upload(slots);
    positions_ = Upload(positions);
    previous_ = Upload(previous);
    DraftInputs in;
    in.tokens = history_.as<int32_t>();
    in.token_stride = kMaxContext;
    in.slots = slots_.as<int32_t>();
    in.token_slots = token_slots_.as<int32_t>();
    in.positions = positions_.as<int32_t>();
    in.rows = in.logit_count = rows;
    in.decode_rows = previous.empty() ? 0 : rows;
    in.previous = previous.empty() ? nullptr : previous_.as<int32_t>();
    in.logit_rows = numbers_.as<int32_t>();
    in.logits = logits_.as<float>();
    model_->Draft(*stream_, in, *window_);
    return Read(rows);
  }

 private:
  Buffer Upload(const std::vector<int32_t>& values) {
    Buffer buffer = OrFail(device_->Allocate(
        MemoryKind::kDevice, std::max<size_t>(values.size(), 1) * sizeof(int32_t), "test"));
    stream_->Copy(buffer.data(), values.data(), values.size() * sizeof(int32_t));
    Finish();
    return buffer;
  }
  std::vector<float> Read(int rows) {
    std::vector<float> out(static_cast<size_t>(rows * config().vocab_size));
    const Buffer host = OrFail(device_->Allocate(MemoryKind::kPinned, logits_.bytes(), "test"));
    stream_->Copy(host.data(), logits_.data(), logits_.bytes());
    Finish();
    std::copy_n(host.as<float>(), out.size(), out.begin());
    return out;
  }
  void Finish() {
    stream_->Record(*done_);
    done_->Wait();
    REQUIRE(device_->Health().ok());
  }

  std::unique_ptr<Device> device_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<PlainLatentPolicy> policy_;
  std::unique_ptr<DraftWindow> window_;
  std::unique_ptr<Stream> stream_;
  std::unique_ptr<Event> done_;
  Buffer logits_, history_, slots_, token_slots_, positions_, previous_, numbers_;
};

// Returns the worst difference of any draft's logits.
double WorstDifference(const std::string& dir, const std::string& format, Rig& rig) {
  const ModelConfig config = LoadModelConfig(dir).value();
  LatentFloat64 want(
      config, format == "dummy" ? DummyWeights(config) : OrFail(OpenCheckpoint(dir, config)));
  const std::vector<int32_t> tokens = Tokens(config.vocab_size);
  // Rows [0, kTokens - 2) know the token behind them, and one more draft follows the last of them.
  constexpr int kRows = kTokens - 2;
  const size_t vocab = static_cast<size_t>(config.vocab_size);
  std::vector<LatentFloat64::Row> hidden = want.Hidden({tokens.begin(), tokens.begin() + kRows});
  const std::vector<float> main = rig.Forward(tokens, kRows);
  double worst = 0;
  for (size_t row = 0; row < kRows; ++row) {
    worst = std::max(worst, Difference(&main[row * vocab], want.Logits(hidden[row])));
  }
  std::vector<int32_t> next(tokens.begin() + 1, tokens.begin() + 1 + kRows);
  const std::vector<LatentFloat64::Row> first = want.Draft(next, hidden);
  const std::vector<float> drafts = rig.Draft(0, kRows);
  for (size_t row = 0; row < kRows; ++row) {
    worst = std::max(worst, Difference(&drafts[row * vocab], want.DraftLogits(first[row])));
  }
  // The second draft takes the first one's output in place of a hidden state.
  hidden.push_back(first.back());
  next.push_back(tokens[kRows + 1]);
  const std::vector<float> second = rig.Draft(kRows, 1, {kRows - 1});
  return std::max(worst,
                  Difference(second.data(), want.DraftLogits(want.Draft(next, hidden).back())));
}

double WorstOf(const std::string& name, const std::string& format, const std::string& kernels,
               DType type) {
  const std::string dir = format == "dummy" ? fixtures::SourceDir(name) : fixtures::ModelDir(name);
  Rig rig(dir, format, kernels, type);
  return WorstDifference(dir, format, rig);
}

// The bound has room for a row or two whose experts are others than in float64, as random weights
// have near ties.
void CheckPath(const std::string& path) {
  if (!HasPath(path)) return;
  for (const std::string& name : fixtures::TinyDraftModels()) {
    INFO(name << " on " << path);
    CHECK(WorstOf(name, "dummy", path, DType::kBFloat16) < 0.12);
  }
}

}  // namespace

TEST_CASE("the float64 model gives transformers' logits") {
  for (const std::string& name : fixtures::TinyLatentModels()) {
    const ModelConfig config = LoadModelConfig(fixtures::SourceDir(name)).value();
    LatentFloat64 model(config, OrFail(OpenCheckpoint(fixtures::ModelDir(name), config)));
    const fixtures::GoldenCase golden = OrFail(fixtures::LoadGolden(name)).at(1);
    const auto hidden = model.Hidden(golden.prompt);
    const LatentFloat64::Row logits = model.Logits(hidden.back());
    INFO(name);
    CHECK(Difference(golden.logits.data(), logits) < 1e-4);
  }
}

TEST_CASE("drafts on reference kernels are those of float64 arithmetic") {
  for (const std::string& name : fixtures::TinyDraftModels()) {
    for (const char* format : {"dummy", "auto"}) {
      INFO(name << " " << format);
      CHECK(WorstOf(name, format, "reference", DType::kFloat32) < 1e-4);
    }
  }
}

TEST_CASE("drafts of bf16 caches are near float64 on portable kernels") { CheckPath("portable"); }
TEST_CASE("drafts of bf16 caches are near float64 on AVX2 kernels") { CheckPath("avx2"); }
TEST_CASE("drafts of bf16 caches are near float64 on AVX-512 kernels") { CheckPath("avx512bf16"); }
TEST_CASE("drafts of bf16 caches are near float64 on AMX kernels") { CheckPath("amx"); }
TEST_CASE("drafts of bf16 caches are near float64 on a GPU", "[cuda]") { CheckPath("cuda"); }

}  // namespace sluice
