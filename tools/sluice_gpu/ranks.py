"""Parts of tools/gpu-test --bench for several ranks on the GPUs of one host, and ESS at the paper's proportion.

Ranks need a GPU each. Where there are fewer they share one, and the figures then say only that it works.
"""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from sluice_gpu import machine
from sluice_gpu.latent import EP32, LatentRun
from sluice_gpu.latent import SMALL as SMALL_LATENT
from sluice_gpu.place import Place
from sluice_gpu.policy_runs import LARGE, LLAMA, SMALL

RANKS = (2, 4)  # those that this host's GPUs can be
CONTEXT = 32768
# Table 2 of the ESS paper has 52 sequences without the pool and 160 with it, at a ratio of 0.21. HBM for 160 at this
# ratio is HBM for 54 of `full`.
FULL_SEQUENCES, ESS_SEQUENCES, RATIO = 52, 160, 0.195
PROPORTION_MIB = 82_400


def ranks_here() -> list[int]:
    """Returns the numbers of ranks that have a GPU each; two where none have, which share."""
    return [ranks for ranks in RANKS if ranks <= machine.gpus()] or [RANKS[0]]


@dataclass(frozen=True)
class RanksRun:
    """One call of sluice-bench ranks. Weights are by formula."""

    name: str
    model: str
    batches: tuple[int, ...]
    context: int = 8192
    steps: int = 40
    # Ranks of experts have so many each; 0: the ranks divide tensors.
    experts_each: int = 0
    policies: tuple[str, ...] = ("full",)
    overlaps: tuple[int, ...] = (0,)
    misses: int = 0
    quality = False

    def quickly(self) -> "RanksRun":
        """Returns a run with the same rows that takes seconds on any device."""
        few = tuple(policy.replace("ratio=", "least=160:ratio=") for policy in self.policies)
        return replace(self, model=SMALL_LATENT if self.experts_each else SMALL, batches=(1, 4), context=1024, steps=8,
                       experts_each=self.experts_each and 2, policies=few, misses=self.misses and 8)

    def counts(self) -> list[int]:
        # The model of ranks of experts grows with their number, so one rank is no measure for them.
        return ranks_here()[-1:] if self.experts_each else [1, *ranks_here()]

    def _model(self, place: Place, folder: Path) -> Path:
        """Returns the model's folder. One with experts for all ranks is made beside the results."""
        source = place.root / self.model
        if not self.experts_each:
            return source
        experts = self.experts_each * self.counts()[0]
        made = folder / f"{source.name}-{experts}-experts"
        made.mkdir(parents=True, exist_ok=True)
        config = json.loads((source / "config.json").read_text()) | {"n_routed_experts": experts}
        (made / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        return made

    def report(self, folder: Path) -> Path:
        return folder / self.name / "ranks.json"

    def command(self, place: Place, device: str, quick: bool, folder: Path) -> list[str]:
        self.report(folder).parent.mkdir(parents=True, exist_ok=True)
        out = [str(place.bin / "sluice-bench"), "ranks", "--device", device, "--model", str(self._model(place, folder)),
               "--dummy", "--ranks", ",".join(map(str, self.counts())), "--batches", ",".join(map(str, self.batches)),
               "--context", str(self.context), "--steps", str(self.steps), "--policies", ",".join(self.policies),
               "--expert-overlap", ",".join(map(str, self.overlaps)), "--json", str(self.report(folder))]
        if self.experts_each:
            out += ["--divide", "experts", "--misses", str(self.misses)]
        return out


@dataclass(frozen=True)
class KilledRun:
    """One call of tests/bench/ranks_killed.py."""

    name: str
    kills: int = 20
    model: str = "configs/models/topic-drift-small"
    tokens: int = 1500
    quality = False

    def quickly(self) -> "KilledRun":
        return replace(self, kills=2, tokens=100)

    def report(self, folder: Path) -> Path:
        return folder / f"{self.name}.json"

    def command(self, place: Place, device: str, quick: bool, folder: Path) -> list[str]:
        return [sys.executable, str(place.root / "tests/bench/ranks_killed.py"), "--kills", str(self.kills), "--tokens",
                str(self.tokens), "--model", str(place.root / self.model), "--dummy", "--json", str(self.report(folder))]


@dataclass(frozen=True)
class OperatorsRun:
    """One call of sluice-bench kernels --only step: this machine's times of operators, for a forecast."""

    name: str
    home_gib: int = 48
    rows: tuple[int, ...] = (1, 16, 32, 64, 96, 128, 256)
    more: tuple[str, ...] = ()
    model: str = EP32
    quality = False

    def quickly(self) -> "OperatorsRun":
        return replace(self, model=SMALL_LATENT, home_gib=1, rows=(1, 4),
                       more=("--misses", "0,16", "--contexts", "1024,4096"))

    def report(self, folder: Path) -> Path:
        return folder / f"{self.name}.json"

    def command(self, place: Place, device: str, quick: bool, folder: Path) -> list[str]:
        return [str(place.bin / "sluice-bench"), "kernels", "--device", device, "--only", "step", "--model",
                str(place.root / self.model), "--home-gib", str(self.home_gib), "--step-rows",
                ",".join(map(str, self.rows)), "--seconds", "0.001" if quick else "0.05", "--json",
                str(self.report(folder)), *self.more]


def _rates(report: dict, policy: str) -> dict[int, float]:
    """Returns batch -> tokens/s of the policy's steps in a report of sluice-bench policies or simulate."""
    runs = report["details"].get("steps") or report["details"]["runs"]
    return {run["batch"]: run["tokens_per_second"] for run in runs if run["policy"].split(":")[0] == policy}


def gains(measured: dict, forecast: dict) -> str:
    """Returns the gain of ess over full, each at its largest measured batch: measured, forecast, and how far apart."""
    over = {}
    lines = []
    full, ess = (max(_rates(measured, policy)) for policy in ("full", "ess"))
    for name, report in (("measured", measured), ("forecast", forecast)):
        rates = {policy: _rates(report, policy) for policy in ("full", "ess")}
        if full not in rates["full"] or ess not in rates["ess"]:
            return f"no {name} of {full} sequences of full and {ess} of ess: {rates}"
        over[name] = rates["ess"][ess] / rates["full"][full]
        lines.append(f"{name}: full, {full} sequences, {rates['full'][full]:.0f} tokens/s; ess, {ess} sequences, "
                     f"{rates['ess'][ess]:.0f} tokens/s: {100 * (over[name] - 1):+.1f} % over full")
    apart = 100 * (over["measured"] / over["forecast"] - 1)
    return "\n".join([*lines, f"the measured ratio is {apart:+.1f} % off the forecast one"])


@dataclass(frozen=True)
class ForecastRun:
    """One call of sluice-bench simulate for the sequences that an earlier run of the part measured."""

    name: str
    measured: LatentRun
    operators: OperatorsRun
    batches: tuple[int, ...] = (FULL_SEQUENCES, ESS_SEQUENCES)
    context: int = CONTEXT
    quality = False

    def quickly(self) -> "ForecastRun":
        return replace(self, measured=self.measured.quickly(), operators=self.operators.quickly(), batches=(4,),
                       context=2048)  # the least that it takes

    def report(self, folder: Path) -> Path:
        return folder / f"{self.name}.json"

    def command(self, place: Place, device: str, quick: bool, folder: Path) -> list[str]:
        return [str(place.bin / "sluice-bench"), "simulate", "--operators", str(self.operators.report(folder)),
                "--model", str(place.root / self.measured.model), "--ratio", str(RATIO), "--batches",
                ",".join(map(str, self.batches)), "--contexts", str(self.context), "--extrapolate", "--json",
                str(self.report(folder))]

    def conclude(self, folder: Path) -> str:
        """Returns the measured gain beside the forecast one."""
        return gains(json.loads((folder / self.measured.name / "policies.json").read_text()),
                     json.loads(self.report(folder).read_text()))


def _tensors(name: str, model: str) -> RanksRun:
    return RanksRun(name, model, batches=(1, 8, 32, 64))


OPERATORS = OperatorsRun("operators")
PROPORTION = LatentRun("proportion", ("full", f"ess:ratio={RATIO}"), CONTEXT, PROPORTION_MIB,
                       batches=(FULL_SEQUENCES, ESS_SEQUENCES), given_batches=True, most=ESS_SEQUENCES, steps=16,
                       dram_gib=220)

RANK_PARTS = {
    "tp": [_tensors("qwen3-14b", LARGE), _tensors("llama-3-8b", LLAMA)],
    # Each rank has EP32's eight experts and all other weights. A row misses what the workload of part ess32k misses.
    "ep": [RanksRun("ep", EP32, batches=(8, 32), context=CONTEXT, experts_each=8,
                    policies=("full", "ess:ratio=0.2"), overlaps=(0, 2), misses=190)],
    "ranks-killed": [KilledRun("killed")],
    "ess-proportion": [OPERATORS, PROPORTION, ForecastRun("forecast", PROPORTION, OPERATORS)],
}
