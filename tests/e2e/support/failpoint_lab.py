"""Tools of the tests of failpoints: streams that are read beside a test, and a node whose faults can be set."""

import threading
import time

import grpc
from sluice.v1 import admin_pb2, decode_pb2
from support.nodes import TIMEOUT_S, Node, greedy
from support.transfers import Transfer, committed

# Makes steps so slow that the streams beside a test still run at its end; 1000 steps take 5 s or more.
PACE = "engine.step=delay(5ms)"
LONG = 1000


class Stream:
    """A Generate that a thread of its own reads to its end."""

    def __init__(self, node: Node, timeout: float | None = TIMEOUT_S, **request):
        self.ids: list[int] = []
        self.error: grpc.RpcError | None = None
        self.call = node.decode.Generate(decode_pb2.GenerateRequest(**request), timeout=timeout)
        self.thread = threading.Thread(target=self._read)
        self.thread.start()

    def _read(self):
        try:
            for message in self.call:
                self.ids.extend(token.id for token in message.tokens)
        except grpc.RpcError as error:
            self.error = error

    def end(self) -> "Stream":
        self.thread.join(2 * TIMEOUT_S)
        assert not self.thread.is_alive(), "the stream hangs"
        return self

    def leave(self) -> "Stream":
        """Cancels the call, which is no error here."""
        self.call.cancel()
        self.end()
        if self.error is not None and self.error.code() == grpc.StatusCode.CANCELLED:
            self.error = None
        return self

    def wait_for_tokens(self, count: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while len(self.ids) < count and self.error is None and time.monotonic() < deadline:
            time.sleep(0.002)
        assert len(self.ids) >= count, self.error


class Lab:
    """A node whose failpoints may be set, and the answers that it gives without faults."""

    def __init__(self, node: Node, golden, tokens: int = LONG):
        self.node, self.golden = node, golden
        self.at_rest = node.held()
        self.long = self.start(tokens).end().ids
        assert len(self.long) == tokens
        self.node.wait_until_held(self.at_rest)

    def set(self, *terms: str, clear: bool = False, seed: int = 0) -> None:
        self.node.admin.SetFailpoints(
            admin_pb2.SetFailpointsRequest(terms=";".join(terms), clear=clear, seed=seed), timeout=TIMEOUT_S)

    def state(self, name: str) -> admin_pb2.Failpoint:
        answer = self.node.admin.ListFailpoints(admin_pb2.ListFailpointsRequest(), timeout=TIMEOUT_S)
        return next(point for point in answer.failpoints if point.name == name)

    def start(self, tokens: int, timeout: float | None = TIMEOUT_S, **handoff) -> Stream:
        """Starts a greedy stream of `tokens` tokens of case 0, from a transfer of its own unless `handoff` names one.
        """
        if not handoff:
            handoff = {"transfer_id": committed(self.node, self.golden, 0, max_new_tokens=tokens)}
        return Stream(self.node, timeout, sampling=greedy(max_tokens=tokens, ignore_eos=True), **handoff)

    def wait_for_transfers(self, count: int) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while self.node.capacity().transfers != count and time.monotonic() < deadline:
            time.sleep(0.01)
        assert self.node.capacity().transfers == count

    def dram_used(self) -> int:
        return sum(t.used_bytes for t in self.node.capacity().tiers if t.tier == "dram")

    def check_good_request(self) -> None:
        stream = self.start(24).end()
        assert stream.error is None and stream.ids == self.long[:24]

    def transfer(self, **kwargs) -> Transfer:
        return Transfer(self.node, self.golden, 0, **kwargs)
