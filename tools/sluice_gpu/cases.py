"""The CUDA tests of the Catch2 programs, one job each, as ctest has them."""

import re
from pathlib import Path

from sluice_gpu.jobs import Job, run_command
from sluice_gpu.place import Place

# A case is a CUDA test if its name, its program's or a tag of it says so.
# Kernels of cuBLASLt: racecheck does not see what orders their shared memory.
_LIBRARY_KERNEL = re.compile(r"\bnvjet_")
_IS_CUDA = re.compile(r"cuda|\bgpu\b", re.IGNORECASE)


def _names(program: Path, env: dict[str, str], *spec: str) -> list[str]:
    # Catch2's exit status here is the number of the cases.
    _, said = run_command([str(program), *spec, "--list-test-names-only"], env, 60)
    return [line.strip() for line in said.splitlines() if line.strip()]


def _argument(name: str) -> str:
    """A case's name as Catch2 takes it on its command line, where commas and brackets mean something."""
    return re.sub(r"([\\,\[\]])", r"\\\1", name)


def cuda_cases(place: Place) -> list[tuple[Path, str]]:
    """(program, case) of every CUDA test that is here."""
    env, found = place.test_environment(), []
    for program in sorted(place.bin.glob("*_test")):
        names = _names(program, env)
        if _IS_CUDA.search(program.name):
            found += [(program, name) for name in names]
            continue
        tagged = set(_names(program, env, "[cuda]")) & set(names)
        found += [(program, name) for name in names if name in tagged or _IS_CUDA.search(name)]
    return found


def case_jobs(place: Place, cases: list[tuple[Path, str]], seconds: float) -> list[Job]:
    env = place.test_environment()
    return [Job(f"{program.name}: {name}", (str(program), _argument(name)), env, seconds)
            for program, name in cases]


def judge_sanitizer(said: str) -> tuple[str, str] | None:
    """What compute-sanitizer's status hides: nothing to check, or nothing but a library's kernels."""
    if "terminated before first instrumented API call" in said and "All tests passed" in said:
        return "skipped", "the case gives the GPU nothing to do"
    errors = [line for line in said.splitlines() if re.match(r"=+ (Error|Warning):", line)]
    if errors and "All tests passed" in said and all(_LIBRARY_KERNEL.search(e) for e in errors):
        return "passed", f"{said}\n{len(errors)} reports, all of kernels of cuBLASLt"
    return None


def sanitizer_jobs(place: Place, cases: list[tuple[Path, str]], tool: str, sanitizer: str | None,
                   seconds: float) -> list[Job]:
    """The kernels' cases under compute-sanitizer's `tool`."""
    env, jobs = place.test_environment(), []
    for program, name in cases:
        if program.name != "sluice_kernels_test":
            continue
        title = f"{tool}: {name}"
        if sanitizer is None:
            jobs.append(Job(title, skip="compute-sanitizer is not on PATH"))
            continue
        jobs.append(Job(title, (sanitizer, "--tool", tool, "--error-exitcode", "99", "--print-limit", "10000",
                                str(program), _argument(name)), env, seconds, judge=judge_sanitizer))
    return jobs
