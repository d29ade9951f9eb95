"""tools/gpu-test --bench --part NAME: measures attention policies side by side, in parts of some minutes.

A part is a few runs of `sluice-bench policies`, and of `sluice-profile` where they need a profile. Reports and traces
go to folders of their own, the output to policies-NAME.md and .json. With --quick a part runs a small model with short
contexts: it rehearses the same rows, and its figures mean nothing.
"""

import json
import os
import re
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sluice_gpu import machine
from sluice_gpu.bench import Bench, Outcome, markdown, run_bench
from sluice_gpu.latent import LATENT_PARTS, LatentRun, ProfileRun
from sluice_gpu.place import Place

PART_SECONDS = 480
GIB = 1 << 30
LARGE = "configs/models/qwen3-14b"
LLAMA, QWEN8, QWEN25 = (f"configs/models/{name}" for name in ("llama-3-8b", "qwen3-8b", "qwen2.5-14b"))
SMALL = "configs/models/topic-drift-small"
WINDOWS = 4  # measured windows of sluice-bench policies
SPARE_TOKENS = 67  # tokens that it decodes before its windows and may decode after them
EVERYONE = ("full", "scout", "recall-paper", "hgca-mean", "recall", "hgca")


@dataclass(frozen=True)
class Run:
    """One call of sluice-bench policies."""

    name: str
    policies: tuple[str, ...]
    contexts: tuple[int, ...]
    model: str = LARGE
    batches: tuple[int, ...] = (1,)
    given_batches: bool = False  # runs only `batches`, not the largest batch that fits
    most: int = 16
    # Sequences of the longest context that HBM holds whole; None: HBM for caches is all that is free.
    full_sequences: float | None = 2
    layers: int | None = None  # layers of the model; None means all
    dense_layers: int = 0
    budget: int = 2048
    block_tokens: int = 32
    steps: int = 32
    distinct: int = 2
    statistics: int = 16
    trace: bool = True
    drifts: tuple[float, ...] = ()
    dram_gib: int = 110
    quality: bool = False
    profile: str = ""  # name of an earlier IntervalRun whose file it takes
    traffic: str = ""  # traffics to run instead of equal sequences
    jump: int = 0  # tokens between jumps to another topic
    more: tuple[str, ...] = ()

    def quickly(self) -> "Run":
        """Returns a run with the same rows that takes seconds on any device."""
        if self.quality:
            return replace(self, contexts=(512,), more=("--quality-texts", "1", "--quality-steps", "8",
                                                        "--passkeys", "1"))
        windows = tuple(re.sub(r"window=(\d+)", lambda m: f"window={max(int(m[1]) // 32 // 32 * 32, 32)}", name)
                        for name in self.policies)
        return replace(self, policies=windows, contexts=tuple(max(c // 32, 512) for c in self.contexts),
                       steps=min(self.steps, 4), most=min(self.most, 8),
                       batches=tuple(min(b, 8) for b in self.batches), budget=256,
                       jump=self.jump and 6, layers=self.layers and 4, statistics=min(self.statistics, 4), dram_gib=1,
                       more=(*self.more, "--hgca-window", "64"))

    def _model(self, place: Place, quick: bool, folder: Path) -> Path:
        """Returns the model's folder. A model with fewer layers is made beside the results."""
        source = place.root / (SMALL if quick else self.model)
        if self.layers is None:
            return source
        made = folder / f"{source.name}-{self.layers}-layers"
        made.mkdir(parents=True, exist_ok=True)
        config = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": self.layers}
        (made / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        return made

    def arguments(self, place: Place, quick: bool, folder: Path, texts: Path | None) -> list[str]:
        """Returns the flags of sluice-bench policies, without the device and the output."""
        out = ["--policies", ",".join(self.policies), "--contexts", ",".join(map(str, self.contexts)),
               "--dense-layers", str(self.dense_layers), "--block-tokens", str(self.block_tokens),
               "--workers", str(max(len(os.sched_getaffinity(0)) - 2, 1)), *self.more]
        if self.quality:
            return [*out, "--model", str(place.smollm2), "--quality", "--texts", str(texts)]
        model = self._model(place, quick, folder)
        hbm = "auto"
        if self.full_sequences is not None:
            # A little more than `full` takes for that many sequences with their new tokens.
            tokens = max(self.contexts) + (WINDOWS + 1) * self.steps + SPARE_TOKENS + self.block_tokens
            hbm = f"{(int(self.full_sequences * tokens * token_bytes(model) * 1.005) + (1 << 20)) >> 20}MiB"
        out += ["--model", str(model), "--topic-drift", "--batches", ",".join(map(str, self.batches)),
                "--max-batch", str(self.most), "--hbm-bytes", hbm,
                "--dram-bytes", f"{self.dram_gib}GiB", "--budget", str(self.budget),
                "--steps", str(self.steps), "--distinct", str(self.distinct),
                "--statistics", str(self.statistics)]
        if self.given_batches:
            out.append("--given-batches")
        if self.traffic:
            out += ["--traffic", self.traffic, "--jump", str(self.jump)]
        if not self.trace:
            out.append("--no-trace")
        if self.drifts:
            out += ["--drift", ",".join(map(str, self.drifts))]
        if self.profile:
            out += ["--policy-profile", str(folder / f"{self.profile}.json")]
        return out


@dataclass(frozen=True)
class IntervalRun:
    """One call of sluice-profile that measures recall intervals on the topic-drift workload, for later runs."""

    name: str
    context: int
    model: str = LARGE
    prompts: int = 2
    steps: int = 32
    budget: int = 2048
    quality = False

    def quickly(self) -> "IntervalRun":
        """Returns a run that takes seconds, with the model, the context and the budget of Run.quickly."""
        return replace(self, model=SMALL, context=max(self.context // 32, 512), steps=8, budget=256)

    def arguments(self, place: Place, quick: bool, folder: Path, texts: Path | None) -> list[str]:
        """Returns the flags of sluice-profile, without the device and the output."""
        return ["--model", str(place.root / self.model), "--topic-drift", "--dense-layers", "0",
                "--context", str(self.context), "--prompts", str(self.prompts), "--steps", str(self.steps),
                "--budget-tokens", str(self.budget),
                "--workers", str(max(len(os.sched_getaffinity(0)) - 2, 1))]
# Topic drift in which heads turn at rates as different as a model's: with them a KV head of clo misses in a fifth of its
# lookups.
TURNING = ("--turning-heads", "0.4", "--turning", "0.35")
TURNING_DRIFT = 0.02


@dataclass(frozen=True)
class HeadsRun:
    """One call of sluice-profile that measures the heads of clo on that workload, for later runs."""

    name: str
    longest: int  # longest context of the later runs
    context: int = 8192
    model: str = LLAMA
    prompts: int = 2
    quality = False

    def quickly(self) -> "HeadsRun":
        """Returns a run that takes seconds, with the model and the context of Run.quickly."""
        return replace(self, model=SMALL, context=512, longest=max(self.longest // 32, 512))

    def arguments(self, place: Place, quick: bool, folder: Path, texts: Path | None) -> list[str]:
        """Returns the flags of sluice-profile, without the device and the output."""
        return ["--model", str(place.root / self.model), "--topic-drift", "--clo", "--no-intervals",
                "--context", str(self.context), "--drift-context", str(self.longest), "--prompts", str(self.prompts),
                "--steps", "16", "--drift", str(TURNING_DRIFT), *TURNING]


def _clo(name: str, policies: tuple[str, ...], context: int, **more) -> Run:
    return Run(name, policies, (context,), statistics=0, trace=False, budget=256, drifts=(TURNING_DRIFT,), more=TURNING,
               **{"model": LLAMA, "profile": "heads", **more})


def _figure10(name: str, context: int, batches: tuple[int, ...], model: str) -> list[HeadsRun | Run]:
    """Returns shapes of CLO's figure 10. HBM holds all of each under every policy."""
    heads = f"{name}-heads"
    return [HeadsRun(heads, context, model=model),
            *(_clo(f"{name}-{batch}", ("full", "lru", "clo-fetch-all", "clo:persistent=0.25"), context, most=batch,
                   batches=(batch,), given_batches=True, full_sequences=batch + 1, steps=16, distinct=1, model=model,
                   profile=heads)
              for batch in batches)]


# Fluxion's baseline, blocks of 16 and a twentieth of each head's tokens: as published (digests in DRAM, the CPU alone
# attends), with digests in HBM, and with hot blocks there too. Then a network that no model trained and whose volume
# (equation 3) is 3.1 times smaller, as the paper's predictor implies: each of these forms, without and with the link
# beside the CPU.
FLUXION = ("full", "fluxion-paper-fixed:device-share=0", "fluxion-fixed:device-share=0", "fluxion-fixed:hot=1",
           *(f"fluxion-synthetic:hot=0:host-digests={digests}{how}" for digests in (1, 0)
             for how in (":device-share=0", "")),
           "fluxion-synthetic:hot=1")


def _fluxion(name: str, context: int, batch: int, policies: tuple[str, ...] = FLUXION) -> Run:
    return Run(name, policies, (context,), model=LLAMA, batches=(batch,), given_batches=True, most=batch,
               full_sequences=None, block_tokens=16, statistics=0, steps=8, distinct=1)


BUDGETS = ("full", "scout", "scout:budget=1024", "recall-paper", "hgca-mean")


def _hgca_quality() -> tuple[str, ...]:
    """Returns the rows of the paper's table 1: beta by the share of the context that the window holds."""
    context = 2048
    return ("full", *(f"hgca:beta={beta}:window={context * ratio // 4}"
                      for ratio in (1, 2, 3) for beta in (0.25, 0.5, 0.75, 1)))


# The window at equal HBM. A bf16 KV head's selection is the same rule in each: beta 8 left 1,555 tokens to the CPU with
# a window of 512, without what follows a salient token.
HGCA_WINDOWS = ("full", *(f"hgca:beta=8:following={following}:window={window}"
                          for following, window in ((0, 512), (8, 512), (8, 2048), (8, 4096), (8, 8192), (8, 12288))))


def _auto(name: str, contexts: tuple[int, ...], most: int = 16, **more) -> Run:
    """Returns shapes, one for each context, in which auto is beside what it may take at quality fast."""
    # A batch of `most` is the largest batch or does not fit, so that each policy decodes once.
    return Run(name, ("auto", "full", "scout", "scout:codes=0", "recall"), contexts, most=most, batches=(most,), statistics=0,
               trace=False, steps=12, distinct=1, **{"layers": 8, "dram_gib": 40, **more})


AnyRun = Run | IntervalRun | HeadsRun | LatentRun | ProfileRun
PARTS: dict[str, list[AnyRun]] = {
    # Every policy at its largest batch and at the largest batch of full.
    "main64k": [Run("64k", (*EVERYONE, "recall:budget=20%"), (65536,), batches=(2,))],
    # One GPU of a host with 256 GiB. One context, so that it fits beside 22 sequences on a GPU of 80 GB.
    "big64k": [Run("64k-256gib", ("full", "scout"), (65536,), batches=(2,), most=24, dram_gib=220, distinct=1,
                   statistics=0, trace=False)],
    # HBM for two sequences of 64K in both runs.
    "budgets": [Run("contexts", BUDGETS, (8192, 16384, 32768), most=48, full_sequences=4, statistics=0, trace=False),
                Run("64k", BUDGETS, (65536,), statistics=0, trace=False)],
    "blocks": [Run(f"blocks-{block}", ("full", "scout", "scout:budget=1024"), (32768,), most=24,
                   block_tokens=block, statistics=8, trace=False) for block in (16, 32, 64)],
    # DRAM holds 21 sequences of 32K of the whole model.
    "batch32k": [Run("32k-half-the-layers", ("full", "scout"), (32768,), batches=(8, 16, 24, 32),
                     given_batches=True, most=32, layers=20, full_sequences=8)],
    # Eleven shapes at quality fast and one at quality high: few and many sequences, three geometries.
    "auto": [_auto("qwen14b-two-of-64k", (2048, 8192, 32768, 65536)),
             _auto("llama8b-four-sequences", (4096, 16384), model=LLAMA, most=4),
             _auto("qwen8b-many", (2048, 8192, 32768), model=QWEN8, most=32, full_sequences=4),
             _auto("qwen8b-all-fit", (4096, 16384), model=QWEN8, most=8, full_sequences=8.1),
             replace(_auto("qwen14b-high", (32768,), more=("--auto-quality", "high")),
                     policies=("auto", "full", "scout:budget=25%", "scout:budget=13%", "recall:budget=25%"))],
    # All of the GPU's HBM instead of a cap that only full feels.
    "equal": [Run("64k-two-contexts", ("full", "scout", "recall", "hgca"), (65536,), batches=(2, 4, 8, 10),
                  given_batches=True, most=10, full_sequences=None, statistics=0, trace=False, steps=16),
              Run("64k-one-context", ("full", "scout"), (65536,), batches=(8,), given_batches=True, most=8,
                  full_sequences=None, statistics=0, trace=False, steps=16, distinct=1)],
    "equal128k": [Run("128k", ("full", "scout", "recall", "hgca"), (129024,), batches=(2, 4), given_batches=True,
                      most=4, full_sequences=None, statistics=0, trace=False, steps=16)],
    # Topics that jump, lengths that differ, arrivals and ends: every step is timed by itself.
    "jumps": [Run("jumps", ("full", "scout", "recall"), (2048, 8192, 32768, 65536), batches=(10,),
                  given_batches=True, most=10, layers=20, full_sequences=10, dram_gib=60, statistics=0,
                  traffic="steady,mixed,staggered", jump=48),
              Run("jumps-capped", ("scout",), (65536,), batches=(10,), given_batches=True, most=10,
                  full_sequences=2.5, statistics=0, traffic="steady", jump=48)],
    # Intervals of a profile beside the controller.
    "profile": [IntervalRun("intervals", 65536),
                Run("64k", ("full", "scout", "scout:controller=1"), (65536,), statistics=0, trace=False, steps=24,
                    profile="intervals")],
    "equal8k": [Run("8k-batch-8", EVERYONE, (8192,), batches=(1, 8), given_batches=True, most=8,
                  full_sequences=8, statistics=0)],
    "ablation": [Run("ablation", ("full", "scout", "scout-no-ahead", "scout-no-recall",
                                  "scout-no-ahead-no-recall"), (65536,), statistics=0)],
    # The largest batch of each window; then batch 1, where recall-fetch-all with the whole context shows what it costs
    # to load the whole cache to the GPU: it takes 16,384 tokens with those that are decoded. The paper's table of beta
    # by window is a part of its own.
    "hgca": [Run("window-64k", HGCA_WINDOWS, (65536,), statistics=0, trace=False, steps=16, batches=(2,)),
             Run("batch-1", ("full", "hgca", "hgca-mean", "recall-fetch-all:budget=100%"),
                 (4096, 16128), given_batches=True, most=1, full_sequences=4, statistics=0, trace=False)],
    "hgca-quality": [Run("quality", _hgca_quality(), (2048,), quality=True, dense_layers=0,
                         more=("--budget-shares", "25", "--quality-texts", "4", "--quality-steps", "64",
                               "--passkeys", "0"))],
    # Every text and every pass key of tools/sluice texts, at both budgets.
    "quality": [Run("quality", ("full", "scout", "recall", "hgca", "oracle"), (4096,), quality=True, dense_layers=2,
                    more=("--hbm-bytes", "640MiB"))],
    "drift": [Run("drift", ("scout", "recall", "recall-paper"), (32768,), batches=(4,), given_batches=True,
                  most=4, drifts=(0.005, 0.01, 0.014, 0.02, 0.04), distinct=1, steps=32, trace=False,
                  dram_gib=24)],
    # HBM for six sequences of 32K: clo's largest batches beside its baselines', with persistent heads and without.
    "clo32k": [HeadsRun("heads", 32768),
               _clo("32k", ("full", "lru", "clo", "clo:persistent=0.2", "clo:persistent=0.3",
                            "clo:persistent=0.3:bits=256", "clo:persistent=0.35",
                            "clo:persistent=0.35:similarity=0.95"), 32768, most=20,
                    full_sequences=6.6)],
    # Each row beside the first differs by one form or setting. Those of mover=1 are the forms as published, in which
    # CPU workers gather.
    "clo-forms": [HeadsRun("heads", 32768),
                  _clo("forms-32k", ("clo", "clo:replace=1", "clo:mover=1", "clo:early=0", "clo:persistent=0.2",
                                     "clo-paper", "clo-paper:mover=1", "lru", "lru:mover=1", "clo-fetch-all", "hata",
                                     "hata-paper", "full"), 32768,
                       most=6, batches=(6,), given_batches=True, full_sequences=8, steps=16)],
    "clo128k": [HeadsRun("heads", 129024),
                _clo("128k", ("full", "hata", "clo", "clo:persistent=0.25", "clo-fetch-all"), 129024, most=1,
                     given_batches=True, full_sequences=1.5, steps=16)],
    "clo-figure10": [*_figure10("llama-8k", 8192, (4, 64), LLAMA), *_figure10("llama-32k", 32768, (1,), LLAMA),
                     *_figure10("qwen-8k", 8192, (32,), QWEN25)],
    "clo-qwen128k": _figure10("qwen-128k", 129024, (1,), QWEN25),
    # Shapes of Fluxion's figure 7.
    "fluxion": [_fluxion("llama-4x32k", 32768, 4), _fluxion("llama-16x32k", 32768, 16)],
    "fluxion-long": [_fluxion("llama-4x128k", 129024, 4)],
    **LATENT_PARTS,
}


def token_bytes(model: Path) -> int:
    """Returns the bytes of K and V of one token in all layers, in bf16."""
    config = json.loads((model / "config.json").read_text())
    return 4 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]


def command(run: AnyRun, place: Place, device: str, quick: bool, folder: Path,
            texts: Path | None) -> list[str]:
    if isinstance(run, (IntervalRun, HeadsRun, ProfileRun)):
        begin, out = [str(place.bin / "sluice-profile")], folder / f"{run.name}.json"
    else:
        begin, out = [str(place.bin / "sluice-bench"), "policies"], folder / run.name
    return [*begin, "--device", device, "--out", str(out), *run.arguments(place, quick, folder, texts)]


def run_part(place: Place, results: Path, part: str, device: str, quick: bool,
             texts: Path | None) -> tuple[int, int, int]:
    """Returns how many runs went well, failed and were skipped."""
    folder = results / f"policies-{part}"
    folder.mkdir(parents=True, exist_ok=True)
    about = machine.describe(place) | {"part": part + (" (quick: a rehearsal)" if quick else "")}
    give_up = time.monotonic() + PART_SECONDS
    outcomes: list[Outcome] = []
    skipped = failed = 0
    for run in PARTS[part]:
        run = run.quickly() if quick else run
        if run.quality and (texts is None or not place.smollm2.is_dir()):
            print(f"SKIPPED {run.name}: it needs SmolLM2's weights and --texts FILE (tools/sluice texts)")
            skipped += 1
            continue
        print(f"== {part}: {run.name}", flush=True)
        bench = Bench(run.name, command(run, place, device, quick, folder, texts),
                      max(give_up - time.monotonic(), 1), folder / run.name / "policies.json")
        outcome = run_bench(place, bench)
        outcomes.append(outcome)
        print(outcome.said.strip(), flush=True)
        if outcome.status != 0:
            ended = "ran out of time" if outcome.status is None else f"ended with {outcome.status}"
            print(f"FAILED  {run.name}: {ended} after {outcome.seconds} s", flush=True)
            failed += 1
        (results / f"policies-{part}.json").write_text(json.dumps(
            {"machine": about, "runs": [asdict(o) for o in outcomes]}, indent=1) + "\n")
        (results / f"policies-{part}.md").write_text(markdown(about, outcomes))
    return len(outcomes) - failed, failed, skipped
