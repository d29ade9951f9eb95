"""Nodes with links between their devices (kv_transport nccl; shared memory on CPUs), for tests of pulls and pushes."""

import itertools
import time

from support.metrics_text import Scrape
from support.nodes import DEVICE, SCALE, TIMEOUT_S

# Nodes that share a GPU take turns on it, a few milliseconds each.
DEADLINE_S = (4.0 if DEVICE == "cuda" else 1.0) * SCALE
LINKS = ("--kv-transport", "nccl", "--kv-transport-deadline-seconds", f"{DEADLINE_S}s")
LINK = "nccl" if DEVICE == "cuda" else "shared_memory"  # the transport that carries the bytes
MADE = "a link to another node is made"  # in the log of either end
PROMPT = [(i * 37) % 250 + 3 for i in range(200)]
KV_BYTES = 1536 * len(PROMPT)  # of tiny-llama
_NUMBERS = itertools.count()


def starting_apart(start):
    """Returns a `start` of nodes that take part in NCCL as if each had its own host, since they may share a GPU."""
    def begin(program, model, *flags, **more):
        host = {"NCCL_HOSTID": f"{program}-{next(_NUMBERS)}", "NCCL_SOCKET_IFNAME": "lo"}
        return start(program, model, *flags, env=host if DEVICE == "cuda" else None, **more)

    return begin


def wait_until_made(node):
    """Waits until the node has made its first link and has sent something over it.

    Over NCCL that takes a second or more.
    """
    deadline = time.monotonic() + TIMEOUT_S
    while node.log.read_text().count(MADE) == 0:
        assert time.monotonic() < deadline, "no link was made"
        time.sleep(0.005)
    time.sleep(0.2 * SCALE)


class LinkCounts:
    """What a node's pulls or pushes came to since this object was made.

    `calls` is the metric that counts them by outcome, `moved` the one that counts bytes by transport.
    """

    def __init__(self, node, calls: str, moved: str):
        self.node = node
        self.names = [(calls, "outcome", ("done", "refused", "broken")),
                      (moved, "transport", ("grpc", "nccl", "shared_memory"))]
        self.before = self._now()

    def _now(self):
        scrape = Scrape(self.node)
        return {value: scrape.get(name, **{label: value}) for name, label, values in self.names for value in values}

    def __getitem__(self, name):
        return self._now()[name] - self.before[name]
