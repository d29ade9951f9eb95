"""Starts a real vLLM with the connector, and has the requests that the tests of engines send."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import requests
from sluice.v1 import decode_pb2
from support.nodes import ENVIRONMENT, ROOT, Node, free_port, greedy, tokens_of

ENGINES = Path(os.environ.get("SLUICE_ENGINES", ROOT / "build/engines"))
# vLLM takes most of a minute to start on two cores.
START_S = 300
CALL_S = 120
HANDED_OVER = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass
class Prefilled:
    """What vLLM answers to a prefill leg."""

    tokens: list[int]
    params: dict | None
    seconds: float


class Vllm:
    """A running vLLM, over HTTP or, for the gateway, over its gRPC service."""

    def __init__(self, model: Path, folder: Path, extra: dict, *flags: str, grpc: bool = False,
                 blocks: int = 32):
        self.log = folder / "vllm.log"
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.url = f"http://{self.address}"
        self.model = str(model)
        module = "vllm.entrypoints.launchers.grpc_server" if grpc else "vllm.entrypoints.openai.api_server"
        transfer = {"kv_connector": "SluiceConnector", "kv_role": "kv_producer",
                    "kv_connector_module_path": "sluice_client.vllm_connector", "kv_connector_extra_config": extra}
        command = [str(ENGINES / "vllm/bin/python"), "-m", module, "--model", self.model, "--host", "127.0.0.1",
                   "--port", str(self.port), "--enforce-eager", "--block-size", str(blocks),
                   "--kv-transfer-config", json.dumps(transfer), *flags]
        environment = ENVIRONMENT | {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
                                     "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
                                     "SMG_VLLM_SERVICER_WARMUP": "off"}
        self.grpc = grpc
        with self.log.open("w") as log:
            # Its engine is a process of its own, which must not outlive it.
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment,
                                            start_new_session=True)

    def wait(self) -> "Vllm":
        """Waits until it serves."""
        deadline = time.monotonic() + START_S
        while not self._serves():
            assert self.process.poll() is None, f"vLLM exited with {self.process.returncode}:\n{self.tail()}"
            assert time.monotonic() < deadline, f"vLLM was not ready in time:\n{self.tail()}"
            time.sleep(0.2)
        return self

    def refusal(self) -> str:
        """Waits until it has ended without ever serving, and returns its log."""
        self.process.wait(START_S)
        return self.log.read_text(errors="replace")

    def prefill(self, prompt: list[int], params: dict | None = None, *, tokens: int = 1, timeout=CALL_S) -> Prefilled:
        """Sends a prefill leg."""
        begun = time.monotonic()
        body = {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True,
                "return_token_ids": True}
        if params is not None:
            body["kv_transfer_params"] = params
        answer = requests.post(f"{self.url}/v1/completions", json=body, timeout=timeout)
        assert answer.status_code == 200, answer.text
        got = answer.json()
        return Prefilled(got["choices"][0]["token_ids"], got.get("kv_transfer_params"), time.monotonic() - begun)

    def metric(self, name: str) -> float:
        """Returns the sum of a counter or gauge."""
        lines = requests.get(f"{self.url}/metrics", timeout=CALL_S).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith((f"{name}{{", f"{name} ")))

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def kill(self) -> None:
        """Ends all of its processes at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.kill()

    def _serves(self) -> bool:
        if self.grpc:
            return "gRPC" in self.log.read_text(errors="replace") and _listens(self.port)
        with contextlib.suppress(requests.ConnectionError):
            return requests.get(f"{self.url}/health", timeout=5).status_code == 200
        return False


def _listens(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def decoded(node: Node, transfer_id: str, tokens: int) -> list[int]:
    """Returns the whole greedy output of the sequence that was handed over."""
    call = node.decode.Generate(decode_pb2.GenerateRequest(
        transfer_id=transfer_id, sampling=greedy(max_tokens=tokens, ignore_eos=True)), timeout=CALL_S)
    return [token.id for token in tokens_of(call)[0]]
