#include "src/profile/hash_training.h"

#include <Eigen/Core>
#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>

#include "kernels/hash_params.h"
#include "src/attention/policies/clo/hash_matrix.h"
#include "src/profile/head_math.h"

namespace sluice {
namespace {

using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

constexpr int64_t kQueries = 48, kKeys = 384;  // of a step
constexpr float kSteepness = 2;                // of tanh, for directions of variance 1
constexpr float kHalfPi = 1.5707963f;
constexpr float kRate = 0.02f;  // Adam's, with its usual decays

int64_t TokensOf(const HeadQueries& head, int64_t head_dim) {
  return static_cast<int64_t>(head.k.size()) / head_dim;
}

// Returns the mean of keys at equal distances (kernels::KeyCentresParams).
Eigen::RowVectorXf CentreOf(const HeadQueries& head, int64_t head_dim) {
  const int64_t tokens = TokensOf(head, head_dim);
  const int64_t count = std::min<int64_t>(tokens, kernels::kCentreKeys);
  const Eigen::Map<const Matrix> keys(head.k.data(), tokens, head_dim);
  Eigen::RowVectorXf sum = Eigen::RowVectorXf::Zero(head_dim);
  for (int64_t i = 0; i < count; ++i) sum += keys.row(i * tokens / count);
  return sum / static_cast<float>(std::max<int64_t>(count, 1));
}

Matrix Drawn(const std::vector<float>& from, int64_t head_dim, int64_t rows, int64_t count,
             std::mt19937_64& random) {
  Matrix drawn(count, head_dim);
  for (int64_t i = 0; i < count; ++i) {
    const auto row = static_cast<int64_t>(random() % static_cast<uint64_t>(rows));
    drawn.row(i) = Eigen::Map<const Eigen::RowVectorXf>(from.data() + row * head_dim, head_dim);
  }
  return drawn;
}

// Soft codes of keys, and what their gradient needs.
struct SoftCodes {
  SoftCodes(const Matrix& vectors, const Matrix& hash) : lengths(vectors.rowwise().norm()) {
    const float scale = std::sqrt(static_cast<float>(vectors.cols()));
    directions = vectors;
    for (Eigen::Index i = 0; i < vectors.rows(); ++i) {
      directions.row(i) *= scale / std::max(lengths[i], 1e-6f);
    }
    codes = (kSteepness * (directions * hash)).array().tanh();
  }
  // Returns the gradient of the matrix from that of the codes.
  Matrix Gradient(const Matrix& of_codes) const {
    const Matrix of_sums = of_codes.array() * kSteepness * (1 - codes.array().square());
    return directions.transpose() * of_sums;
  }
  Matrix directions, codes;
  Eigen::VectorXf lengths;
};

void SoftmaxRows(Matrix* scores) {
  for (Eigen::Index row = 0; row < scores->rows(); ++row) {
    scores->row(row).array() -= scores->row(row).maxCoeff();
    scores->row(row) = scores->row(row).array().exp();
    scores->row(row) /= scores->row(row).sum();
  }
}

// Returns the gradient of the loss of one draw. `keys` are less their centre.
Matrix GradientOf(const Matrix& queries, const Matrix& keys, const Matrix& hash) {
  const SoftCodes k(keys, hash);
  const Matrix products = queries * hash;
  const auto dim = static_cast<float>(hash.rows());
  Matrix wanted = queries * keys.transpose() / std::sqrt(dim);
  // For random columns of length 1 this is what q k / sqrt(dim) is expected to be.
  const Eigen::RowVectorXf scale =
      k.lengths.transpose() * std::sqrt(kHalfPi) / static_cast<float>(hash.cols());
  Matrix scores = (products * k.codes.transpose()).array().rowwise() * scale.array();
  SoftmaxRows(&wanted);
  SoftmaxRows(&scores);
  const Matrix of_sums =
      ((scores - wanted).array().rowwise() * scale.array()) / static_cast<float>(queries.rows());
  return queries.transpose() * (of_sums * k.codes) + k.Gradient(of_sums.transpose() * products);
}

// Returns the indices of the `count` largest values.
std::vector<int32_t> Largest(const std::vector<double>& values, size_t count) {
  std::vector<int32_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + static_cast<int64_t>(count), order.end(),
                    [&](int32_t a, int32_t b) {
                      const double x = values[static_cast<size_t>(a)];
                      const double y = values[static_cast<size_t>(b)];
                      return x > y || (x == y && a < b);
                    });
  order.resize(count);
  return order;
}

Matrix Products(const std::vector<float>& vectors, int64_t head_dim,
                const Eigen::RowVectorXf& centre, const Matrix& hash) {
  const Eigen::Map<const Matrix> all(vectors.data(),
                                     static_cast<int64_t>(vectors.size()) / head_dim, head_dim);
  return (all.rowwise() - centre) * hash;
}

}  // namespace

double HeldByCodes(const HeadQueries& head, int64_t head_dim, const float* hash, int64_t bits,
                   int64_t first_row) {
  const int64_t tokens = TokensOf(head, head_dim);
  const int64_t group =
      static_cast<int64_t>(head.q.size()) / head_dim / std::max<int64_t>(tokens, 1);
  const Matrix matrix = Eigen::Map<const Matrix>(hash, head_dim, bits);
  const Eigen::RowVectorXf centre = CentreOf(head, head_dim);
  const Matrix codes = Products(head.k, head_dim, centre, matrix).unaryExpr([](float x) {
    return x > 0 ? 1.0f : -1.0f;
  });
  Matrix levels = Products(head.q, head_dim, Eigen::RowVectorXf::Zero(head_dim), matrix);
  for (Eigen::Index i = 0; i < levels.rows(); ++i) {
    const float most = std::max(levels.row(i).cwiseAbs().maxCoeff(), 1e-30f);
    levels.row(i) = (levels.row(i) * (kernels::kMostHashLevels / most)).array().rint();
  }
  const Eigen::Map<const Matrix> all(head.k.data(), tokens, head_dim);
  const Eigen::VectorXf lengths = (all.rowwise() - centre).rowwise().norm();
  double sum = 0;
  int rows = 0;
  for (int64_t row = first_row; row < tokens; row += MeasuredRowStride(tokens - first_row)) {
    const auto count = static_cast<size_t>(row + 1) / 10;
    if (count == 0) continue;
    std::vector<double> attention(static_cast<size_t>(row + 1));
    std::vector<double> scores(attention.size(), -std::numeric_limits<double>::infinity());
    for (int64_t g = row * group; g < (row + 1) * group; ++g) {
      const std::vector<float> weights =
          AttentionWeights(head.q.data() + g * head_dim, head.k, row + 1, head_dim);
      const Eigen::VectorXf agreement = codes.topRows(row + 1) * levels.row(g).transpose();
      for (size_t t = 0; t < scores.size(); ++t) {
        const auto at = static_cast<Eigen::Index>(t);
        attention[t] += double{weights[t]};
        scores[t] = std::max(scores[t], double{agreement[at]} * double{lengths[at]});
      }
    }
    double held = 0, most = 0;
    for (const int32_t t : Largest(scores, count)) held += attention[static_cast<size_t>(t)];
    for (const int32_t t : Largest(attention, count)) most += attention[static_cast<size_t>(t)];
    sum += held / most;
    ++rows;
  }
  return rows == 0 ? 1 : sum / rows;
}

void TrainHash(const HeadQueries& head, int64_t head_dim, int64_t rows,
               const HashTrainingOptions& options, uint64_t seed, float* hash) {
  const int64_t group = static_cast<int64_t>(head.q.size()) / static_cast<int64_t>(head.k.size());
  std::mt19937_64 random(seed);
  Matrix matrix = Eigen::Map<const Matrix>(hash, head_dim, options.bits);
  const Eigen::RowVectorXf centre = CentreOf(head, head_dim);
  Matrix mean = Matrix::Zero(head_dim, options.bits), square = mean;
  float mean_decay = 1, square_decay = 1;
  for (int step = 0; step < options.steps; ++step) {
    const Matrix queries = Drawn(head.q, head_dim, rows * group, kQueries, random);
    const Matrix keys = Drawn(head.k, head_dim, rows, kKeys, random).rowwise() - centre;
    const Matrix gradient = GradientOf(queries, keys, matrix);
    mean = 0.9f * mean + 0.1f * gradient;
    square = 0.999f * square + 0.001f * gradient.array().square().matrix();
    mean_decay *= 0.9f;
    square_decay *= 0.999f;
    const float rate = kRate * (1 - static_cast<float>(step) / static_cast<float>(options.steps));
    matrix.array() -= rate / (1 - mean_decay) * mean.array() /
                      ((square / (1 - square_decay)).array().sqrt() + 1e-8f);
    for (int64_t column = 0; column < options.bits; ++column) {
      matrix.col(column) /= std::max(matrix.col(column).norm(), 1e-6f);
    }
  }
  Eigen::Map<Matrix>(hash, head_dim, options.bits) = matrix;
}

TrainedHashes TrainHashes(const CapturedQueries& captured, const HashTrainingOptions& options,
                          int threads, const std::function<void(int64_t, int64_t)>& progress) {
  const int64_t dim = captured.head_dim, heads = captured.layers * captured.kv_heads;
  TrainedHashes result;
  result.hash = RandomHash({captured.layers, captured.kv_heads, dim, options.bits}, options.seed);
  result.layers.resize(static_cast<size_t>(captured.layers));
  std::vector<HashQuality> judged(static_cast<size_t>(heads));
  std::atomic<int64_t> next{0};
  std::mutex mutex;
  int64_t done = 0;
  const auto work = [&] {
    for (int64_t i = next++; i < heads; i = next++) {
      const HeadQueries& head = captured.heads[static_cast<size_t>(i)];
      float* const hash = result.hash.data() + i * dim * options.bits;
      const int64_t rows = TokensOf(head, dim) * 3 / 4;
      HashQuality& of = judged[static_cast<size_t>(i)];
      of.random = of.trained = HeldByCodes(head, dim, hash, options.bits, rows);
      std::vector<float> trained(hash, hash + dim * options.bits);
      TrainHash(head, dim, rows, options, options.seed + static_cast<uint64_t>(i), trained.data());
      const double held = HeldByCodes(head, dim, trained.data(), options.bits, rows);
      if (held > of.random) {
        of.trained = held;
        std::copy(trained.begin(), trained.end(), hash);
      }
      const std::lock_guard lock(mutex);
      progress(++done, heads);
    }
  };
  {
    std::vector<std::jthread> team;
    for (int i = 0; i < std::max(threads, 1); ++i) team.emplace_back(work);
  }
  for (int64_t i = 0; i < heads; ++i) {
    HashQuality& of = result.layers[static_cast<size_t>(i / captured.kv_heads)];
    of.random += judged[static_cast<size_t>(i)].random / static_cast<double>(captured.kv_heads);
    of.trained += judged[static_cast<size_t>(i)].trained / static_cast<double>(captured.kv_heads);
  }
  return result;
}

}  // namespace sluice
