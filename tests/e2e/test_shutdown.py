"""SIGTERM with work of every kind: work that can finish does, and the rest ends with a clear status in time."""

import threading
import time
import uuid

import grpc
import pytest
from sluice.v1 import decode_pb2
from sluice_client import rpc
from support.nodes import SCALE, TIMEOUT_S, greedy, tokens_of
from support.transfers import Transfer, committed

DRAIN_SECONDS = 5 * SCALE
DRAINING = (grpc.StatusCode.UNAVAILABLE, "DRAINING")


def end_of(stream) -> tuple:
    """Returns the status and reason with which a stream ends."""
    try:
        tokens_of(stream)
        return (grpc.StatusCode.OK, "")
    except grpc.RpcError as error:
        return (error.code(), rpc.reason_of(error))


def test_sigterm_finishes_what_it_can_and_ends_the_rest_in_time(tiny_models, start, golden):
    node = start("sluice-server", tiny_models("tiny-llama"), "--hbm-bytes", "16MiB", "--dram-bytes", "16MiB",
                 "--drain-timeout-seconds", str(DRAIN_SECONDS))
    g = golden("tiny-llama")

    def generate(max_tokens, **handoff):
        return node.decode.Generate(decode_pb2.GenerateRequest(
            sampling=greedy(max_tokens=max_tokens, ignore_eos=True), **handoff), timeout=TIMEOUT_S)

    running = generate(300, transfer_id=committed(node, g, max_new_tokens=300))
    next(running)
    # Generates whose transfer never comes, or is never complete.
    unmatched = generate(4, rendezvous_key=uuid.uuid4().hex)
    partial = Transfer(node, g)
    partial.write(partial.message(partial.parts()[0]))
    incomplete = generate(4, transfer_id=partial.id)
    # Transfers for which no Generate ever comes.
    Transfer(node, g)
    committed(node, g)
    while node.capacity().waiting < 2:
        time.sleep(0.01)

    ends = {}
    streams = {"running": running, "unmatched": unmatched, "incomplete": incomplete}
    readers = [threading.Thread(target=lambda n=name, s=stream: ends.update({n: end_of(s)}))
               for name, stream in streams.items()]
    for reader in readers:
        reader.start()
    node.process.terminate()
    told = time.monotonic()
    while node.http("/readyz")[0] == 200:
        assert time.monotonic() - told < DRAIN_SECONDS / 2
    # New work is refused while the rest still runs.
    for call in (lambda: Transfer(node, g), lambda: list(generate(1, rendezvous_key="later"))):
        with pytest.raises(grpc.RpcError) as refused:
            call()
        assert (refused.value.code(), rpc.reason_of(refused.value)) == DRAINING
    for reader in readers:
        reader.join(TIMEOUT_S)
    assert ends == {"running": (grpc.StatusCode.OK, ""), "unmatched": DRAINING, "incomplete": DRAINING}
    assert node.process.wait(TIMEOUT_S) == 0
    elapsed = time.monotonic() - told
    assert 0.9 * DRAIN_SECONDS < elapsed < DRAIN_SECONDS + 6 * SCALE
