// RopeAppend: rows that have queries alone, rings, and the write-through to the home.
#include "tests/kernels/sparse_support.h"

namespace sluice::kernels {
namespace {

// Rows of two sequences, several of one, with padding between.
struct AppendRows {
  AppendRows(int32_t q_heads, int32_t heads_of_kv, int32_t dim, Random& random)
      : heads(q_heads),
        kv_heads(heads_of_kv),
        head_dim(dim),
        width(int64_t{heads + 2 * kv_heads} * head_dim),
        slots(BufferOf<int32_t>({0, 0, -1, 1, 1, 0})),
        positions(BufferOf<int32_t>({0, 31, 4, 96, 97, 32})),
        qkv(NormalBuffer<float>(6 * width, random, 2.0f)),
        cos_sin(NormalBuffer<float>(6 * int64_t{head_dim}, random)),
        q_norm(NormalBuffer<float>(head_dim, random)),
        k_norm(NormalBuffer<float>(head_dim, random)) {}

  RopeAppendParams Params(Guarded<float>& rows, const PagedCache& cache, void* written) const {
    return {rows.data(),    q_norm.data(), k_norm.data(),
            cos_sin.data(), slots.data(),  positions.data(),
            cache,          written,       6,
            heads,          1e-6f};
  }

  const int32_t heads, kv_heads, head_dim;
  const int64_t width;
  const Guarded<int32_t> slots, positions;
  const Guarded<float> qkv, cos_sin, q_norm, k_norm;
};

// The query heads of rows without keys are the same as in rows with keys.
void TestQueriesAlone(const KernelTable& table, Random& random) {
  for (int32_t head_dim : {16, 64, 128}) {
    INFO("head_dim " << head_dim);
    const AppendRows in(6, 2, head_dim, random);
    TestCache<uint16_t> cache(2, 7, 32, 2, head_dim, random);
    Guarded<float> whole = CopyOf(in.qkv), alone(6 * 6 * int64_t{head_dim});
    for (int64_t r = 0; r < 6; ++r) {
      std::copy_n(in.qkv.data() + r * in.width, 6 * head_dim, alone.data() + r * 6 * head_dim);
    }
    RunWorkers(table.rope_append, in.Params(whole, cache.view, nullptr), 2);
    PagedCache none = {};
    none.head_dim = head_dim;
    none.block_tokens = 32;
    none.type = DType::kBFloat16;
    RunWorkers(table.rope_append, in.Params(alone, none, nullptr), 3);
    CHECK(alone.Damage() == "");
    for (int64_t r = 0; r < 6; ++r) {
      INFO("row " << r);
      const auto queries = static_cast<size_t>(6 * head_dim);
      CHECK(BitDifference(alone.span().subspan(static_cast<size_t>(r) * queries, queries),
                          whole.span().subspan(static_cast<size_t>(r * in.width), queries),
                          head_dim) == "");
    }
  }
}

template <typename T>
void CheckRing(const KernelTable& table, Random& random) {
  constexpr int32_t kBlockTokens = 32, kRing = 2, kHeadDim = 64;
  const AppendRows in(3, 3, kHeadDim, random);
  TestCache<T> cache(2, 7, kBlockTokens, 3, kHeadDim, random);
  TestCache<T> ring(2, kRing, kBlockTokens, 3, kHeadDim, random, kRing);
  Guarded<float> to_cache = CopyOf(in.qkv), to_ring = CopyOf(in.qkv);
  RunWorkers(table.rope_append, in.Params(to_cache, cache.view, nullptr), 2);
  RunWorkers(table.rope_append, in.Params(to_ring, ring.view, nullptr), 2);
  CHECK(ring.data.Damage() == "");
  CHECK(BitDifference(to_ring.span(), to_cache.span(), kHeadDim) == "");
  int64_t written = 0;
  for (int64_t r = 0; r < 6; ++r) {
    if (in.slots[r] < 0) continue;
    for (int64_t h = 0; h < 3; ++h) {
      const T* want = cache.Key(in.slots[r], in.positions[r], h);
      const int64_t block = in.positions[r] / kBlockTokens % kRing;
      const int64_t page = ring.table[in.slots[r] * kRing + block];
      const T* got = ring.data.data() + page * ring.page_elements +
                     (h * 2 * kBlockTokens + in.positions[r] % kBlockTokens) * kHeadDim;
      for (int64_t v : {0, kBlockTokens * kHeadDim}) {
        CHECK(std::memcmp(got + v, want + v, kHeadDim * sizeof(T)) == 0);
        written += kHeadDim;
      }
    }
  }
  CHECK(written == std::count_if(ring.data.begin(), ring.data.end(),
                                 [](T v) { return !std::isnan(Value(v)); }));
}

// Writing through the rows that rope_append wrote beside the cache makes the home that rope_append
// itself would have made.
template <typename T>
void CheckWriteThrough(const KernelTable& table, Random& random) {
  for (int32_t head_dim : {16, 80, 128}) {
    INFO("head_dim " << head_dim << ", " << sizeof(T) << " bytes an element");
    const AppendRows in(4, 2, head_dim, random);
    TestCache<T> want(2, 7, 32, 2, head_dim, random);
    TestCache<T> cache(2, 7, 32, 2, head_dim, random);
    Guarded<T> home(want.data.size());
    Guarded<T> written(6 * 2 * 2 * int64_t{head_dim});
    Guarded<float> rows = CopyOf(in.qkv), again = CopyOf(in.qkv);
    RunWorkers(table.rope_append, in.Params(rows, cache.view, written.data()), 2);
    RunWorkers(table.rope_append, in.Params(again, want.view, nullptr), 2);
    WriteThroughParams p = {written.data(), in.slots.data(), in.positions.data(), want.view, 6};
    p.home.base = home.data();
    RunThreads(table.write_through, p, 3);
    CHECK(home.Damage() == "");
    CHECK(BitDifference(home.span(), want.data.span(), head_dim) == "");
  }
}

void TestAppend(const KernelTable& table, Random& random) {
  TestQueriesAlone(table, random);
  CheckRing<uint16_t>(table, random);
  CheckRing<float>(table, random);
  CheckWriteThrough<uint16_t>(table, random);
  CheckWriteThrough<float>(table, random);
}
SLUICE_TEST_ON_EVERY_PATH("queries alone, rings and homes get what a cache would", TestAppend)
TEST_CASE("queries alone, rings and homes get what a cache would (reference)", "[kernels]") {
  OnPath("reference", TestAppend);
}

}  // namespace
}  // namespace sluice::kernels
