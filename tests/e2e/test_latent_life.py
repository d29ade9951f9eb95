"""Sequences whose entries lie in DRAM are run at once, cancelled, late, drained, restarted and preempted."""

import contextlib
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from sluice.v1 import admin_pb2, decode_pb2, ingest_pb2
from sluice_client import rpc
from support.latent_lab import (AHEAD, EXACT, FAST, FULL, MARGIN, MEMORY, NAMES, PACKED, SCARCE, SPARE, answer,
                                assert_same, decoded, long_prompt, nodes, prefilled, pushed)  # noqa: F401
from support.metrics_text import Scrape
from support.nodes import BIN, DEVICE, SCALE, TIMEOUT_S, Pair, error_of, greedy, matching_steps, run, tokens_of

OFFLOADING = {"scarce": SCARCE, "spare": SPARE, "ahead": AHEAD}
LENGTHS = [1, 5, 33, 64, 65, 130, 200, 257, 300, 31, 90, 400]
# Tokens of a sequence that is long enough for something to happen to it.
LONG = 250


@pytest.fixture(scope="module")
def prefill(tiny_models, start):
    return start("sluice-prefill", tiny_models(NAMES[0]), *MEMORY[:2], "--max-context", "2048", *FAST)


@pytest.fixture(scope="module")
def servers(tiny_models, start):
    """servers(*flags) -> a shared decode node with packed caches."""
    made = {}

    def get(*flags):
        if flags not in made:
            made[flags] = start("sluice-server", tiny_models(NAMES[0]), *MEMORY, *FAST, *flags)
        return made[flags]

    return get


@pytest.fixture
def calm(servers):
    """calm(*flags) -> a decode node that must be left as it was found."""
    found = []

    def get(*flags):
        node = servers(*flags)
        found.append((node, node.settled()))
        return node

    yield get
    for node, before in found:
        node.wait_until_held(before)


def generating(node, transfer_id, max_tokens=LONG, timeout=TIMEOUT_S):
    """Returns a stream whose first token has come."""
    stream = node.decode.Generate(decode_pb2.GenerateRequest(
        transfer_id=transfer_id, sampling=greedy(max_tokens=max_tokens, ignore_eos=True)), timeout=timeout)
    next(stream)
    return stream


@pytest.mark.parametrize("policy", list(OFFLOADING))
def test_many_at_once_give_what_each_gives_alone(calm, prefill, policy):
    """There are more sequences than slots: some wait, with their caches in DRAM."""
    pair = Pair(calm(*OFFLOADING[policy]), prefill)
    prompts = [long_prompt(n) for n in LENGTHS]
    alone = [answer(pair, prompt, 40) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        together = list(pool.map(lambda prompt: answer(pair, prompt, 40), prompts))
    for length, a, b in zip(LENGTHS, alone, together):
        assert a == b, f"prompt of {length}"


@pytest.mark.parametrize("policy", list(OFFLOADING))
def test_whoever_leaves_takes_nobody_along(calm, prefill, policy):
    """A cancel, a deadline and a broken connection, beside a stream that goes on."""
    node = calm(*OFFLOADING[policy])
    pair = Pair(node, prefill)
    prompt = long_prompt(120)
    expected = answer(pair, prompt, LONG)
    stays = generating(node, prefilled(pair, prompt, LONG).transfer_id)
    leaving = [prefilled(pair, long_prompt(100 + n), LONG).transfer_id for n in range(3)]
    cancelled = generating(node, leaving[0])
    gone = generating(node, leaving[1])
    with pytest.raises(grpc.RpcError) as late:
        list(generating(node, leaving[2], timeout=0.05 * SCALE))
    assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    cancelled.cancel()
    del gone
    ids = [t.id for t in tokens_of(stays)[0]]
    assert ids == expected[len(expected) - len(ids):] and len(ids) >= LONG - 8
    # Other sequences have their KV slots now, and the slots hold nothing of the old ones.
    assert answer(pair, prompt, LONG) == expected


def test_a_sequence_that_ends_in_its_warm_up_gives_everything_back(calm, prefill):
    node = calm(*SCARCE)
    pair = Pair(node, prefill)
    expected = answer(pair, long_prompt(300), 8)
    for n in range(20):
        transfer = prefilled(pair, long_prompt(300), 8).transfer_id
        call = node.decode.Generate(decode_pb2.GenerateRequest(
            transfer_id=transfer, sampling=greedy(max_tokens=8, ignore_eos=True)), timeout=TIMEOUT_S)
        time.sleep(n * 0.0005)
        call.cancel()
        with contextlib.suppress(grpc.RpcError):  # if no Generate had it yet
            node.ingest.Abort(ingest_pb2.AbortRequest(transfer_id=transfer), timeout=TIMEOUT_S)
    node.settled()
    assert answer(pair, long_prompt(300), 8) == expected


@pytest.mark.parametrize("policy", ["scarce", "spare"])
def test_what_never_fits_and_what_does_not_fit_now_are_told_apart(tiny_models, start, prefill, policy):
    """HBM has room for two such sequences, DRAM for three."""
    node = start("sluice-server", tiny_models(NAMES[0]), *FAST, "--max-sequences", "2", "--max-context", "2048",
                 "--hbm-bytes", "4MiB", "--dram-bytes", "2900KiB", *OFFLOADING[policy])
    pair = Pair(node, prefill)
    before = node.settled()
    prompts = [long_prompt(n) for n in (250, 251, 252)]
    expected = [answer(pair, prompt, 50) for prompt in prompts]
    # A sequence that DRAM can never hold is refused by name, and nothing is taken.
    error = error_of(lambda: prefilled(pair, long_prompt(1100), 24))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, error
    assert "raise --dram-bytes" in error.details(), error
    node.wait_until_held(before)
    transfers = [prefilled(pair, prompt, 50).transfer_id for prompt in prompts]
    error = error_of(lambda: prefilled(pair, long_prompt(253), 50))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and rpc.reason_of(error) == "DRAM_FULL", error
    with ThreadPoolExecutor(3) as pool:
        got = list(pool.map(lambda t: decoded(node, 50, transfer_id=t)[0], transfers))
    assert got == expected
    node.wait_until_held(before)
    assert answer(pair, prompts[0], 50) == expected[0]


@pytest.mark.parametrize("policy", ["scarce", "ahead"])
def test_a_drained_node_finishes_and_comes_back_with_the_same_bits(servers, prefill, policy):
    node = servers(*OFFLOADING[policy])
    pair = Pair(node, prefill)
    prompt = long_prompt(150)
    expected = answer(pair, prompt, LONG)
    stream = generating(node, prefilled(pair, prompt, LONG).transfer_id)
    node.admin.Drain(admin_pb2.DrainRequest(), timeout=TIMEOUT_S)
    assert node.http("/readyz")[0] != 200
    error = error_of(lambda: prefilled(pair, prompt))
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    ids = [t.id for t in tokens_of(stream)[0]]
    assert ids == expected[len(expected) - len(ids):]
    node.admin.Resume(admin_pb2.ResumeRequest(), timeout=TIMEOUT_S)
    assert answer(pair, prompt, LONG) == expected


def test_a_node_that_is_told_to_end_finishes_and_its_successor_gives_the_same_bits(tiny_models, start, prefill):
    prompt, flags = long_prompt(150), [*MEMORY, *FAST, *SCARCE]
    first = start("sluice-server", tiny_models(NAMES[0]), *flags)
    expected = answer(Pair(first, prefill), prompt, LONG)
    stream = generating(first, prefilled(Pair(first, prefill), prompt, LONG).transfer_id)
    first.process.terminate()
    ids = [t.id for t in tokens_of(stream)[0]]
    assert ids == expected[len(expected) - len(ids):]
    assert first.process.wait(TIMEOUT_S) == 0
    second = start("sluice-server", tiny_models(NAMES[0]), *flags)
    assert answer(Pair(second, prefill), prompt, LONG) == expected


@pytest.fixture(scope="module")
def of_policy_full(nodes, golden):
    """(prompts, their tokens, the tokens of a pushed cache) of a node of policy full, and the prefill node."""
    full, prefill = nodes("sluice-server", NAMES[0], *PACKED, *FULL), nodes("sluice-prefill", NAMES[0], *PACKED)
    prompts = [long_prompt(n) for n in (40, 100, 150)]
    expected = [answer(Pair(full, prefill), prompt, 20) for prompt in prompts]
    return prompts, expected, decoded(full, transfer_id=pushed(full, golden(NAMES[0]), 2))[0], prefill


@pytest.mark.parametrize("flags", [
    ["--ess-overlap", "none"], ["--ess-overlap", "da"], ["--ess-overlap", "dba"], ["--no-ess-warm-up"],
    ["--recompute-last", "on"], ["--recompute-last", "off"], ["--ess-transfer-workers", "1"],
    ["--ess-sparse-memory-ratio", "1"],
], ids=" ".join)
def test_no_setting_changes_a_token(nodes, golden, of_policy_full, flags):
    """Compares with hints, and with recorded caches without hints, which are good as they came whatever is computed
    again.
    """
    ratio = [] if flags[0] == SCARCE[2] else SCARCE[2:4]
    node = nodes("sluice-server", NAMES[0], *PACKED, *SCARCE[:2], *ratio, *SCARCE[4:], *flags)
    prompts, expected, expected_pushed, prefill = of_policy_full
    with ThreadPoolExecutor(len(prompts)) as pool:
        got = list(pool.map(lambda prompt: answer(Pair(node, prefill), prompt, 20), prompts))
    for a, b in zip(got, expected):
        assert_same(a, b)
    assert_same(decoded(node, transfer_id=pushed(node, golden(NAMES[0]), 2))[0], expected_pushed)


@pytest.mark.parametrize("policy", ["full", *OFFLOADING])
def test_a_node_computes_prompts_itself(nodes, golden, policy):
    flags = [*{"full": FULL, **OFFLOADING}[policy], "--local-prefill", "always", "--chunk-tokens", "48"]
    g, node = golden(NAMES[0]), nodes("sluice-server", NAMES[0], *EXACT, *flags)
    for case in (0, 1, 2) if DEVICE == "cpu" else (0, 1):
        ids = decoded(node, prompt_token_ids=g.prompt(case))[0]
        matching_steps(ids, g.tokens(case), g.margins(case), MARGIN)
    # The prompt is computed beside sequences that decode.
    node = nodes("sluice-server", NAMES[0], *FAST, *flags)
    prompts = [long_prompt(n) for n in (300, 20, 170, 64)]
    alone = [decoded(node, 40, prompt_token_ids=prompt)[0] for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(lambda prompt: decoded(node, 40, prompt_token_ids=prompt)[0], prompts)) == alone


def test_overcommit_is_refused_where_nothing_is_preempted(tiny_models):
    done = run(BIN / "sluice-server", "--model", tiny_models(NAMES[0]), "--device", DEVICE, *MEMORY, "--policy", "ess",
               "--overcommit", "2", "--listen", "127.0.0.1:0", "--admin-listen", "")
    assert done.returncode == 1 and "overcommit: expected 1 with policy ess" in done.stderr


def test_preempted_sequences_of_policy_full_go_on_with_the_same_bits(tiny_models, start, prefill):
    """All kinds of caches leave HBM and come back."""
    node = start("sluice-server", tiny_models(NAMES[0]), *FAST, *FULL, "--max-sequences", "4", "--max-context", "1024",
                 "--hbm-bytes", "3MiB", "--dram-bytes", "64MiB", "--overcommit", "4")
    pair = Pair(node, prefill)
    prompts = [long_prompt(n) for n in (60, 61, 62, 63)]
    expected = [answer(pair, prompt, 400) for prompt in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(lambda prompt: answer(pair, prompt, 400), prompts)) == expected
    assert Scrape(node).get("sluice_preemptions_total") > 0


@pytest.mark.parametrize("flags, words", [
    (["--hbm-bytes", "900KiB"], "hbm_bytes: too few for one sequence with policy ess"),
    (["--hbm-bytes", "60KiB"], "hbm_bytes: 61440 bytes are too few"),
    (["--dram-bytes", "60KiB"], "dram_bytes: 61440 bytes are too few"),
    (["--ess-sparse-memory-ratio", "1.5"], "ess_sparse_memory_ratio (--ess-sparse-memory-ratio) must be a number"),
    (["--ess-prefetch", "999"], "ess_prefetch: expected 0 (none) to the"),
    (["--ess-overlap", "both"], "ess_overlap (--ess-overlap) must be one of none, da, dba, layer-wise"),
    (["--policy-profile", "/no/such/file"], "policy_profile: /no/such/file: No such file"),
], ids=lambda v: v[1] if isinstance(v, list) else "")
def test_what_ess_cannot_have_is_refused_by_its_setting(tiny_models, flags, words):
    memory = {"--hbm-bytes": "64MiB", "--dram-bytes": "64MiB", flags[0]: flags[1]}
    done = run(BIN / "sluice-server", "--model", tiny_models(NAMES[0]), "--device", DEVICE, *FAST, "--max-context",
               "1024", *(word for flag in memory.items() for word in flag), "--policy", "ess", "--listen", "127.0.0.1:0",
               "--admin-listen", "")
    assert done.returncode == 1 and words in done.stderr, done.stderr


def test_load_of_random_caches_is_served(calm):
    """sluice-bench serve draws random caches. The packed form has values that are not numbers, which must not be
    drawn.
    """
    node = calm(*SCARCE)
    done = run(BIN / "sluice-bench", "serve", "--decode", node.address, "--requests", "12", "--concurrency", "4",
               "--prompt", "200", "--output", "12")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "12 done, 0 refused, 0 failed" in done.stdout
