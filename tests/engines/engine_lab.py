"""Starts a real vLLM or SGLang that hands prompts over, and has the requests that the tests of engines send."""

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


class Engine:
    """A running engine with HTTP at `url`."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], folder: Path):
        self.name = name
        self.log = folder / f"{name}.log"
        with self.log.open("w") as log:
            # Its scheduler is a process of its own, which must not outlive it.
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=ENVIRONMENT | environment,
                                            start_new_session=True)

    def wait(self):
        """Waits until it serves."""
        deadline = time.monotonic() + START_S
        while not self._serves():
            assert self.process.poll() is None, f"{self.name} exited with {self.process.returncode}:\n{self.tail()}"
            assert time.monotonic() < deadline, f"{self.name} was not ready in time:\n{self.tail()}"
            time.sleep(0.2)
        return self

    def refusal(self) -> str:
        """Waits until it has ended without ever serving, and returns its log."""
        self.process.wait(START_S)
        return self.log.read_text(errors="replace")

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
        with contextlib.suppress(requests.ConnectionError):
            return requests.get(f"{self.url}/health", timeout=30).status_code == 200
        return False


class Vllm(Engine):
    """A running vLLM, over HTTP or, for the gateway, over its gRPC service."""

    def __init__(self, model: Path, folder: Path, extra: dict, *flags: str, grpc: bool = False,
                 blocks: int = 32):
        self.port = free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.url = f"http://{self.address}"
        self.model = str(model)
        self.grpc = grpc
        module = "vllm.entrypoints.launchers.grpc_server" if grpc else "vllm.entrypoints.openai.api_server"
        transfer = {"kv_connector": "SluiceConnector", "kv_role": "kv_producer",
                    "kv_connector_module_path": "sluice_client.vllm_connector", "kv_connector_extra_config": extra}
        command = [str(ENGINES / "vllm/bin/python"), "-m", module, "--model", self.model, "--host", "127.0.0.1",
                   "--port", str(self.port), "--enforce-eager", "--block-size", str(blocks),
                   "--kv-transfer-config", json.dumps(transfer), *flags]
        super().__init__("vllm", command, {
            "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "SMG_VLLM_SERVICER_WARMUP": "off"}, folder)

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

    def _serves(self) -> bool:
        if self.grpc:
            return "gRPC" in self.log.read_text(errors="replace") and _listens(self.port)
        return super()._serves()


class Sglang(Engine):
    """A running SGLang in prefill mode, whose transfer backend is ours."""

    def __init__(self, model: Path, folder: Path, settings: dict, *flags: str, environment: dict[str, str] | None = None):
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        command = [str(ENGINES / "sglang/bin/python"), "-m", "sglang.launch_server", "--model-path", str(model), "--device",
                   "cpu", "--attention-backend", "torch_native", "--host", "127.0.0.1", "--port", str(port),
                   "--max-total-tokens", "16384", "--cuda-graph-backend-decode", "disabled",
                   "--cuda-graph-backend-prefill", "disabled", "--skip-server-warmup", "--disaggregation-mode", "prefill",
                   "--disaggregation-transfer-backend", "sluice", *flags]
        super().__init__("sglang", command, {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
                                             "SGLANG_SLUICE": json.dumps(settings)} | (environment or {}), folder)

    def leg(self, prompt: list[int], room: int, *, timeout=CALL_S, **sampling) -> requests.Response:
        """Sends a prefill leg as SGLang's routers do, which give both legs a room."""
        return requests.post(f"{self.url}/generate", timeout=timeout, json={
            "input_ids": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 64, **sampling},
            "bootstrap_host": "127.0.0.1", "bootstrap_port": 8998, "bootstrap_room": room})


def _listens(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex(("127.0.0.1", port)) == 0


def decoded(node: Node, transfer_id: str, tokens: int, *, room: str = "") -> list[int]:
    """Returns the whole greedy output of the sequence that was handed over, or will be under the key `room`."""
    handed_over = {"rendezvous_key": room} if room else {"transfer_id": transfer_id}
    call = node.decode.Generate(decode_pb2.GenerateRequest(
        **handed_over, sampling=greedy(max_tokens=tokens, ignore_eos=True)), timeout=CALL_S)
    return [token.id for token in tokens_of(call)[0]]
