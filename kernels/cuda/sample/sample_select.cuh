// Finds the tokens of a row that may be drawn, without sorting. The row is cut where a running
// sum, best token first, reaches a goal (top_k: counts, top_p: weights). The sums come from
// histograms: a first one that spreads the tokens, then histograms over the bits of the logits,
// most significant first.
#pragma once

#include <climits>
#include <cstdint>

#include "kernels/cuda/common/float_keys.cuh"
#include "kernels/cuda/sample/sample_cluster.cuh"

namespace sluice::kernels::cuda {

// Weights are integers, exp(x) * 2^44 rounded to nearest. Their sums are exact and do not depend
// on the order, and those of 2^19 tokens fit 64 bits. A weight below 2^-45 of the best token's is
// 0.
constexpr int kWeightBits = 44;
constexpr uint64_t kWeightOfBest = uint64_t{1} << kWeightBits;
constexpr double kLog2E = 1.4426950408889634074;

// Coefficients of 2^r on [-1/2, 1/2]: Chebyshev, error 2.2e-16, exactly 1 at 0, highest power
// first. They lie in constant memory, from which an instruction takes them without a register.
constexpr int kExp2Terms = 11;
static __constant__ double kExp2[kExp2Terms] = {7.072585949269223699857e-9,
                                                1.020869029995830583464e-7,
                                                1.321544258792168965296e-6,
                                                1.525265726020683706359e-5,
                                                1.540353044173605015492e-4,
                                                1.333355823016497389937e-3,
                                                9.618129107606888527278e-3,
                                                5.550410866444771916642e-2,
                                                2.402265069591009822004e-1,
                                                6.931471805599499828569e-1,
                                                1.0};

// Returns exp2((logit - largest) * scale) * 2^kWeightBits, for logit <= largest and scale > 0.
// The result is exact at `largest`, and otherwise within 1e-15 before it is rounded.
__device__ __forceinline__ uint64_t Weight(float logit, double largest, double scale) {
  constexpr double kRound = 0x1.8p52;                   // leaves an integer in the low bits
  constexpr double kUnit = 1ull << (52 - kWeightBits);  // its last bit is 2^-kWeightBits
  const double x = fmax((static_cast<double>(logit) - largest) * scale, -64.0);
  const double shifted = x + kRound;
  const double r = x - (shifted - kRound);
  double e = kExp2[0];
#pragma unroll
  for (int i = 1; i < kExp2Terms; ++i) e = fma(e, r, kExp2[i]);
  e = __hiloint2double(__double2hiint(e) + (__double2loint(shifted) << 20), __double2loint(e));
  return static_cast<uint64_t>(__double_as_longlong(e + kUnit) - __double_as_longlong(kUnit));
}

// log2 of the bins of the first histogram, and of the most bins that a later one takes.
constexpr int kFirstBits = 12, kLaterBits = 11;
constexpr int kBins = 1 << kFirstBits;
static_assert(kBins == kClusterBlocks * kSampleThreads, "each thread adds up one bin");

// The bin of a histogram in which the running sum reaches the goal.
struct FoundBin {
  uint64_t before;  // sum of the bins before
  uint64_t sum;     // sum of the bin
  int32_t bin;
  int32_t id;
};

// Sums in shared memory are kept as two words: a 64-bit addition there would compile to a loop.
struct SelectMemory {
  uint2 bins[kBins];  // low word, high word; zero while not in use
  FoundBin found;
  uint32_t warp_counts[kSampleWarps];
};

// The quantity that is summed. Add() adds to a bin. FirstBin() returns a token's bin in the first
// histogram, higher for better tokens; after it the bits of the token's key from kKnownBit up are
// known. Tokens of lower weight than light() may stay in the first histogram's last bin, 0.
struct CountTokens {
  static constexpr int kKnownBit = 32 - kLaterBits;
  __device__ uint64_t operator()(float) const { return 1; }
  __device__ static void Add(uint2& bin, uint64_t) { atomicAdd(&bin.x, 1u); }
  __device__ static uint32_t FirstBin(float l) { return KeyOf(l) >> kKnownBit; }
  __device__ uint64_t light() const { return 0; }
};

// The first bins cut the logarithm of the weight evenly. Cut by the bits of the logits, most
// tokens would lie in few bins, and their additions would wait for each other there.
class SumWeights {
 public:
  static constexpr int kKnownBit = 32;
  // weight = exp((l - largest) * inverse_temperature)
  __device__ SumWeights(float largest, double inverse_temperature, uint64_t light)
      : largest_(largest),
        light_(light),
        scale_(kLog2E * inverse_temperature),
        bins_(fminf(static_cast<float>(scale_) * (kBins / (kWeightBits + 2.0f)), 1e30f)) {}
  __device__ uint64_t operator()(float l) const { return Weight(l, largest_, scale_); }
  __device__ static void Add(uint2& bin, uint64_t value) {
    const uint32_t low = static_cast<uint32_t>(value);
    const uint32_t old = atomicAdd(&bin.x, low);
    const uint32_t high = static_cast<uint32_t>(value >> 32) + (old + low < old ? 1 : 0);
    if (high != 0) atomicAdd(&bin.y, high);
  }
  // Every rounding here is monotone, so that no token is in a worse bin than one behind it.
  __device__ uint32_t FirstBin(float l) const {
    return kBins - 1 - static_cast<uint32_t>(fminf((largest_ - l) * bins_, kBins - 1));
  }
  __device__ uint64_t light() const { return light_; }

 private:
  float largest_;
  uint64_t light_;
  double scale_;
  float bins_;
};

// A block's part of the row, in shared memory: ids [begin, begin + count). It is padded to a
// multiple of four with -inf.
struct Slice {
  float* logits;
  int begin;
  int count;

  // Calls visit(logits, id) for every four neighbours, spread over the threads.
  template <typename Visit>
  __device__ __forceinline__ void ForEachFour(Visit visit) const {
    for (int i = 4 * threadIdx.x; i < count; i += 4 * kSampleThreads) {
      const float4 v = *reinterpret_cast<const float4*>(logits + i);
      const float four[4] = {v.x, v.y, v.z, v.w};
      visit(four, begin + i);
    }
  }

  // The tokens of this thread where each thread has neighbouring ones: [first, last), in order of
  // id. Threads are an odd number of words apart, which avoids bank conflicts.
  struct Run {
    int first, last;
  };
  __device__ Run Mine() const {
    const int size = (count + kSampleThreads - 1) / kSampleThreads | 1;
    return {min(static_cast<int>(threadIdx.x) * size, count),
            min((static_cast<int>(threadIdx.x) + 1) * size, count)};
  }
};

// The tokens whose logits are above `logit`, and of those that equal it the ones up to `last_id`.
struct Cut {
  float logit;
  int last_id;
  __device__ bool Keeps(float l, int id) const {
    return l > logit || (l == logit && id <= last_id);
  }
};

__device__ __forceinline__ Cut KeepAll() { return {-INFINITY, INT_MAX}; }

// Returns this thread's bin of a histogram, summed over the blocks. The bins are in the order of
// the threads, or in the reverse order.
__device__ __forceinline__ uint64_t SumOfBin(Cluster& cluster, SelectMemory& memory, int bin) {
  uint64_t sum = 0;
#pragma unroll
  for (int block = 0; block < kClusterBlocks; ++block) {
    const uint2 part = cluster.At(memory.bins, block)[bin];
    sum += uint64_t{part.y} << 32 | part.x;
  }
  return sum;
}

// Clears the first bins and tells every block which bin reaches the goal. Exactly one thread has
// before < goal <= before + sum.
__device__ __forceinline__ void ShareFound(Cluster& cluster, SelectMemory& memory, int to_clear,
                                           uint64_t before, uint64_t sum, uint64_t goal, int bin) {
  for (int i = threadIdx.x; i < to_clear; i += kSampleThreads) memory.bins[i] = {0, 0};
  if (before < goal && goal <= before + sum) {
    for (int block = 0; block < kClusterBlocks; ++block) {
      *cluster.At(&memory.found, block) = {before, sum, bin, 0};
    }
  }
  cluster.Sync();
}

// Finds the shortest beginning of the tokens that `within` keeps, in order of logit, then of id,
// whose weights add up to at least goal_of(their total), 0 < goal_of(total) <= total. Callers
// call Narrow() until done(), then Finish().
template <typename Weights>
class CutSearch {
 public:
  __device__ CutSearch(Cluster& cluster, SelectMemory& memory, const Slice& slice, Cut within,
                       Weights weights)
      : cluster_(cluster),
        memory_(memory),
        slice_(slice),
        within_(within),
        weights_(weights),
        source_(slice),
        source_within_(within) {}

  __device__ bool done() const { return known_ == 0; }

  // Makes one histogram over the tokens that are left.
  template <typename Goal>
  __device__ void Narrow(Goal goal_of) {
    const bool is_first = first_bin_ < 0;
    const int bits = is_first ? kFirstBits : min(kLaterBits, known_);
    const int shift = is_first ? Weights::kKnownBit : known_ - bits;
    const uint32_t mask = (1u << bits) - 1;
    const auto bin_of = [&](float l) {
      return is_first ? weights_.FirstBin(l) : KeyOf(l) >> shift & mask;
    };
    uint64_t light = 0;
    source_.ForEachFour([&](const float(&l)[4], int id) {
      bool wanted[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        wanted[j] = IsLeft(l[j]) && source_within_.Keeps(l[j], id + j);
      }
      if (!(wanted[0] || wanted[1] || wanted[2] || wanted[3])) return;
      uint64_t weight[4];  // all four are computed side by side
#pragma unroll
      for (int j = 0; j < 4; ++j) weight[j] = weights_(l[j]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (!wanted[j]) continue;
        if (is_first && weight[j] < weights_.light()) {
          light += weight[j];
        } else if (weight[j] != 0) {
          Weights::Add(memory_.bins[bin_of(l[j])], weight[j]);
        }
      }
    });
    if (weights_.light() > 0 && is_first) {
      light = SumThroughLane(light);
      if (threadIdx.x % kWarpSize == kWarpSize - 1) Weights::Add(memory_.bins[0], light);
    }
    cluster_.Sync();
    const int bin =
        static_cast<int>(mask) - (cluster_.rank() * kSampleThreads + static_cast<int>(threadIdx.x));
    const uint64_t sum = bin >= 0 ? SumOfBin(cluster_, memory_, bin) : 0;
    const Cluster::Scan scan = cluster_.Sum(sum);
    if (is_first) goal_ = goal_of(scan.total);
    const int to_clear = is_first || shift == 0 ? kBins : static_cast<int>(mask) + 1;
    ShareFound(cluster_, memory_, to_clear, before_ + scan.before, sum, goal_, bin);
    before_ = memory_.found.before;
    const int found = memory_.found.bin;
    if (!is_first) {
      prefix_ = prefix_ << bits | static_cast<uint32_t>(found);
    } else {
      first_bin_ = found;
      prefix_ = shift == 32 ? 0 : static_cast<uint32_t>(found);
    }
    known_ = shift;
  }

  // After the first Narrow(): copies the logits that are left to a part of the bins that the next
  // ones do not use, if there is room. They may be few, and then the next calls have little to
  // do.
  __device__ void Compact() {
    constexpr int kRoom = 2 * (kBins - (1 << kLaterBits));
    float* list = reinterpret_cast<float*>(memory_.bins + (1 << kLaterBits));
    uint32_t count = 0;
    ForEachLeft([&](float) { ++count; });
    const int warp = threadIdx.x / kWarpSize;
    const auto through = static_cast<uint32_t>(SumThroughLane(count));
    if (threadIdx.x % kWarpSize == kWarpSize - 1) memory_.warp_counts[warp] = through;
    __syncthreads();
    uint32_t at = through - count, total = 0;
#pragma unroll
    for (int i = 0; i < kSampleWarps; ++i) {
      at += i < warp ? memory_.warp_counts[i] : 0;
      total += memory_.warp_counts[i];
    }
    if (total > kRoom) return;
    ForEachLeft([&](float l) { list[at++] = l; });
    const uint32_t padded = (total + 3) / 4 * 4;
    if (total + threadIdx.x < padded) list[total + threadIdx.x] = -INFINITY;
    __syncthreads();
    source_ = {list, 0, static_cast<int>(total)};
    source_within_ = KeepAll();
  }

  // After the first Narrow(): returns true if the token may be before the cut, or is in the bin
  // that has the cut.
  __device__ bool MayKeep(float l, int id) const {
    return static_cast<int>(weights_.FirstBin(l)) >= first_bin_ && within_.Keeps(l, id);
  }
  __device__ bool IsLeft(float l, int id) const { return IsLeft(l) && within_.Keeps(l, id); }
  __device__ uint64_t goal() const { return goal_; }
  // Returns the weight of the tokens better than all that are left.
  __device__ uint64_t before() const { return before_; }

  __device__ Cut Finish() {
    Cut cut = {FloatOf(prefix_), INT_MAX};
    if (cut.logit == within_.logit) cut.last_id = within_.last_id;
    const uint64_t each = weights_(cut.logit);
    const uint64_t wanted = (goal_ - before_ + each - 1) / each;  // number of equal tokens to keep
    if (wanted * each == memory_.found.sum) return cut;
    const Slice::Run run = slice_.Mine();
    const auto equals = [&](int i) {
      const float l = slice_.logits[i];
      return l == cut.logit && within_.Keeps(l, slice_.begin + i);
    };
    uint64_t count = 0;
    for (int i = run.first; i < run.last; ++i) count += equals(i) ? 1 : 0;
    const uint64_t earlier = cluster_.Sum(count).before;
    if (earlier < wanted && wanted <= earlier + count) {
      uint64_t left = wanted - earlier;
      int i = run.first;
      for (;; ++i) {
        if (equals(i) && --left == 0) break;
      }
      for (int block = 0; block < kClusterBlocks; ++block) {
        cluster_.At(&memory_.found, block)->id = slice_.begin + i;
      }
    }
    cluster_.Sync();
    cut.last_id = memory_.found.id;
    return cut;
  }

 private:
  __device__ bool IsLeft(float l) const {
    if (first_bin_ < 0) return true;
    return static_cast<int>(weights_.FirstBin(l)) == first_bin_ &&
           (known_ == 32 || KeyOf(l) >> known_ == prefix_);
  }

  template <typename Visit>
  __device__ void ForEachLeft(Visit visit) const {
    slice_.ForEachFour([&](const float(&l)[4], int id) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (IsLeft(l[j], id + j)) visit(l[j]);
      }
    });
  }

  Cluster& cluster_;
  SelectMemory& memory_;
  const Slice slice_;
  const Cut within_;
  const Weights weights_;
  Slice source_;  // the logits that Narrow() reads: the slice, or the part of it that is left
  Cut source_within_;
  // The known part of the logit at which the goal is reached: its first bin, and its key's bits
  // from known_ up.
  int first_bin_ = -1;
  uint32_t prefix_ = 0;
  int known_ = 32;
  uint64_t before_ = 0;
  uint64_t goal_ = 0;
};

}  // namespace sluice::kernels::cuda
