// The choice of the paths that this processor has. No other file asks the processor.
#include <cstring>

#include "kernels/cpu/cpu_tables.h"
#include "kernels/reference/reference.h"

#if defined(SLUICE_KERNELS_X86)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace sluice::kernels {
namespace {

#if defined(SLUICE_KERNELS_X86)

struct Features {
  bool avx2 = false;
  bool avx512_bf16 = false;
  bool amx_bf16 = false;
};

bool Bit(unsigned value, int bit) { return (value >> bit & 1u) != 0; }

// Returns the register state that the operating system saves (XCR0). REQUIRES: OSXSAVE.
uint64_t EnabledState() {
  unsigned low = 0, high = 0;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return uint64_t{high} << 32 | low;
}

// Asks Linux to let this process use AMX tile data; without it the first tile load is a SIGILL. The
// grant covers every thread and lasts for the life of the process.
bool AmxPermitted() {
  constexpr long kArchReqXcompPerm = 0x1023;  // ARCH_REQ_XCOMP_PERM of asm/prctl.h
  constexpr long kXtileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kXtileData) == 0;
}

Features Detect() {
  Features f;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return f;
  const bool fma = Bit(c, 12), os_xsave = Bit(c, 27), avx = Bit(c, 28);
  if (!os_xsave || !avx) return f;
  const uint64_t state = EnabledState();
  const bool ymm = (state & 0x6) == 0x6;
  const bool zmm = (state & 0xE6) == 0xE6;          // + opmask, upper zmm0-15, zmm16-31
  const bool tiles = (state & 0x60000) == 0x60000;  // TILECFG, TILEDATA
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return f;
  f.avx2 = ymm && fma && Bit(b, 5);
  const bool avx512 = zmm && Bit(b, 16) && Bit(b, 17) && Bit(b, 30) && Bit(b, 31);  // F DQ BW VL
  const bool amx = tiles && Bit(d, 22) && Bit(d, 24) && Bit(c, 1);  // BF16 TILE, AVX512_VBMI
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) == 0) return f;
  f.avx512_bf16 = f.avx2 && avx512 && Bit(a, 5);
  f.amx_bf16 = f.avx512_bf16 && amx && AmxPermitted();
  return f;
}

// The path "amx" is "avx512bf16" with its matrix products, its attention and its scores
// of levels on tiles.
const KernelTable& AmxTable() {
  static const KernelTable table = [] {
    KernelTable t = cpu::Avx512Bf16Table();
    t.name = "amx";
    t.linear = cpu::LinearAmx;
    t.attention = cpu::AttentionAmx;
    t.sparse_attention = cpu::SparseAttentionAmx;
    t.pull_attention = cpu::PullAttention<cpu::SparseAttentionAmx>;
    t.head_linear = cpu::HeadLinearAmx;
    t.expert_linear = cpu::ExpertLinearAmx;
    t.sparse_mla = cpu::SparseMlaAmx;
    t.index_logits = cpu::IndexLogitsAmx;
    t.level_scores = cpu::LevelScoresAmx;
    return t;
  }();
  return table;
}

#endif  // SLUICE_KERNELS_X86

}  // namespace

const std::vector<const KernelTable*>& AvailableKernelTables() {
  static const auto* const tables = [] {
    auto* list = new std::vector<const KernelTable*>{&reference::Table(), &cpu::PortableTable()};
#if defined(SLUICE_KERNELS_X86)
    const Features features = Detect();
    if (features.avx2) list->push_back(&cpu::Avx2Table());
    if (features.avx512_bf16) list->push_back(&cpu::Avx512Bf16Table());
    if (features.amx_bf16) list->push_back(&AmxTable());
#endif
    return list;
  }();
  return *tables;
}

const std::vector<const char*>& KnownKernelTables() {
  static const auto* const names = new std::vector<const char*> {
    "reference", "portable",
#if defined(SLUICE_KERNELS_X86)
        "avx2", "avx512bf16", "amx",
#endif
  };
  return *names;
}

const KernelTable* FindKernelTable(const char* name) {
  for (const KernelTable* table : AvailableKernelTables()) {
    if (std::strcmp(table->name, name) == 0) return table;
  }
  return nullptr;
}

}  // namespace sluice::kernels
