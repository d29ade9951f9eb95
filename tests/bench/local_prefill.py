#!/usr/bin/env python3
"""Measures how prompts that a node computes itself (local_prefill) slow down a running sequence.

    .venv/bin/python tests/bench/local_prefill.py                  # SmolLM2, chunks of 64 to 512 tokens
    .venv/bin/python tests/bench/local_prefill.py --chunks 128 --prompt 4000

Each value of --chunks gets its own node, on which one stream decodes: first alone, then beside a caller whose
prompts name a dead source, so that the node computes them, chunk_tokens per step. The promised bound: a gap of
the stream is a step with one chunk beside it, so its 99th percentile is at most --bound times a step alone plus
a chunk's share of the prompt's time. The exit status is 1 if the bound is broken.
"""

import argparse
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path

from loaded_node import Verdict  # makes the folder of the next ones known
from sluice.v1 import decode_pb2, source_pb2
from support.gaps import p99
from support.nodes import SMOLLM2, TIMEOUT_S, Node, greedy, tokens_of

GONE = source_pb2.KvSourceRef(address="127.0.0.1:1", source_id="0" * 32)


def arguments() -> argparse.Namespace:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--model", type=Path, default=SMOLLM2, help="model directory (default: %(default)s)")
    out.add_argument("--chunks", default="64,256,512", help="chunk_tokens, with commas (default: %(default)s)")
    out.add_argument("--prompt", type=int, default=2000, help="tokens of a prompt (default: %(default)s)")
    out.add_argument("--seconds", type=float, default=20, help="time that the stream is watched (default: %(default)s)")
    out.add_argument("--bound", type=float, default=1.5, help="bound, see above (default: %(default)s)")
    return out.parse_args()


def computed(node: Node, prompt: list[int], max_tokens: int) -> decode_pb2.GenerateRequest:
    return decode_pb2.GenerateRequest(source=GONE, prompt_token_ids=prompt,
                                      sampling=greedy(max_tokens=max_tokens, ignore_eos=True))


def gaps_of(node: Node, seconds: float) -> list[float]:
    """Returns the seconds between the tokens of a stream, watched for that long."""
    times = []
    stream = node.decode.Generate(computed(node, [5, 6, 7], 4000), timeout=seconds + TIMEOUT_S)
    for _ in stream:
        times.append(time.perf_counter())
        if times[-1] > times[0] + seconds:
            break
    stream.cancel()
    return [after - before for before, after in zip(times, times[1:])]


def prompt_seconds(node: Node, prompt: list[int]) -> float:
    began = time.perf_counter()
    tokens_of(node.decode.Generate(computed(node, prompt, 1), timeout=TIMEOUT_S))
    return time.perf_counter() - began


def main() -> int:
    args = arguments()
    verdict = Verdict()
    prompt = [(37 * i) % 250 + 3 for i in range(args.prompt)]
    print(f"{'chunk':>6} {'prompt alone':>13} {'gap alone, p50':>15} {'p99 beside':>11} {'most':>9} {'bound':>9}  prompts")
    for chunk in (int(c) for c in args.chunks.split(",")):
        with tempfile.TemporaryDirectory(prefix="sluice-bench-") as name:
            node = Node("sluice-server", args.model, Path(name), "--local-prefill", "on_failure", "--chunk-tokens",
                        str(chunk), "--hbm-bytes", "512MiB", "--dram-bytes", "512MiB")
            try:
                alone = statistics.median(prompt_seconds(node, prompt) for _ in range(3))
                step = statistics.median(gaps_of(node, 2))
                stop, computed_prompts = threading.Event(), []

                def compute(node=node, stop=stop, done=computed_prompts):
                    while not stop.is_set():
                        done.append(prompt_seconds(node, prompt))

                caller = threading.Thread(target=compute)
                caller.start()
                try:
                    beside = gaps_of(node, args.seconds)
                finally:
                    stop.set()
                    caller.join()
            finally:
                status = node.stop()
        chunks = -(-args.prompt // chunk)
        bound = args.bound * (step + alone / chunks)
        print(f"{chunk:6} {alone * 1e3:10.0f} ms {step * 1e3:12.1f} ms {p99(beside) * 1e3:8.0f} ms "
              f"{max(beside) * 1e3:6.0f} ms {bound * 1e3:6.0f} ms  {len(computed_prompts)}", flush=True)
        verdict.hold(f"chunks of {chunk}: 99th percentile of gaps within its bound", f"{p99(beside) * 1e3:.0f} ms",
                     p99(beside) <= bound and status == 0)
        verdict.hold(f"chunks of {chunk}: prompts were computed meanwhile", str(len(computed_prompts)),
                     len(computed_prompts) >= 1)
    return verdict.status()


if __name__ == "__main__":
    sys.exit(main())
