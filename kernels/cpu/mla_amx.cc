// Sparse MLA of the path "amx": its products run on tiles.
#include "kernels/cpu/cpu_tables.h"
#include "kernels/cpu/mla_bf16.h"

namespace sluice::kernels::cpu {
namespace {

struct AmxProducts {
  static void Linear(const LinearParams& p) { LinearAmx(p, {0, 1}); }
};

}  // namespace

void SparseMlaAmx(const SparseMlaParams& p, Worker worker) {
  SparseMlaBf16<AmxProducts>(p, worker);
}

}  // namespace sluice::kernels::cpu
