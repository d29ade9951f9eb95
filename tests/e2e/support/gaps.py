"""Measures whether a stream notices other work: its gaps between tokens with and without that work, in one run."""

import math
import time
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Callable

from sluice.v1 import decode_pb2
from support.nodes import TIMEOUT_S, Golden, Node, greedy
from support.transfers import committed

# A machine that is busy with something else can spoil a round, so a few rounds may be tried. Work that really holds
# the stream up spoils all of them.
ATTEMPTS = 5
ROUNDS = 3


@dataclass
class Watched:
    """The token ids of one stream, and the seconds before each message but the first."""

    ids: list[int]
    gaps: list[float]


def watch(node: Node, golden: Golden, tokens: int) -> Watched:
    """Decodes greedily from a golden cache. Messages are parsed afterwards, so that parsing adds no gap."""
    generate = node.channel.unary_stream("/sluice.v1.Decode/Generate",
                                         request_serializer=decode_pb2.GenerateRequest.SerializeToString)
    request = decode_pb2.GenerateRequest(
        transfer_id=committed(node, golden, max_new_tokens=tokens),
        sampling=greedy(max_tokens=tokens, ignore_eos=True))
    times, messages = [], []
    for message in generate(request, timeout=TIMEOUT_S):
        times.append(time.perf_counter())
        messages.append(message)
    ids = [t.id for m in messages for t in decode_pb2.GenerateResponse.FromString(m).tokens]
    assert len(ids) == tokens
    return Watched(ids, [after - before for before, after in zip(times, times[1:])])


def p99(gaps: list[float]) -> float:
    return sorted(gaps)[math.ceil(0.99 * len(gaps)) - 1]


def check_unnoticed(node: Node, golden: Golden, others: Callable[[], AbstractContextManager], bound: float,
                    tokens: int = 2000) -> str:
    """Checks that beside `others()` a stream gives the same tokens, and that its p99 gap stays within `bound` times
    its gap alone.

    Rounds with and without the others alternate, so that both see the same machine. Returns the figures.
    """
    figures = []
    for _ in range(ATTEMPTS):
        alone, beside = [], []
        for _ in range(ROUNDS):
            without = watch(node, golden, tokens)
            with others():
                among = watch(node, golden, tokens)
            assert among.ids == without.ids
            alone += without.gaps
            beside += among.gaps
        figures.append(f"{1e3 * p99(alone):.2f} -> {1e3 * p99(beside):.2f} ms")
        if p99(beside) <= bound * p99(alone):
            return f"p99 gap {figures[-1]} (attempt {len(figures)}, {len(beside)} gaps)"
    raise AssertionError(f"p99 gap over {bound} x in every attempt: {figures}")
