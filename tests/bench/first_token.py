#!/usr/bin/env python3
"""The first token through the router, the prefill node and the decode node, over the sum of its parts.

    .venv/bin/python tests/bench/first_token.py            # SmolLM2 (tools/fetch-model), one decode node

Sends the same prompt alternately over HTTP, streamed, through smg, and to the nodes themselves: Prefill.Run, which
computes and holds the prompt, then Decode.Generate, which reads it and gives a token. The parts are those two
calls; what the router adds (HTTP, the chat template, tokens and text) is in the first figure alone.
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

from loaded_node import Verdict  # makes the folder of the next ones known
from sluice.v1 import decode_pb2, prefill_pb2
from sluice_client.text import Text
from support.nodes import SMOLLM2, TIMEOUT_S, greedy
from support.router_lab import Lab

WORDS = "the quick brown fox jumps over the lazy dog while the river flows past the old stone bridge".split()


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--model", type=Path, default=SMOLLM2, help="model, with a chat template (default: %(default)s)")
    flags.add_argument("--rounds", type=int, default=20, help="measured rounds (default: %(default)s)")
    flags.add_argument("--words", type=int, default=300, help="words of the prompt (default: %(default)s)")
    flags.add_argument("--ratio", type=float, default=1.15, help="bound on the ratio (default: %(default)s)")
    args = flags.parse_args()
    prompt = " ".join(WORDS[i % len(WORDS)] for i in range(args.words))
    ids = Text(args.model).encode_chat([{"role": "user", "content": prompt}])
    whole, prefills, decodes = [], [], []
    with tempfile.TemporaryDirectory(prefix="sluice-first-") as folder, \
            Lab(args.model, Path(folder), "--hbm-bytes", "256MiB", "--dram-bytes", "256MiB", decodes=1) as lab:
        decode, prefill = lab.decodes[0], lab.prefill
        for number in range(args.rounds + 2):
            reply = lab.router.ask(prompt, stream=True, max_tokens=2, ignore_eos=True)
            if not reply.whole:
                raise SystemExit(f"the router answered {reply}")
            began = time.monotonic()
            source = prefill.prefill.Run(prefill_pb2.RunRequest(prompt_token_ids=ids, sampling=greedy(max_tokens=1)),
                                         timeout=TIMEOUT_S).source
            held = time.monotonic()
            stream = decode.decode.Generate(decode_pb2.GenerateRequest(
                source=source, prompt_token_ids=ids, sampling=greedy(max_tokens=2, ignore_eos=True)), timeout=TIMEOUT_S)
            next(stream)
            first = time.monotonic()
            list(stream)
            if number >= 2:  # the first ones open connections
                whole.append(reply.first_s)
                prefills.append(held - began)
                decodes.append(first - held)

    def shown(values):
        ordered = sorted(values)
        return (f"median {statistics.median(ordered) * 1e3:.1f} ms, p10 {ordered[len(ordered) // 10] * 1e3:.1f}, "
                f"p90 {ordered[len(ordered) * 9 // 10] * 1e3:.1f}")

    print(f"{len(ids)} tokens, {args.rounds} rounds\nthrough the router: {shown(whole)}\nprefill leg: {shown(prefills)}\n"
          f"decode leg: {shown(decodes)}")
    ratio = statistics.median(w / (p + d) for w, p, d in zip(whole, prefills, decodes))
    verdict = Verdict()
    verdict.hold("the first token through the router over the sum of its parts", f"{ratio:.3f}", ratio <= args.ratio)
    return verdict.status()


if __name__ == "__main__":
    sys.exit(main())
