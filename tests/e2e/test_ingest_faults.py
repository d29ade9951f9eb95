"""Transfers under faults: the answer of each call in each state, and connections that are cut."""

import socket
import struct
import threading
import time
import uuid

import grpc
import pytest
from google.protobuf import duration_pb2
from sluice.v1 import decode_pb2, ingest_pb2, prefill_pb2
from sluice_client import rpc
from sluice_client.pusher import Pusher
from support.nodes import SCALE, TIMEOUT_S, error_of, greedy, matching_steps, tokens_of
from support.transfers import Part, Transfer

# Time for a Generate that has no token to send yet.
WAIT_S = 0.25 * SCALE


@pytest.fixture
def g(golden):
    return golden("tiny-llama")


@pytest.fixture(autouse=True)
def unharmed(small):
    """Checks that after each test the small node holds what it held before."""
    before = small.settled()
    yield
    small.wait_until_held(before)


class Scene:
    """A transfer of 33 tokens under a rendezvous key, brought into a state."""

    def __init__(self, node, golden):
        self.node, self.golden, self.key = node, golden, uuid.uuid4().hex
        self.transfer = Transfer(node, golden, rendezvous_key=self.key, reserve=False)
        self.transfer.id = uuid.uuid4().hex  # no transfer has this id until it is reserved
        self.others = []

    # States.
    def never_reserved(self):
        pass

    def receiving(self):
        self.transfer.reserve()

    def committed(self):
        self.receiving()
        self.transfer.write_all()
        self.transfer.commit()

    def poisoned(self):
        self.receiving()
        self.write()
        part = self.transfer.parts()[0]
        size = len(self.transfer.message(part).payload)
        assert answer(lambda: self.transfer.write(self.transfer.message(part, payload=bytes(size)))) == "POISONED"

    def decoded(self):
        self.committed()
        assert self.generate(transfer_id=self.transfer.id) == "tokens"

    def aborted(self):
        self.committed()
        self.transfer.abort()

    def expired(self):
        self.transfer.request.lease.CopyFrom(duration_pb2.Duration(nanos=1_000_000))
        self.receiving()
        time.sleep(0.01)

    # Calls. Each returns "OK", what it found, or the reason of its refusal.
    def write(self):
        return answer(lambda: self.transfer.write(self.transfer.message(self.transfer.parts()[0])))

    def commit(self):
        return answer(self.transfer.commit)

    def abort(self):
        return answer(self.transfer.abort)

    def get(self):
        return answer(lambda: ingest_pb2.GetTransferResponse.State.Name(self.transfer.status().state))

    def generate(self, **handoff):
        request = decode_pb2.GenerateRequest(sampling=greedy(max_tokens=4), **handoff)
        try:
            tokens, _ = tokens_of(self.node.decode.Generate(request, timeout=WAIT_S))
            return "tokens" if [t.id for t in tokens] == self.golden.tokens(1)[:4] else "wrong tokens"
        except grpc.RpcError as error:
            waited = error.code() == grpc.StatusCode.DEADLINE_EXCEEDED and not rpc.reason_of(error)
            return "waits" if waited else rpc.reason_of(error)

    def generate_by_id(self):
        return self.generate(transfer_id=self.transfer.id)

    def generate_by_key(self):
        return self.generate(rendezvous_key=self.key)

    def reserve_again(self):
        other = Transfer(self.node, self.golden, rendezvous_key=self.key, reserve=False)
        found = answer(other.reserve)
        if other.id:
            other.abort()
        return found


def answer(call):
    """Returns the answer of a call: its text, "OK", or the reason of its error."""
    try:
        found = call()
        return found if isinstance(found, str) else "OK"
    except grpc.RpcError as error:
        return rpc.reason_of(error)


NONE, USED = "TRANSFER_NOT_FOUND", "RENDEZVOUS_KEY_IN_USE"
CALLS = ["write", "commit", "abort", "get", "generate_by_id", "generate_by_key", "reserve_again"]
GONE = [NONE, NONE, "OK", NONE, NONE, "waits", "OK"]
ANSWERS = {
    "never_reserved": GONE,
    "receiving": ["OK", "MISSING_BLOCKS", "OK", "STATE_RECEIVING", "waits", "waits", USED],
    "committed": ["COMMITTED", "OK", "OK", "STATE_COMMITTED", "tokens", "tokens", USED],
    "poisoned": ["POISONED", "POISONED", "OK", "STATE_POISONED", "POISONED", "POISONED", USED],
    "decoded": [NONE, "OK", "OK", "STATE_COMMITTED", NONE, "waits", "OK"],
    "aborted": GONE,
    "expired": GONE,
}


@pytest.mark.parametrize("state", ANSWERS)
def test_every_call_has_one_answer_in_every_state(small, g, state):
    found = []
    for call in CALLS:
        scene = Scene(small, g)
        getattr(scene, state)()
        found.append(getattr(scene, call)())
        scene.transfer.abort()
    assert dict(zip(CALLS, found)) == dict(zip(CALLS, ANSWERS[state]))


def in_background(call):
    """Starts `call()`; returns a function that waits for its answer."""
    result = []
    thread = threading.Thread(target=lambda: result.append(call()), daemon=True)
    thread.start()

    def wait():
        thread.join(TIMEOUT_S)
        assert result, "it did not end"
        return result[0]

    return wait


def generate_error(node, **handoff):
    return error_of(lambda: tokens_of(node.decode.Generate(
        decode_pb2.GenerateRequest(sampling=greedy(max_tokens=24), **handoff), timeout=TIMEOUT_S)))


def wait_for_waiting(node, count):
    """Waits until so many sequences wait for their transfer or for room."""
    deadline = time.monotonic() + TIMEOUT_S
    while node.capacity().waiting != count and time.monotonic() < deadline:
        time.sleep(0.01)
    assert node.capacity().waiting == count


def test_a_generate_before_its_transfer_is_told_how_it_ended(small, g):
    for end, reason in (("abort", "TRANSFER_ABORTED"), ("poison", "POISONED"), ("lease", "LEASE_EXPIRED")):
        scene = Scene(small, g)
        if end == "lease":
            scene.transfer.request.lease.CopyFrom(duration_pb2.Duration(seconds=1, nanos=500_000_000))
        waiting = small.capacity().waiting
        early = in_background(lambda key=scene.key: generate_error(small, rendezvous_key=key))
        wait_for_waiting(small, waiting + 1)
        if end == "poison":
            scene.poisoned()
        else:
            scene.receiving()
        second = generate_error(small, transfer_id=scene.transfer.id)
        # A poisoned transfer has let go of the first Generate.
        assert rpc.reason_of(second) in ("GENERATE_EXISTS", reason)
        if end == "abort":
            scene.transfer.abort()
        assert rpc.reason_of(early()) == reason
        scene.transfer.abort()


def test_two_generates_at_the_same_time_one_decodes(small, g):
    transfer = Transfer(small, g)
    transfer.write_all()
    transfer.commit()

    def one():
        try:
            tokens, _ = tokens_of(small.decode.Generate(decode_pb2.GenerateRequest(
                transfer_id=transfer.id, sampling=greedy(max_tokens=24)), timeout=TIMEOUT_S))
            return [t.id for t in tokens]
        except grpc.RpcError as error:
            return rpc.reason_of(error)

    found = [wait() for wait in [in_background(one) for _ in range(4)]]
    decoded = [f for f in found if isinstance(f, list)]
    assert len(decoded) == 1
    matching_steps(decoded[0], g.tokens(1), g.margins(1), 0.1)
    assert {f for f in found if isinstance(f, str)} <= {"GENERATE_EXISTS", "TRANSFER_NOT_FOUND"}


class Cutter:
    """A TCP proxy that resets connections.

    It resets the first connection that carries more than reset_after[0] bytes from the client, then the first one that
    carries more than reset_after[1], and so on. Connections that carry less pass, and so do all connections after the
    last reset.
    """

    def __init__(self, address, reset_after):
        host, port = address.rsplit(":", 1)
        self.target = (host, int(port))
        self.lock = threading.Lock()
        self.reset_after = list(reset_after)
        self.resets = 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self.listener.close()

    def _accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            server = socket.create_connection(self.target)
            threading.Thread(target=self._pass, args=(client, server, True), daemon=True).start()
            threading.Thread(target=self._pass, args=(server, client, False), daemon=True).start()

    def _reset_after(self, carried):
        """Returns the limit that a connection with so many bytes exceeds; no other connection has that limit any more.
        """
        with self.lock:
            if not self.reset_after or carried <= self.reset_after[0]:
                return None
            self.resets += 1
            return self.reset_after.pop(0)

    def _pass(self, source, target, from_client):
        passed = 0
        try:
            while data := source.recv(4096):
                if from_client and (limit := self._reset_after(passed + len(data))) is not None:
                    target.sendall(data[:max(0, limit - passed)])  # the cut is in the middle of a message
                    for end in (source, target):
                        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    break
                target.sendall(data)
                passed += len(data)
        except OSError:
            pass
        for end in (source, target):
            try:
                end.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            end.close()


@pytest.fixture
def cut(request):
    made = []

    def start(node, *reset_after):
        made.append(Cutter(node.address, reset_after))
        return made[-1]

    yield start
    for cutter in made:
        cutter.close()


def check_decodes(node, transfer_id, golden, case):
    tokens, _ = tokens_of(node.decode.Generate(decode_pb2.GenerateRequest(
        transfer_id=transfer_id, sampling=greedy(max_tokens=24)), timeout=TIMEOUT_S))
    matching_steps([t.id for t in tokens], golden.tokens(case), golden.margins(case), 0.1)


@pytest.mark.parametrize("streams", [1, 2])
def test_a_pusher_whose_connections_are_cut_mid_chunk_goes_on_by_itself(small, g, cut, streams):
    case = 2  # 257 tokens, 395 KB
    # Reserve and Commit have a connection of their own, which carries less than any of these limits.
    cutter = cut(small, *[30_000, 40_000, 50_000, 60_000][:2 + streams])
    with Pusher(cutter.address, streams=streams) as pusher:
        pusher.reserve(g.prompt(case), max_new_tokens=24)
        for layer in range(pusher.model.layers):
            k, v = (g.file[f"case{case}.{p}.{layer}"] for p in "kv")
            for begin in range(0, len(k), 64):
                pusher.write_layer(layer, k[begin:begin + 64], v[begin:begin + 64], token_begin=begin)
        transfer_id = pusher.commit()
    assert 3 <= cutter.resets <= 2 + streams
    check_decodes(small, transfer_id, g, case)


def test_a_prefill_node_whose_connection_is_cut_goes_on_by_itself(pairs, g, cut):
    pair = pairs("tiny-llama")
    before = pair.decode.settled()
    case = 2
    cutter = cut(pair.decode, 60_000, 120_000)
    answer_ = pair.prefill.prefill.Run(prefill_pb2.RunRequest(
        prompt_token_ids=g.prompt(case), decode_address=cutter.address, skip_first_token=True,
        sampling=greedy(max_tokens=24)), timeout=TIMEOUT_S)
    assert cutter.resets == 2
    check_decodes(pair.decode, answer_.transfer_id, g, case)
    pair.decode.wait_until_held(before)


def test_a_chunk_cut_in_the_middle_leaves_nothing_and_the_same_channel_goes_on(small, g):
    transfer = Transfer(small, g, case=2)
    parts = transfer.parts()
    whole = transfer.message(parts[0]).SerializeToString()
    call = small.channel.stream_unary("/sluice.v1.KvIngest/Write")
    error = error_of(lambda: call(iter([whole, whole[:len(whole) // 2]]), timeout=TIMEOUT_S))
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert transfer.status().blocks_landed == 1
    transfer.write(*(transfer.message(p) for p in parts))  # the first part comes again and is accepted once
    assert transfer.status().blocks_landed == len(parts)
    transfer.commit()
    check_decodes(small, transfer.id, g, 2)


def test_an_abort_while_a_stream_writes_ends_the_stream(small, g):
    transfer = Transfer(small, g, case=2)
    aborted = threading.Event()

    def endless():
        for n in range(100_000):
            if n == 5:
                transfer.abort()
                aborted.set()
            yield transfer.message(Part(0, (0, 1), (0, 32)))

    error = error_of(lambda: small.ingest.Write(endless(), timeout=TIMEOUT_S))
    # The node may end the stream before the thread of endless() has seen its
    # own abort return.
    assert aborted.wait(timeout=TIMEOUT_S)
    assert rpc.reason_of(error) == "TRANSFER_NOT_FOUND"
    assert error_of(transfer.commit).code() == grpc.StatusCode.NOT_FOUND
