#include "src/attention/offload/home_admission.h"

#include <utility>

#include "src/base/failpoint.h"
#include "src/base/status_macros.h"

namespace sluice {

bool AdmitWithHome(PagePool* hbm, const TokensByKind& hbm_tokens, PagePool* dram,
                   const TokensByKind& home_tokens, std::unique_ptr<SequenceCache>& home,
                   std::unique_ptr<SequenceCache>* working_set) {
  SLUICE_CHECK(*working_set == nullptr, "a slot has one sequence");
  if (SLUICE_FAILPOINT(kKvAdmit)) return false;
  Reservation reserved = hbm->TryReserve(hbm_tokens);
  if (reserved.empty()) return false;
  if (home != nullptr && !home->Covers(home_tokens) && !home->Extend(home_tokens)) return false;
  if (home == nullptr) {
    Reservation dram_reserved = dram->TryReserve(home_tokens);
    if (dram_reserved.empty()) return false;
    home = std::make_unique<SequenceCache>(dram, std::move(dram_reserved));
  }
  home->EnsureTokens(home_tokens);
  *working_set = std::make_unique<SequenceCache>(hbm, std::move(reserved));
  (*working_set)->EnsureTokens(hbm_tokens);
  return true;
}

}  // namespace sluice
