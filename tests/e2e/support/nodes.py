"""Starts Sluice's programs on free ports, and has the requests that several tests send."""

import contextlib
import io
import json
import os
import random
import socket
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path

import grpc
import numpy as np
from sluice.v1 import (admin_pb2, admin_pb2_grpc, common_pb2, decode_pb2, decode_pb2_grpc, ingest_pb2_grpc,
                       prefill_pb2_grpc)
from sluice_client import cli, rpc
from sluice_client.safetensors_file import SafetensorsFile

ROOT = Path(__file__).resolve().parents[3]
BIN = Path(os.environ.get("SLUICE_BIN_DIR", ROOT / "build/release/bin")).resolve()
FIXTURES = ROOT / "tests/fixtures"
SLUICE = ROOT / "tools/sluice"
SMOLLM2 = ROOT / "models/smollm2-135m-instruct"
TINY = ["tiny-llama", "tiny-qwen2", "tiny-qwen3"]
# The fastest kernels of this processor that do not round activations to bf16.
FLOAT32_KERNELS = "avx2" if "avx2" in Path("/proc/cpuinfo").read_text().split() else "portable"
# Device of the nodes' models; tools/gpu-test sets cuda.
DEVICE = os.environ.get("SLUICE_TEST_DEVICE", "cpu")
# Factor of all time limits. Sanitizers make everything slower; SLUICE_TEST_TIMEOUT_SCALE=10 gives them time.
SCALE = float(os.environ.get("SLUICE_TEST_TIMEOUT_SCALE", "1"))
TIMEOUT_S = 60 * SCALE
# The programs take SLUICE_... for settings and refuse unknown ones.
# Nodes of tests compute with one thread unless a flag says otherwise: several tests run at a time, and threads that wait
# for each other spin. A result does not depend on the number of threads.
ONE_THREAD = {"SLUICE_THREADS": "1"}
# A node that leaves a profile behind would start otherwise the next time.
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith("SLUICE_")} | {
    "SLUICE_POLICY_PROFILE_FOLDER": "none"}


def free_port() -> int:
    """Returns a free port, for a program that cannot be given port 0 or that keeps its port when it starts again.

    The port is a random one below those that the system gives out by itself, so that no other test takes it before its
    owner listens.
    """
    while True:
        port = random.randrange(10000, 32000)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("0.0.0.0", port))
            return port


def run(*args, timeout=TIMEOUT_S, env=ENVIRONMENT, **kwargs) -> subprocess.CompletedProcess:
    """Runs a command to its end and returns its output as text."""
    return subprocess.run([str(a) for a in args], capture_output=True, text=True, timeout=timeout,
                          env=env, check=False, **kwargs)


def sluice_json(*args) -> dict:
    """Returns the object of tools/sluice ... --json, which must succeed. The command runs in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = cli.main([*map(str, args), "--json"])
    assert status == 0, err.getvalue()
    return json.loads(out.getvalue())


class Node:
    """A running sluice-server or sluice-prefill."""

    def __init__(self, program: str, model: Path, folder: Path, *flags: str, admin: bool = True,
                 credentials: rpc.Credentials | None = None, listen: str = "127.0.0.1:0",
                 env: dict[str, str] | None = None):
        self.program = program
        self.address_file = folder / f"{program}.json"
        self.log = folder / f"{program}.log"
        self.address_file.unlink(missing_ok=True)
        command = [str(BIN / program), "--model", str(model), "--device", DEVICE, "--listen", listen,
                   "--address-file", str(self.address_file)]
        if admin and program in ("sluice-server", "sluice-prefill"):
            command += ["--admin-listen", "127.0.0.1:0"]
        # By itself a node takes most of a GPU and pins a large part of DRAM: tests share both.
        sizes = {"--hbm-bytes": "1GiB",
                 **({"--dram-bytes": "1GiB"} if program == "sluice-server" else {"--hold-bytes": "256MiB"})}
        command += [word for size in sizes.items() if DEVICE == "cuda" and size[0] not in flags for word in size]
        started = time.monotonic()
        with self.log.open("w") as log:
            self.process = subprocess.Popen([*command, *flags], stdout=log,
                                            stderr=subprocess.STDOUT,
                                            env=ENVIRONMENT | ONE_THREAD | (env or {}))
        while not self.address_file.exists() or not self.address_file.read_text().strip():
            if self.process.poll() is not None:
                raise AssertionError(f"{program} exited with {self.process.returncode}:\n{self.tail()}")
            if time.monotonic() - started > TIMEOUT_S:
                self.process.kill()
                raise AssertionError(f"{program} was not ready in time:\n{self.tail()}")
            time.sleep(0.01)
        self.ready_seconds = time.monotonic() - started
        self.addresses = json.loads(self.address_file.read_text())
        self.address = self.addresses["listen"]
        self.channel = rpc.open_channel(self.address, credentials)
        self.decode = decode_pb2_grpc.DecodeStub(self.channel)
        self.ingest = ingest_pb2_grpc.KvIngestStub(self.channel)
        self.admin = admin_pb2_grpc.AdminStub(self.channel)
        self.prefill = prefill_pb2_grpc.PrefillStub(self.channel)

    def tail(self) -> str:
        return self.log.read_text()[-4000:]

    def stop(self, timeout: float = TIMEOUT_S) -> int:
        """Sends SIGTERM and returns the exit status."""
        self.channel.close()
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
                raise
        return self.process.returncode

    def http(self, path: str) -> tuple[int, str]:
        """Returns the status and body of a page of the admin port."""
        try:
            with urllib.request.urlopen(f"http://{self.addresses['admin_listen']}{path}",
                                        timeout=TIMEOUT_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def capacity(self) -> admin_pb2.GetCapacityResponse:
        return self.admin.GetCapacity(admin_pb2.GetCapacityRequest(), timeout=TIMEOUT_S)

    def held(self) -> tuple:
        """Returns all that requests hold: bytes reserved and used in each tier, then sequences and transfers."""
        c = self.capacity()
        return (*((t.tier, t.kind, t.reserved_bytes, t.used_bytes) for t in c.tiers),
                c.running, c.waiting, c.transfers)

    def settled(self, seconds: float = TIMEOUT_S) -> tuple:
        """Returns held() once no sequence is left: the last ones end a moment after their answers."""
        deadline = time.monotonic() + seconds
        while True:
            c = self.capacity()
            if not (c.running or c.waiting or any(t.reserved_bytes for t in c.tiers if t.tier == "hbm")):
                return self.held()
            assert time.monotonic() < deadline, c
            time.sleep(0.01)

    def wait_until_held(self, expected: tuple, seconds: float = 5 * SCALE) -> None:
        """Waits until held() is `expected`: memory comes back after its last reader and writer, a moment after the
        answer.
        """
        deadline = time.monotonic() + seconds
        while (now := self.held()) != expected and time.monotonic() < deadline:
            time.sleep(0.01)
        assert now == expected

    def rss_bytes(self) -> int:
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
        raise AssertionError("no VmRSS")


class Pair:
    """A decode node and a prefill node of one model."""

    def __init__(self, decode: Node, prefill: Node):
        self.decode = decode
        self.prefill = prefill

    def flags(self) -> list[str]:
        return ["--prefill", self.prefill.address, "--decode", self.decode.address]


class Golden:
    """The recorded tokens, logits and caches of a tiny model."""

    def __init__(self, name: str):
        self.name = name
        self.path = FIXTURES / name / "golden.safetensors"
        self.file = SafetensorsFile(self.path)

    def prompt(self, case: int) -> list[int]:
        return self.file[f"case{case}.prompt"].tolist()

    def tokens(self, case: int) -> list[int]:
        return self.file[f"case{case}.tokens"].tolist()

    def margins(self, case: int) -> list[float]:
        return self.file[f"case{case}.margin"].tolist()

    def logprobs(self, case: int) -> np.ndarray:
        """Returns log-probabilities, [steps, vocabulary]."""
        logits = self.file[f"case{case}.logits"].astype(np.float64)
        top = logits.max(axis=1, keepdims=True)
        return logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))


def matching_steps(found: list[int], expected: list[int], margins: list[float], threshold: float) -> int:
    """Returns the number of steps that agree. The first difference is allowed only where the margin is within the
    threshold.

    After a difference the two continue different texts, so nothing after it is compared.
    """
    for step, (a, b) in enumerate(zip(found, expected)):
        if a != b:
            assert margins[step] <= threshold, (
                f"step {step}: token {a}, expected {b} with margin {margins[step]:.4f}; found {found}")
            return step
    assert len(found) == len(expected), f"{len(found)} tokens, expected {len(expected)}"
    return len(found)


def tokens_of(stream) -> tuple[list[common_pb2.Token], decode_pb2.Finish]:
    """Returns all tokens of a Generate stream and its one Finish, which comes last."""
    tokens, finish = [], None
    for message in stream:
        assert finish is None
        tokens.extend(message.tokens)
        if message.HasField("finish"):
            finish = message.finish
    assert finish is not None
    return tokens, finish


def greedy(**settings) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(temperature=0, **settings)


def refused_as_ending(error: grpc.RpcError) -> bool:
    """Returns whether `error` is what a call to a node that is about to end gets.

    gRPC itself cancels a call that comes at the moment at which its server closes.
    """
    if error.code() is grpc.StatusCode.CANCELLED:
        return error.details() == "CANCELLED"
    return error.code() is grpc.StatusCode.UNAVAILABLE


def error_of(call) -> grpc.RpcError:
    """Returns the error with which `call()` ends. A stream is read to its end."""
    try:
        answer = call()
        if hasattr(answer, "__next__"):
            list(answer)
    except grpc.RpcError as error:
        return error
    raise AssertionError("expected an error, found an answer")
