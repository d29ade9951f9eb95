#include "tests/kernels/kernel_test_support.h"

namespace sluice::kernels {
namespace {

const KernelTable& Reference() { return *FindKernelTable("reference"); }

// The result of an operator that writes floats or bf16, as floats, with the tolerance of that type.
double Tolerance(DType type) { return type == DType::kFloat32 ? 2e-6 : 4e-3; }

template <typename Params>
Guarded<float> RunTyped(void (*kernel)(const Params&, Worker), Params p, int64_t size,
                        int workers) {
  if (p.out_type == DType::kFloat32) {
    Guarded<float> out(size);
    p.out = out.data();
    RunWorkers(kernel, p, workers);
    CHECK(out.Damage() == "");
    return out;
  }
  Guarded<uint16_t> out(size);
  p.out = out.data();
  RunWorkers(kernel, p, workers);
  CHECK(out.Damage() == "");
  Guarded<float> floats(size);
  for (int64_t i = 0; i < size; ++i) floats[i] = Bf16ToFloat(out[i]);
  return floats;
}

void TestRmsNorm(const KernelTable& table, Random& random) {
  const auto index = BufferOf<int32_t>({3, -1, 8, 0, 0, 5, -1});
  for (int32_t dim : {1, 15, 16, 33, 576, 4096, 5120, 9216, 16384}) {
    for (int32_t rows : {0, 1, 7}) {
      for (DType type : {DType::kFloat32, DType::kBFloat16}) {
        INFO(rows << " rows of " << dim);
        const int64_t stride = dim + (dim % 3 == 0 ? 5 : 8);
        const auto x = NormalBuffer<float>(9 * stride, random, 3.0f);
        const auto weight = NormalBuffer<float>(dim, random);
        for (const int32_t* rows_of_x : {static_cast<const int32_t*>(nullptr), index.data()}) {
          RmsNormParams p = {x.data(), rows_of_x, weight.data(), nullptr, stride,
                             rows,     dim,       1e-5f,         type};
          const auto want = RunTyped(Reference().rms_norm, p, int64_t{rows} * dim, 1);
          const auto got = RunTyped(table.rms_norm, p, int64_t{rows} * dim, 3);
          CHECK(Difference(got.span(), want.span(), Tolerance(type), dim) == "");
        }
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("rms_norm agrees with the reference", TestRmsNorm)

// Rows of three sequences, which go on for some steps through two layers, with the state of the
// look-ahead in between.
struct AheadRun {
  AheadRun(int32_t elements, DType out_type)
      : dim(elements),
        type(out_type),
        stride(2 * int64_t{dim} + 4),
        before(kRows * dim),
        drift(kSlots * stride),
        out(kRows * dim),
        ahead(kRows * dim) {
    // What lies there before a sequence's first row does not count.
    std::fill_n(drift.data(), drift.size(), std::numeric_limits<float>::quiet_NaN());
    std::fill_n(before.data(), before.size(), 0.0f);
  }

  // Computes the norm before layer `layer` of 2; that of the last one only measures the drift.
  void Step(void (*kernel)(const RmsNormParams&, Worker), int workers, const Guarded<float>& x,
            const Guarded<float>& weight, const Guarded<int32_t>& slots,
            const Guarded<int32_t>& numbers, int layer) {
    RmsNormParams p = {x.data(), nullptr, weight.data(), out.data(), dim, kRows, dim, 1e-5f, type};
    p.ahead.rows = kRows - 1;
    p.ahead.slots = slots.data();
    p.ahead.numbers = numbers.data();
    p.ahead.weight = weight.data();
    p.ahead.out = layer == 0 ? ahead.data() : nullptr;
    p.ahead.drift = drift.data();
    p.ahead.drift_before = layer == 0 ? nullptr : drift.data();
    p.ahead.before = before.data();
    p.ahead.slot_stride = stride;
    RunWorkers(kernel, p, workers);
  }

  static constexpr int32_t kRows = 5, kSlots = 4;
  int32_t dim;
  DType type;
  int64_t stride;
  Guarded<float> before, drift, out, ahead;  // out and ahead hold either type
};

void TestAhead(const KernelTable& table, Random& random) {
  const auto slots = BufferOf<int32_t>({2, -1, 0, 3, 1});
  // In a row of one or two elements x and the drift may cancel, and the norm makes the rest large.
  for (const int32_t dim : {9, 33, 576, 5120}) {
    for (const DType type : {DType::kFloat32, DType::kBFloat16}) {
      INFO(dim << " elements");
      const auto weight = NormalBuffer<float>(dim, random);
      // The reference's results stay floats: they would be rounded once more.
      AheadRun want(dim, DType::kFloat32), got(dim, type);
      for (int32_t step = 0; step < 14; ++step) {
        // The fourth row's sequence gives way to another, whose first row is at step 3.
        const auto numbers = BufferOf<int32_t>({step, 0, step, step < 3 ? step : step - 3, 3});
        const auto at_begin = NormalBuffer<float>(AheadRun::kRows * dim, random, 3.0f);
        const auto at_end = NormalBuffer<float>(AheadRun::kRows * dim, random, 3.0f);
        for (int layer = 0; layer < 2; ++layer) {
          const auto& x = layer == 0 ? at_begin : at_end;
          want.Step(Reference().rms_norm, 1, x, weight, slots, numbers, layer);
          got.Step(table.rms_norm, 1 + step % 3, x, weight, slots, numbers, layer);
        }
        CHECK(got.before.Damage() + got.drift.Damage() + got.out.Damage() == "");
        for (const int32_t slot : {0, 2, 3}) {
          for (int32_t i = 0; i < dim; ++i) {
            const float w = want.drift[slot * want.stride + i];
            REQUIRE(std::fabs(got.drift[slot * got.stride + i] - w) <= 1e-5f * (1 + std::fabs(w)));
          }
        }
        for (int32_t i = 0; i < (AheadRun::kRows - 1) * dim; ++i) {
          const auto value = [&](const Guarded<float>& of) {
            return type == DType::kFloat32
                       ? of[i]
                       : Bf16ToFloat(reinterpret_cast<const uint16_t*>(of.data())[i]);
          };
          REQUIRE(std::fabs(value(got.ahead) - want.ahead[i]) <=
                  Tolerance(type) * (1 + std::fabs(want.ahead[i])));
          REQUIRE(std::fabs(value(got.out) - want.out[i]) <=
                  Tolerance(type) * (1 + std::fabs(want.out[i])));
        }
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("a look-ahead's norm follows the drift of a sequence's rows", TestAhead)

void TestSiluMul(const KernelTable& table, Random& random) {
  for (int32_t dim : {1, 17, 1536, 12288}) {
    for (int32_t rows : {0, 1, 5}) {
      for (DType type : {DType::kFloat32, DType::kBFloat16}) {
        INFO(rows << " rows of " << dim);
        auto gate_up = NormalBuffer<float>(int64_t{rows} * 2 * dim, random, 4.0f);
        const float extremes[] = {0.0f, -0.0f, -87.0f, -89.0f, -300.0f, 88.0f, 300.0f};
        for (int64_t i = 0; i < std::min<int64_t>(7, rows * dim); ++i) gate_up[i] = extremes[i];
        const SiluMulParams p = {gate_up.data(), nullptr, rows, dim, type};
        const auto want = RunTyped(Reference().silu_mul, p, int64_t{rows} * dim, 1);
        const auto got = RunTyped(table.silu_mul, p, int64_t{rows} * dim, 2);
        CHECK(Difference(got.span(), want.span(), Tolerance(type), dim) == "");
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("silu_mul agrees with the reference", TestSiluMul)

void TestEmbedding(const KernelTable& table, Random& random) {
  constexpr int32_t kVocab = 45, kStride = 4;
  const auto tokens = BufferOf<int32_t>({0, 44, 7, -1, 16, 15, 45, 3});  // [2][kStride]
  const auto slots = BufferOf<int32_t>({0, 0, -1, 1, 1, 0, 1});
  const auto positions = BufferOf<int32_t>({0, 1, 0, 0, 3, 3, 2});
  for (int32_t hidden : {1, 71, 4096}) {
    INFO("hidden " << hidden);
    const auto rows = NormalBuffer<uint16_t>(kVocab * hidden, random);
    Guarded<uint16_t> panels(PanelElements(kVocab, hidden));
    std::fill_n(panels.data(), panels.size(), uint16_t{0});
    PackPanels(rows.data(), kVocab, hidden, 0, panels.data());
    const bool packed = table.weight_layout == WeightLayout::kPanel16;
    const WeightMatrix matrix = {packed ? panels.data() : rows.data(), kVocab, hidden,
                                 table.weight_layout};
    Guarded<float> out(7 * hidden);
    const EmbeddingParams p = {tokens.data(), kStride, slots.data(), positions.data(), matrix,
                               out.data(),    7};
    RunWorkers(table.embedding, p, 3);
    CHECK(out.Damage() == "");
    for (int64_t r = 0; r < 7; ++r) {
      const int32_t token = slots[r] < 0 ? -1 : tokens[slots[r] * kStride + positions[r]];
      for (int64_t i = 0; i < hidden; ++i) {
        const bool none = token < 0 || token >= kVocab;
        REQUIRE(out[r * hidden + i] == (none ? 0.0f : Bf16ToFloat(rows[token * hidden + i])));
      }
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("embedding takes the token's row, and zeros for padding and bad tokens",
                          TestEmbedding)
TEST_CASE("embedding takes the token's row, and zeros for padding and bad tokens (reference)",
          "[kernels]") {
  OnPath("reference", TestEmbedding);
}

void TestRopeTable(const KernelTable& table, Random& random) {
  const auto inv_freq = NormalBuffer<float>(32, random);
  const auto positions = BufferOf<int32_t>({0, 1, 77, 8191, 131071});
  Guarded<float> want(5 * 64), got(5 * 64);
  RopeTableParams p = {positions.data(), inv_freq.data(), 1.25f, want.data(), 5, 32};
  RunWorkers(Reference().rope_table, p, 1);
  p.cos_sin = got.data();
  RunWorkers(table.rope_table, p, 2);
  CHECK(got.Damage() == "");
  CHECK(Difference(got.span(), want.span(), 1e-6, 64) == "");
  CHECK(got[0] == 1.25f);
  CHECK(got[1] == 0.0f);
}
SLUICE_TEST_ON_EVERY_PATH("rope_table agrees with the reference at far positions", TestRopeTable)

struct RopeCase {
  int32_t heads, kv_heads, head_dim, block_tokens;
  bool norm;
  DType type;
};

template <typename T>
void CheckRopeAppend(const KernelTable& table, const RopeCase& c, Random& random) {
  constexpr int32_t kRows = 6, kPages = 7, kTable = 3;
  const auto slots = BufferOf<int32_t>({0, 0, -1, 1, 1, 0});
  const auto positions = BufferOf<int32_t>({0, 31, 4, 40, 41, 32});
  const auto pages = BufferOf<int32_t>({6, 1, 3, 0, 5, 2});  // [2][kTable]
  const int64_t width = int64_t{c.heads + 2 * c.kv_heads} * c.head_dim;
  const int64_t page_elements = int64_t{c.kv_heads} * 2 * c.block_tokens * c.head_dim;
  const auto qkv = NormalBuffer<float>(kRows * width, random, 2.0f);
  const auto cos_sin = NormalBuffer<float>(kRows * c.head_dim, random);
  const auto q_norm = NormalBuffer<float>(c.head_dim, random);
  const auto k_norm = NormalBuffer<float>(c.head_dim, random);
  const auto run = [&](const KernelTable& path, Guarded<float>& q, Guarded<T>& cache,
                       Guarded<T>* written, int workers) {
    std::copy_n(qkv.data(), qkv.size(), q.data());
    const RopeAppendParams p = {q.data(),
                                c.norm ? q_norm.data() : nullptr,
                                c.norm ? k_norm.data() : nullptr,
                                cos_sin.data(),
                                slots.data(),
                                positions.data(),
                                {cache.data(), pages.data(), kTable, page_elements * SizeOf(c.type),
                                 c.block_tokens, c.kv_heads, c.head_dim, c.type},
                                written != nullptr ? written->data() : nullptr,
                                kRows,
                                c.heads,
                                1e-6f};
    RunWorkers(path.rope_append, p, workers);
    CHECK(q.Damage() == "");
    CHECK(cache.Damage() == "");
  };
  Guarded<float> want_q(qkv.size()), got_q(qkv.size());
  Guarded<T> want_cache(kPages * page_elements), got_cache(kPages * page_elements);
  const int64_t written_width = int64_t{c.kv_heads} * 2 * c.head_dim;
  Guarded<T> want_written(kRows * written_width), got_written(kRows * written_width);
  run(Reference(), want_q, want_cache, &want_written, 1);
  run(table, got_q, got_cache, &got_written, 2);
  CHECK(got_written.Damage() == "");
  for (int64_t r = 0; r < kRows; ++r) {
    const auto part = [&](const Guarded<float>& all, int64_t size) {
      return all.span().subspan(static_cast<size_t>(r * width), static_cast<size_t>(size));
    };
    INFO("row " << r);
    CHECK(Difference(part(got_q, c.heads * c.head_dim), part(want_q, c.heads * c.head_dim), 2e-6,
                     c.head_dim) == "");
    if (slots[r] < 0) CHECK(BitDifference(part(got_q, width), part(qkv, width), width) == "");
  }
  // Elements that nobody wrote are still NaN in both, so this also says where nothing was written.
  CHECK(Difference(got_cache.span(), want_cache.span(), Tolerance(c.type), c.head_dim) == "");
  CHECK(Difference(got_written.span(), want_written.span(), Tolerance(c.type), c.head_dim) == "");
  // The copy equals what went to the cache, and asking for it changes nothing else.
  for (int64_t r = 0; r < kRows; ++r) {
    if (slots[r] < 0) continue;
    for (int64_t h = 0; h < c.kv_heads; ++h) {
      const PagedCache place = {
          nullptr,        pages.data(), kTable,     page_elements * SizeOf(c.type),
          c.block_tokens, c.kv_heads,   c.head_dim, c.type};
      const int64_t key = KeyIndex(place, slots[r], positions[r], h);
      for (int64_t kv = 0; kv < 2; ++kv) {
        const auto in_cache =
            got_cache.span().subspan(static_cast<size_t>(key + kv * c.block_tokens * c.head_dim),
                                     static_cast<size_t>(c.head_dim));
        const auto in_copy = got_written.span().subspan(
            static_cast<size_t>(((r * c.kv_heads + h) * 2 + kv) * c.head_dim),
            static_cast<size_t>(c.head_dim));
        CHECK(BitDifference(in_copy, in_cache, c.head_dim) == "");
      }
    }
  }
  Guarded<float> same_q(qkv.size());
  Guarded<T> same_cache(kPages * page_elements);
  run(table, same_q, same_cache, nullptr, 2);
  CHECK(BitDifference(same_q.span(), got_q.span(), width) == "");
  CHECK(BitDifference(same_cache.span(), got_cache.span(), c.head_dim) == "");
}

void TestRopeAppend(const KernelTable& table, Random& random) {
  for (int32_t head_dim : {16, 32, 64, 80, 128, 256}) {
    for (bool norm : {false, true}) {
      INFO("head_dim " << head_dim << " norm " << norm);
      const int32_t block_tokens = head_dim == 64 ? 16 : 32;
      CheckRopeAppend<uint16_t>(table, {6, 2, head_dim, block_tokens, norm, DType::kBFloat16},
                                random);
      CheckRopeAppend<float>(table, {3, 1, head_dim, block_tokens, norm, DType::kFloat32}, random);
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("rope_append turns q, and writes k and v to their places only",
                          TestRopeAppend)

}  // namespace
}  // namespace sluice::kernels
