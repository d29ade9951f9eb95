"""Starts nodes of several ranks, and looks at how they end."""

import contextlib
import functools
import shutil
import signal
import subprocess
import time
import urllib.request

import pytest
from sluice.v1 import decode_pb2
from support.nodes import (BIN, DEVICE, ENVIRONMENT, FLOAT32_KERNELS, SCALE, TIMEOUT_S, Golden, Node, free_port, greedy,
                           matching_steps, tokens_of)
from support.transfers import committed

# One precision for all: the sums of ranks differ from those of one device in their last bits alone.
PRECISION = [] if DEVICE == "cuda" else ["--kernels", FLOAT32_KERNELS, "--kv-dtype", "float32"]
EXACT = [*PRECISION, "--hbm-bytes", "128MiB", "--dram-bytes", "64MiB", "--max-sequences", "8", "--seed", "5"]
END_S = 5 * SCALE  # in which streams end when a rank is lost
FLUSH_S = 10 * SCALE  # in which processes end: callers get 6 s to take their errors
EXPERTS = "tiny-deepseek-v32"  # its ranks divide the experts
MODELS = ["tiny-llama", EXPERTS]
CASES = range(3)  # of the golden files
LONG = 1500  # tokens of a stream that is to run for a while


@functools.cache
def count_gpus():
    if DEVICE != "cuda" or shutil.which("nvidia-smi") is None:
        return 0
    return subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False).stdout.count("GPU ")


def skip_without_gpus(size):
    """Skips a test of `size` ranks where they would share a GPU; two may."""
    if DEVICE == "cuda" and size > max(2, count_gpus()):
        pytest.skip("two ranks share the GPU, and no more")


class AdminPort:
    """The admin port of another rank than 0."""

    def __init__(self, address):
        self.address = address

    def http(self, path):
        """Returns the status and body of a page."""
        with urllib.request.urlopen(f"http://{self.address}{path}", timeout=TIMEOUT_S) as answer:
            return answer.status, answer.read().decode()


class Ranks:
    """A running node of several ranks. `failpoints`: rank -> terms; `models`: rank -> another folder; `places`: rank ->
    another working directory.
    """

    def __init__(self, model, folder, size, *flags, transport="auto", failpoints=None, dram="64MiB", hbm="128MiB",
                 leader=None, models=None, credentials=None, places=None):
        sizes = {"--dram-bytes": dram, "--hbm-bytes": hbm}
        exact = [sizes.get(before, flag) for before, flag in zip(["", *EXACT], EXACT)]
        division = "--expert-parallel" if "deepseek" in model.name else "--tensor-parallel"
        shared = [*exact, division, str(size), "--leader", leader or f"127.0.0.1:{free_port()}", "--rank-transport", transport,
                  *flags]
        terms = {rank: ["--failpoints", text] for rank, text in (failpoints or {}).items()}
        self.followers, self.logs = [], []
        for rank in range(1, size):
            self.logs.append(folder / f"rank{rank}.log")
            with self.logs[-1].open("w") as log:
                self.followers.append(subprocess.Popen(
                    [str(BIN / "sluice-server"), "--model", str((models or {}).get(rank, model)), "--device", DEVICE,
                     "--rank", str(rank),
                     "--admin-listen", "127.0.0.1:0", *shared, *terms.get(rank, [])], stdout=log, stderr=subprocess.STDOUT,
                    env=ENVIRONMENT | self.env(rank), cwd=(places or {}).get(rank)))
        try:
            self.leader = Node("sluice-server", model, folder, *shared, *terms.get(0, []), env=self.env(0),
                               credentials=credentials)
        except BaseException:
            for follower in self.followers:
                follower.kill()
            raise

    @staticmethod
    def env(rank):
        """Each rank has a GPU of its own where there are several. Two ranks that share one take part in NCCL as if each
        had a host of its own.
        """
        if count_gpus() > 1:
            return {"CUDA_VISIBLE_DEVICES": str(rank)}
        return {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo"} if DEVICE == "cuda" else {}

    def processes(self):
        return [self.leader.process, *self.followers]

    def statuses(self, seconds=END_S):
        """Returns the exit status of every rank, which must end in the time given."""
        deadline = time.monotonic() + seconds
        return [p.wait(max(0.01, deadline - time.monotonic())) for p in self.processes()]

    def end(self):
        for process in self.processes():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()
        self.leader.channel.close()


TRANSPORTS = ["shm", "grpc"]


def starting_ranks(tiny_models, folder, transport):
    """Yields ranks(name, size, *flags, **more) -> Ranks, which end with the test."""
    made = []

    def begin(name, size, *flags, **more):
        own = folder / str(len(made))
        own.mkdir()
        made.append(Ranks(tiny_models(name), own, size, *flags, **{"transport": transport} | more))
        return made[-1]

    yield begin
    for each in made:
        each.end()


def generate(node, tokens=24, **request):
    """Returns the ids that a greedy Generate answers, and its finish."""
    found, finish = tokens_of(node.decode.Generate(decode_pb2.GenerateRequest(
        sampling=greedy(max_tokens=tokens, ignore_eos=True), **request), timeout=TIMEOUT_S))
    return [token.id for token in found], finish


def checking(start, tiny_models):
    """Returns check(golden, case, ids), which asserts that the tokens are right for the case's caches."""
    made = {}

    def check(g: Golden, case: int, ids: list[int]) -> None:
        if g.name != EXPERTS:
            # The fixture's caches are bf16, and its tokens of float32.
            matching_steps(ids, g.tokens(case)[:len(ids)], g.margins(case), 0.1)
            return
        # Selections near the cut flip by rounding, so that these are held to one device.
        if not made:
            one = start("sluice-server", tiny_models(EXPERTS), *EXACT, "--prefix-cache=false")
            made.update((c, generate(one, transfer_id=committed(one, g, c))[0]) for c in CASES)
        count = min(len(ids), len(made[case])) if DEVICE == "cpu" else 1
        assert ids[:count] == made[case][:count] and ids

    return check
