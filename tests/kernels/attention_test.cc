#include "kernels/kernel_cases.h"
#include "tests/kernels/kernel_test_support.h"

namespace sluice::kernels {
namespace {

constexpr int64_t kNoPartial = 0;

bool IsCuda(const KernelTable& path) { return std::string_view(path.name) == "cuda"; }

// Rows of `partial` with which a path spreads the splits of every case: on a GPU each of up to 132
// SMs leaves two lots of at most 20 splits and groups of splits, for one KV head.
int64_t AmplePartial(const KernelTable& path, const AttentionCase& c) {
  return IsCuda(path) ? 132 * 2 * 20 * 17 / 16 / c.kv_heads : 300;
}

// Numbers of a case's rows that count as decode rows. A GPU has a kernel for either kind.
std::vector<int32_t> DecodeCounts(const KernelTable& path, int32_t rows) {
  return IsCuda(path) ? std::vector<int32_t>{rows, 0, rows / 2} : std::vector<int32_t>{rows};
}

struct Tolerance {
  double out;
  double lse;
};

// The CUDA path's tensor-core kernels take bf16 operands. Decode rows split queries and weights
// into two bf16 parts: 16 bits of mantissa. Prompt rows round both once: 8 bits.
Tolerance ToleranceOf(const KernelTable& path, const AttentionCase& c, int32_t decode_rows) {
  const bool tensor_cores = IsCuda(path) && c.cache_type == DType::kBFloat16 &&
                            (c.head_dim == 64 || c.head_dim == 128) && c.heads / c.kv_heads <= 16;
  if (!tensor_cores) return {3e-6, 1e-6};
  const bool prompts = decode_rows < static_cast<int32_t>(c.rows.size());
  return prompts ? Tolerance{5e-3, 5e-3} : Tolerance{2e-5, 1e-5};
}

struct Result {
  Guarded<float> out, lse;
};

// Caches of every sequence of a case, scattered over an arena in which everything else is NaN.
template <typename T>
class AttentionFixture {
 public:
  AttentionFixture(const AttentionCase& c, Random& random) : case_(c), arena_(0) {
    std::vector<int32_t> contexts;
    for (const AttentionRow& row : c.rows) {
      if (row.slot < 0) continue;
      contexts.resize(std::max(contexts.size(), static_cast<size_t>(row.slot) + 1), 0);
      int32_t& context = contexts[static_cast<size_t>(row.slot)];
      context = std::max(context, row.position + 1);
    }
    for (int32_t context : contexts) {
      stride_ = std::max(stride_, int64_t{context + c.block_tokens - 1} / c.block_tokens);
    }
    const int64_t entries = static_cast<int64_t>(contexts.size()) * stride_;
    table_ = Guarded<int32_t>(entries);
    for (int64_t i = 0; i < entries; ++i) table_[i] = static_cast<int32_t>(i) + 1;
    std::shuffle(table_.data(), table_.data() + entries, random);
    page_elements_ = int64_t{c.kv_heads} * 2 * c.block_tokens * c.head_dim;
    arena_ = Guarded<T>((entries + 2) * page_elements_);
    const PagedCache cache = Cache();
    for (size_t slot = 0; slot < contexts.size(); ++slot) {
      for (int32_t t = 0; t < contexts[slot]; ++t) {
        for (int32_t h = 0; h < c.kv_heads; ++h) {
          T* key = arena_.data() + KeyIndex(cache, static_cast<int64_t>(slot), t, h);
          T* value = key + int64_t{c.block_tokens} * c.head_dim;
          FillNormal(std::span<T>(key, static_cast<size_t>(c.head_dim)), random);
          FillNormal(std::span<T>(value, static_cast<size_t>(c.head_dim)), random);
        }
      }
    }
    FillNormal(std::span<float>(q_.data(), static_cast<size_t>(q_.size())), random, 1.5f);
  }

  PagedCache Cache() {
    return {arena_.data(),
            table_.data(),
            stride_,
            page_elements_ * static_cast<int64_t>(sizeof(T)),
            case_.block_tokens,
            case_.kv_heads,
            case_.head_dim,
            case_.cache_type};
  }

  // Runs both phases over rows [first, first + rows); the case's first `decode_rows` rows are
  // decode rows.
  Result Run(const KernelTable& path, int32_t first, int32_t rows, int32_t decode_rows,
             int64_t partial_rows, int workers, bool threads = false, int32_t sequence_rows = 1) {
    Result result{Guarded<float>(rows * width_), Guarded<float>(int64_t{rows} * case_.heads)};
    Guarded<float> partial(partial_rows * case_.heads * (case_.head_dim + 1));
    Guarded<int32_t> slots(rows), positions(rows);
    for (int32_t r = 0; r < rows; ++r) {
      slots[r] = case_.rows[static_cast<size_t>(first + r)].slot;
      positions[r] = case_.rows[static_cast<size_t>(first + r)].position;
    }
    const AttentionParams p = {q_.data() + first * q_stride_,
                               q_stride_,
                               slots.data(),
                               positions.data(),
                               Cache(),
                               result.out.data(),
                               result.lse.data(),
                               partial_rows > 0 ? partial.data() : nullptr,
                               partial_rows,
                               rows,
                               std::clamp(decode_rows - first, 0, rows),
                               case_.heads,
                               1.0f / std::sqrt(static_cast<float>(case_.head_dim)),
                               DType::kFloat32,
                               sequence_rows};
    threads ? RunThreads(path.attention, p, workers) : RunWorkers(path.attention, p, workers);
    RunWorkers(path.attention_merge, p, workers);
    CHECK(result.out.Damage() == "");
    CHECK(result.lse.Damage() == "");
    CHECK(partial.Damage() == "");
    return result;
  }

  int32_t rows() const { return static_cast<int32_t>(case_.rows.size()); }
  int64_t width() const { return width_; }

 private:
  const AttentionCase case_;
  Guarded<T> arena_;
  int64_t stride_ = 1;
  int64_t page_elements_ = 0;
  Guarded<int32_t> table_{0};
  const int64_t width_ = int64_t{case_.heads} * case_.head_dim;
  const int64_t q_stride_ = width_ + 2 * int64_t{case_.kv_heads} * case_.head_dim;
  Guarded<float> q_{static_cast<int64_t>(case_.rows.size()) * q_stride_};
};

// Calls `check` with a fixture of each case.
template <typename Check>
void ForEachCase(Random& random, Check check) {
  for (const AttentionCase& c : AttentionCases()) {
    INFO(c.name);
    if (c.cache_type == DType::kFloat32) {
      AttentionFixture<float> fixture(c, random);
      check(c, fixture);
    } else {
      AttentionFixture<uint16_t> fixture(c, random);
      check(c, fixture);
    }
  }
}

void CheckSame(const Result& got, const Result& want, const AttentionCase& c) {
  CHECK(BitDifference(got.out.span(), want.out.span(), int64_t{c.heads} * c.head_dim) == "");
  CHECK(BitDifference(got.lse.span(), want.lse.span(), c.heads) == "");
}

void TestAttention(const KernelTable& path, Random& random) {
  ForEachCase(random, [&](const AttentionCase& c, auto& fixture) {
    const Result want = fixture.Run(*FindKernelTable("reference"), 0, fixture.rows(),
                                    fixture.rows(), kNoPartial, 1);
    for (int32_t decode_rows : DecodeCounts(path, fixture.rows())) {
      INFO(decode_rows << " decode rows");
      const Tolerance tolerance = ToleranceOf(path, c, decode_rows);
      const Result got =
          fixture.Run(path, 0, fixture.rows(), decode_rows, AmplePartial(path, c), 2);
      CHECK(Difference(got.out.span(), want.out.span(), tolerance.out, fixture.width()) == "");
      CHECK(Difference(got.lse.span(), want.lse.span(), tolerance.lse, c.heads) == "");
    }
  });
}
SLUICE_TEST_ON_EVERY_PATH("attention agrees with the reference", TestAttention)

void TestAttentionSharing(const KernelTable& path, Random& random) {
  ForEachCase(random, [&](const AttentionCase& c, auto& fixture) {
    for (int32_t decode_rows : DecodeCounts(path, fixture.rows())) {
      const Result want = fixture.Run(path, 0, fixture.rows(), decode_rows, kNoPartial, 1);
      for (int64_t partial_rows : {kNoPartial, int64_t{5}, AmplePartial(path, c)}) {
        for (int workers : {1, 3, 16}) {
          if (IsCuda(path) && workers > 1) continue;
          INFO(decode_rows << " decode rows, " << partial_rows << " partial rows, " << workers
                           << " workers");
          CheckSame(fixture.Run(path, 0, fixture.rows(), decode_rows, partial_rows, workers,
                                workers == 3),
                    want, c);
        }
      }
    }
  });
}
SLUICE_TEST_ON_EVERY_PATH("attention has the same bits with any workers and any partial scratch",
                          TestAttentionSharing)

void TestAttentionOfDrafts(const KernelTable& path, Random& random) {
  ForEachCase(random, [&](const AttentionCase& c, auto& fixture) {
    const Result want = fixture.Run(path, 0, fixture.rows(), fixture.rows(), kNoPartial, 1);
    // As many rows of a sequence as a GPU takes at once need up to 16 times the room for splits.
    for (int64_t partial_rows : {kNoPartial, AmplePartial(path, c), 16 * AmplePartial(path, c)}) {
      for (int32_t sequence_rows : {2, 3, 4, 16}) {
        INFO(sequence_rows << " rows a sequence, " << partial_rows << " partial rows");
        CheckSame(fixture.Run(path, 0, fixture.rows(), fixture.rows(), partial_rows, 2,
                              /*threads=*/false, sequence_rows),
                  want, c);
      }
    }
  });
}
SLUICE_TEST_ON_EVERY_PATH("rows of a sequence's drafts have the bits of rows that are read apart",
                          TestAttentionOfDrafts)

// Holds rows [first, first + rows), computed by themselves, to the same rows of `all`.
template <typename Fixture>
void CheckPart(const KernelTable& path, const AttentionCase& c, Fixture& fixture, const Result& all,
               int32_t first, int32_t rows, int32_t decode_rows, int64_t partial_rows) {
  INFO(rows << " rows from row " << first << ", " << decode_rows << " decode rows in all");
  const auto part = [&](const Guarded<float>& of, int64_t width) {
    return of.span().subspan(static_cast<size_t>(first * width), static_cast<size_t>(rows * width));
  };
  const Result got = fixture.Run(path, first, rows, decode_rows, partial_rows, 2);
  CHECK(BitDifference(got.out.span(), part(all.out, fixture.width()), fixture.width()) == "");
  CHECK(BitDifference(got.lse.span(), part(all.lse, c.heads), c.heads) == "");
}

void TestAttentionAlone(const KernelTable& path, Random& random) {
  ForEachCase(random, [&](const AttentionCase& c, auto& fixture) {
    for (int32_t decode_rows : DecodeCounts(path, fixture.rows())) {
      const Result all = fixture.Run(path, 0, fixture.rows(), decode_rows, kNoPartial, 1);
      for (int32_t r = 0; r < fixture.rows(); ++r) {
        const int64_t partial_rows = r == 0       ? AmplePartial(path, c)
                                     : r % 2 == 0 ? kNoPartial
                                                  : int64_t{3};
        CheckPart(path, c, fixture, all, r, 1, decode_rows, partial_rows);
      }
    }
  });
}
SLUICE_TEST_ON_EVERY_PATH("a row of attention has the same bits alone and in a batch",
                          TestAttentionAlone)

void TestAttentionChunks(const KernelTable& path, Random& random) {
  ForEachCase(random, [&](const AttentionCase& c, auto& fixture) {
    const Result all = fixture.Run(path, 0, fixture.rows(), 0, kNoPartial, 1);
    for (int32_t chunk : {7, 32, 50}) {
      for (int32_t first = 0; first < fixture.rows(); first += chunk) {
        CheckPart(path, c, fixture, all, first, std::min(chunk, fixture.rows() - first), 0,
                  kNoPartial);
      }
    }
  });
}
SLUICE_TEST_ON_EVERY_PATH("prompt rows have the same bits however a prompt is cut",
                          TestAttentionChunks)

void TestAttentionPadding(const KernelTable& path, Random& random) {
  const AttentionCase c = AttentionCases()[2];
  AttentionFixture<uint16_t> fixture(c, random);
  for (int32_t decode_rows : DecodeCounts(path, fixture.rows())) {
    const Result result = fixture.Run(path, 0, fixture.rows(), decode_rows, kNoPartial, 2);
    int padded = 0;
    for (int64_t r = 0; r < fixture.rows(); ++r) {
      if (c.rows[static_cast<size_t>(r)].slot >= 0) continue;
      ++padded;
      for (int64_t i = 0; i < fixture.width(); ++i)
        REQUIRE(result.out[r * fixture.width() + i] == 0);
      for (int64_t h = 0; h < c.heads; ++h) {
        REQUIRE(result.lse[r * c.heads + h] == kNegativeInfinity);
      }
    }
    CHECK(padded == 2);
  }
}
SLUICE_TEST_ON_EVERY_PATH("padded rows of attention give zeros and -inf", TestAttentionPadding)

}  // namespace
}  // namespace sluice::kernels
