"""A transfer survives what it can. test_bad_input.py has what is refused, and how."""

import threading
import time
import uuid

import grpc
import pytest
from google.protobuf import duration_pb2
from sluice.v1 import decode_pb2, ingest_pb2
from sluice_client import rpc
from support.nodes import SCALE, TIMEOUT_S, error_of, greedy, matching_steps, tokens_of
from support.transfers import Part, Transfer

Code = grpc.StatusCode


@pytest.fixture
def g(golden):
    return golden("tiny-llama")


@pytest.fixture(autouse=True)
def unharmed(small, golden):
    """Checks that after each test the small node is as before, and that a good transfer decodes."""
    before = small.settled()
    yield
    small.wait_until_held(before)
    transfer = Transfer(small, golden("tiny-llama"), case=0)
    finish_and_decode(transfer, transfer.parts())
    small.wait_until_held(before)


def finish_and_decode(transfer, parts):
    """Writes `parts`, commits, and checks the tokens that are decoded."""
    if parts:
        transfer.write(*(transfer.message(p) for p in parts))
    assert transfer.commit().context_length == len(transfer.prompt)
    tokens, _ = tokens_of(transfer.node.decode.Generate(decode_pb2.GenerateRequest(
        transfer_id=transfer.id, sampling=greedy(max_tokens=24)), timeout=TIMEOUT_S))
    g, case = transfer.golden, transfer.case
    matching_steps([t.id for t in tokens], g.tokens(case), g.margins(case), 0.1)


# A chunk of layer 1, head 0, tokens 0-32 of 33, with one error in each case.
GOOD = Part(1, (0, 1), (0, 32))


def test_chunks_that_are_refused_leave_the_transfer_as_it_was(small, g):
    transfer = Transfer(small, g)
    for wrong in ({"layer": 3}, {"head_end": 3}, {"token_begin": 1}, {"payload": b"x"}):
        assert error_of(lambda w=wrong: transfer.write(transfer.message(GOOD, **w))).code() == Code.INVALID_ARGUMENT
    assert error_of(lambda: small.channel.stream_unary("/sluice.v1.KvIngest/Write")(
        iter([b"\xff" * 40]), timeout=TIMEOUT_S)).code() == Code.INVALID_ARGUMENT
    assert transfer.status().blocks_landed == 0
    finish_and_decode(transfer, transfer.parts())


def test_a_damaged_chunk_is_data_loss_and_may_be_sent_again(small, g):
    transfer = Transfer(small, g)
    good = transfer.message(GOOD)
    error = error_of(lambda: transfer.write(transfer.message(GOOD, crc32c=good.header.crc32c ^ 1)))
    assert error.code() == Code.DATA_LOSS and "layer 1" in error.details()
    assert transfer.status().blocks_landed == 0
    assert transfer.write(good).blocks_landed == 1
    finish_and_decode(transfer, transfer.parts())


def test_a_write_to_an_unknown_transfer_is_not_found(small, g):
    transfer = Transfer(small, g)
    stranger = error_of(lambda: transfer.write(transfer.message(GOOD, transfer_id="0" * 32)))
    assert stranger.code() == Code.NOT_FOUND
    transfer.abort()
    assert error_of(lambda: transfer.write(transfer.message(GOOD))).code() == Code.NOT_FOUND
    assert error_of(transfer.commit).code() == Code.NOT_FOUND
    transfer.abort()  # abort is idempotent


def test_the_same_block_twice_is_fine_and_with_other_bytes_poisons(small, g):
    transfer = Transfer(small, g)
    message = transfer.message(GOOD)
    assert transfer.write(message).blocks_landed == 1
    transfer.write(message)
    assert transfer.status().blocks_landed == 1
    other = transfer.message(GOOD, payload=bytes(len(message.payload)))
    assert error_of(lambda: transfer.write(other)).code() == Code.FAILED_PRECONDITION
    assert transfer.status().state == ingest_pb2.GetTransferResponse.STATE_POISONED
    assert error_of(transfer.commit).code() == Code.FAILED_PRECONDITION
    transfer.abort()


def test_commit_names_the_missing_blocks_and_then_resumes(small, g):
    transfer = Transfer(small, g, case=2)  # 257 tokens: 9 blocks of 2 heads in 3 layers
    parts = transfer.parts()
    missing = [parts[0], parts[20], parts[-1]]
    transfer.write(*(transfer.message(p) for p in parts if p not in missing))
    error = error_of(transfer.commit)
    assert error.code() == Code.FAILED_PRECONDITION
    detail = rpc.details_of(error)["MissingBlocks"]
    assert detail.count == 3
    named = {(r.layer, r.head_begin, r.head_end, r.token_begin, r.token_end) for r in detail.ranges}
    assert named == {(p.layer, *p.heads, *p.tokens) for p in missing}
    status = transfer.status()
    assert (status.blocks_landed, status.blocks_total) == (51, 54)
    assert {(r.layer, r.head_begin, r.token_begin) for r in status.missing.ranges} == {
        (p.layer, p.heads[0], p.tokens[0]) for p in missing}
    finish_and_decode(transfer, missing)


def test_a_broken_stream_resumes_from_what_was_acknowledged(small, g):
    transfer = Transfer(small, g, case=2)
    parts = transfer.parts()

    over = threading.Event()

    def breaks():
        for part in parts[:10]:
            yield transfer.message(part)
        over.wait(TIMEOUT_S)

    call = small.ingest.Write.future(breaks(), timeout=TIMEOUT_S)
    while transfer.status().blocks_landed < 10:
        time.sleep(0.01)
    call.cancel()
    over.set()
    with pytest.raises(grpc.FutureCancelledError):
        call.result()
    landed = transfer.status()
    assert landed.state == ingest_pb2.GetTransferResponse.STATE_RECEIVING
    assert landed.blocks_landed == 10
    finish_and_decode(transfer, parts[10:])


def test_chunks_of_several_blocks_and_heads_in_any_order(small, g):
    transfer = Transfer(small, g, case=2)
    parts = [Part(layer, (0, 2), tokens) for layer in (2, 0, 1) for tokens in ((128, 257), (0, 64), (64, 128))]
    finish_and_decode(transfer, parts)


def test_commit_is_idempotent(small, g):
    transfer = Transfer(small, g, case=0)
    transfer.write_all()
    assert transfer.commit().context_length == transfer.commit().context_length == 1
    finish_and_decode(transfer, [])


def reserve_error(transfer):
    return error_of(transfer.reserve)


def test_what_does_not_fit_now_is_told_when_to_retry(small, g):
    def large():
        """Returns a prompt of 1533 tokens, which takes 2.4 MB of the 6 MiB of DRAM."""
        transfer = Transfer(small, g, reserve=False)
        transfer.request.manifest.prompt_token_ids.extend([5] * 1500)
        transfer.request.manifest.context_length = 1533
        return transfer

    held = [large() for _ in range(2)]
    for transfer in held:
        transfer.reserve()
    refused = large()
    error = reserve_error(refused)
    assert error.code() == Code.RESOURCE_EXHAUSTED
    assert 0 < rpc.retry_seconds(error) < 3600
    held.pop().abort()
    refused.reserve()  # there is room again
    for transfer in (refused, *held):
        transfer.abort()


def test_a_rendezvous_key_in_use_is_refused_within_its_tenant(small, g):
    key = uuid.uuid4().hex
    first = Transfer(small, g, rendezvous_key=key)
    twin = Transfer(small, g, rendezvous_key=key, reserve=False)
    assert reserve_error(twin).code() == Code.ALREADY_EXISTS
    twin.request.manifest.tenant = "another"
    twin.reserve()
    twin.abort()
    finish_and_decode(first, first.parts())
    again = Transfer(small, g, rendezvous_key=key)  # the key is free, because its transfer has ended
    again.abort()


def test_a_lease_that_ends_gives_the_memory_back(small, g):
    before = small.settled()
    transfer = Transfer(small, g, lease=duration_pb2.Duration(nanos=300_000_000))
    assert small.held() != before
    # There is no request that would wake anything up.
    time.sleep(1.0 * SCALE)
    small.wait_until_held(before)
    assert error_of(transfer.commit).code() == Code.NOT_FOUND


def test_a_slow_sender_keeps_its_lease_while_it_writes(small, g):
    transfer = Transfer(small, g, lease=duration_pb2.Duration(seconds=1, nanos=200_000_000))
    parts = transfer.parts()
    for part in parts[:4]:
        time.sleep(0.5)
        transfer.write(transfer.message(part))
    finish_and_decode(transfer, parts[4:])
