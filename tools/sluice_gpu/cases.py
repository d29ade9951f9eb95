"""Lists the CUDA tests of the Catch2 programs as jobs, one for each case, like ctest."""

import re
from pathlib import Path

from sluice_gpu.jobs import Job, run_command
from sluice_gpu.place import Place

# Names of kernels of cuBLASLt. racecheck does not see the operations that order their shared memory.
_LIBRARY_KERNEL = re.compile(r"\bnvjet_")
# A case is a CUDA test if its name or its program's name matches, or if it has the tag [cuda].
_IS_CUDA = re.compile(r"cuda|\bgpu\b", re.IGNORECASE)


def _names(program: Path, env: dict[str, str], *spec: str) -> list[str]:
    # The exit status of --list-test-names-only is the number of cases.
    _, said = run_command([str(program), *spec, "--list-test-names-only"], env, 60)
    return [line.strip() for line in said.splitlines() if line.strip()]


def _argument(name: str) -> str:
    """Returns a case's name for Catch2's command line, where commas and brackets have a meaning of their own."""
    return re.sub(r"([\\,\[\]])", r"\\\1", name)


def cuda_cases(place: Place) -> list[tuple[Path, str]]:
    """Returns (program, case) for every CUDA test that is here."""
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
    """Returns the outcome where compute-sanitizer's status is misleading.

    It is misleading where the case uses no GPU, and where all reports are about kernels of a library. Returns None
    where the status is right.
    """
    if "terminated before first instrumented API call" in said and "All tests passed" in said:
        return "skipped", "the case gives the GPU nothing to do"
    errors = [line for line in said.splitlines() if re.match(r"=+ (Error|Warning):", line)]
    if errors and "All tests passed" in said and all(_LIBRARY_KERNEL.search(e) for e in errors):
        return "passed", f"{said}\n{len(errors)} reports, all of kernels of cuBLASLt"
    return None


def sanitizer_jobs(place: Place, cases: list[tuple[Path, str]], tool: str, sanitizer: str | None,
                   seconds: float) -> list[Job]:
    """Returns the kernels' cases under compute-sanitizer's `tool`."""
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
