"""Runs commands side by side, each with its own time limit, and reports progress.

Each command has a process group of its own, so that its children end with it: when its time is over, and when this
program is told to end (`end_with_signals`).
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

SKIPPED_STATUS = 77  # exit status of a test that the machine lacks something for (tests/test_main.h)
SHOWN_LINES = 40  # last lines of a failed job's output that are shown


@dataclass(frozen=True)
class Job:
    """One test. `skip` is the reason for which it is not run at all; `seconds` is its limit.

    `judge` gets the output of a job that failed. It returns another outcome with its output, or None to agree.
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
    said: str  # all of its output; the reason, if it was skipped


def _kill(process: int) -> None:
    """Kills a process that run_command started, and its group, which it may not have made yet."""
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            kill(process, signal.SIGKILL)


def _children() -> list[int]:
    """Returns the ids of this process's children, those included that another thread has just started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            _, parent, *_ = stat.read_text().rpartition(")")[2].split()
            if int(parent) == os.getpid():
                found.append(int(stat.parent.name))
    return found


def end_with_signals() -> None:
    """Lets SIGTERM and SIGINT end this program and every command that it runs."""
    def end(number, _frame):
        for process in _children():
            _kill(process)
        os._exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)


def _follow(process: subprocess.Popen, seconds: float, on_line: Callable[[str], None]) -> tuple[int | None, str]:
    """Reads a process's lines until it ends, or kills it when its time is over."""
    late = threading.Event()

    def end() -> None:
        late.set()
        _kill(process.pid)

    timer = threading.Timer(seconds, end)
    timer.start()
    said = []
    try:
        for line in process.stdout:
            said.append(line)
            on_line(line)
        process.wait()
    finally:
        timer.cancel()
    return None if late.is_set() else process.returncode, "".join(said)


def run_command(command: Sequence[str], env: dict[str, str], seconds: float,
                on_line: Callable[[str], None] | None = None) -> tuple[int | None, str]:
    """Returns a command's exit status and output. The status is None if its time was over and it was killed.

    `on_line` gets every line as it comes.
    """
    with subprocess.Popen(list(command), env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, errors="replace",
                          start_new_session=True) as process:
        if on_line is not None:
            return _follow(process, seconds, on_line)
        try:
            said, _ = process.communicate(timeout=seconds)
            return process.returncode, said
        except subprocess.TimeoutExpired:
            _kill(process.pid)
            said, _ = process.communicate()
            return None, said


def run_job(job: Job, deadline: float) -> Result:
    """Runs one job, which gets no more time than is left until `deadline` (time.monotonic())."""
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
    """Prints a line for a job that failed or was skipped, and the end of a failed one's output."""
    if result.outcome == "skipped":
        print(f"skipped {result.name} ({result.said.removeprefix('skipped: ')})")
    if result.outcome == "failed":
        print(f"FAILED  {result.name} ({result.seconds:.1f} s)")
        for line in result.said.strip().splitlines()[-SHOWN_LINES:]:
            print(f"    {line}")
    sys.stdout.flush()


def _result(future: Future[Result]) -> Result:
    """Waits for a result. A signal that comes just before a wait begins is handled when it ends, so it is short."""
    while True:
        with contextlib.suppress(TimeoutError):
            return future.result(timeout=0.5)


def run_jobs(jobs: Sequence[Job], side_by_side: int = 1, seconds: float = float("inf"),
             done: Callable[[Result], None] = show) -> list[Result]:
    """Runs all jobs and returns their results in the order of the jobs; shows progress on a terminal."""
    deadline = time.monotonic() + seconds
    results, live = [], sys.stderr.isatty()
    with ThreadPoolExecutor(max(side_by_side, 1)) as pool:
        for future in [pool.submit(run_job, job, deadline) for job in jobs]:
            result = _result(future)
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
