#include <map>

#include "tests/kernels/sparse_support.h"

namespace sluice::kernels {
namespace {

struct AverageCase {
  const char* name;
  int32_t heads;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t unit_tokens;  // tokens of a unit; blocks have 16 tokens
  DType type;
  GroupReduction reduction;
};

constexpr int32_t kBlockTokens = 16;
constexpr int32_t kWindow = 64;  // tokens of a slot's places
constexpr int32_t kSlots = 3;
constexpr int32_t kMaxSteps = 60;
constexpr float kAlpha = 0.3f;

// Sequences that grow by a token a step and attend to some of a window of their newest units, kept
// at places modulo the window; and the expected averages, by position, in float64.
template <typename T>
class Model {
 public:
  Model(const AverageCase& c, Random& random) : case_(c), random_(random) {
    const int64_t blocks = kWindow / kBlockTokens;
    for (int64_t i = 0; i < kSlots * blocks; ++i) table_[i] = static_cast<int32_t>(i);
    std::shuffle(table_.begin(), table_.end(), random);
    page_elements_ = int64_t{c.kv_heads} * 2 * kBlockTokens * c.head_dim;
    cache_ = Guarded<T>(kSlots * blocks * page_elements_);
    for (int32_t s = 0; s < kSlots; ++s) {
      position_[s] = s * 50;
      for (int64_t t = std::max(0, position_[s] - kWindow + 1); t <= position_[s]; ++t) {
        Append(s, t);
      }
    }
  }

  // Runs one step: a new token for each row, attention, averages; checks every average of the
  // lists.
  void Step(const KernelTable& path) {
    for (int64_t r = 0; r < kRows; ++r) {
      slots_[r] = r == 1 ? -1 : static_cast<int32_t>(r == 0 ? 2 : r - 2);
      positions_[r] = r == 1 ? 3 : ++position_[slots_[r]];
      if (r == 1) continue;
      Append(slots_[r], positions_[r]);
    }
    q_ = NormalBuffer<float>(kRows * q_stride(), random_, 2.0f);
    MakeLists();
    SparseAttentionParams attention = Attention();
    RunWorkers(FindKernelTable("reference")->sparse_attention, attention, 1);
    Expect();
    const MovingAverageParams p = Params();
    RunWorkers(path.moving_average, p, 1 + static_cast<int>(random_() % 5));
    CHECK(average_.Damage() == "");
    Check(p);
  }

 private:
  static constexpr int64_t kRows = 4;
  int64_t q_stride() const { return int64_t{case_.heads} * case_.head_dim + 16; }
  int64_t capacity() const { return kWindow / case_.unit_tokens; }
  int32_t PlaceOf(int64_t unit) const { return static_cast<int32_t>(unit % capacity()); }

  PagedCache Cache() {
    return {cache_.data(),          table_.data(),
            kWindow / kBlockTokens, page_elements_ * static_cast<int64_t>(sizeof(T)),
            kBlockTokens,           case_.kv_heads,
            case_.head_dim,         case_.type};
  }

  void Append(int64_t slot, int64_t position) {
    for (int64_t h = 0; h < case_.kv_heads; ++h) {
      T* key = cache_.data() + KeyIndex(Cache(), slot, position % kWindow, h);
      T* value = key + int64_t{kBlockTokens} * case_.head_dim;
      FillNormal(std::span<T>(key, static_cast<size_t>(case_.head_dim)), random_);
      FillNormal(std::span<T>(value, static_cast<size_t>(case_.head_dim)), random_);
      // The average of the place's last token must not count.
      averages_[{slot, h, position}] = 0;
      average_[RowIndex(slot, h, position % kWindow)] = 0;
    }
  }

  // Selects the newest unit, and about half of the units before it, as far as the window has all of
  // them.
  void MakeLists() {
    for (int64_t list = 0; list < kRows * case_.kv_heads; ++list) {
      const int64_t row = list / case_.kv_heads;
      const int64_t newest = positions_[row] / case_.unit_tokens;
      int32_t count = 0;
      for (int64_t u = std::max(int64_t{0}, newest - capacity() + 1); u <= newest; ++u) {
        if (u < newest && random_() % 2 == 0) continue;
        units_[list * kWindow + count] = static_cast<int32_t>(u);
        places_[list * kWindow + count++] = PlaceOf(u);
      }
      counts_[list] = slots_[row] < 0 ? 0 : count;
    }
  }

  SparseAttentionParams Attention() {
    return {q_.data(),
            q_stride(),
            slots_.data(),
            positions_.data(),
            Cache(),
            units_.data(),
            places_.data(),
            counts_.data(),
            o_.data(),
            lse_.data(),
            kWindow,
            case_.unit_tokens,
            kRows,
            case_.heads,
            0,
            case_.kv_heads,
            kScale};
  }

  MovingAverageParams Params() {
    return {q_.data(),
            q_stride(),
            slots_.data(),
            positions_.data(),
            Cache(),
            units_.data(),
            places_.data(),
            counts_.data(),
            lse_.data(),
            {average_.data(), pages_.data(), 2, case_.kv_heads * 32 * 4, 32 * 4, 32, 1,
             DType::kFloat32, case_.kv_heads},
            kWindow,
            case_.unit_tokens,
            kRows,
            case_.heads,
            kScale,
            kAlpha,
            case_.reduction};
  }

  // Place p of (slot, head) lies in pages of 32 rows, two to a slot, page tables in order.
  int64_t RowIndex(int64_t slot, int64_t head, int64_t place) const {
    return (pages_[slot * 2 + place / 32] * case_.kv_heads + head) * 32 + place % 32;
  }

  void Expect() {
    const int64_t group = case_.heads / case_.kv_heads;
    for (int64_t list = 0; list < kRows * case_.kv_heads; ++list) {
      const int64_t row = list / case_.kv_heads, h = list % case_.kv_heads;
      for (int64_t i = 0; i < counts_[list]; ++i) {
        const int64_t unit = units_[list * kWindow + i];
        for (int64_t t = unit * case_.unit_tokens;
             t < (unit + 1) * case_.unit_tokens && t <= positions_[row]; ++t) {
          const T* key = cache_.data() + KeyIndex(Cache(), slots_[row], t % kWindow, h);
          double largest = 0, sum = 0;
          for (int64_t head = h * group; head < (h + 1) * group; ++head) {
            double dot = 0;
            for (int64_t d = 0; d < case_.head_dim; ++d) {
              dot += double{q_[row * q_stride() + head * case_.head_dim + d]} * Value(key[d]);
            }
            const double w = std::exp(dot * double{kScale} - lse_[row * case_.heads + head]);
            largest = std::max(largest, w);
            sum += w;
          }
          const double w =
              case_.reduction == GroupReduction::kMax ? largest : sum / static_cast<double>(group);
          double& average = averages_[{slots_[row], h, t}];
          average = t == positions_[row] ? w : (1 - double{kAlpha}) * average + double{kAlpha} * w;
        }
      }
    }
  }

  // Checks every token of the window, those of this step's lists and the others.
  void Check(const MovingAverageParams& p) {
    for (int64_t s = 0; s < kSlots; ++s) {
      for (int64_t h = 0; h < case_.kv_heads; ++h) {
        for (int64_t t = std::max(0, position_[s] - kWindow + 1); t <= position_[s]; ++t) {
          const double want = averages_[{s, h, t}];
          const float got = average_[RowIndex(s, h, t % kWindow)];
          INFO("slot " << s << ", KV head " << h << ", position " << t << " of " << position_[s]
                       << ", rows " << p.rows);
          REQUIRE(std::fabs(got - want) <= 1e-5 * want + 1e-9);
        }
      }
    }
  }

  const AverageCase case_;
  Random& random_;
  const float kScale = 0.11f;
  int64_t page_elements_ = 0;
  int32_t position_[kSlots];
  Guarded<T> cache_{0};
  Guarded<int32_t> table_{kSlots * kWindow / kBlockTokens};
  Guarded<int32_t> pages_ = BufferOf<int32_t>({4, 0, 3, 1, 2, 5});
  Guarded<int32_t> slots_{kRows}, positions_{kRows};
  Guarded<int32_t> units_{kRows * 8 * kWindow}, places_{kRows * 8 * kWindow}, counts_{kRows * 8};
  Guarded<float> q_{0};
  Guarded<float> o_{kRows * case_.heads * case_.head_dim}, lse_{kRows * case_.heads};
  Guarded<float> average_{6 * 8 * 32};
  std::map<std::tuple<int64_t, int64_t, int64_t>, double> averages_;
};

void TestSteps(const KernelTable& path, Random& random) {
  constexpr DType kBf16 = DType::kBFloat16, kF32 = DType::kFloat32;
  for (const AverageCase& c : std::initializer_list<AverageCase>{
           {"blocks, group 4, max", 8, 2, 64, 16, kBf16, GroupReduction::kMax},
           {"blocks, group 3, mean", 9, 3, 128, 16, kBf16, GroupReduction::kMean},
           {"tokens, group 1, float32", 2, 2, 48, 1, kF32, GroupReduction::kMax},
           {"tokens, group 17, mean", 17, 1, 80, 1, kBf16, GroupReduction::kMean},
           {"units of two blocks", 4, 4, 32, 32, kF32, GroupReduction::kMean}}) {
    INFO(c.name);
    const auto steps = [&](auto model) {
      for (int step = 0; step < kMaxSteps; ++step) model.Step(path);
    };
    if (c.type == kF32) {
      steps(Model<float>(c, random));
    } else {
      steps(Model<uint16_t>(c, random));
    }
  }
}
SLUICE_TEST_ON_EVERY_PATH("moving averages of attention are those of a naive model, step by step",
                          TestSteps)

}  // namespace
}  // namespace sluice::kernels
