// sluice-onednn-peer times oneDNN's bf16 products at the shapes of sluice-bench kernels, on one
// thread, with prepacked weights read from memory, for comparison with Sluice's kernels. It needs
// oneDNN at configuration time; nothing else in Sluice does.
#include <cstdio>

#if SLUICE_HAVE_ONEDNN
#include <omp.h>

#include <algorithm>
#include <cstdint>
#include <dnnl.hpp>
#include <vector>

#include "src/base/timing.h"

namespace {

using dnnl::memory;

// Calls cycle through an arena of weights larger than a core's share of any cache.
constexpr int64_t kArenaBytes = int64_t{256} << 20;

// Small values of both signs; zeros would come from one cached page and draw no power.
void Fill(memory& target) {
  auto* values = static_cast<uint16_t*>(target.get_data_handle());
  uint32_t state = 1;
  for (size_t i = 0; i < target.get_desc().get_size() / 2; ++i) {
    state = state * 1664525u + 1013904223u;
    values[i] = static_cast<uint16_t>(0x3C00u | ((state >> 16) & 0x83FFu));
  }
}

void Run(int rows, int k, int n) {
  const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  dnnl::stream stream(engine);
  const memory::desc x_desc({rows, k}, memory::data_type::bf16, memory::format_tag::ab);
  const memory::desc w_desc({k, n}, memory::data_type::bf16, memory::format_tag::any);
  const memory::desc y_desc({rows, n}, memory::data_type::f32, memory::format_tag::ab);
  const dnnl::matmul::primitive_desc plan(dnnl::matmul::desc(x_desc, w_desc, y_desc), engine);
  const dnnl::matmul product(plan);
  memory x(x_desc, engine), y(y_desc, engine);
  Fill(x);
  std::vector<memory> weights;
  const int64_t bytes = int64_t{k} * n * 2;
  for (int64_t i = 0; i < std::max<int64_t>(kArenaBytes / bytes, 1); ++i) {
    weights.emplace_back(plan.weights_desc(), engine);
    Fill(weights.back());
  }
  size_t next = 0;
  const sluice::Timing t = sluice::Measure(0.3, [&] {
    product.execute(stream, {{DNNL_ARG_SRC, x},
                             {DNNL_ARG_WEIGHTS, weights[next++ % weights.size()]},
                             {DNNL_ARG_DST, y}});
    stream.wait();
  });
  std::printf("oneDNN  linear %dx%d, rows %-4d %10.1f us %8.1f-%.1f %8.1f GB/s %8.1f GFLOP/s\n", n,
              k, rows, t.median * 1e6, t.low * 1e6, t.high * 1e6,
              static_cast<double>(bytes) / t.median / 1e9, 2.0 * rows * k * n / t.median / 1e9);
}

}  // namespace

int main() {
  omp_set_num_threads(1);
  for (const int rows : {1, 8, 32, 512}) Run(rows, 576, 3072);
  for (const int rows : {1, 8, 32, 512}) Run(rows, 1536, 576);
  return 0;
}

#else

int main() {
  std::fputs(
      "sluice-onednn-peer: built without oneDNN: install libdnnl-dev and ocl-icd-opencl-dev, then "
      "configure and build again\n",
      stderr);
  return 1;
}

#endif  // SLUICE_HAVE_ONEDNN
