// The operators of latent attention and of experts whose products run on tiles, on the path "amx".
#include "kernels/cpu/cpu_tables.h"
#include "kernels/cpu/dense_products.h"
#include "kernels/cpu/index_logits_bf16.h"
#include "kernels/cpu/mla_bf16.h"

namespace sluice::kernels::cpu {
namespace {

struct AmxProducts {
  static void Linear(const LinearParams& p) { LinearAmx(p, {0, 1}); }
};

}  // namespace

void HeadLinearAmx(const HeadLinearParams& p, Worker worker) {
  HeadLinearDense<AmxProducts>(p, worker);
}

void ExpertLinearAmx(const ExpertLinearParams& p, Worker worker) {
  ExpertLinearDense<AmxProducts>(p, worker);
}

void SparseMlaAmx(const SparseMlaParams& p, Worker worker) {
  SparseMlaBf16<AmxProducts>(p, worker);
}

void IndexLogitsAmx(const IndexLogitsParams& p, Worker worker) {
  IndexLogitsBf16<AmxProducts>(p, worker);
}

}  // namespace sluice::kernels::cpu
