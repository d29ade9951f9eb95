"""Runs the end-to-end tests against servers with --device cuda, where pytest is installed."""

import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

from sluice_gpu.jobs import Job, Result, run_command, run_jobs, show
from sluice_gpu.place import Place

# Tests whose subject the device touches, and that need no other program of tools/.
FILES = ("test_batch.py", "test_ingest.py", "test_ingest_faults.py", "test_latent.py", "test_latent_dense.py",
         "test_latent_faults.py", "test_latent_life.py", "test_latent_profile.py", "test_pull_links.py",
         "test_push_links.py", "test_rank_caches.py", "test_rank_ports.py", "test_ranks.py",
         "test_shutdown.py", "test_streams.py")
_NEEDS = ("pytest", "grpc", "google.protobuf", "numpy")


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


def run_e2e(place: Place, device: str, only: str | None, seconds: float,
            files: Sequence[str] = FILES) -> list[Result]:
    """Runs `files`. Where the machine cannot run them at all, the result is one skipped test."""
    env = environment(place, device)
    status, said = run_command([sys.executable, "-c", f"import {', '.join(_NEEDS)}"], env, 60)
    if status != 0:
        reason = f"Python lacks something: {said.strip().splitlines()[-1]}"
        return run_jobs([Job("e2e", skip=reason)])
    folder = place.root / "tests/e2e"
    with tempfile.TemporaryDirectory() as name:
        junit = Path(name) / "junit.xml"
        command = [sys.executable, "-m", "pytest", "-q", "--junitxml", str(junit),
                   *(str(folder / f) for f in files)]
        if only is not None:
            command += ["--name-regex", only]
        status, said = run_command(command, env, seconds)
        if status == 5:  # pytest: no test was chosen
            return []
        if not junit.is_file():
            results = [Result("e2e", "failed", seconds, f"{said}\nstatus {status}")]
            show(results[0])
            return results
        results = read_results(junit, "e2e")
    for result in results:
        show(result)
    return results
