// SparseMla whose second lists' entries are brought by the Transfer before it: first lists are
// attended to beneath the Transfer, second ones when it is done.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <numeric>

#include "kernels/cuda/common/launch.h"
#include "kernels/latent_params.h"
#include "tests/kernels/latent_support.h"

namespace sluice::kernels {
namespace {

constexpr int32_t kHeads = 128, kRank = kPackedRank, kRope = kPackedRope, kCapacity = 700;
constexpr int32_t kEntries = 900, kBlockTokens = 64;

struct DeviceFree {
  void operator()(uint8_t* data) const { cudaFree(data); }
};

// Lists of `rows` rows, and the pool's entries of them before and after the transfer.
class Arrivals {
 public:
  Arrivals(int32_t rows, Random& random)
      : rows_(rows),
        cache_(rows, kEntries, kBlockTokens, kRank, kRope, DType::kFloat8E4M3, random),
        before_(cache_.data.size()),
        slots_(rows),
        counts_(rows),
        then_counts_(rows),
        entries_(int64_t{rows} * kCapacity),
        then_entries_(int64_t{rows} * kCapacity),
        units_(int64_t{rows} * kCapacity),
        q_(RandomElements(int64_t{rows} * kHeads * (kRank + kRope), DType::kBFloat16, random)) {
    std::vector<int32_t> numbers(kEntries);
    std::iota(numbers.begin(), numbers.end(), 0);
    for (int32_t slot = 0; slot < rows; ++slot) {
      for (int32_t e = 0; e < kEntries; ++e) {
        cache_.FillEntry(cache_.Entry(slot, e), random, 1.0f);
      }
    }
    std::copy_n(cache_.data.data(), cache_.data.size(), before_.data());
    for (int32_t r = 0; r < rows; ++r) {
      slots_[r] = r % 11 == 7 ? -1 : r;
      std::shuffle(numbers.begin(), numbers.end(), random);
      const auto any = [&](int32_t most) { return static_cast<int32_t>(random() % (most + 1)); };
      counts_[r] = r % 5 == 2 ? 0 : any(kCapacity);
      then_counts_[r] = r % 3 == 1 ? 0 : any(kCapacity - counts_[r]);
      std::copy_n(numbers.begin(), counts_[r], entries_.data() + int64_t{r} * kCapacity);
      for (int32_t i = 0; i < then_counts_[r]; ++i) {
        const int64_t at = int64_t{r} * kCapacity + i;
        then_entries_[at] = numbers[static_cast<size_t>(counts_[r] + i)];
        const int64_t offset = EntryOffset(cache_.view, r, then_entries_[at]);
        units_[at] = static_cast<int32_t>(offset / kPackedEntryBytes);
        std::fill_n(before_.data() + offset, kPackedEntryBytes, uint8_t{0xFF});
      }
    }
    void* pool = nullptr;
    REQUIRE(cudaMalloc(&pool, static_cast<size_t>(before_.size())) == cudaSuccess);
    pool_.reset(static_cast<uint8_t*>(pool));
  }

  // Restores the pool, then runs the transfer by `workers` blocks and attention right behind it.
  std::vector<uint8_t> Run(bool then_arrives, int workers, int64_t scratch_rows) {
    const int64_t out_row = int64_t{kHeads} * kRank * SizeOf(DType::kBFloat16);
    Guarded<uint8_t> out(rows_ * out_row);
    Guarded<float> lse(int64_t{rows_} * kHeads), other_o(int64_t{rows_} * kHeads * kRank),
        other_lse(int64_t{rows_} * kHeads);
    Guarded<uint8_t> scratch(
        cuda::SparseMlaScratchBytes(static_cast<int32_t>(scratch_rows), kHeads, kRank, kCapacity));
    REQUIRE(cudaMemcpy(pool_.get(), before_.data(), static_cast<size_t>(before_.size()),
                       cudaMemcpyHostToDevice) == cudaSuccess);
    TransferParams move{};
    move.source = cache_.data.data();
    move.target = pool_.get();
    move.source_pitch = move.target_pitch = move.unit_bytes = kPackedEntryBytes;
    move.source_units = move.target_units = units_.data();
    move.counts = then_counts_.data();
    move.lists = rows_;
    move.capacity = kCapacity;
    move.max_workers = workers;
    SparseMlaParams p{};
    p.q = q_.data();
    p.slots = slots_.data();
    p.cache = cache_.view;
    p.cache.base = pool_.get();
    p.entries = entries_.data();
    p.counts = counts_.data();
    p.then_entries = then_entries_.data();
    p.then_counts = then_counts_.data();
    p.capacity = kCapacity;
    p.other_o = other_o.data();
    p.other_lse = other_lse.data();
    p.out = out.data();
    p.lse = lse.data();
    p.scratch = scratch.data();
    p.scratch_bytes = scratch.size();
    p.rows = p.decode_rows = rows_;
    p.heads = kHeads;
    p.spare_processors = workers;
    p.then_arrives = then_arrives;
    p.scale = 0.06f;
    p.q_type = p.out_type = DType::kBFloat16;
    REQUIRE(cuda::LaunchTransfer(move, nullptr) == cudaSuccess);
    REQUIRE(cuda::LaunchSparseMla(p, nullptr) == cudaSuccess);
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    CHECK(out.Damage() + lse.Damage() + scratch.Damage() == "");
    std::vector<uint8_t> result(out.span().begin(), out.span().end());
    const auto* const sums = reinterpret_cast<const uint8_t*>(lse.data());
    result.insert(result.end(), sums, sums + lse.size() * 4);
    return result;
  }

 private:
  const int32_t rows_;
  TestLatents cache_;
  Guarded<uint8_t> before_;
  Guarded<int32_t> slots_, counts_, then_counts_, entries_, then_entries_, units_;
  Guarded<uint8_t> q_;
  std::unique_ptr<uint8_t, DeviceFree> pool_;
};

TEST_CASE("sparse_mla waits for second lists that a transfer brings", "[kernels][cuda]") {
  std::string why;
  if (CudaPath(&why) == nullptr) return SkipTest(why);
  Random random(TestSeed());
  for (const int32_t rows : {1, 3, 20, 76, 150}) {
    Arrivals arrivals(rows, random);
    const std::vector<uint8_t> want = arrivals.Run(false, 4, rows);
    for (const int64_t scratch_rows : {int64_t{rows}, int64_t{2}}) {
      for (const int workers : {1, 4, 1}) {
        INFO(rows << " rows, scratch for " << scratch_rows << ", " << workers << " workers");
        CHECK(arrivals.Run(true, workers, scratch_rows) == want);
      }
    }
  }
}

}  // namespace
}  // namespace sluice::kernels
