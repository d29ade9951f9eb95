"""Policy ess in a real server under faults: lost and late transfers, a part of a cache, odd hints."""

import time

import grpc
import pytest
from sluice.v1 import admin_pb2, ingest_pb2
from sluice_client import rpc
from sluice_client.pusher import Pusher, PushError
from support.failpoint_lab import PACE, Stream
from support.latent_lab import FULL, MEMORY, NAMES, PACKED, SCARCE, SPARE, assert_same, decoded
from support.metrics_text import Scrape
from support.nodes import TIMEOUT_S, greedy
from test_latent import hints_of

NAME = NAMES[0]
CASE = 2  # its prompt has 200 tokens, more than SCARCE has KV slots
LAYERS = 3
LONG = 40


@pytest.fixture(scope="module")
def served(tiny_models, start):
    """served(policy) -> a decode node with packed caches, whose failpoints may be set."""
    made = {}

    def get(policy):
        key = tuple(policy)
        if key not in made:
            # Recorded caches and computed ones of one prompt have other bits, so they are not mixed.
            made[key] = start("sluice-server", tiny_models(NAME), *MEMORY, *PACKED, *policy, "--allow-failpoints",
                              "--prefix-cache=false")
        return made[key]

    return get


def handed_over(node, g, context=None, max_new_tokens=24, hints=None, tokens=()):
    """Hands over the recorded caches of the first `context` tokens; returns the transfer's id."""
    prompt = g.prompt(CASE)
    context = len(prompt) if context is None else context
    with Pusher(node.address) as pusher:
        pusher.reserve(prompt, context_length=context, max_new_tokens=max_new_tokens)
        for layer in range(LAYERS):
            pusher.write_latent_layer(
                layer, *(g.file[f"case{CASE}.{p}.{layer}"][:context] for p in ("latent", "rope", "index")))
        return pusher.commit(first_tokens=tokens, hints=hints)


def set_failpoints(node, *terms):
    node.admin.SetFailpoints(admin_pb2.SetFailpointsRequest(terms=";".join(terms), clear=True), timeout=TIMEOUT_S)


@pytest.fixture
def lab(served, golden):
    """A node of policy ess at rest, its answer, and how to start a stream of it. Nothing is left behind."""
    node, g = served(SCARCE), golden(NAME)
    set_failpoints(node)
    at_rest = node.settled()
    hints = hints_of(LAYERS, 200)  # without hints the last rows are computed again, which warms the pool

    def begin():
        transfer = handed_over(node, g, max_new_tokens=LONG, hints=hints)
        return Stream(node, sampling=greedy(max_tokens=LONG, ignore_eos=True), transfer_id=transfer)

    expected = begin().end().ids
    assert len(expected) == LONG
    node.wait_until_held(at_rest)
    yield node, begin, expected
    set_failpoints(node)
    again = begin().end()
    assert again.error is None and again.ids == expected
    node.wait_until_held(at_rest)


def assert_transfer_failed(stream, expected):
    assert stream.error is not None and stream.error.code() is grpc.StatusCode.INTERNAL, stream.error
    assert rpc.reason_of(stream.error) == "TRANSFER_FAILED"
    assert stream.ids == expected[:len(stream.ids)]


def failed_transfers(node):
    return Scrape(node).get("sluice_requests_total", outcome="error", reason="TRANSFER_FAILED")


def test_a_warm_up_that_is_lost_ends_its_sequence_alone(lab):
    node, begin, expected = lab
    before = failed_transfers(node)
    set_failpoints(node, PACE)
    running = begin()
    running.wait_for_tokens(2)
    set_failpoints(node, PACE, "attention.warm_up=error*1")
    hit = begin().end()
    assert_transfer_failed(hit, expected)
    assert len(hit.ids) <= 1  # the prompt's last row chooses the first token before the warm-up
    assert begin().end().ids == expected  # the next stream runs beside it
    running.end()
    assert running.error is None and running.ids == expected
    assert failed_transfers(node) == before + 1


def test_a_gather_that_is_lost_ends_its_sequence_alone(lab):
    node, begin, expected = lab
    before = failed_transfers(node)
    set_failpoints(node, PACE)
    streams = [begin() for _ in range(3)]
    for stream in streams:
        stream.wait_for_tokens(2)
    set_failpoints(node, PACE, "attention.gather=error*1")
    for stream in streams:
        stream.end()
    hit = [stream for stream in streams if stream.error is not None]
    assert len(hit) == 1
    assert_transfer_failed(hit[0], expected)
    assert len(hit[0].ids) < LONG
    assert all(stream.ids == expected for stream in streams if stream not in hit)
    assert failed_transfers(node) == before + 1


def test_a_late_warm_up_keeps_nobody_else_waiting(lab):
    node, begin, expected = lab
    set_failpoints(node, "engine.step=delay(20ms)")
    running = begin()
    running.wait_for_tokens(2)
    set_failpoints(node, "engine.step=delay(20ms)", "attention.warm_up=delay(1s)*1")
    begun, tokens = time.monotonic(), len(running.ids)
    late = begin()
    while time.monotonic() < begun + 0.8:  # its lists are not made yet, so it has only the prompt's token
        assert len(late.ids) <= 1 and late.error is None
        time.sleep(0.02)
    assert len(running.ids) > tokens + 4, "the step loop stood still"
    for stream in (late, running):
        stream.end()
        assert stream.error is None and stream.ids == expected


def test_metrics_say_what_was_selected_and_missed(lab):
    node, begin, _ = lab
    for _ in range(4):  # the counters are read every 32 steps
        begin().end()
    node.settled()
    scrape = Scrape(node)
    rows = scrape.get("sluice_selecting_rows_total")
    assert rows >= 32
    for layer in range(LAYERS):
        selected, missed, fetched = (scrape.get(f"sluice_{what}_tokens_total", layer=str(layer))
                                     for what in ("selected", "missed", "fetched"))
        # Each row selects 64 entries, except the row of the node's canary, which has two tokens.
        assert selected == 64 * (rows - 1) + 2 and 0 < missed < selected and fetched == missed
    assert scrape.get("sluice_link_bytes_total") > 656 * rows * LAYERS
    assert scrape.get("sluice_resident_places") == 0
    set_failpoints(node, PACE)
    running = begin()
    running.wait_for_tokens(2)
    assert Scrape(node).get("sluice_resident_places") == 96
    running.end()


@pytest.mark.parametrize("hinted", [False, True], ids=["bare", "hinted"])
@pytest.mark.parametrize("context", [1, 31, 32, 33, 100, 167, 168, 169, 199, 200])
def test_a_part_of_a_cache_goes_on_as_all_of_it_does(served, golden, context, hinted):
    """Tokens that were not handed over are computed as rows of the prompt; the first decode row is the same."""
    g = golden(NAME)
    hints = hints_of(LAYERS, context, positions=min(32, context)) if hinted else None
    answers = []
    for policy in (FULL, SCARCE, SPARE):
        node = served(policy)
        at_rest = node.settled()
        ids, finish = decoded(node, transfer_id=handed_over(node, g, context, hints=hints))
        assert len(ids) == 24 and finish.usage.cached_tokens == context
        answers.append(ids)
        node.wait_until_held(at_rest)
    assert_same(answers[1], answers[0])
    assert_same(answers[2], answers[0])


@pytest.mark.parametrize("context", [33, 199, 200])
def test_a_part_of_a_cache_with_tokens_that_follow_it(served, golden, context):
    """Three tokens behind the prompt are pending: they become decode rows, behind the prompt's rows."""
    g, hints = golden(NAME), hints_of(LAYERS, context, positions=20)
    answers = []
    for policy in (FULL, SCARCE, SPARE):
        node = served(policy)
        transfer = handed_over(node, g, context, hints=hints, tokens=g.tokens(CASE)[:3])
        answers.append(decoded(node, transfer_id=transfer)[0])
    assert answers[0][:3] == g.tokens(CASE)[:3] and len(answers[0]) == 24
    assert_same(answers[1], answers[0])
    assert_same(answers[2], answers[0])


def repeated(hints, times):
    for entry in list(hints.entries)[:8]:
        for _ in range(times):
            hints.entries.add().CopyFrom(entry)
    return hints


@pytest.mark.parametrize("name, hints", [
    ("none at all", ingest_pb2.Hints(unit_tokens=1)),
    ("entries without units", ingest_pb2.Hints(unit_tokens=1, entries=[{"layer": n} for n in (2, 0, 1, 0)])),
    ("one layer only", ingest_pb2.Hints(unit_tokens=1, entries=[{"layer": 1, "position": 199, "units": [3, 5]}])),
    ("the same entries again and again", repeated(hints_of(LAYERS, 200), 50)),
    ("the newest position first", ingest_pb2.Hints(unit_tokens=1, entries=list(hints_of(LAYERS, 200).entries)[::-1])),
    ("positions of long ago", hints_of(LAYERS, 40)),
    ("blocks in place of tokens", ingest_pb2.Hints(unit_tokens=32, entries=[{"layer": 0, "units": [6]}])),
], ids=lambda v: v if isinstance(v, str) else "")
def test_odd_hints_change_no_token(served, golden, name, hints):
    g = golden(NAME)
    expected, _ = decoded(served(FULL), transfer_id=handed_over(served(FULL), g))
    for policy in (SCARCE, SPARE):
        node = served(policy)
        assert_same(decoded(node, transfer_id=handed_over(node, g, hints=hints))[0], expected)


def too_many_units(node):
    return ingest_pb2.Hints(unit_tokens=1, entries=[{"layer": 0, "position": 199, "units": range(200)}])


def too_many_entries(node):
    return ingest_pb2.Hints(unit_tokens=1, entries=[{"layer": 0}] * (2**16 + 1))


@pytest.mark.parametrize("make, field", [(too_many_units, "hints.entries[0].units"), (too_many_entries, "hints")])
def test_too_many_hints_are_refused_and_cost_nothing(served, golden, make, field):
    node = served(SCARCE)  # which has KV slots for 95 of the hinted tokens
    before = node.settled()
    with pytest.raises(PushError, match="hints") as refused:
        handed_over(node, golden(NAME), hints=make(node))
    assert refused.value.rpc_error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert field in refused.value.rpc_error.details()
    node.wait_until_held(before)
    ids, _ = decoded(node, transfer_id=handed_over(node, golden(NAME)))
    assert len(ids) == 24
