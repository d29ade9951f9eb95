"""Runs commands side by side, each with its own time limit, and says how far it is.

Each command has a process group of its own, so that its children go with it: when it is out of time,
and when this program is told to end (`end_with_signals`).
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

SKIPPED_STATUS = 77  # of a program whose test the machine lacks something for (tests/test_main.h)
SHOWN_LINES = 40  # of what a failed job said


@dataclass(frozen=True)
class Job:
    """One test. `skip` says why it is not run at all; `seconds` is its limit. `judge` may know better
    than the exit status: from the output, an outcome and what is said, or None.
    """

    name: str
    command: Sequence[str] = ()
    env: dict[str, str] = field(default_factory=dict)
    seconds: float = 120
    skip: str = ""
    judge: Callable[[str], tuple[str, str] | None] = lambda said: None


@dataclass(frozen=True)
class Result:
    name: str
    outcome: str  # "passed", "failed" or "skipped"
    seconds: float
    said: str  # all of its output; for a skipped one the reason


_live: set[int] = set()  # process groups
_live_lock = threading.Lock()


def _kill(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass


def end_with_signals() -> None:
    """SIGTERM and SIGINT end this program and every command that it runs."""
    def end(number, _frame):
        for group in list(_live):  # no lock: this thread may hold it
            _kill(group)
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)


def run_command(command: Sequence[str], env: dict[str, str], seconds: float) -> tuple[int | None, str]:
    """Exit status (None: out of time, and it and its children were killed) and output."""
    with subprocess.Popen(list(command), env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace",
                          start_new_session=True) as process:
        with _live_lock:
            _live.add(process.pid)
        try:
            said, _ = process.communicate(timeout=seconds)
            return process.returncode, said
        except subprocess.TimeoutExpired:
            _kill(process.pid)
            said, _ = process.communicate()
            return None, said
        finally:
            with _live_lock:
                _live.discard(process.pid)


def run_job(job: Job, deadline: float) -> Result:
    """One job, which gets no more time than is left until `deadline` (time.monotonic())."""
    if job.skip:
        return Result(job.name, "skipped", 0, job.skip)
    begin = time.monotonic()
    limit = min(job.seconds, deadline - begin)
    if limit <= 0:
        return Result(job.name, "skipped", 0, "no time was left for it")
    try:
        status, said = run_command(job.command, job.env, limit)
    except OSError as error:
        return Result(job.name, "failed", 0, str(error))
    seconds = time.monotonic() - begin
    if status is None and limit < job.seconds:
        return Result(job.name, "skipped", seconds, "no time was left to finish it")
    if status is None:
        return Result(job.name, "failed", seconds, f"{said}\nout of time after {limit:.0f} s")
    if status == SKIPPED_STATUS:
        reasons = [line for line in said.splitlines() if line.startswith("skipped: ")]
        return Result(job.name, "skipped", seconds, "; ".join(dict.fromkeys(reasons)))
    if status != 0:
        if (judged := job.judge(said)) is not None:
            return Result(job.name, judged[0], seconds, judged[1])
        return Result(job.name, "failed", seconds, f"{said}\nexit status {status}")
    return Result(job.name, "passed", seconds, said)


def show(result: Result) -> None:
    """A line for what failed or was skipped, with the end of what a failed one said."""
    if result.outcome == "skipped":
        print(f"skipped {result.name} ({result.said.removeprefix('skipped: ')})")
    if result.outcome == "failed":
        print(f"FAILED  {result.name} ({result.seconds:.1f} s)")
        for line in result.said.strip().splitlines()[-SHOWN_LINES:]:
            print(f"    {line}")
    sys.stdout.flush()


def run_jobs(jobs: Sequence[Job], side_by_side: int = 1, seconds: float = float("inf"),
             done: Callable[[Result], None] = show) -> list[Result]:
    """All of them, in order of their names' places; a line of progress where a person looks on."""
    deadline = time.monotonic() + seconds
    results, live = [], sys.stderr.isatty()
    with ThreadPoolExecutor(max(side_by_side, 1)) as pool:
        for result in pool.map(lambda job: run_job(job, deadline), jobs):
            results.append(result)
            if live:
                sys.stderr.write("\r\033[K")
            done(result)
            if live:
                sys.stderr.write(f"  {len(results)}/{len(jobs)} {result.name[:80]}")
                sys.stderr.flush()
    if live:
        sys.stderr.write("\r\033[K")
    return results
