"""tools/gpu-test: runs every CUDA test, or the benches, on a machine with a GPU."""

import argparse
import os
import re
import shutil
import sys
import tarfile
import time
from collections import Counter
from pathlib import Path

from sluice_gpu import bench, cases, e2e, machine, policies, weights
from sluice_gpu.jobs import Job, Result, end_with_signals, run_jobs
from sluice_gpu.place import Place
from sluice_gpu.stage import PAYLOAD

SANITIZERS = ("memcheck", "racecheck")
NO_GPU = "no GPU (nvidia-smi finds none)"
TEST_SECONDS = 120
E2E_SECONDS = 300  # for the tests of one file
# Programs that run on the GPU at once; each context takes some 0.5 GB of it, and a core.
SIDE_BY_SIDE = 6

ABOUT = """Runs, on a machine with an NVIDIA GPU, every test that needs one:

  kernels, device, engine, attention, parity, ...   the CUDA cases of the C++ test programs, one by one
  SmolLM2                                           if its weights are here, or both their parts
  memcheck, racecheck                               the kernels' cases under compute-sanitizer, for as
                                                    long as --sanitizer-seconds
  smoke, e2e                                        sluice-server and sluice-prefill with --device cuda

In a checkout it runs the programs of build/release. In a folder that tools/gpu-stage made it first
unpacks them beside that folder. Tests that need something that the machine lacks are skipped, and
counted. The last line is "N passed, N failed, N skipped"; the exit status is 0 only if something passed
and nothing failed.
"""
EXAMPLES = """examples:
  tools/gpu-test                          in a checkout with a GPU, after tools/test or a build
  build/stage/gpu-test --quick            in a staged folder, without the sanitizers
  build/stage/gpu-test --unpack           keeps this part of the model for the next one, and stops
  tools/gpu-test --only 'rms_norm|merge'
  tools/gpu-test --bench --results out    writes figures: out/bench.md, out/bench.json and a trace
  tools/gpu-test --bench --part main64k   measures one part of the table of attention policies
  tools/gpu-test --bench --part clo-figure10 --only llama-8k --seconds 300
                                          measures only some runs of a part, and stops after 5 minutes
  tools/gpu-test --bench --part main64k --quick --device cpu
                                          rehearses that part with a small model, on any machine
"""


def unpack(stage: Path) -> Place:
    """Unpacks a staged folder into a folder beside it, to which later parts add."""
    home = stage.parent / "stage-unpacked"
    home.mkdir(exist_ok=True)
    payload = stage / PAYLOAD
    stamp = home / ".payload"
    if payload.is_file():
        digest = weights.sha256_of(payload)
        if not (stamp.is_file() and stamp.read_text() == digest):
            for old in ("build", "tests", "tools"):  # a test that was renamed since must not run
                shutil.rmtree(home / old, ignore_errors=True)
            with tarfile.open(payload) as archive:
                archive.extractall(home, filter="data")
            stamp.write_text(digest)
    place = Place(home)
    if (stage / "model").is_dir():
        shutil.copytree(stage / "model", place.smollm2, dirs_exist_ok=True)
    if not place.bin.is_dir():
        raise SystemExit(f"gpu-test: {stage} is part 2 alone: run gpu-test of part 1 on this machine first")
    return place


def wanted(jobs: list[Job], only: str | None) -> list[Job]:
    return [job for job in jobs if only is None or re.search(only, job.name)]


def smoke_job(place: Place, has_gpu: bool) -> Job:
    tools = Path(__file__).resolve().parents[1]
    return Job("smoke: a server and a prefill node on the GPU",
               (sys.executable, "-m", "sluice_gpu.smoke", str(place.root), "cuda"),
               os.environ | {"PYTHONPATH": str(tools)}, 180,
               skip="" if has_gpu else NO_GPU)


def run_tests(place: Place, args: argparse.Namespace) -> Counter:
    has_gpu = bool(machine.gpu())
    results: list[Result] = []

    def phase(name: str, jobs: list[Job], side_by_side: int, seconds: float = float("inf")) -> None:
        jobs = wanted(jobs, args.only)
        if not jobs:
            return
        begin = time.monotonic()
        print(f"== {name}: {len(jobs)}", flush=True)
        results.extend(run_jobs(jobs, side_by_side, seconds))
        print(f"== {name}: {time.monotonic() - begin:.0f} s", flush=True)

    if (reason := weights.make_model(place.smollm2, place.root / "tools")):
        print(f"gpu-test: {reason}; its tests are skipped", file=sys.stderr)
    found = cases.cuda_cases(place)
    seconds = TEST_SECONDS if args.seconds is None else args.seconds
    phase("tests", cases.case_jobs(place, found, seconds), args.jobs)
    phase("smoke", [smoke_job(place, has_gpu)], 1)
    if has_gpu:
        print("== e2e", flush=True)
        results.extend(e2e.run_e2e(place, "cuda", args.only, E2E_SECONDS))
    else:
        phase("e2e", [Job("e2e", skip=NO_GPU)], 1)
    if not args.quick:
        sanitizer = shutil.which("compute-sanitizer") if has_gpu else None
        for tool in SANITIZERS:
            jobs = cases.sanitizer_jobs(place, found, tool, sanitizer, seconds)
            phase(tool, jobs, args.jobs, args.sanitizer_seconds)
    return Counter(result.outcome for result in results)


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu-test", description=ABOUT, epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true",
                        help="leave the sanitizers out; with --part rehearse with a small model")
    parser.add_argument("--only", metavar="REGEX",
                        help="run only the tests, the benches or the runs of --part whose name matches; runs "
                             "that those need come with them")
    parser.add_argument("--bench", action="store_true", help="run the benches instead of the tests")
    parser.add_argument("--part", choices=sorted(policies.PARTS),
                        help="with --bench: one part of the table of policies")
    parser.add_argument("--texts", type=Path, metavar="FILE",
                        help="texts for parts that measure quality (made by tools/sluice texts)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="device of --part")
    parser.add_argument("--unpack", action="store_true", help="unpack the staged folder and stop")
    parser.add_argument("--results", type=Path, metavar="DIR",
                        help="folder for --bench (default: gpu-results in the checkout or the staged folder)")
    parser.add_argument("--jobs", type=int, default=min(SIDE_BY_SIDE, os.cpu_count() or 1), metavar="N",
                        help="tests that run side by side (default %(default)s)")
    parser.add_argument("--seconds", type=float, metavar="S",
                        help=f"time limit of one test (default {TEST_SECONDS}), or of the whole of --part "
                             f"(default {policies.PART_SECONDS})")
    parser.add_argument("--sanitizer-seconds", type=float, default=180, metavar="S",
                        help="time limit of each sanitizer; cases that it does not reach are skipped "
                             "(default %(default)s)")
    args = parser.parse_args()
    end_with_signals()
    here = Path(os.environ["SLUICE_GPU_ROOT"])  # root of the checkout or the stage; set by gpu-test
    place = unpack(here) if (here / PAYLOAD).is_file() or (here / "model").is_dir() else Place(here)
    if not place.bin.is_dir():
        print(f"gpu-test: {place.bin} is not there: build first (tools/test)", file=sys.stderr)
        return 2
    if args.unpack:
        parts = weights.parts_here(place.smollm2)
        print(f"unpacked into {place.root}; parts of SmolLM2's weights there: {parts or 'none'}")
        return 0
    about = machine.describe(place)
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    if args.bench:
        results = args.results or here / "gpu-results"
        if args.part:
            seconds = policies.PART_SECONDS if args.seconds is None else args.seconds
            passed, failed, skipped = policies.run_part(place, results, args.part, args.device, args.quick,
                                                        args.texts, args.only, seconds)
            print(f"written: {results}/policies-{args.part}.md and .json, and the reports of each run beside them")
            print(f"{passed} passed, {failed} failed, {skipped} skipped")
            return 1 if failed or not passed else 0
        passed, failed, skipped = bench.run_benches(place, results, args.only)
        print(f"written: {results}/bench.md, {results}/bench.json")
    else:
        counts = run_tests(place, args)
        passed, failed, skipped = counts["passed"], counts["failed"], counts["skipped"]
    print(f"{passed} passed, {failed} failed, {skipped} skipped")
    return 1 if failed or not passed else 0


if __name__ == "__main__":
    sys.exit(main())
