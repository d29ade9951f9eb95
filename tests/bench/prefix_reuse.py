#!/usr/bin/env python3
"""What prefix reuse gains and costs, with nodes on this machine: bytes of a second turn, time to first token of callers
behind the real router whose prompts are 90 % the same, and hand-offs that share nothing.

    .venv/bin/python tests/bench/prefix_reuse.py

Each figure is measured with prefix_cache true and false, in turn. The model is tiny, with random weights. The exit
status is 1 if a goal is missed.
"""

import argparse
import contextlib
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from loaded_node import Verdict  # makes the folder of the next ones known
from support.nodes import BIN, ENVIRONMENT, TIMEOUT_S, Node, greedy, tokens_of
from support.router_lab import Lab, add_token_texts, text_of

import numpy as np
from sluice.v1 import decode_pb2, prefill_pb2
from sluice_client.pusher import Pusher

SIZES = ("--hbm-bytes", "128MiB", "--dram-bytes", "128MiB", "--threads", "1")


def arguments() -> argparse.Namespace:
    out = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    out.add_argument("--tokens", type=int, default=3600, help="tokens of a prompt (default: %(default)s)")
    out.add_argument("--callers", type=int, default=8, help="callers at once (default: %(default)s)")
    out.add_argument("--rounds", type=int, default=5, help="rounds of callers (default: %(default)s)")
    out.add_argument("--pushes", type=int, default=120, help="hand-offs that share nothing (default: %(default)s)")
    return out.parse_args()


def ids(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, 500, count).tolist()


@contextlib.contextmanager
def prefix_cache(on: bool):
    """Gives nodes that start meanwhile the setting."""
    ENVIRONMENT["SLUICE_PREFIX_CACHE"] = "true" if on else "false"
    yield
    del ENVIRONMENT["SLUICE_PREFIX_CACHE"]


def first_tokens(model: Path, folder: Path, args, on: bool) -> list[float]:
    """Returns the seconds to the first token of all callers, behind the router."""
    out = []
    folder.mkdir()
    with prefix_cache(on), Lab(model, folder, *SIZES, decodes=1) as lab:
        for number in range(args.rounds):
            system = ids(args.tokens * 9 // 10, number)

            def ask(caller, system=system, number=number):
                prompt = text_of(system + ids(args.tokens - len(system), 1000 * (number + 1) + caller))
                reply = lab.router.ask(prompt, stream=True, max_tokens=8, ignore_eos=True)
                assert reply.whole, reply
                return reply.first_s

            ask(999)  # somebody was there before
            time.sleep(0.5)
            out += lab.ask_all(args.callers, ask)
    return out


def second_turn(model: Path, folder: Path) -> float:
    """Returns which share of its bytes a turn of 200 tokens behind 3,840 sends."""
    folder.mkdir()
    with prefix_cache(True):
        decode = Node("sluice-server", model, folder, *SIZES)
        prefill = Node("sluice-prefill", model, folder, "--hbm-bytes", "128MiB")
    sampling = greedy(max_tokens=24, ignore_eos=True)
    pushed, prompt = [], ids(3840, 5)
    try:
        for _ in range(2):
            run = prefill.prefill.Run(prefill_pb2.RunRequest(
                prompt_token_ids=prompt, sampling=sampling, decode_address=decode.address), timeout=TIMEOUT_S)
            tokens, _ = tokens_of(decode.decode.Generate(decode_pb2.GenerateRequest(
                transfer_id=run.transfer_id, sampling=sampling), timeout=TIMEOUT_S))
            pushed.append(run.timings.bytes_pushed / len(prompt))
            prompt = prompt + [t.id for t in tokens] + ids(200, 6)
            time.sleep(0.5)
    finally:
        decode.stop()
        prefill.stop()
    return pushed[1] / pushed[0]


def hand_offs(model: Path, folder: Path, args) -> dict[bool, list[float]]:
    """Returns the seconds of hand-offs, from Reserve to the end of a Generate of one token, by prefix_cache."""
    nodes = {}
    for on in (False, True):
        (folder / str(on)).mkdir(parents=True)
        with prefix_cache(on):
            nodes[on] = Node("sluice-server", model, folder / str(on), *SIZES)
    took = {False: [], True: []}
    with Pusher(nodes[True].address) as pusher:
        kind, layers = pusher.model.cache_kinds[0], pusher.model.layers
    dim = kind.part_bytes[0] // 2
    arrays = [np.zeros((args.tokens, kind.heads, dim), np.float32) for _ in range(2)]
    for number in range(args.pushes):
        for on in (number % 2 == 0, number % 2 == 1):
            prompt = ids(args.tokens, 10_000 + number)
            with Pusher(nodes[on].address) as pusher:
                began = time.perf_counter()
                pusher.reserve(prompt, max_new_tokens=8)
                assert pusher.cached_tokens == 0
                for layer in range(layers):
                    pusher.write_layer(layer, *arrays)
                transfer = pusher.commit()
                tokens_of(nodes[on].decode.Generate(decode_pb2.GenerateRequest(
                    transfer_id=transfer, sampling=greedy(max_tokens=1)), timeout=TIMEOUT_S))
                took[on].append(time.perf_counter() - began)
    for node in nodes.values():
        node.stop()
    # The first third touches every page of DRAM once, which the other node's few pages are spared.
    return {on: times[len(times) // 3:] for on, times in took.items()}


def main() -> int:
    args = arguments()
    verdict = Verdict()
    with tempfile.TemporaryDirectory(prefix="sluice-prefix-") as name:
        folder = Path(name)
        (folder / "model").mkdir()
        subprocess.run([BIN / "sluice-make-fixture", "tiny-llama", folder / "model"], check=True)
        model = add_token_texts(folder / "model", folder / "text")
        share = second_turn(model, folder / "turn")
        verdict.hold("a second turn sends at most 6 % of its bytes", f"{share:.1%}", share <= 0.06)
        took = hand_offs(model, folder / "push", args)
        medians = {on: statistics.median(took[on]) for on in took}
        verdict.hold("a hand-off that shares nothing takes at most 1.02 x",
                     f"{medians[True] * 1e3:.2f} ms with, {medians[False] * 1e3:.2f} ms without, "
                     f"{medians[True] / medians[False]:.3f} x", medians[True] <= 1.02 * medians[False])
        first = {on: first_tokens(model, folder / f"lab-{on}", args, on) for on in (False, True)}
        medians = {on: statistics.median(first[on]) for on in first}
        verdict.hold(f"the first token of {args.callers} callers comes in at most 0.4 x the time",
                     f"median {medians[True] * 1e3:.0f} ms with, {medians[False] * 1e3:.0f} ms without, "
                     f"{medians[True] / medians[False]:.2f} x; slowest {max(first[True]) * 1e3:.0f} and "
                     f"{max(first[False]) * 1e3:.0f} ms", medians[True] <= 0.4 * medians[False])
    return verdict.status()


if __name__ == "__main__":
    sys.exit(main())
