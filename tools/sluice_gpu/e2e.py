"""Runs the end-to-end tests against servers with --device cuda, where pytest is installed."""

import re
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sluice_gpu import machine
from sluice_gpu.jobs import Job, Result, run_command, run_jobs, show
from sluice_gpu.place import Place

# Tests whose subject the device touches, and that need no other program of tools/.
FILES = ("test_batch.py", "test_ingest.py", "test_ingest_faults.py", "test_latent.py", "test_latent_dense.py",
         "test_latent_faults.py", "test_latent_life.py", "test_latent_profile.py", "test_pull_links.py",
         "test_push_links.py", "test_rank_caches.py", "test_rank_links.py", "test_rank_losses.py", "test_rank_ports.py",
         "test_ranks.py", "test_shutdown.py", "test_streams.py")
_NEEDS = ("pytest", "grpc", "google.protobuf", "numpy")
# Files that run at once on each GPU. Each starts up to four nodes, which take turns there.
_SIDE_BY_SIDE = 3
_SHOWING = threading.Lock()  # the lines of a file's results stay together
_LINE = re.compile(r"\S+\.py::(?P<name>.+?)(?: (?P<outcome>PASSED|FAILED|ERROR|SKIPPED)\b.*)?$")


def environment(place: Place, device: str) -> dict[str, str]:
    """Returns the environment of Python programs that start nodes with tests/e2e/support."""
    env = place.test_environment() | {"SLUICE_TEST_DEVICE": device, "SLUICE_BIN_DIR": str(place.bin)}
    paths = [place.root / "tools", place.root / ".venv/sluice_stubs"]
    # The machine's own packages go before the carried ones.
    site = place.root / "tools/site"
    env["SLUICE_TEST_SITE"] = str(site) if site.is_dir() else ""
    return env | {"PYTHONPATH": ":".join(str(p) for p in paths)}


def read_results(junit: Path, group: str) -> list[Result]:
    """Returns a result for each test in a JUnit file."""
    results = []
    for case in ElementTree.parse(junit).iter("testcase"):
        name = f"{group}: {case.get('name')}"
        seconds = float(case.get("time") or 0)
        failure = next((c for c in case if c.tag in ("failure", "error")), None)
        skipped = case.find("skipped")
        if failure is not None:
            results.append(Result(name, "failed", seconds, failure.text or ""))
        elif skipped is not None:
            results.append(Result(name, "skipped", seconds, skipped.get("message") or ""))
        else:
            results.append(Result(name, "passed", seconds, ""))
    return results


def results_so_far(said: str, group: str, why: str) -> list[Result]:
    """Returns a result for each test in the output of a `pytest -v` that was ended: one without an outcome has failed."""
    results = []
    for line in said.splitlines():
        if (found := _LINE.match(line)) is None:
            continue
        outcome = {"PASSED": "passed", "SKIPPED": "skipped"}.get(found["outcome"], "failed")
        results.append(Result(f"{group}: {found['name'].strip()}", outcome, 0, "" if found["outcome"] else why))
    return results


def run_file(file: Path, env: dict[str, str], only: str | None, seconds: float) -> list[Result]:
    """Runs the tests of one file. If their time is over, the one that ran has failed, and the rest has no result."""
    with tempfile.TemporaryDirectory() as name:
        junit = Path(name) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-v", "--color=no", "--junitxml", str(junit), str(file)]
        if only is not None:
            command += ["--name-regex", only]
        status, said = run_command(command, env | {"PYTHONUNBUFFERED": "1"}, seconds)
        if status == 5:  # pytest: no test was chosen
            return []
        if junit.is_file():
            return read_results(junit, "e2e")
    why = f"out of time after {seconds:.0f} s" if status is None else f"exit status {status}"
    results = results_so_far(said, "e2e", why)
    if all(result.outcome != "failed" for result in results):
        results.append(Result(f"e2e: {file.name}", "failed", seconds, f"{said}\n{why}"))
    return results


def run_e2e(place: Place, device: str, only: str | None, seconds: float,
            files: Sequence[str] = FILES) -> list[Result]:
    """Runs `files`, each for `seconds` at most. Where the machine cannot run them at all, the result is one skipped test."""
    env = environment(place, device)
    status, said = run_command([sys.executable, "-c", f"import {', '.join(_NEEDS)}"], env, 60)
    if status != 0:
        reason = f"Python lacks something: {said.strip().splitlines()[-1]}"
        return run_jobs([Job("e2e", skip=reason)])
    gpus = machine.gpus() if device == "cuda" else 0

    def run_one(numbered: tuple[int, str]) -> list[Result]:
        number, file = numbered
        # The nodes of a file share a GPU; ranks choose theirs themselves.
        where = {"CUDA_VISIBLE_DEVICES": str(number % gpus)} if gpus > 1 else {}
        return _run_and_show(place.root / "tests/e2e" / file, env | where, only, seconds)

    with ThreadPoolExecutor(_SIDE_BY_SIDE * max(gpus, 1)) as pool:
        found = list(pool.map(run_one, enumerate(files)))
    return [result for results in found for result in results]


def _run_and_show(file: Path, env: dict[str, str], only: str | None, seconds: float) -> list[Result]:
    begin = time.monotonic()
    results = run_file(file, env, only, seconds)
    counts = Counter(result.outcome for result in results)
    with _SHOWING:
        for result in results:
            show(result)
        if results:
            counted = ", ".join(f"{counts[outcome]} {outcome}" for outcome in ("passed", "failed", "skipped"))
            print(f"e2e: {file.name}: {counted} ({time.monotonic() - begin:.0f} s)", flush=True)
    return results
