"""Tests a whole node on the GPU: it starts, takes caches, decodes, reports metrics and ends as it should.

    python3 -m sluice_gpu.smoke ROOT DEVICE

It is a test of its own, with exit status 0 or 1.
"""

import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from sluice_gpu.jobs import run_command
from sluice_gpu.place import Place

READY_SECONDS = 60
MODEL = "tiny-llama"


class SmokeError(Exception):
    pass


class Node:
    """A running sluice-server or sluice-prefill."""

    def __init__(self, place: Place, folder: Path, program: str, *flags: str):
        self.program = program
        self.log = folder / f"{program}.log"
        address_file = folder / f"{program}.json"
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [str(place.bin / program), "--listen", "127.0.0.1:0", "--address-file",
                 str(address_file), *flags],
                stdout=log, stderr=subprocess.STDOUT, env=place.program_environment())
        give_up = time.monotonic() + READY_SECONDS
        while not (address_file.exists() and address_file.read_text().strip()):
            if self.process.poll() is not None:
                raise SmokeError(f"{program} ended with {self.process.returncode}:\n{self.tail()}")
            if time.monotonic() > give_up:
                self.process.kill()
                raise SmokeError(f"{program} was not ready after {READY_SECONDS} s:\n{self.tail()}")
            time.sleep(0.02)
        self.addresses = json.loads(address_file.read_text())

    def tail(self) -> str:
        return self.log.read_text()[-4000:]

    def stop(self) -> None:
        self.process.terminate()
        try:
            status = self.process.wait(READY_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise SmokeError(f"{self.program} did not end after SIGTERM:\n{self.tail()}") from None
        if status != 0:
            raise SmokeError(f"{self.program} ended with {status} after SIGTERM:\n{self.tail()}")


def must(env: dict[str, str], *command: str, seconds: float = 120) -> str:
    status, said = run_command(command, env, seconds)
    if status != 0:
        raise SmokeError(f"{' '.join(command)}: exit status {status}\n{said}")
    return said


def metric(text: str, name: str) -> float:
    """Returns the sum of a metric over its labels."""
    return sum(float(line.rpartition(" ")[2]) for line in text.splitlines()
               if line.startswith((name + " ", name + "{")))


def smoke(place: Place, device: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = folder / MODEL
        must(place.test_environment(), str(place.bin / "sluice-make-fixture"), MODEL, str(model))
        flags = ["--model", str(model), "--device", device, "--hbm-bytes", "256MiB"]
        server = Node(place, folder, "sluice-server", *flags, "--dram-bytes", "256MiB",
                      "--admin-listen", "127.0.0.1:0")
        try:
            requests = 64
            print(must(place.program_environment(), str(place.bin / "sluice-bench"), "serve",
                       "--decode", server.addresses["listen"], "--requests", str(requests),
                       "--concurrency", "16", "--prompt", "lognormal:100:0.8", "--output", "32"))
            with urllib.request.urlopen(f"http://{server.addresses['admin_listen']}/metrics",
                                        timeout=10) as answer:
                metrics = answer.read().decode()
            tokens = metric(metrics, "sluice_tokens_total")
            if tokens < requests * 32:
                raise SmokeError(f"{tokens:.0f} tokens are in the metrics, {requests * 32} were decoded")
            for gauge in ("sluice_tier_used_bytes", "sluice_tier_reserved_bytes"):
                if metric(metrics, gauge) != 0:
                    raise SmokeError(f"{gauge} is not 0 with nothing alive")
        finally:
            server.stop()
        Node(place, folder, "sluice-prefill", *flags).stop()


def main() -> int:
    try:
        smoke(Place(Path(sys.argv[1])), sys.argv[2])
    except (SmokeError, OSError, KeyError) as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
