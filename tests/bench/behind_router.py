#!/usr/bin/env python3
"""Chat completions through the real router, smg, over a prefill node and two decode nodes, for a long time.

    .venv/bin/python tests/bench/behind_router.py --streams 256 --seconds 300   # many callers at once
    .venv/bin/python tests/bench/behind_router.py --rounds 100                  # rolling updates under load

Callers ask over HTTP, one request after the other, alternately streamed and not; every answer is compared with the
answer of the quiet nodes to the same prompt. A round of a rolling update restarts each decode node in turn: SIGTERM,
which finishes what it runs, and a new process on the same port. The model is tiny, with random weights,
and its steps take at least --step-ms, so that restarts meet requests in mid-stream. The exit status
is 1 if a bound is broken.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from loaded_node import Verdict  # makes the folder of the next ones known
from support.nodes import BIN, Golden
from support.router_lab import GATEWAYS, Lab, Reply, add_token_texts, ids_of, text_of


def arguments() -> argparse.Namespace:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--streams", type=int, default=16, help="callers at once (default: %(default)s)")
    out.add_argument("--seconds", type=float, default=20, help="without --rounds: how long (default: %(default)s)")
    out.add_argument("--rounds", type=int, default=0, help="rolling updates of both decode nodes (default: none)")
    out.add_argument("--tokens", type=int, default=24, help="tokens of an answer (default: %(default)s)")
    out.add_argument("--step-ms", type=float, default=5, help="minimum time of a decode step")
    out.add_argument("--ready-seconds", type=float, default=3,
                     help="between a restarted node's readiness and the next restart, as minReadySeconds of a "
                          "Deployment: the router connects to it again meanwhile (default: %(default)s)")
    out.add_argument("--drain-seconds", type=float, default=60, help="time to finish (default: %(default)s)")
    out.add_argument("--gateway", choices=GATEWAYS, default="vllm",
                     help="dialect in which the router talks to the nodes (default: %(default)s)")
    return out.parse_args()


class Callers:
    """Threads that ask one request after the other until they are told to stop."""

    def __init__(self, lab: Lab, args: argparse.Namespace, prompt: str):
        self.lab, self.args, self.prompt = lab, args, prompt
        self.expected = ids_of(self.ask(False).text)
        self.stop = threading.Event()
        self.lock = threading.Lock()
        self.ends: Counter[str] = Counter()
        self.first: list[float] = []
        self.examples: dict[str, Reply] = {}

    def ask(self, stream: bool) -> Reply:
        return self.lab.router.ask(self.prompt, stream=stream, max_tokens=self.args.tokens, ignore_eos=True)

    def run(self, caller: int) -> None:
        count = caller
        while not self.stop.is_set():
            stream = bool(count % 2)
            reply = self.ask(stream)
            end = "right" if reply.whole and ids_of(reply.text) == self.expected else \
                "wrong" if reply.whole else f"failed ({reply.status or 'connection'})"
            with self.lock:
                self.ends[end] += 1
                self.examples.setdefault(end, reply)
                if end == "right" and stream:
                    self.first.append(reply.first_s)
            count += 1


def main() -> int:
    args = arguments()
    verdict = Verdict()
    with tempfile.TemporaryDirectory(prefix="sluice-router-") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        subprocess.run([BIN / "sluice-make-fixture", "tiny-llama", folder / "model"], check=True)
        model = add_token_texts(folder / "model", folder / "text")
        prompt = text_of(Golden("tiny-llama").prompt(1))
        (folder / "lab").mkdir()
        with Lab(model, folder / "lab", "--hbm-bytes", "64MiB", "--dram-bytes", "64MiB", "--threads", "1", "--failpoints",
                 f"engine.step=delay({args.step_ms:g}ms)", "--drain-timeout-seconds", f"{args.drain_seconds:g}s",
                 # After a restart a node is asked again soon, not after a minute.
                 router_flags=("--cb-timeout-duration-secs", "1"), gateway=args.gateway) as lab:
            callers = Callers(lab, args, prompt)
            restarts = []
            began = time.monotonic()
            with ThreadPoolExecutor(args.streams) as pool:
                running = [pool.submit(callers.run, i) for i in range(args.streams)]
                try:
                    if not args.rounds:
                        time.sleep(args.seconds)
                    for number in range(args.rounds):
                        for index in range(len(lab.decodes)):
                            start = time.monotonic()
                            lab.restart(index)
                            lab.wait_until_healthy()
                            restarts.append(time.monotonic() - start)
                            time.sleep(args.ready_seconds)
                        print(f"round {number + 1}: {dict(callers.ends)}", flush=True)
                finally:
                    callers.stop.set()
                for caller in running:
                    caller.result()
            seconds = time.monotonic() - began
            verdict.hold("every restarted node ended well", str(Counter(lab.statuses)), not any(lab.statuses))
            try:
                lab.held()
                empty = True
            except AssertionError:
                empty = False
            verdict.hold("no sequence stays behind", str(empty), empty)
    ends = callers.ends
    answers = sum(ends.values())
    print(f"{answers} answers in {seconds:.1f} s to {args.streams} callers: {dict(ends)}")
    if callers.first:
        ordered = sorted(callers.first)
        print(f"first token of streamed ones: median {statistics.median(ordered) * 1e3:.1f} ms, "
              f"p99 {ordered[int(len(ordered) * 0.99)] * 1e3:.1f} ms")
    if restarts:
        print(f"{len(restarts)} restarts, until healthy again: median {statistics.median(restarts):.2f} s, "
              f"most {max(restarts):.2f} s")
    verdict.hold("there were answers", str(ends["right"]), ends["right"] > 0)
    verdict.hold("no answer is wrong", str(ends["wrong"]), not ends["wrong"])
    failed = answers - ends["right"] - ends["wrong"]
    verdict.hold("no request fails", str(failed), not failed)
    for end, reply in callers.examples.items():
        if end != "right":
            print(f"  {end}: {reply}")
    return verdict.status()


if __name__ == "__main__":
    sys.exit(main())
