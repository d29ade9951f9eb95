"""Runs a node under the load of sluice-bench for the long runs: starts it, watches its memory, checks bounds."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/e2e"))
# Packages that a staged folder (tools/gpu-stage) carries come behind the machine's own.
if os.environ.get("SLUICE_TEST_SITE"):
    sys.path.append(os.environ["SLUICE_TEST_SITE"])

from support.nodes import BIN, ENVIRONMENT, SMOLLM2, Node  # noqa: E402


def parser(description: str, streams: int) -> argparse.ArgumentParser:
    """Returns a parser with the flags that both runs share."""
    out = argparse.ArgumentParser(description=description,
                                  formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--model", type=Path, default=SMOLLM2, help="model directory (default: %(default)s)")
    out.add_argument("--streams", type=int, default=streams,
                     help="sequences that decode at once (default: %(default)s)")
    out.add_argument("--prompt", default="128", help="tokens of a prompt, in the form of sluice-bench serve")
    out.add_argument("--output", default="128", help="tokens of an output, in the same form")
    out.add_argument("--hbm-bytes", default="1GiB", help="HBM of the node (default: %(default)s)")
    out.add_argument("--dram-bytes", default="512MiB", help="DRAM of the node (default: %(default)s)")
    out.add_argument("--threads", default="0", help="threads of the node; 0: its choice (default: %(default)s)")
    out.add_argument("--json", type=Path, help="write the report of sluice-bench there")
    return out


class LoadedNode:
    """A sluice-server of its own, its memory over time, and the report of sluice-bench."""

    def __init__(self, args, *flags: str):
        self.args = args
        self.folder = tempfile.TemporaryDirectory(prefix="sluice-bench-")
        self.node = Node("sluice-server", args.model, Path(self.folder.name), "--hbm-bytes", args.hbm_bytes,
                         "--dram-bytes", args.dram_bytes, "--max-sequences", str(args.streams), "--threads",
                         args.threads, *flags)
        # (seconds since the load began, resident bytes, those of them outside the arenas)
        self.memory: list[tuple[float, int, int]] = []
        self._ending = threading.Event()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        status = self.node.stop()
        self.folder.cleanup()
        if status != 0:
            raise AssertionError(f"the node ended with {status}")

    def serve(self, *flags: str) -> dict:
        """Runs `sluice-bench serve` to its end; its table goes to standard output."""
        path = self.args.json or Path(self.folder.name) / "report.json"
        command = [str(BIN / "sluice-bench"), "serve", "--decode", self.node.address, "--prompt",
                   self.args.prompt, "--output", self.args.output, "--json", str(path), *flags]
        watcher = threading.Thread(target=self._watch, args=(time.monotonic(),))
        watcher.start()
        try:
            # Requests that failed make its status 1 and are in the report; anything else is an end.
            done = subprocess.run(command, env=ENVIRONMENT, check=False)
        finally:
            self._ending.set()
            watcher.join()
        if done.returncode not in (0, 1) or not path.exists():
            raise SystemExit(f"sluice-bench ended with {done.returncode}")
        return json.loads(path.read_text())

    def gives_back(self, idle: tuple) -> bool:
        """Returns whether the resources that requests held return to their earlier values."""
        try:
            self.node.wait_until_held(idle)
        except AssertionError:
            return False
        return True

    def _watch(self, began: float) -> None:
        while not self._ending.wait(0.25):
            self.memory.append((time.monotonic() - began, *resident_bytes(self.node.process.pid)))


def resident_bytes(pid: int) -> tuple[int, int]:
    """Returns all resident memory, and the part outside the arenas and weights, which ask for huge pages."""
    total = outside = rss = 0
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        if line.startswith("Rss:"):
            rss = int(line.split()[1]) * 1024
            total += rss
        elif line.startswith("VmFlags:") and " hg" not in line:
            outside += rss
    return total, outside


class Verdict:
    """Checks bounds and prints each with its figure."""

    def __init__(self):
        self.broken = 0

    def hold(self, what: str, figure: str, holds: bool) -> None:
        print(f"{'holds ' if holds else 'BROKEN'}  {what}: {figure}", flush=True)
        self.broken += not holds

    def status(self) -> int:
        return 1 if self.broken else 0
