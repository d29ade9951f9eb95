"""Parts of `tools/gpu-test --bench` that measure policy fluxion: shapes of Fluxion's figures 7 to 9 (arXiv 2605.07719).

Those with 64 GiB of caches or more in HBM need a GPU of 141 GB.
"""

import random

from sluice_gpu.policy_runs import LLAMA, QWEN7, Run

# Fluxion's baseline, blocks of 16 and a twentieth of each head's tokens, as published: digests in DRAM, and the CPU
# alone attends.
BASELINE = "fluxion-paper-fixed:device-share=0"
# A network that no model trained and whose volume (equation 3) is 3.1 times smaller than the baseline's, as the paper's
# predictor implies: in the published form and with digests in HBM.
PAPER, DIGESTS = (f"fluxion-synthetic:hot=0:host-digests={digests}" for digests in (1, 0))
HOT = "fluxion-synthetic:hot=1"

# The baseline with digests in HBM, and with hot blocks there too; then the network in each form, where the CPU attends
# alone to what is not in HBM, and where the device pulls beside it.
FORMS = ("full", BASELINE, "fluxion-fixed:device-share=0", "fluxion-fixed:hot=1",
         *(f"{form}{how}" for form in (PAPER, DIGESTS) for how in (":device-share=0", ":pull=1")), HOT, f"{HOT}:pull=1")
FIGURE7 = ("full", BASELINE, f"{PAPER}:device-share=0", f"{PAPER}:pull=1", f"{DIGESTS}:pull=1", f"{HOT}:pull=1")
SCHEDULES = tuple(f"{DIGESTS}:{how}" for how in ("schedule=none", "schedule=uniform", "schedule=length",
                                                 "schedule=parts", "pull=1"))
# One size of block for all heads, sizes by the plan where no head streams, and everything.
ABLATION = (BASELINE, *(f"{form}:device-share=0{less}" for form in (PAPER, DIGESTS)
                        for less in (":streaming=0:level=16", ":streaming=0:level=32", ":streaming=0", "")))


def _shape(name: str, context: int, batch: int, policies: tuple[str, ...], **more) -> Run:
    # A trace takes as long as the rest of a row, so only the rows of table 5 have one.
    return Run(name, policies, (context,), given_batches=True, most=batch, block_tokens=16, statistics=0, steps=8,
               distinct=1, **{"model": LLAMA, "batches": (batch,), "full_sequences": None, "trace": False, **more})


def _qwen(name: str, context: int, batch: int) -> Run:
    # 56 KiB of K and V a token: 28 GiB at most.
    return _shape(f"qwen-{name}", context, batch, FIGURE7, model=QWEN7, dram_gib=36)


def drawn(least: int, most: int, seed: int, sequences: int = 8) -> tuple[int, ...]:
    """Returns the lengths of sequences, drawn alike between both, in tokens; the same ones for a seed."""
    lengths = random.Random(seed)
    return tuple(sorted(lengths.randint(least, most) for _ in range(sequences)))


def _mixed(name: str, lengths: tuple[int, ...], policies: tuple[str, ...]) -> Run:
    # A sequence of each length. All contexts lie in HBM until they are handed over, so that `full` has no room there.
    return Run(name, policies, lengths, model=LLAMA, batches=(len(lengths),), given_batches=True, most=len(lengths),
               full_sequences=None, block_tokens=16, statistics=0, steps=8, distinct=1, traffic="mixed", trace=False)


MIXED = {"16k-64k": drawn(16384, 65536, seed=1), "32k-128k": drawn(32768, 129024, seed=1)}

FLUXION_PARTS = {
    # Shapes of figure 7, and idle times (table 5). The others of the figure: fluxion-long.
    "fluxion": [_shape(f"llama-{batch}x32k", 32768, batch, FORMS, trace=True) for batch in (4, 16)],
    "fluxion-long": [_shape("llama-8x32k", 32768, 8, FIGURE7), _shape("llama-4x64k", 65536, 4, FIGURE7),
                     _shape("llama-4x128k", 129024, 4, FIGURE7)],
    "fluxion-qwen": [_qwen(f"{batch}x32k", 32768, batch) for batch in (4, 8, 16)],
    "fluxion-qwen-long": [_qwen("4x64k", 65536, 4), _qwen("4x128k", 129024, 4)],
    # Figure 8.
    "fluxion-mixed": [_mixed(f"llama-{name}", lengths, (BASELINE, f"{PAPER}:pull=1", f"{DIGESTS}:pull=1", f"{HOT}:pull=1"))
                      for name, lengths in MIXED.items()],
    # Figure 9c.
    "fluxion-schedule": [_mixed(f"schedules-{name}", lengths, SCHEDULES) for name, lengths in MIXED.items()],
    # Figure 9b.
    "fluxion-ablation": [_shape("ablation-16x32k", 32768, 16, ABLATION)],
    # 24 sequences of 32K beside `full` with HBM for two of them, then with HBM for all.
    "fluxion-capped": [
        _shape("llama-24x32k-capped", 32768, 24, ("full", BASELINE, f"{PAPER}:device-share=0", f"{PAPER}:pull=1"),
               full_sequences=2, batches=(2, 24)),
        _shape("llama-24x32k-equal", 32768, 24, ("full", f"{DIGESTS}:pull=1", f"{HOT}:pull=1"))],
    # The same on a host with 256 GiB and its DRAM's speed, and twice as many sequences.
    "fluxion-256gib": [
        _shape("llama-24x32k-capped", 32768, 24, ("full", f"{PAPER}:pull=1"), full_sequences=2, batches=(2, 24),
               dram_gib=120),
        _shape("llama-48x32k", 32768, 48, ("full", f"{DIGESTS}:pull=1", f"{HOT}:pull=1"), batches=(24, 48),
               dram_gib=230)],
}
