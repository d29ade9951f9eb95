"""Caches that come over a link (kv_transport nccl) to a node of several ranks of one host: rank 0's end of the link writes
to the memory of every rank.
"""

import functools
import threading

import grpc
import pytest
from sluice.v1 import prefill_pb2
from support.link_lab import DEADLINE_S, LINK, LINKS, MADE, PROMPT, LinkCounts, starting_apart, wait_until_made
from support.nodes import DEVICE, SCALE, TIMEOUT_S, error_of, greedy
from support.rank_lab import (EXACT, EXPERTS, FLUSH_S, PRECISION, count_gpus, generate, skip_without_gpus, starting_ranks)

Pulls = functools.partial(LinkCounts, calls="sluice_pull_link_reads_total", moved="sluice_pull_bytes_total")
Pushes = functools.partial(LinkCounts, calls="sluice_push_link_writes_total", moved="sluice_push_bytes_total")
# The bytes of a chunk, a block or little more, so that a prompt is many messages; over NCCL they have four chunks.
CHUNK_KIB = {"tiny-llama": 8, EXPERTS: 40} if DEVICE == "cuda" else {"tiny-llama": 16, EXPERTS: 80}
# Two ranks have a KV head of tiny-llama each; four have each of the two on two ranks.
SIZES = [("tiny-llama", 2), ("tiny-llama", 4), (EXPERTS, 2)]


@pytest.fixture(name="ranks")
def _ranks(tiny_models, tmp_path):
    yield from starting_ranks(tiny_models, tmp_path, "shm")


def small(name):
    return ["--max-chunk-bytes", f"{CHUNK_KIB[name]}KiB", "--prefix-cache=false"]


@pytest.fixture(scope="module", name="prefill")
def _prefill(start, tiny_models):
    """prefill(name, *flags) -> a prefill node, on a GPU that rank 0 does not have where there are several."""
    def begin(name, *flags):
        where = {"env": {"CUDA_VISIBLE_DEVICES": str(count_gpus() - 1)}} if count_gpus() > 1 else {}
        begin_node = start if where else starting_apart(start)
        return begin_node("sluice-prefill", tiny_models(name), *PRECISION, "--hbm-bytes", "64MiB", *flags, **where)

    return begin


def push(prefill, node, prompt=PROMPT):
    """Returns the tokens behind a prompt that the prefill node pushes to the node."""
    done = prefill.prefill.Run(prefill_pb2.RunRequest(
        prompt_token_ids=prompt, sampling=greedy(max_tokens=600), decode_address=node.address), timeout=TIMEOUT_S)
    return generate(node, transfer_id=done.transfer_id)[0]


def pull(prefill, node, prompt=PROMPT):
    """Returns the tokens behind a prompt that the prefill node holds and the node reads."""
    held = prefill.prefill.Run(prefill_pb2.RunRequest(prompt_token_ids=prompt, sampling=greedy(max_tokens=1)),
                               timeout=TIMEOUT_S)
    return generate(node, source=held.source, prompt_token_ids=prompt)[0]


@pytest.mark.parametrize("name,size", SIZES)
def test_what_comes_over_a_link_is_where_each_rank_has_it(name, size, ranks, prefill, start, tiny_models):
    skip_without_gpus(size)
    node = ranks(name, size, *small(name), *LINKS).leader
    plain, linked = prefill(name), prefill(name, *LINKS)
    # Ranks of experts have sequences of their own; several prompts come to each.
    prompts = [[(i * 37 + n) % 250 + 3 for i in range(200)] for n in range(4 if name == EXPERTS else 1)]
    expected = [push(plain, node, prompt) for prompt in prompts]
    if DEVICE == "cpu":
        one = start("sluice-server", tiny_models(name), *EXACT, *small(name))
        assert expected == [push(plain, one, prompt) for prompt in prompts]
    pulls, pushes = Pulls(node), Pushes(linked)
    assert [push(linked, node, prompt) for prompt in prompts] == expected
    assert [pull(linked, node, prompt) for prompt in prompts] == expected
    for counts in (pulls, pushes):
        assert (counts["done"], counts["broken"], counts["refused"], counts["grpc"]) == (len(prompts), 0, 0, 0)
        assert counts[LINK] > 0
    assert node.log.read_text().count(MADE) == 2  # one each way


@pytest.mark.parametrize("name,size", SIZES)
def test_what_a_broken_link_left_comes_over_grpc(name, size, ranks, prefill):
    skip_without_gpus(size)
    node = ranks(name, size, *small(name), *LINKS).leader
    expected = push(prefill(name), node)
    breaks = ("--failpoints", "link.send=error*1@1")
    pulls, source = Pulls(node), prefill(name, *LINKS, *breaks)
    assert pull(source, node) == expected
    sender = prefill(name, *LINKS, *breaks)
    pushes = Pushes(sender)
    assert push(sender, node) == expected
    for counts in (pulls, pushes):
        assert counts["broken"] == 1 and counts["grpc"] > 0
    # The next ones make new links.
    assert pull(source, node) == expected and push(sender, node) == expected
    assert pulls["done"] == pushes["done"] == 1


@pytest.mark.parametrize("name", ["tiny-llama", EXPERTS])
def test_a_link_that_stands_still_holds_up_no_step_of_the_ranks(name, ranks, prefill):
    # The link is given up later than the ranks would give one another up.
    node = ranks(name, 2, *small(name), *LINKS).leader
    plain = prefill(name)
    expected = push(plain, node)
    slow = prefill(name, *LINKS, "--failpoints", f"link.send=delay({int(3000 * DEADLINE_S)}ms)*1@1")
    ids = []
    done = threading.Event()

    def decode():
        while not done.is_set():
            ids.append(push(plain, node))

    stream = threading.Thread(target=decode)
    stream.start()
    pulls = Pulls(node)
    try:
        assert pull(slow, node) == expected
    finally:
        done.set()
        stream.join()
    assert pulls["broken"] == 1 and pulls["grpc"] > 0
    assert len(ids) > 1 and all(found == expected for found in ids)


@pytest.mark.parametrize("name", ["tiny-llama", EXPERTS])
def test_a_rank_that_is_killed_while_a_link_writes_ends_the_node_and_no_other(name, ranks, prefill):
    node, other = ranks(name, 2, *small(name), *LINKS), ranks(name, 2, *small(name), *LINKS)
    sender = prefill(name, *LINKS, "--failpoints", f"link.send=delay({int(500 * SCALE)}ms)*1@1")
    errors = []
    call = threading.Thread(target=lambda: errors.append(error_of(lambda: push(sender, node.leader))))
    call.start()
    wait_until_made(sender)
    node.followers[0].kill()
    assert node.statuses(FLUSH_S)[0] == 1
    call.join()
    assert errors[0].code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED), errors
    # The prefill node goes on.
    assert push(sender, other.leader) == push(prefill(name), other.leader)
