"""Describes a bad call and where it happens. The cases are in bad_decode.py, bad_ingest.py and bad_wire.py;
test_bad_input.py runs them.
"""

from dataclasses import dataclass
from typing import Callable

import grpc
from sluice.v1 import common_pb2
from support.nodes import TIMEOUT_S, Golden, Node
from support.transfers import Transfer

MAX32 = 2**32 - 1
VOCABULARY, LAYERS, HEADS, CONTEXT = 512, 3, 2, 4096  # sizes of tiny-llama
UNKNOWN_ID = "0" * 32
NOT_THERE = {"code": grpc.StatusCode.NOT_FOUND, "reason": "TRANSFER_NOT_FOUND"}


class Site:
    """The nodes of a case: a decode node, a prefill node of the same model, and the transfers that the case opened."""

    def __init__(self, node: Node, prefill: Node, golden: Golden, ready: str):
        self.node, self.prefill, self.golden, self.ready = node, prefill, golden, ready
        self.opened: list[Transfer] = []

    def transfer(self, case: int = 1, **kwargs) -> Transfer:
        self.opened.append(Transfer(self.node, self.golden, case, **kwargs))
        return self.opened[-1]

    def committed(self, case: int = 0) -> Transfer:
        transfer = self.transfer(case)
        transfer.write_all()
        transfer.commit()
        return transfer

    def clean(self) -> None:
        while self.opened:
            transfer = self.opened.pop()
            if transfer.id:
                transfer.abort()


@dataclass(frozen=True)
class BadCall:
    """A call that is refused: `call(site)` ends with `code`, BadRequest names `field`, ErrorInfo gives `reason`, and
    the message holds `words`.
    """

    name: str
    call: Callable[[Site], object]
    code: grpc.StatusCode = grpc.StatusCode.INVALID_ARGUMENT
    field: str = ""
    reason: str = ""
    words: str = ""


def sampling(settings) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(**{"temperature": 0, "max_tokens": 8, **settings})


def raw(kind: str, method: str, *bodies: bytes):
    """Returns a call that sends bytes as they are, without the client's own serialisation."""
    def call(site: Site):
        invoke = getattr(site.node.channel, kind)(f"/sluice.v1.{method}")
        return invoke(iter(bodies) if kind.startswith("stream") else bodies[0], timeout=TIMEOUT_S)
    return call
