"""Calls of `sluice-bench step --speculation-tokens`: what drafts of a stated acceptance are worth."""

from dataclasses import dataclass, replace
from pathlib import Path

from sluice_gpu import machine
from sluice_gpu.place import Place
from sluice_gpu.policy_runs import GIB, LLAMA, SMALL, token_bytes

# Weights of Llama-3-8B, working memory and CUDA's own, beside the caches. The largest batch is one that also fits a GPU
# of 80 GB.
BESIDE_CACHES = 22 * GIB
MOST_BATCH = 24


@dataclass(frozen=True)
class SpeculationRun:
    """One call of sluice-bench step that decodes with drafts and without them. Weights are by formula."""

    name: str
    context: int
    batches: tuple[int, ...]  # The largest may be lowered to what the HBM of this machine's GPU holds.
    drafts: int = 3
    acceptance: float = 0.7
    steps: int = 64
    model: str = LLAMA
    quality = False

    def quickly(self) -> "SpeculationRun":
        """Returns a run with the same drafts that takes seconds on any device."""
        return replace(self, model=SMALL, context=512, batches=(1, 4), steps=8)

    def fitting(self, model: Path, hbm_mib: float) -> list[int]:
        """Returns the batches that fit HBM; one that does not becomes the largest that does."""
        # The bench keeps room for each sequence's drafted tokens too.
        sequence = (self.context + 2 * self.steps * (1 + self.drafts)) * token_bytes(model)
        most = max(int((hbm_mib * (1 << 20) - BESIDE_CACHES) // sequence), 1)
        return sorted({min(batch, most) for batch in self.batches})

    def arguments(self, place: Place, quick: bool, folder: Path, texts: Path | None) -> list[str]:
        """Returns the flags of sluice-bench step, without the device and the output."""
        model = place.root / self.model
        hbm = machine.gpu().get("memory_mib")
        batches = self.batches if quick or hbm is None else self.fitting(model, float(hbm))
        return ["--model", str(model), "--dummy", "--contexts", str(self.context),
                "--batches", ",".join(map(str, batches)), "--speculation-tokens", str(self.drafts),
                "--acceptance", str(self.acceptance), "--steps", str(self.steps)]


SPECULATION_PARTS = {"speculation": [SpeculationRun("32k", 32768, (1, 8, MOST_BATCH))]}
