"""The parts of tools/gpu-test --bench --part NAME for DeepSeek-V3.2: policy ess beside full and offload-naive.

They measure one rank of an expert-parallel deployment at its real size (configs/models), under the HBM caps of the
tables in src/attention/policies/ess/measured.md. A part takes minutes on an H200; all parts together do not fit into
one PART_SECONDS.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from sluice_gpu.place import Place

EP32 = "configs/models/deepseek-v3.2-ep32"
EP16 = "configs/models/deepseek-v3.2-ep16"
SMALL = "configs/models/topic-drift-indexer-small"
IDEAS = ("ess", "ess-no-overlap", "ess-da", "ess-dba", "ess-no-warm-up", "ess-no-lru", "offload-naive")


@dataclass(frozen=True)
class LatentRun:
    """One call of sluice-bench policies on a model with latent caches."""

    name: str
    policies: tuple[str, ...]
    context: int
    hbm_mib: int
    batches: tuple[int, ...] = (1,)
    given_batches: bool = False  # runs only `batches`, not the largest batch that fits
    most: int = 1
    model: str = EP32
    steps: int = 16  # layer-wise schedules begin after 32
    distinct: int = 1
    dram_gib: int = 108
    trace: bool = False
    misses: tuple[int, ...] = ()  # runs only these set misses, with and without transfers
    profile: str = ""  # name of an earlier ProfileRun whose file it takes
    more: tuple[str, ...] = ()
    quality = False

    def quickly(self) -> "LatentRun":
        """Returns a run with the same rows that takes seconds on any device. Ratios keep their words, misses shrink."""
        few = [policy.replace("ratio=", "least=160:ratio=").replace("prefetch=512", "prefetch=32")
               .replace("mover-workers=14", "mover-workers=2")
               for policy in self.policies]
        return replace(self, model=SMALL, context=1024, hbm_mib=64, dram_gib=1, most=min(self.most, 4),
                       batches=tuple(min(b, 4) for b in self.batches), steps=4, policies=tuple(few),
                       misses=tuple(m // 8 for m in self.misses), more=(*self.more, "--paths", "4"))

    def arguments(self, place: Place, quick: bool, folder: Path, texts: Path | None) -> list[str]:
        """Returns the flags of sluice-bench policies, without the device and the output."""
        out = ["--model", str(place.root / self.model), "--topic-drift",
               "--policies", ",".join(self.policies), "--contexts", str(self.context),
               "--batches", ",".join(map(str, self.batches)), "--max-batch", str(self.most),
               "--steps", str(self.steps), "--distinct", str(self.distinct),
               "--hbm-bytes", f"{self.hbm_mib}MiB", "--dram-bytes", f"{self.dram_gib}GiB", *self.more]
        if self.given_batches:
            out.append("--given-batches")
        if not self.trace:
            out.append("--no-trace")
        if self.misses:
            out += ["--misses", ",".join(map(str, self.misses)), "--only-overlap"]
        if self.profile:
            out += ["--policy-profile", str(folder / f"{self.profile}.json")]
        return out


@dataclass(frozen=True)
class ProfileRun:
    """One call of sluice-profile that measures misses, for later runs of the same part."""

    name: str
    context: int
    ratios: tuple[float, ...]
    least_places: int
    hbm_mib: int
    batches: tuple[int, ...]
    model: str = EP32
    prompts: int = 2
    steps: int = 32
    dram_gib: int = 60
    more: tuple[str, ...] = ()
    quality = False

    def quickly(self) -> "ProfileRun":
        """Returns a run with the same rows that takes seconds, with the model and the context of LatentRun.quickly."""
        return replace(self, model=SMALL, context=1024, hbm_mib=64, dram_gib=1, least_places=160, prompts=1,
                       steps=8, batches=tuple(min(b, 2) for b in self.batches[:1]),
                       ratios=tuple(ratio for ratio in self.ratios if ratio >= 0.15),
                       more=(*self.more, "--paths", "4"))

    def arguments(self, place: Place, quick: bool, folder: Path, texts: Path | None) -> list[str]:
        """Returns the flags of sluice-profile, without the device and the output."""
        return ["--model", str(place.root / self.model), "--dummy", "--topic-drift",
                "--contexts", str(self.context), "--ratios", ",".join(map(str, self.ratios)),
                "--least-places", str(self.least_places), "--batches", ",".join(map(str, self.batches)),
                "--prompts", str(self.prompts), "--steps", str(self.steps),
                "--hbm-bytes", f"{self.hbm_mib}MiB", "--dram-bytes", f"{self.dram_gib}GiB", *self.more]


def _of(ratio: str, *policies: str) -> tuple[str, ...]:
    return tuple(f"{policy}:ratio={ratio}" for policy in policies)


LATENT_PARTS: dict[str, list[LatentRun | ProfileRun]] = {
    # The throughput table. With --forecast-dram the planner says how much a TB would hold.
    "ess32k": [LatentRun("32k", ("full", *_of("0.2", "ess")), 32768, 40200, batches=(1, 16), most=76,
                         distinct=2, trace=True, more=("--forecast-dram", "1TiB", "--forecast-hbm", "90GiB"))],
    "ess128k": [LatentRun("128k", ("full", *_of("0.1", "ess")), 131072, 30300, most=19)],
    "ess128k-ep16": [LatentRun("128k-ep16", ("full", *_of("0.1", "ess")), 131072, 30300, most=19, model=EP16)],
    # HBM has room for all entries of a few sequences.
    "ess-few": [LatentRun("few", ("full", "ess", "ess:ratio=0.2"), 32768, 40200, batches=(1, 2, 4),
                          given_batches=True, most=4)],
    # KV slots are divided among layers by their misses, which are measured first; and entries are fetched for the
    # next step.
    "ess-divide": [ProfileRun("profile", 32768, (0.08, 0.11, 0.15, 0.2, 0.3, 0.45, 0.7), 2080, 40200,
                              batches=(4, 24)),
                   LatentRun("divide", ("full", *_of("0.2", "ess"), "ess:ratio=0.2:prefetch=512",
                                        "ess:ratio=0.2:divide=1", "ess:ratio=0.2:divide=1:prefetch=512"), 32768, 40200,
                             most=76, distinct=2, profile="profile")],
    # The same at 128K with EP16's weights, and the throughput without transfers.
    "ess-divide128k": [ProfileRun("profile", 131072, (0.02, 0.035, 0.05, 0.1, 0.15, 0.25, 0.45), 2080, 30300,
                                  batches=(2, 8), model=EP16),
                       LatentRun("divide", ("full", *_of("0.1", "ess"), "ess:ratio=0.1:divide=1",
                                            "ess:ratio=0.1:divide=1:prefetch=512", "ess:ratio=0.1:skip=1"),
                                 131072, 30300, most=19, model=EP16, profile="profile")],
    # Batch against ratio, as in table 2 of the paper.
    "ess-ratios": [LatentRun(f"ratios-{context >> 10}k",
                             ("full", *(f"ess:ratio={ratio}" for ratio in (1, 0.7, 0.5, 0.3, 0.2, 0.1))),
                             context, hbm, most=128, steps=6, distinct=1)
                   for context, hbm in ((32768, 40200), (131072, 30300))],
    # Each of ess's ideas is switched off in turn.
    "ess-ideas": [LatentRun("ideas", _of("0.2", *IDEAS), 32768, 40200, batches=(20,), given_batches=True,
                            most=20, steps=12),
                  # A copy command for each row takes seconds a step.
                  LatentRun("row-copies", ("offload-naive:ratio=0.2", "offload-naive:ratio=0.2:row-copies=1"),
                            32768, 40200, batches=(1,), given_batches=True, steps=2, dram_gib=4)],
    # The misses are brought by one of three: the GPU by itself, or CPU threads through a ring, or the faster of both.
    "ess-mover": [LatentRun("mover", _of("0.2", "ess", "ess:mover=cpu:mover-workers=14", "ess:mover=cpu:mover-workers=8",
                                         "ess:mover=auto:mover-workers=14", "ess:skip=1"), 32768, 40200, batches=(76,),
                            given_batches=True, most=76, distinct=2)],
    # The share of the transfers that is hidden, by set misses. At 128K the cap has room for the paper's 20 sequences.
    "ess-overlap32k": [LatentRun("overlap-32k", _of("0.2", "ess-da", "ess-dba"), 32768, 40200, batches=(76,),
                                 given_batches=True, most=76, steps=24, misses=(80, 200))],
    "ess-overlap128k": [LatentRun(f"overlap-128k-{batch}", _of("0.1", "ess-da", "ess-dba"), 131072, 32000,
                                  batches=(batch,), given_batches=True, most=batch, steps=24,
                                  misses=(100, 512)) for batch in (8, 20)],
}
