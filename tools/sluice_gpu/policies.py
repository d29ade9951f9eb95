"""tools/gpu-test --bench --part NAME: measures attention policies side by side, in parts of some minutes.

A part is a few runs of `sluice-bench policies`, and of `sluice-profile` where they need a profile; part `speculation`
is one of `sluice-bench step`, and the parts of ranks.py and transport.py run what they name. Reports and traces go to
folders of their own, the output to policies-NAME.md and .json. With --only REGEX a part is those of its runs whose name
matches, and the runs whose files they read.
With --quick a part runs a small model with short contexts: it rehearses the same rows, and its figures mean nothing.
"""

import json
import re
import time
from dataclasses import asdict, replace
from pathlib import Path

from sluice_gpu import e2e, machine
from sluice_gpu.bench import Bench, Outcome, markdown, run_bench
from sluice_gpu.fluxion import FLUXION_PARTS
from sluice_gpu.latent import LATENT_PARTS, LatentRun, ProfileRun
from sluice_gpu.place import Place
from sluice_gpu.policy_runs import LLAMA, QWEN8, QWEN25, TURNING, TURNING_DRIFT, HeadsRun, IntervalRun, Run
from sluice_gpu.ranks import RANK_PARTS, ForecastRun, KilledRun, OperatorsRun, RanksRun
from sluice_gpu.speculation import SPECULATION_PARTS, SpeculationRun
from sluice_gpu.transport import TRANSPORT_PARTS, TransportRun

PART_SECONDS = 480
EVERYONE = ("full", "scout", "recall-paper", "hgca-mean", "recall", "hgca")


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


# Runs that make their whole command by themselves.
OwnRun = RanksRun | KilledRun | OperatorsRun | ForecastRun | TransportRun
AnyRun = Run | IntervalRun | HeadsRun | LatentRun | ProfileRun | SpeculationRun | OwnRun
PARTS: dict[str, list[AnyRun]] = {
    # Every policy at its largest batch and at the largest batch of full.
    "main64k": [Run("64k", (*EVERYONE, "recall:budget=20%"), (65536,), batches=(2,))],
    # One GPU of a host with 256 GiB. One context, so that it fits beside 22 sequences on a GPU of 80 GB.
    "big64k": [Run("64k-256gib", ("full", "scout"), (65536,), batches=(2,), most=24, dram_gib=220, distinct=1,
                   statistics=0, trace=False)],
    # The same on a host with 512 GiB, where 35 sequences have homes of 380 GiB. With codes HBM is full before DRAM is.
    "big64k-512gib": [Run("64k-512gib", ("full", "scout", "scout:codes=0"), (65536,), batches=(2,), most=35,
                          dram_gib=400, distinct=1, statistics=0, trace=False)],
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
    # Each row beside the first differs by one form or setting. Those of mover=cpu are the forms as published, in which
    # CPU workers gather.
    "clo-forms": [HeadsRun("heads", 32768),
                  _clo("forms-32k", ("clo", "clo:replace=1", "clo:mover=cpu", "clo:early=0", "clo:persistent=0.2",
                                     "clo-paper", "clo-paper:mover=cpu", "lru", "lru:mover=cpu", "clo-fetch-all", "hata",
                                     "hata-paper", "full"), 32768,
                       most=6, batches=(6,), given_batches=True, full_sequences=8, steps=16)],
    "clo128k": [HeadsRun("heads", 129024),
                _clo("128k", ("full", "hata", "clo", "clo:persistent=0.25", "clo-fetch-all"), 129024, most=1,
                     given_batches=True, full_sequences=1.5, steps=16)],
    "clo-figure10": [*_figure10("llama-8k", 8192, (4, 64), LLAMA), *_figure10("llama-32k", 32768, (1,), LLAMA),
                     *_figure10("qwen-8k", 8192, (32,), QWEN25)],
    # HBM for twice as many sequences as clo32k, on a host with 256 GiB: with 110 GiB DRAM bounds clo at 25 sequences.
    "clo-256gib": [HeadsRun("heads", 32768),
                   _clo("32k-256gib", ("full", "lru", "clo:persistent=0.2", "clo:persistent=0.3", "clo:persistent=0.35"),
                        32768, batches=(12,), most=48, full_sequences=12.6, steps=16, dram_gib=230)],
    "clo-qwen128k": _figure10("qwen-128k", 129024, (1,), QWEN25),
    **FLUXION_PARTS,
    **LATENT_PARTS,
    **SPECULATION_PARTS,
    **RANK_PARTS,
    **TRANSPORT_PARTS,
}


def _reads(run: AnyRun) -> tuple[str, ...]:
    """Returns the names of the runs of the same part whose files the run reads."""
    if isinstance(run, ForecastRun):
        return run.operators.name, run.measured.name
    profile = run.profile if isinstance(run, (Run, LatentRun)) else ""
    return (profile,) if profile else ()


def chosen(part: str, only: str | None) -> list[AnyRun]:
    """Returns the runs of a part whose name matches `only`, and those that they need, in the part's order."""
    runs = PARTS[part]
    matching = [run for run in runs if only is None or re.search(only, run.name)]
    if not matching:
        raise SystemExit(f"gpu-test: no run of part {part} matches --only '{only}'; its runs are "
                         f"{', '.join(run.name for run in runs)}")
    needed = {name for run in matching for name in _reads(run)}
    return [run for run in runs if run in matching or run.name in needed]


def report_of(run: AnyRun, folder: Path) -> Path:
    """Returns the file of a run's report."""
    if isinstance(run, OwnRun):
        return run.report(folder)
    return folder / run.name / ("step.json" if isinstance(run, SpeculationRun) else "policies.json")


def command(run: AnyRun, place: Place, device: str, quick: bool, folder: Path,
            texts: Path | None) -> list[str]:
    if isinstance(run, OwnRun):
        return run.command(place, device, quick, folder)
    if isinstance(run, (IntervalRun, HeadsRun, ProfileRun)):
        begin, out = [str(place.bin / "sluice-profile")], folder / f"{run.name}.json"
    elif isinstance(run, SpeculationRun):
        (folder / run.name).mkdir(parents=True, exist_ok=True)
        return [str(place.bin / "sluice-bench"), "step", "--device", device, "--json", str(report_of(run, folder)),
                *run.arguments(place, quick, folder, texts)]
    else:
        begin, out = [str(place.bin / "sluice-bench"), "policies"], folder / run.name
    return [*begin, "--device", device, "--out", str(out), *run.arguments(place, quick, folder, texts)]


def run_part(place: Place, results: Path, part: str, device: str, quick: bool, texts: Path | None,
             only: str | None = None, seconds: float = PART_SECONDS) -> tuple[int, int, int]:
    """Runs the chosen runs of a part in `seconds` at most; returns how many went well, failed and were skipped."""
    runs = chosen(part, only)
    folder = results / f"policies-{part}"
    folder.mkdir(parents=True, exist_ok=True)
    about = machine.describe(place) | {"part": part + (" (quick: a rehearsal)" if quick else "")}
    give_up = time.monotonic() + seconds
    outcomes: list[Outcome] = []
    skipped = failed = 0
    for run in runs:
        run = run.quickly() if quick else run
        if run.quality and (texts is None or not place.smollm2.is_dir()):
            print(f"SKIPPED {run.name}: it needs SmolLM2's weights and --texts FILE (tools/sluice texts)")
            skipped += 1
            continue
        print(f"== {part}: {run.name}", flush=True)
        bench = Bench(run.name, command(run, place, device, quick, folder, texts),
                      max(give_up - time.monotonic(), 1), report_of(run, folder),
                      e2e.environment(place, device) if isinstance(run, KilledRun) else None)
        outcome = run_bench(place, bench, show=True)
        outcomes.append(outcome)
        if isinstance(run, ForecastRun) and outcome.status == 0:
            concluded = run.conclude(folder)
            print(concluded, flush=True)
            outcome.said += concluded + "\n"
        if outcome.status != 0:
            ended = "ran out of time" if outcome.status is None else f"ended with {outcome.status}"
            print(f"FAILED  {run.name}: {ended} after {outcome.seconds} s", flush=True)
            failed += 1
        (results / f"policies-{part}.json").write_text(json.dumps(
            {"machine": about, "runs": [asdict(o) for o in outcomes]}, indent=1) + "\n")
        (results / f"policies-{part}.md").write_text(markdown(about, outcomes))
    return len(outcomes) - failed, failed, skipped
