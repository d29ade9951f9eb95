// These tests say how a model is divided among ranks, and that a source gives parts of a matrix.
#include "src/model/shard.h"

#include <catch2/catch.hpp>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "src/model/checkpoint.h"
#include "src/model/dummy_weights.h"
#include "src/model/safetensors.h"
#include "src/model/tensor_list.h"
#include "src/model/weight_source.h"
#include "tests/fixtures/fixtures.h"

namespace sluice {
namespace {

ModelConfig Config(const std::string& name) {
  return LoadModelConfig(fixtures::SourceDir(name)).value();
}

void CheckTiles(const std::vector<ShardPart>& parts, int all) {
  int next = 0;
  for (const ShardPart& part : parts) {
    CHECK(part.first == next);
    CHECK(part.count > 0);
    next += part.count;
  }
  CHECK(next == all);
}

TEST_CASE("the parts of all ranks are the whole, and no two overlap") {
  for (const std::string& name : fixtures::TinyModels()) {
    const ModelConfig config = Config(name);
    for (const int size : {1, 2, 4}) {
      std::vector<ShardPart> heads, inner, hidden, vocabulary;
      for (int rank = 0; rank < size; ++rank) {
        const auto shard = ShardOf(config, rank, size);
        INFO(name << " " << rank << " of " << size << " " << shard.status());
        REQUIRE(shard.ok());
        heads.push_back(shard->heads);
        inner.push_back(shard->inner);
        hidden.push_back(shard->hidden);
        vocabulary.push_back(shard->vocabulary);
        // Every query's head finds its KV head on the rank.
        const int group = config.heads / config.kv_heads;
        const ModelConfig part = PartOf(config, *shard);
        for (int head = 0; head < shard->heads.count; ++head) {
          const int own = head / (part.heads / part.kv_heads);
          CHECK(shard->kv_heads.first + own == (shard->heads.first + head) / group);
        }
      }
      CheckTiles(heads, config.heads);
      CheckTiles(inner, config.intermediate_size);
      CheckTiles(hidden, config.hidden_size);
      CheckTiles(vocabulary, config.vocab_size);
    }
  }
}

TEST_CASE("a model that cannot be divided is refused by name") {
  const auto refused = [](const ModelConfig& config, int size, const char* names) {
    const absl::Status status = ShardOf(config, 0, size).status();
    INFO(status);
    CHECK(absl::IsInvalidArgument(status));
    CHECK(status.message().find("tensor_parallel") != std::string::npos);
    CHECK(status.message().find(names) != std::string::npos);
  };
  ModelConfig config = Config("tiny-llama");
  refused(config, 0, "of 0 ranks");
  refused(config, 3, "KV heads");
  refused(config, 8, "heads");  // 2 heads for each KV head, and 4 ranks
  config.intermediate_size = 255;
  refused(config, 2, "intermediate_size 255");
  config = Config("tiny-llama");
  config.vocab_size = 40;
  refused(config, 4, "vocab_size 40");
  CHECK(absl::IsUnimplemented(ShardOf(Config("tiny-deepseek-v32"), 0, 2).status()));
  CHECK(ShardOf(Config("tiny-deepseek-v32"), 0, 1).ok());
}

TEST_CASE("experts are divided evenly or not at all") {
  const ModelConfig config = Config("tiny-deepseek-v32");
  for (const int size : {1, 2, 4, 8}) {
    for (int rank = 0; rank < size; ++rank) {
      for (const int redundancy : {0, 8 - 8 / size}) {
        const auto shard = ExpertShardOf(config, rank, size, redundancy);
        REQUIRE(shard.ok());
        CHECK(shard->each == 8 / size + redundancy);
      }
    }
  }
  const auto refused = [](const ModelConfig& of, int rank, int size, const char* names,
                          int redundancy = 0, const char* setting = "expert_parallel: ") {
    const absl::Status status = ExpertShardOf(of, rank, size, redundancy).status();
    INFO(status);
    CHECK(absl::IsInvalidArgument(status));
    CHECK(status.message().find(setting) == 0);
    CHECK(status.message().find(names) != std::string::npos);
  };
  refused(config, 0, 3, "8 experts, which 3 ranks");
  refused(config, 0, 16, "8 experts, which 16 ranks");
  refused(config, 2, 2, "rank 2 of 2");
  refused(Config("tiny-llama"), 0, 2, "tensor_parallel");
  refused(config, 0, 4, "copies of up to 6 more, but expert_redundancy is 7", 7,
          "expert_redundancy: ");
  refused(config, 0, 1, "up to 0 more", 1, "expert_redundancy: ");
}

TEST_CASE("a vocabulary of any size is divided") {
  ModelConfig config = Config("tiny-llama");
  for (const int vocabulary : {64, 100, 32'001, 128'256, 151'936}) {
    config.vocab_size = vocabulary;
    std::vector<ShardPart> parts;
    for (int rank = 0; rank < 4; ++rank) {
      const auto shard = ShardOf(config, rank, 4);
      REQUIRE(shard.ok());
      CHECK(shard->vocabulary_step % 16 == 0);
      CHECK((rank == 3 || shard->vocabulary.count == shard->vocabulary_step));
      parts.push_back(shard->vocabulary);
    }
    CheckTiles(parts, vocabulary);
  }
}

// Checks parts of a matrix against the whole.
void CheckSlices(WeightSource& source, const std::string& name, int64_t rows, int64_t cols) {
  INFO(name);
  const auto whole = source.Matrix(name, rows, cols);
  REQUIRE(whole.ok());
  for (const MatrixRange& range :
       {MatrixRange{0, rows, 0, cols}, MatrixRange{rows / 2, rows / 4, 0, cols},
        MatrixRange{0, rows, cols / 2, cols / 4}, MatrixRange{3, 7, 5, 11}}) {
    auto part = source.Slice(name, rows, cols, range);
    INFO(part.status());
    REQUIRE(part.ok());
    REQUIRE(part->rows() == range.rows);
    REQUIRE(part->cols() == range.cols);
    for (int64_t row = 0; row < range.rows; ++row) {
      const uint16_t* want = whole->data() + (range.first_row + row) * cols + range.first_col;
      REQUIRE(std::memcmp(part->data() + row * range.cols, want, size_t(range.cols) * 2) == 0);
    }
    source.Release(*std::move(part));
  }
}

TEST_CASE("a part of a matrix is what the whole has there, however it is stored") {
  const std::string up = LayerTensor(1, "mlp.up_proj.weight");
  for (const std::string& name : fixtures::TinyModels()) {
    const ModelConfig config = Config(name);
    auto stored = OpenCheckpoint(fixtures::ModelDir(name), config);
    REQUIRE(stored.ok());
    CheckSlices(**stored, up, config.intermediate_size, config.hidden_size);
    CheckSlices(**stored, kEmbeddingTensor, config.vocab_size, config.hidden_size);
    const auto made = DummyWeights(config);
    CheckSlices(*made, up, config.intermediate_size, config.hidden_size);
  }
}

TEST_CASE("a part of a matrix of F16 or F32 is converted") {
  ModelConfig config = Config("tiny-llama");
  const auto stored = Checkpoint::Open(fixtures::ModelDir("tiny-llama"));
  REQUIRE(stored.ok());
  for (const TensorType type : {TensorType::kF16, TensorType::kF32}) {
    std::vector<fixtures::RawTensor> tensors;
    for (const auto& [name, entry] : stored->tensors()) {
      const auto n = static_cast<size_t>(entry.tensor->elements());
      fixtures::RawTensor raw{name, type, entry.tensor->shape, ""};
      for (size_t i = 0; i < n; ++i) {
        if (type == TensorType::kF16) {
          const auto bits = static_cast<uint16_t>(0x2000 + i % 0x1800);  // small normal numbers
          raw.bytes.append(reinterpret_cast<const char*>(&bits), 2);
        } else {
          const float value = static_cast<float>(i % 1000) * 0.013f - 5.0f;
          raw.bytes.append(reinterpret_cast<const char*>(&value), 4);
        }
      }
      tensors.push_back(std::move(raw));
    }
    const fixtures::TempDir dir;
    REQUIRE(fixtures::WriteSafetensors(dir.File("model.safetensors"), tensors).ok());
    auto source = OpenCheckpoint(dir.path(), config);
    REQUIRE(source.ok());
    CheckSlices(**source, LayerTensor(0, "self_attn.o_proj.weight"), config.hidden_size,
                config.q_size());
  }
}

TEST_CASE("a part of a formula is a formula") {
  const TensorSpec spec{LayerTensor(0, "mlp.up_proj.weight"), {64, 32}};
  kernels::WeightFormula formula = DummyFormula(spec, false, kDummySeed);
  for (const uint64_t live : {~uint64_t{0}, uint64_t{100}, uint64_t{700}}) {
    formula.live = live;
    const kernels::WeightFormula part = FormulaFrom(formula, 640);
    for (uint64_t i = 0; i < 200; ++i) {
      REQUIRE(kernels::FormulaElement(part, i) == kernels::FormulaElement(formula, 640 + i));
    }
  }
}

}  // namespace
}  // namespace sluice
