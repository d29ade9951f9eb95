"""No tenant reaches what another tenant has; and tenants have quotas."""

import time
from types import SimpleNamespace

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from sluice.v1 import admin_pb2_grpc, decode_pb2, decode_pb2_grpc, ingest_pb2, ingest_pb2_grpc
from sluice_client import rpc
from support.nodes import TIMEOUT_S, error_of, greedy, tokens_of
from support.pki import Pki, node_flags, token_entry, write_access
from support.transfers import Transfer

Code = grpc.StatusCode
# A transfer of case 0 with 24 new tokens takes less than 1 MiB; one with 2000 new tokens takes more.
QUOTAS = {"alice": {"sequences": 2}, "carol": {"dram_bytes": "1MiB"}, "dave": {"tokens_per_second": 4}}
TENANTS = ("alice", "bob", "carol", "dave")


class Person:
    """A tenant's view of the node, with the members of a Node."""

    def __init__(self, node, credentials):
        channel = rpc.open_channel(node.address, credentials)
        self.admin = admin_pb2_grpc.AdminStub(channel)
        self.ingest = ingest_pb2_grpc.KvIngestStub(channel)
        self.decode = decode_pb2_grpc.DecodeStub(channel)

    def transfer(self, golden, max_new_tokens=24, **kwargs) -> Transfer:
        transfer = Transfer(self, golden, 0, max_new_tokens, **kwargs)
        transfer.write_all()
        transfer.commit()
        return transfer

    def generate(self, **request):
        return self.decode.Generate(decode_pb2.GenerateRequest(**request), timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def house(tmp_path_factory, start, tiny_models, golden):
    folder = tmp_path_factory.mktemp("tenants")
    pki = Pki(folder)
    access = write_access(folder / "access.json", tenants=QUOTAS, tokens=[
        *(token_entry(t, f"token-of-{t}", "prefill", "router", tenant=t) for t in TENANTS),
        token_entry("everybody", "token-of-everybody", "prefill", "router")],
        certificates=[{"identity": "cn:operator", "roles": ["operator"]}])
    node = start("sluice-server", tiny_models("tiny-llama"), *node_flags(pki, access, "node"),
                 credentials=pki.credentials("operator"))
    people = {t: Person(node, pki.bearer(f"token-of-{t}")) for t in (*TENANTS, "everybody")}
    return SimpleNamespace(node=node, golden=golden("tiny-llama"), access=access, **people)


def test_a_transfer_is_its_tenants_alone(house):
    theirs = Transfer(house.alice, house.golden, 0)
    theirs.write(theirs.message(theirs.parts()[0]))
    same = SimpleNamespace(id=theirs.id)
    bob = house.bob
    for call in (
            lambda: bob.ingest.GetTransfer(ingest_pb2.GetTransferRequest(transfer_id=same.id), timeout=TIMEOUT_S),
            lambda: bob.ingest.Commit(ingest_pb2.CommitRequest(transfer_id=same.id), timeout=TIMEOUT_S),
            lambda: bob.ingest.Write(iter([theirs.message(theirs.parts()[1])]), timeout=TIMEOUT_S),
            lambda: list(bob.ingest.WriteByLink(iter([ingest_pb2.WriteByLinkRequest(
                open=ingest_pb2.WriteByLinkRequest.Open(transfer_id=same.id))]), timeout=TIMEOUT_S)),
            lambda: list(bob.generate(transfer_id=same.id, sampling=greedy(max_tokens=2)))):
        error = error_of(call)
        assert error.code() == Code.NOT_FOUND and rpc.reason_of(error) == "TRANSFER_NOT_FOUND"
        # The answer is word for word that for an id that never existed.
        assert "no such transfer: it was never reserved here, or has ended" in error.details()
    bob.ingest.Abort(ingest_pb2.AbortRequest(transfer_id=same.id), timeout=TIMEOUT_S)
    theirs.write_all()  # it is still there
    theirs.commit()
    tokens, _ = tokens_of(house.alice.generate(transfer_id=theirs.id, sampling=greedy(ignore_eos=True)))
    assert len(tokens) == 24
    error = error_of(lambda: bob.ingest.Commit(ingest_pb2.CommitRequest(transfer_id=same.id), timeout=TIMEOUT_S))
    assert error.code() == Code.NOT_FOUND  # nor is one that was taken


def test_a_tenant_cannot_name_another(house):
    theirs = Transfer(house.bob, house.golden, 0, reserve=False)
    theirs.request.manifest.tenant = "alice"
    error = error_of(theirs.reserve)
    assert error.code() == Code.PERMISSION_DENIED and rpc.reason_of(error) == "OTHER_TENANT"
    assert error.details().startswith("manifest.tenant: token:bob may act for tenant \"bob\" alone")
    for call in (lambda: list(house.bob.generate(tenant="alice", rendezvous_key="room")),
                 lambda: house.bob.decode.Forget(decode_pb2.ForgetRequest(sequence_id="0" * 32, tenant="alice"))):
        assert error_of(call).code() == Code.PERMISSION_DENIED


def test_rooms_of_the_same_name_do_not_meet(house):
    alices = house.alice.transfer(house.golden, rendezvous_key="room")
    error = error_of(lambda: house.bob.decode.Generate(decode_pb2.GenerateRequest(
        rendezvous_key="room", sampling=greedy(max_tokens=2)), timeout=1))
    assert error.code() == Code.DEADLINE_EXCEEDED  # it waits for bob's own transfer, which never comes
    tokens, _ = tokens_of(house.alice.generate(rendezvous_key="room", sampling=greedy(ignore_eos=True)))
    assert len(tokens) == 24 and alices.id


def test_request_ids_of_the_same_name_are_two(house):
    streams = {}
    for who in (house.alice, house.bob):
        transfer = who.transfer(house.golden, 3000)
        streams[who] = who.generate(transfer_id=transfer.id, request_id="same", sampling=greedy(ignore_eos=True))
        assert next(streams[who]).request_id == "same"
    assert house.bob.decode.Cancel(decode_pb2.CancelRequest(request_id="same"), timeout=TIMEOUT_S).found
    assert error_of(lambda: list(streams[house.bob])).code() == Code.CANCELLED
    assert not house.bob.decode.Cancel(decode_pb2.CancelRequest(request_id="same"), timeout=TIMEOUT_S).found
    assert next(streams[house.alice]).tokens  # the stream goes on
    streams[house.alice].cancel()


def test_a_kept_sequence_is_its_tenants_alone(house):
    transfer = house.alice.transfer(house.golden)
    _, finish = tokens_of(house.alice.generate(transfer_id=transfer.id, keep=Duration(seconds=30),
                                               sampling=greedy(ignore_eos=True)))
    assert finish.sequence_id
    error = error_of(lambda: house.bob.generate(sequence_id=finish.sequence_id, prompt_token_ids=[1],
                                                sampling=greedy(max_tokens=2)))
    assert error.code() == Code.NOT_FOUND
    forget = decode_pb2.ForgetRequest(sequence_id=finish.sequence_id)
    assert not house.bob.decode.Forget(forget, timeout=TIMEOUT_S).found
    assert house.alice.decode.Forget(forget, timeout=TIMEOUT_S).found


def test_a_tenant_has_its_number_of_sequences(house):
    house.node.settled()
    streams = []
    for _ in range(2):
        transfer = house.alice.transfer(house.golden, 3000)
        streams.append(house.alice.generate(transfer_id=transfer.id, sampling=greedy(ignore_eos=True)))
        next(streams[-1])
    third = house.alice.transfer(house.golden)
    error = error_of(lambda: house.alice.generate(transfer_id=third.id, sampling=greedy()))
    assert error.code() == Code.RESOURCE_EXHAUSTED and rpc.reason_of(error) == "TENANT_SEQUENCES"
    assert rpc.retry_seconds(error) > 0
    # The same holds where a caller that acts for all tenants names the transfer.
    error = error_of(lambda: house.everybody.generate(transfer_id=third.id, sampling=greedy()))
    assert rpc.reason_of(error) == "TENANT_SEQUENCES"
    other = house.bob.transfer(house.golden)
    assert len(tokens_of(house.bob.generate(transfer_id=other.id, sampling=greedy(ignore_eos=True)))[0]) == 24
    for stream in streams:
        stream.cancel()
    house.node.settled()
    tokens, _ = tokens_of(house.alice.generate(transfer_id=third.id, sampling=greedy(ignore_eos=True)))
    assert len(tokens) == 24  # the refusal took nothing


def test_a_tenant_has_its_bytes_of_dram(house):
    before = house.node.settled()
    opened = []
    while True:
        transfer = Transfer(house.carol, house.golden, 1, reserve=False)
        try:
            transfer.reserve()
        except grpc.RpcError as error:
            assert error.code() == Code.RESOURCE_EXHAUSTED and rpc.reason_of(error) == "TENANT_DRAM"
            assert rpc.retry_seconds(error) > 0 and "of its 1048576 bytes" in error.details()
            break
        opened.append(transfer)
        assert len(opened) < 1000
    assert opened
    Transfer(house.bob, house.golden, 1).abort()  # other tenants are not held back
    opened.pop().abort()
    opened.append(Transfer(house.carol, house.golden, 1))  # memory that was given back may be used again
    for transfer in opened:
        transfer.abort()
    house.node.wait_until_held(before)


def test_a_tenant_has_its_tokens_a_second(house):
    def use(count: int):
        transfer = house.dave.transfer(house.golden, count)
        return tokens_of(house.dave.generate(transfer_id=transfer.id, sampling=greedy(ignore_eos=True)))

    use(52)  # more than 10 s allow: a running sequence is not cut short
    error = error_of(lambda: use(10))
    assert error.code() == Code.RESOURCE_EXHAUSTED and rpc.reason_of(error) == "TENANT_TOKENS"
    seconds = rpc.retry_seconds(error)
    assert 0 < seconds <= 3.2  # at most (52 - 40) / 4, and a moment
    time.sleep(seconds)
    assert len(use(10)[0]) == 10


def test_tenants_without_tls_are_what_requests_name(tmp_path, start, tiny_models, golden):
    access = write_access(tmp_path / "access.json", tenants={"*": {"dram_bytes": 1}})
    node = start("sluice-server", tiny_models("tiny-llama"), "--access-file", str(access), "--security-reload-seconds", "1")
    Transfer(node, golden("tiny-llama"), 0).abort()  # without a tenant
    named = Transfer(node, golden("tiny-llama"), 0, reserve=False)
    named.request.manifest.tenant = "erin"
    assert rpc.reason_of(error_of(named.reserve)) == "TENANT_DRAM"
