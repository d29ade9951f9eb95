// AnchorStatistics: moments, attention to the segments, and budgets at an anchor.
#include "kernels/e4m3.h"
#include "tests/kernels/sparse_support.h"

namespace sluice::kernels {
namespace {

struct AnchorCase {
  const char* name;
  int32_t group, kv_heads, head_dim, block_tokens;
  float tau;
  std::vector<int32_t> tokens;  // by row; 0: a padded row
};

const std::vector<int32_t> kLengths = {300, 1, 0, 3000, 64, 448, 0, 1000, 447};

// Every case is run with caches of both types.
const std::vector<AnchorCase>& Cases() {
  static const std::vector<AnchorCase> cases = {
      {"group 1, head_dim 16", 1, 3, 16, 16, 0.1f, kLengths},
      {"group 3, head_dim 64", 3, 2, 64, 32, 0.05f, kLengths},
      {"group 4, head_dim 128", 4, 2, 128, 64, 0.02f, kLengths},
      {"group 8, head_dim 256", 8, 1, 256, 16, 0.3f, {1025, 513, 640}},
      {"group 5, head_dim 80", 5, 2, 80, 48, 0.1f, {17, 0, 700, 2048}},
      {"group 7, head_dim 128", 7, 2, 128, 16, 0.1f, {700, 449, 1500}},
      {"long", 2, 1, 16, 32, 0.05f, {20011}},
  };
  return cases;
}

// Everything that a call reads and writes. Row r belongs to slot rows - 1 - r.
template <typename T>
struct AnchorInput {
  AnchorInput(const AnchorCase& of_case, Random& random)
      : c(of_case),
        rows(static_cast<int32_t>(c.tokens.size())),
        heads(c.group * c.kv_heads),
        longest(*std::max_element(c.tokens.begin(), c.tokens.end())),
        q_stride(int64_t{heads} * c.head_dim + 3),
        slots(rows),
        positions(rows),
        cache(rows, (longest - 1) / c.block_tokens + 1, c.block_tokens, c.kv_heads, c.head_dim,
              random),
        q(NormalBuffer<float>(rows * q_stride, random, 0.3f)),
        levels(random() % 3 == 0 ? kFluxionLevels : 1),
        spread(levels == 1 && random() % 2 == 0) {
    for (int32_t level = 0; level < kFluxionLevels; ++level) {
      digests.emplace_back(rows, longest / LevelTokens(level) + 1, 3 + level,
                           (spread ? kDigestVectors : kDigestPieces) * c.head_dim, c.kv_heads,
                           random);
    }
    for (int32_t r = 0; r < rows; ++r) {
      const int32_t tokens = c.tokens[static_cast<size_t>(r)];
      slots[r] = tokens == 0 ? -1 : rows - 1 - r;
      positions[r] = tokens - 1;
      for (int32_t h = 0; h < c.kv_heads && tokens > 0; ++h) FillHead(r, h, random);
    }
  }

  // Tokens of a stretch share a topic, which shows in their keys and values, and a query seeks one
  // of the topics: so attention is peaked, and some blocks matter more than others.
  void FillHead(int32_t row, int32_t head, Random& random) {
    constexpr int kTopics = 5, kStretch = 40;
    const int64_t dim = c.head_dim, slot = slots[row];
    std::vector<std::vector<float>> topics(2 * kTopics, std::vector<float>(c.head_dim));
    for (std::vector<float>& topic : topics) FillNormal(topic, random);
    size_t topic = 0;
    std::vector<float> noise(static_cast<size_t>(dim));
    for (int64_t t = 0; t <= positions[row]; ++t) {
      if (t % kStretch == 0) topic = random() % kTopics;
      for (int i = 0; i < 2; ++i) {
        FillNormal(noise, random);
        T* const out = cache.Key(slot, t, head) + i * c.block_tokens * dim;
        for (size_t d = 0; d < noise.size(); ++d) {
          const float v = 0.6f * topics[topic + (i == 0 ? 0 : kTopics)][d] + 0.5f * noise[d];
          PutElement(double{v}, out[d]);
        }
      }
    }
    for (int32_t g = 0; g < c.group; ++g) {
      const std::vector<float>& sought = topics[random() % kTopics];
      const float strength = 0.25f * static_cast<float>(random() % 6);
      float* const of_head = Query(row, head * c.group + g);
      for (size_t d = 0; d < sought.size(); ++d) of_head[d] += strength * sought[d];
    }
    PutDigests(slot, positions[row] + 1, head, random);
  }

  void PutDigests(int64_t slot, int32_t tokens, int32_t head, Random& random) {
    const int64_t dim = c.head_dim;
    for (int32_t level = 0; level < kFluxionLevels; ++level) {
      const int64_t length = LevelTokens(level);
      for (int64_t b = 0; (b + 1) * length <= tokens; ++b) {
        uint8_t* const row = digests[static_cast<size_t>(level)].Row(slot, b, head);
        if ((b + 1) * length <= kFluxionSinkTokens) continue;
        for (int64_t piece = 0; piece < kDigestPieces; ++piece) {
          int64_t begin = b * length + piece * length / kDigestPieces;
          if (begin < kFluxionSinkTokens) begin += length / 2;
          PutPiece(slot, head, begin, begin + length / kDigestPieces, row + piece * dim);
        }
        // Any spread will do here: scores need not be those of the keys. Blocks have more of it and
        // less, so that it changes their order.
        const float most = static_cast<float>(random() % 100) * 0.01f;
        for (int64_t d = 0; spread && d < dim; ++d) {
          const float share = static_cast<float>(random() % 100) * 0.01f;
          row[kDigestPieces * dim + d] = FloatToE4M3(most * share);
        }
      }
    }
  }
  // Writes the mean of keys [begin, end).
  void PutPiece(int64_t slot, int64_t head, int64_t begin, int64_t end, uint8_t* piece) {
    for (int64_t d = 0; d < c.head_dim; ++d) {
      double sum = 0;
      for (int64_t t = begin; t < end; ++t) sum += Value(cache.Key(slot, t, head)[d]);
      piece[d] = FloatToE4M3(static_cast<float>(sum / static_cast<double>(end - begin)));
    }
  }
  static void PutElement(double v, T& out) {
    if constexpr (sizeof(T) == 4) {
      out = static_cast<float>(v);
    } else {
      out = FloatToBf16(static_cast<float>(v));
    }
  }

  float* Query(int32_t row, int32_t head) {
    return q.data() + row * q_stride + int64_t{head} * c.head_dim;
  }

  AnchorStatisticsParams Params() {
    AnchorStatisticsParams p{};
    p.q = q.data();
    p.q_stride = q_stride;
    p.slots = slots.data();
    p.positions = positions.data();
    p.cache = cache.view;
    for (size_t level = 0; level < levels; ++level) p.digests.of[level] = digests[level].view;
    p.rows = rows;
    p.heads = heads;
    p.scale = 1 / std::sqrt(static_cast<float>(c.head_dim));
    p.tau = c.tau;
    return p;
  }

  const AnchorCase c;
  const int32_t rows, heads, longest;
  const int64_t q_stride;
  Guarded<int32_t> slots, positions;
  TestCache<T> cache;
  std::vector<TestRows<uint8_t>> digests;
  Guarded<float> q;
  const size_t levels;  // that have digests
  const bool spread;    // of digests
};

struct AnchorResults {
  template <typename T>
  explicit AnchorResults(const AnchorInput<T>& in)
      : kv_width(kAnchorKvNumbers + in.c.head_dim),
        head_width(kAnchorHeadNumbers + in.c.head_dim),
        kv(int64_t{in.rows} * in.c.kv_heads * kv_width),
        heads(int64_t{in.rows} * in.heads * head_width),
        resident(in.rows),
        scratch(AnchorScratchBytes(in.longest, in.heads, in.c.head_dim)) {}

  AnchorStatisticsParams In(AnchorStatisticsParams p) {
    p.anchors = {kv.data(), heads.data(), resident.data()};
    p.scratch = scratch.data();
    return p;
  }
  std::string Damage() const {
    return kv.Damage() + heads.Damage() + resident.Damage() + scratch.Damage();
  }

  int64_t kv_width, head_width;
  Guarded<float> kv, heads, resident;
  Guarded<unsigned char> scratch;
};

void CheckSameBits(const AnchorResults& a, const AnchorResults& b) {
  CHECK(BitDifference(a.kv.span(), b.kv.span(), a.kv_width) == "");
  CHECK(BitDifference(a.heads.span(), b.heads.span(), a.head_width) == "");
  CHECK(BitDifference(a.resident.span(), b.resident.span(), 1) == "");
}

// Computes a head's outputs in float64 straight from the cache, token by token.
template <typename T>
class Direct {
 public:
  Direct(AnchorInput<T>& in, int32_t row, int32_t head)
      : in_(in), row_(row), head_(head), segments_(SegmentsOf(in.positions[row])) {
    for (int32_t t = 0; t < segments_.end; ++t) scores_.push_back(Dot(Key(t)) * Scale());
  }

  const FluxionSegments& segments() const { return segments_; }

  // Returns the output over the tokens for which `takes` holds.
  template <typename Takes>
  std::vector<double> Output(Takes takes) const {
    const double largest = *std::max_element(scores_.begin(), scores_.end());
    std::vector<double> o(static_cast<size_t>(in_.c.head_dim));
    double weight = 0;
    for (int32_t t = 0; t < segments_.end; ++t) {
      if (!takes(t)) continue;
      const double w = std::exp(scores_[static_cast<size_t>(t)] - largest);
      const T* const value = Key(t) + in_.c.block_tokens * in_.c.head_dim;
      weight += w;
      for (size_t d = 0; d < o.size(); ++d) o[d] += w * Value(value[d]);
    }
    for (double& x : o) x /= weight;
    return o;
  }

  double ScoreOfRow(int32_t level, int32_t row) const {
    const uint8_t* const digest =
        in_.digests[static_cast<size_t>(level)].Row(in_.slots[row_], row, head_ / in_.c.group);
    double best = -INFINITY;
    for (int32_t piece = 0; piece < kDigestPieces; ++piece) {
      double sum = 0;
      for (int32_t d = 0; d < in_.c.head_dim; ++d) {
        sum += double{Query()[d]} * E4M3ToFloat(digest[piece * in_.c.head_dim + d]);
      }
      best = std::max(best, sum);
    }
    double spread = 0;
    for (int32_t d = 0; in_.spread && d < in_.c.head_dim; ++d) {
      spread += double{Query()[d]} * double{Query()[d]} *
                E4M3ToFloat(digest[kDigestPieces * in_.c.head_dim + d]);
    }
    return best + double{kFluxionDeviations} * std::sqrt(spread);
  }
  // Returns the errors of all prefixes but the longest one.
  std::vector<double> Errors(int32_t level) const {
    const int32_t first = FirstBlock(segments_, level), count = CpuBlocks(segments_, level);
    std::vector<std::pair<float, int32_t>> order;  // by -score, then by block
    for (int32_t b = first; b < first + count; ++b) {
      const int32_t below = static_cast<size_t>(level) < in_.levels ? 0 : level;
      double score = -INFINITY;
      for (int32_t row = b << below; row < (b + 1) << below; ++row) {
        if (below > 0 && row * LevelTokens(0) < segments_.sink) continue;
        score = std::max(score, ScoreOfRow(level - below, row));
      }
      order.push_back({-static_cast<float>(score), b});
    }
    std::sort(order.begin(), order.end());
    const std::vector<double> whole = Output([](int32_t) { return true; });
    std::vector<bool> taken(static_cast<size_t>(first + count));
    std::vector<double> errors;
    for (const auto& [score, block] : order) {
      const std::vector<double> o = Output([&](int32_t t) {
        return t < segments_.sink || t >= segments_.local ||
               taken[static_cast<size_t>(t / LevelTokens(level))];
      });
      double square = 0;
      for (size_t d = 0; d < o.size(); ++d) square += (o[d] - whole[d]) * (o[d] - whole[d]);
      errors.push_back(std::sqrt(square));
      taken[static_cast<size_t>(block)] = true;
    }
    return errors;
  }

  const std::vector<double>& scores() const { return scores_; }

 private:
  const float* Query() const { return in_.Query(row_, head_); }
  const T* Key(int32_t token) const {
    return in_.cache.Key(in_.slots[row_], token, head_ / in_.c.group);
  }
  double Scale() const { return double{1 / std::sqrt(static_cast<float>(in_.c.head_dim))}; }
  double Dot(const T* key) const {
    double sum = 0;
    for (int32_t d = 0; d < in_.c.head_dim; ++d) sum += double{Query()[d]} * Value(key[d]);
    return sum;
  }

  AnchorInput<T>& in_;
  const int32_t row_, head_;
  const FluxionSegments segments_;
  std::vector<double> scores_;
};

double LengthOf(const std::vector<double>& x) {
  return std::sqrt(std::inner_product(x.begin(), x.end(), x.begin(), 0.0));
}

// Returns the largest output over all tokens of the row's heads, times tau.
template <typename T>
double Limit(AnchorInput<T>& in, int32_t row) {
  double largest = 0;
  for (int32_t h = 0; h < in.heads; ++h) {
    const Direct<T> direct(in, row, h);
    largest = std::max(largest, LengthOf(direct.Output([](int32_t) { return true; })));
  }
  return double{in.c.tau} * largest;
}

// Returns how many blocks a budget is, or -1 where it is no whole number of them.
int32_t BlocksOf(float budget, const FluxionSegments& segments, int32_t level) {
  if (budget >= 1) return budget == 1 ? CpuBlocks(segments, level) : -1;
  const double exact = double{budget} * CpuTokens(segments) / LevelTokens(level);
  const double blocks = std::round(exact);
  return std::fabs(exact - blocks) < 1e-3 && blocks >= 0 ? static_cast<int32_t>(blocks) : -1;
}

// Returns true if `blocks` is the right prefix for a bound that is off by at most a share `off` of
// it.
bool IsRight(const std::vector<double>& errors, int32_t blocks, double bound, double off) {
  if (blocks < 0 || blocks > static_cast<int32_t>(errors.size())) return false;
  for (size_t n = static_cast<size_t>(blocks); n < errors.size(); ++n) {
    if (errors[n] > bound * (1 + off)) return false;
  }
  return blocks == 0 || errors[static_cast<size_t>(blocks) - 1] >= bound * (1 - off);
}

// Errors within this share of the bound may be on either side of it: they are errors of float32.
constexpr double kNearBound = 3e-4;

template <typename T>
void CheckBudgets(AnchorInput<T>& in, int32_t row, int32_t head, const float* got,
                  const float* want) {
  for (int32_t level = 0; level < kFluxionLevels; ++level) {
    if (got[level] == want[level]) continue;
    const Direct<T> direct(in, row, head);
    INFO("row " << row << " head " << head << " level " << level << ": got " << got[level]
                << ", want " << want[level]);
    CHECK(IsRight(direct.Errors(level), BlocksOf(got[level], direct.segments(), level),
                  Limit(in, row), kNearBound));
  }
}

// Returns an empty string where every number is near.
std::string Far(const float* got, const float* want, int64_t count, double relative,
                double absolute) {
  for (int64_t i = 0; i < count; ++i) {
    const bool same = std::memcmp(got + i, want + i, sizeof(float)) == 0;
    const double off = std::fabs(double{got[i]} - double{want[i]});
    if (same || off <= absolute + relative * std::fabs(double{want[i]})) continue;
    return "number " + std::to_string(i) + " is " + std::to_string(got[i]) + ", not " +
           std::to_string(want[i]);
  }
  return "";
}

template <typename T>
void CheckResults(AnchorInput<T>& in, const AnchorResults& got, const AnchorResults& want) {
  const int64_t dim = in.c.head_dim;
  CHECK(got.Damage() == "");
  for (int64_t slot = 0; slot < in.rows; ++slot) {
    INFO("slot " << slot);
    for (int64_t h = 0; h < in.c.kv_heads; ++h) {
      INFO("KV head " << h);
      const int64_t at = (slot * in.c.kv_heads + h) * got.kv_width;
      const float *g = got.kv.data() + at, *w = want.kv.data() + at;
      CHECK(Far(g, w, 4, 1e-5, 1e-6) == "");
      CHECK(Far(g + 4, w + 4, 8, 2e-4, 1e-4) == "");
      CHECK(Far(g + kAnchorKvNumbers, w + kAnchorKvNumbers, dim, 1e-5, 1e-6) == "");
    }
    const auto row = static_cast<int32_t>(in.rows - 1 - slot);
    for (int32_t h = 0; h < in.heads; ++h) {
      INFO("head " << h);
      const int64_t at = (slot * in.heads + h) * got.head_width;
      const float *g = got.heads.data() + at, *w = want.heads.data() + at;
      CHECK(Far(g, w, 2, 1e-4, 2e-6) == "");
      CHECK(Far(g + 2, w + 2, 2, 2e-4, 1e-4) == "");
      CHECK(Far(g + 4, w + 4, 3, 2e-6, 1e-5) == "");
      CHECK(Far(g + 7, w + 7, 4, 2e-5, 1e-5) == "");
      if (in.slots[row] >= 0) CheckBudgets(in, row, h, g + 11, w + 11);
      CHECK(Far(g + kAnchorHeadNumbers, w + kAnchorHeadNumbers, dim, 0, 0) == "");
    }
    CHECK(Far(got.resident.data() + slot, want.resident.data() + slot, 1, 2e-5, 1e-5) == "");
  }
}

template <typename T>
void CheckCase(const KernelTable& table, const AnchorCase& c, Random& random) {
  INFO(c.name << ", " << sizeof(T) << " bytes an element");
  AnchorInput<T> in(c, random);
  std::fill_n(in.Query(0, 0), c.head_dim, 0.0f);  // z is 0, and all scores are equal
  AnchorResults want(in), first(in), alone(in);
  RunWorkers(Reference().anchor_statistics, want.In(in.Params()), 2);
  RunWorkers(table.anchor_statistics, first.In(in.Params()), 1);
  CheckResults(in, first, want);
  for (const int workers : {2, 3}) {
    AnchorResults got(in);
    RunThreads(table.anchor_statistics, got.In(in.Params()), workers);
    CHECK(got.Damage() == "");
    CheckSameBits(got, first);
  }
  for (int32_t r = 0; r < in.rows; ++r) {
    AnchorStatisticsParams p = alone.In(in.Params());
    p.rows = 1;
    p.q += r * p.q_stride;
    p.slots += r;
    p.positions += r;
    RunWorkers(table.anchor_statistics, p, 2);
  }
  CheckSameBits(alone, first);
}

void TestAnchors(const KernelTable& table, Random& random) {
  for (const AnchorCase& c : Cases()) {
    CheckCase<uint16_t>(table, c, random);
    CheckCase<float>(table, c, random);
  }
}
SLUICE_TEST_ON_EVERY_PATH("anchors: statistics agree with the reference, and are a row's own",
                          TestAnchors)

// Equal keys and values have no moments but a mean, and no need of any block.
void TestEqualTokens(const KernelTable& table, Random& random) {
  AnchorInput<float> in({"equal", 2, 1, 64, 16, 0.01f, {900}}, random);
  for (int64_t t = 1; t < in.longest; ++t) {
    for (const int64_t part : {0, 16 * 64}) {
      std::copy_n(in.cache.Key(0, 0, 0) + part, 64, in.cache.Key(0, t, 0) + part);
    }
  }
  in.PutDigests(0, in.longest, 0, random);
  AnchorResults got(in);
  RunWorkers(table.anchor_statistics, got.In(in.Params()), 1);
  for (const int64_t i : {4, 8}) {
    CHECK(got.kv[i] == Approx(got.kv[i / 4 - 1]));
    for (const int64_t moment : {1, 2, 3}) CHECK(got.kv[i + moment] == 0);
  }
  for (int64_t h = 0; h < 2; ++h) {
    const float* const of_head = got.heads.data() + h * got.head_width;
    for (const int64_t moment : {1, 2, 3}) CHECK(of_head[moment] == 0);
    for (int64_t level = 0; level < kFluxionLevels; ++level) CHECK(of_head[11 + level] == 0);
  }
}
SLUICE_TEST_ON_EVERY_PATH("anchors: equal tokens have no deviation and need no blocks",
                          TestEqualTokens)

// Scores that lie further apart than float32 has exponents: weights of the default set vanish
// beside those of the cpu segment, and yet its own output is what the empty prefix has.
void TestFarScores(const KernelTable& table, Random& random) {
  for (const float tau : {0.05f, 4.0f}) {
    AnchorInput<float> in({"far", 1, 1, 16, 16, tau, {700}}, random);
    for (int64_t d = 0; d < 16; ++d) in.q[d] = 20;
    for (int64_t t = 0; t < in.longest; ++t) {
      const bool high = t >= 320 && t < 336;
      for (int64_t d = 0; d < 16; ++d) {
        in.cache.Key(0, t, 0)[d] = high ? 3.0f : 0.01f * static_cast<float>(t % 7);
      }
    }
    in.PutDigests(0, in.longest, 0, random);
    AnchorResults got(in), want(in);
    RunWorkers(Reference().anchor_statistics, want.In(in.Params()), 1);
    RunWorkers(table.anchor_statistics, got.In(in.Params()), 1);
    CheckResults(in, got, want);
    CHECK(got.heads[11] ==
          (tau < 1 ? 16.0f / static_cast<float>(CpuTokens(SegmentsOf(699))) : 0.0f));
  }
}
SLUICE_TEST_ON_EVERY_PATH("anchors: scores may lie far apart", TestFarScores)

TEST_CASE("anchors: the reference's budgets are those of a direct computation",
          "[kernels][anchors]") {
  Random random(TestSeed());
  int64_t partial = 0;
  for (int i = 0; i < 12; ++i) {
    const int32_t dim = 16 * (1 + i % 2);
    AnchorInput<float> in({"tiny",
                           2,
                           2,
                           dim,
                           16,
                           0.02f * static_cast<float>(1 + i),
                           {450 + static_cast<int32_t>(random() % 500)}},
                          random);
    AnchorResults got(in);
    RunWorkers(Reference().anchor_statistics, got.In(in.Params()), 1);
    const double bound = Limit(in, 0);
    for (int32_t h = 0; h < in.heads; ++h) {
      const Direct<float> direct(in, 0, h);
      const FluxionSegments& s = direct.segments();
      const float* const of_head = got.heads.data() + h * got.head_width;
      const int32_t bounds[4] = {0, s.sink, s.local, s.end};
      for (size_t part = 0; part < 3; ++part) {
        double sum = 0;
        for (int32_t t = bounds[part]; t < bounds[part + 1]; ++t) {
          sum += std::exp(direct.scores()[static_cast<size_t>(t)]);
        }
        const auto o =
            direct.Output([&](int32_t t) { return t >= bounds[part] && t < bounds[part + 1]; });
        CHECK(of_head[4 + part] == Approx(std::log(sum)).epsilon(1e-6));
        CHECK(of_head[7 + part] == Approx(LengthOf(o)).epsilon(1e-6));
      }
      for (int32_t level = 0; level < kFluxionLevels; ++level) {
        INFO("run " << i << " head " << h << " level " << level);
        const int32_t blocks = BlocksOf(of_head[11 + level], s, level);
        CHECK(IsRight(direct.Errors(level), blocks, bound, 1e-9));
        partial += blocks > 0 && blocks < CpuBlocks(s, level);
      }
    }
  }
  CHECK(partial > 0);
}

}  // namespace
}  // namespace sluice::kernels
