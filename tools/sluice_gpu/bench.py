"""tools/gpu-test --bench: measures the figures of kernels/cuda/README.md, and describes the machine they come from."""

import json
import re
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sluice_gpu import machine
from sluice_gpu.jobs import SKIPPED_STATUS, run_command
from sluice_gpu.place import Place

LATENT_MODEL = "configs/models/deepseek-v3.2-ep32"
MODEL = "configs/models/qwen3-8b"  # only config.json; the weights are dummies
# The weights take 16.4 GB and each sequence of 8K tokens takes 1.2 GB of cache, so 48 sequences fill 80 GB.
LARGEST_BATCH_80_GB = 48
CPU_BENCHES = {"sluice-metrics-bench", "sluice-token-bench"}
_LARGE_GPU_MIB = 100_000


@dataclass(frozen=True)
class Bench:
    name: str
    command: list[str]
    seconds: float  # time limit
    json_file: Path | None = None  # report that it writes
    env: dict[str, str] | None = None  # None: that of Sluice's programs


@dataclass
class Outcome:
    name: str
    command: str
    status: int | None  # exit status; None if its time was over
    seconds: float
    said: str
    report: dict = field(default_factory=dict)  # content of json_file


def step_bench(place: Place, gpu: dict[str, str], results: Path) -> Bench:
    large = float(gpu.get("memory_mib", 0)) > _LARGE_GPU_MIB
    batches = f"1,8,32,{64 if large else LARGEST_BATCH_80_GB}"
    file = results / "step.json"
    return Bench("step, Qwen3-8B geometry, 8K tokens each",
                 [str(place.bin / "sluice-bench"), "step", "--device", "cuda", "--model",
                  str(place.root / MODEL), "--dummy", "--batches", batches, "--contexts", "8192",
                  "--trace", str(results / "step-trace.json"), "--json", str(file)], 300, file)


def operators_bench(place: Place, results: Path) -> Bench:
    """Returns the run whose report sluice-bench simulate reads: every operator of a step of DeepSeek-V3.2's rank."""
    file = results / "operators.json"
    return Bench("operators of a decode step, DeepSeek-V3.2",
                 [str(place.bin / "sluice-bench"), "kernels", "--device", "cuda", "--only", "step", "--model",
                  str(place.root / LATENT_MODEL), "--home-gib", "48", "--seconds", "0.05", "--json", str(file)], 300, file)


def benches(place: Place, gpu: dict[str, str], results: Path) -> list[Bench]:
    """Returns every program of tests/bench/cuda (sluice-NAME-bench), then a whole step, and its operators for forecasts."""
    found = [Bench(program.name, [str(program)], 120)
             for program in sorted(place.bin.glob("sluice-*-bench")) if program.name not in CPU_BENCHES]
    if not found:
        print("gpu-test: no bench of a kernel is built: cmake --build --preset release --target benches",
              file=sys.stderr)
    if (place.bin / "sluice-bench").is_file():
        found += [step_bench(place, gpu, results), operators_bench(place, results)]
    return found


def run_bench(place: Place, bench: Bench, show: bool = False) -> Outcome:
    """Runs a bench; with `show` its output is printed as it comes."""
    begin = time.monotonic()
    try:
        status, said = run_command(bench.command, bench.env or place.program_environment(), bench.seconds,
                                   on_line=(lambda line: print(line, end="", flush=True)) if show else None)
    except OSError as error:
        status, said = 1, str(error)
    outcome = Outcome(bench.name, " ".join(bench.command).replace(f"{place.root}/", ""), status,
                      round(time.monotonic() - begin, 1), said)
    if bench.json_file is not None and bench.json_file.is_file():
        outcome.report = json.loads(bench.json_file.read_text())
    return outcome


def markdown(about: dict[str, str], outcomes: list[Outcome]) -> str:
    lines = ["# Sluice on a GPU: measured", ""]
    lines += [f"* {key.replace('_', ' ')}: {value}" for key, value in about.items()]
    for outcome in outcomes:
        end = "" if outcome.status == 0 else f", **ended with {outcome.status}**"
        lines += ["", f"## {outcome.name}", "", f"`{outcome.command}` ({outcome.seconds} s{end})", "",
                  "```", outcome.said.strip(), "```"]
    return "\n".join(lines) + "\n"


def run_benches(place: Place, results: Path, only: str | None) -> tuple[int, int, int]:
    """Runs the benches one after the other; returns how many ran well, failed and were skipped."""
    results.mkdir(parents=True, exist_ok=True)
    about = machine.describe(place)
    wanted = [b for b in benches(place, machine.gpu(), results)
              if only is None or re.search(only, b.name)]
    outcomes = []
    for bench in wanted:
        print(f"== {bench.name}", flush=True)
        outcomes.append(run_bench(place, bench))
        print(outcomes[-1].said.strip(), flush=True)
        if outcomes[-1].status not in (0, SKIPPED_STATUS):
            print(f"FAILED  {bench.name}: status {outcomes[-1].status}", file=sys.stderr)
        # The reports are written after each bench, so that a failure of the next one loses nothing.
        (results / "bench.json").write_text(json.dumps(
            {"machine": about, "benches": [asdict(o) for o in outcomes]}, indent=1) + "\n")
        (results / "bench.md").write_text(markdown(about, outcomes))
    skipped = sum(o.status == SKIPPED_STATUS for o in outcomes)
    failed = sum(o.status not in (0, SKIPPED_STATUS) for o in outcomes)
    return len(outcomes) - failed - skipped, failed, skipped
