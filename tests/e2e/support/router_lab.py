"""The real router smg in front of real nodes on loopback, sluice-prefill and two sluice-server, and an HTTP client."""

import contextlib
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import requests
from support.nodes import ENVIRONMENT, TIMEOUT_S, Node, free_port

HEALTH_INTERVAL_S = 1
MODEL = "tiny"
# Flags of a lab that the prefill node gets too, with their values.
SHARED = {"--kv-dtype", "--kernels", "--hbm-bytes", "--threads", "--gateway"}
# The engine whose protocol smg speaks to the nodes: vLLM's, one leg after the other, or SGLang's, both legs at once.
GATEWAYS = ["vllm", "sglang"]


def add_token_texts(model: Path, folder: Path) -> Path:
    """Returns a copy of a tiny model with a tokenizer in which <5><17> is the text of the ids 5, 17.

    Its chat template gives the contents of the messages alone, so that a test chooses the ids of the prompt.
    """
    folder.mkdir()
    for path in model.iterdir():
        (folder / path.name).symlink_to(path)
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    added = [{"id": i, "content": f"<{i}>", "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": False} for i in range(size)]
    # The vocabulary below the added tokens is never used, but it must have the same ids.
    vocabulary = {f"<{i}>": i for i in range(size)}
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "vocab": vocabulary,
                  "merges": []}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}"}))
    return folder


def text_of(ids: list[int]) -> str:
    return "".join(f"<{i}>" for i in ids)


def ids_of(text: str) -> list[int]:
    return [int(part) for part in text.strip("<>").split("><")] if text else []


@dataclass
class Reply:
    """The answer that an HTTP caller has received: the text, and how and when it came."""
    status: int
    text: str = ""
    finish: str | None = None
    error: str = ""  # body of a refusal, or how the stream broke
    first_s: float = 0        # seconds to the first text
    seconds: float = 0
    pieces: int = 0           # events with text
    usage: dict = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        return self.status == 200 and not self.error and self.finish is not None


class Router:
    """smg in front of a prefill node and decode nodes."""

    def __init__(self, model: Path, folder: Path, prefill: str, decodes: list[str], *flags: str,
                 gateway: str = "vllm"):
        self.log = folder / "smg.log"
        self.port, self.metrics_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        # smg by default prefers the node that had the beginning of a prompt last, for its retries too. All of those
        # would reach a node that is draining, until smg asks for its health again.
        workers = ["--pd-disaggregation", "--decode-policy", "round_robin", "--prefill", f"grpc://{prefill}",
                   *([prefill.rpartition(":")[2]] if gateway == "sglang" else []),
                   *(x for a in decodes for x in ("--decode", f"grpc://{a}"))]
        command = [sys.executable, "-m", "smg", "launch", "--host", "127.0.0.1", "--port", str(self.port), *workers,
                   "--model-path", str(model), "--worker-startup-check-interval", "1",
                   "--health-check-interval-secs", str(HEALTH_INTERVAL_S), "--prometheus-host", "127.0.0.1",
                   "--prometheus-port", str(self.metrics_port), *flags]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=ENVIRONMENT)
        try:
            self.wait_until_healthy(len(decodes) + 1)
            self.wait_for_tokenizer()
        except BaseException:
            self.stop()
            raise

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-6000:]

    def workers(self) -> list[dict]:
        return requests.get(f"{self.url}/workers", timeout=TIMEOUT_S).json()["workers"]

    def wait_until_healthy(self, count: int, seconds: float = TIMEOUT_S) -> None:
        """Waits until smg has registered `count` workers and finds all of them healthy."""
        deadline = time.monotonic() + seconds
        found = []
        while time.monotonic() < deadline:
            assert self.process.poll() is None, f"smg exited with {self.process.returncode}:\n{self.tail()}"
            with contextlib.suppress(requests.ConnectionError, KeyError, ValueError):
                found = self.workers()
                if sum(w["is_healthy"] for w in found) >= count:
                    return
            time.sleep(0.05)
        raise AssertionError(f"{count} workers were not healthy in time: {found}\n{self.tail()}")

    def wait_for_tokenizer(self) -> None:
        """Waits for the tokenizer, which smg loads beside registering workers. smg does not say when it is there."""
        deadline = time.monotonic() + TIMEOUT_S
        while "tokenizer_not_ready" in (reply := self.ask("<5>", max_tokens=1)).error:
            assert time.monotonic() < deadline, reply
            time.sleep(0.05)

    def stop(self) -> None:
        self.process.kill()  # it takes seconds to end by itself, which is not tested here
        self.process.wait()

    def body(self, content: str, **fields) -> dict:
        return {"model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0, **fields}

    def ask(self, content: str, stream: bool = False, on_piece=None, timeout: float = TIMEOUT_S, **fields) -> Reply:
        """Asks for one chat completion and returns it. on_piece(reply) is called after each piece of a stream's text;
        where it returns True the caller hangs up.
        """
        began = time.monotonic()
        reply = Reply(0)
        try:
            with requests.post(f"{self.url}/v1/chat/completions", json=self.body(content, stream=stream, **fields),
                               stream=stream, timeout=timeout) as answer:
                reply.status = answer.status_code
                if answer.status_code != 200:
                    reply.error = answer.text
                elif stream:
                    self.read_events(answer, reply, began, on_piece)
                else:
                    whole = answer.json()
                    reply.text = whole["choices"][0]["message"]["content"] or ""
                    reply.finish, reply.usage = whole["choices"][0]["finish_reason"], whole["usage"]
        except requests.RequestException as error:
            reply.error = repr(error)
        reply.seconds = time.monotonic() - began
        return reply

    @staticmethod
    def read_events(answer: requests.Response, reply: Reply, began: float, on_piece) -> None:
        """Reads server-sent events into `reply`."""
        for line in answer.iter_lines():
            if not line.startswith(b"data: ") or line == b"data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                reply.error = json.dumps(event["error"])
                return
            reply.usage = event.get("usage") or reply.usage
            for choice in event["choices"]:
                reply.finish = choice.get("finish_reason") or reply.finish
                if text := choice["delta"].get("content"):
                    reply.first_s = reply.first_s or time.monotonic() - began
                    reply.text += text
                    reply.pieces += 1
                    if on_piece and on_piece(reply):
                        return


class Lab:
    """The router and its nodes; a context manager."""

    def __init__(self, model: Path, folder: Path, *flags: str, decodes: int = 2, router_flags: tuple = (),
                 gateway: str = "vllm"):
        self.model, self.folder, self.gateway = model, folder, gateway
        self.flags = (*flags, "--gateway", gateway)
        self.prefill = None
        self.decodes: list[Node] = []
        self.router = None
        self.addresses = [f"127.0.0.1:{free_port()}" for _ in range(decodes)]
        self.router_flags = router_flags
        self.statuses: list[int] = []  # exit statuses of the nodes that were stopped

    def __enter__(self):
        try:
            (self.folder / "prefill").mkdir()
            self.prefill = Node("sluice-prefill", self.model, self.folder / "prefill", "--served-model-name", MODEL,
                                *(part for pair in zip(self.flags, self.flags[1:]) if pair[0] in SHARED
                                  for part in pair))
            self.decodes = [self.start_decode(i) for i in range(len(self.addresses))]
            self.router = Router(self.model, self.folder, self.prefill.address, self.addresses, *self.router_flags,
                                 gateway=self.gateway)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if self.router:
            self.router.stop()
        for node in [*self.decodes, *filter(None, [self.prefill])]:
            node.stop()

    def wait_until_healthy(self) -> None:
        self.router.wait_until_healthy(1 + len(self.decodes))

    def start_decode(self, index: int) -> Node:
        folder = self.folder / f"decode-{index}"
        folder.mkdir(exist_ok=True)
        return Node("sluice-server", self.model, folder, "--served-model-name", MODEL, *self.flags,
                    listen=self.addresses[index])

    def restart(self, index: int) -> None:
        """Sends SIGTERM, after which the node finishes its sequences within drain_timeout, and starts a new process on
        the same port.
        """
        self.statuses.append(self.decodes[index].stop())
        self.decodes[index] = self.start_decode(index)

    def held(self) -> list[tuple]:
        return [node.settled() for node in self.decodes]

    def ask_all(self, count: int, ask, threads: int = 64) -> list[Reply]:
        """Calls ask(i) for each i below count, as many at once as there are threads."""
        with ThreadPoolExecutor(min(count, threads)) as pool:
            return list(pool.map(ask, range(count)))
