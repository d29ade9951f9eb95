"""The metrics of a policy on a node of several ranks: rank 0 shows those of all ranks, the others their own."""

import json
import time

import pytest
from sluice.v1 import decode_pb2
from support.metrics_text import Scrape
from support.nodes import SCALE, TIMEOUT_S, greedy, tokens_of
from support.rank_lab import EXACT, TRANSPORTS, AdminPort, starting_ranks

COMPUTES = ["--local-prefill", "always", "--prefix-cache=false"]
SCOUT = ["--dense-layers", "0", "--policy-workers", "2", "--policy", "scout", "--budget-tokens", "128"]
ESS = ["--policy", "ess", "--ess-sparse-memory-ratio", "0.01", "--ess-least-places", "96"]
# Each counter that is shown by rank has one for the node.
BY_RANK = {
    "sluice_rank_selecting_rows_total": "sluice_selecting_rows_total",
    "sluice_rank_missed_tokens_total": "sluice_missed_tokens_total",
    "sluice_rank_link_bytes_total": "sluice_link_bytes_total",
    "sluice_rank_worker_tokens_total": "sluice_attention_worker_tokens_total",
    "sluice_rank_worker_busy_seconds_total": "sluice_attention_worker_busy_seconds_total",
}


@pytest.fixture(name="ranks", params=TRANSPORTS)
def _ranks(request, tiny_models, tmp_path):
    yield from starting_ranks(tiny_models, tmp_path, request.param)


def generate(node):
    """Decodes sequences side by side, so that ranks that have sequences of their own each get some."""
    calls = [node.decode.Generate(decode_pb2.GenerateRequest(
        prompt_token_ids=[(7 * i * j + 3) % 500 for i in range(500 + 20 * j)],
        sampling=greedy(max_tokens=80, ignore_eos=True)), timeout=TIMEOUT_S) for j in range(1, 7)]
    return [[token.id for token in tokens_of(call)[0]] for call in calls]


def admin_port(made, rank):
    (line,) = [json.loads(line) for line in made.logs[rank - 1].read_text().splitlines() if '"following"' in line]
    return AdminPort(line["admin_listen"])


def settled_pages(made):
    """Returns the pages of all ranks once rank 0 shows what the others have counted, by rank."""
    followers = [admin_port(made, rank) for rank in range(1, len(made.logs) + 1)]
    made.leader.settled()
    deadline = time.monotonic() + 5 * SCALE
    while True:
        pages = [Scrape(port) for port in (made.leader, *followers)]
        known = all(pages[0].get(name, rank=str(rank)) == page.get(name)
                    for name in BY_RANK for rank, page in enumerate(pages[1:], start=1))
        if known or time.monotonic() > deadline:
            return pages
        time.sleep(0.05)


def check_sums(pages, own_rows):
    leader, others = pages[0], pages[1:]
    for by_rank, of_node in BY_RANK.items():
        parts = [leader.get(by_rank, rank=str(rank)) for rank in range(len(pages))]
        for rank, page in enumerate(others, start=1):
            # Another rank shows itself, and nobody else.
            assert page.get(by_rank, rank=str(rank)) == page.get(by_rank) == page.get(of_node) == parts[rank], by_rank
        total = max(parts) if by_rank == "sluice_rank_selecting_rows_total" and not own_rows else sum(parts)
        assert leader.get(of_node) == pytest.approx(total, rel=1e-9), by_rank
    return {name: [leader.get(name, rank=str(rank)) for rank in range(len(pages))] for name in BY_RANK}


def test_workers_of_all_ranks_are_counted(ranks, start, tiny_models):
    """Ranks with whole KV heads select what one device would, so all of them do what its workers do."""
    one = start("sluice-server", tiny_models("tiny-qwen3"), *EXACT, *COMPUTES, *SCOUT)
    made = ranks("tiny-qwen3", 2, *COMPUTES, *SCOUT)
    answers = generate(made.leader)
    assert answers == generate(one) and [len(answer) for answer in answers] == [80] * 6
    one.settled()
    alone, pages = Scrape(one), settled_pages(made)
    parts = check_sums(pages, own_rows=False)
    for name in ("sluice_rank_worker_tokens_total", "sluice_rank_worker_busy_seconds_total"):
        assert min(parts[name]) > 0, parts
    tokens = "sluice_attention_worker_tokens_total"
    assert pages[0].get(tokens) == alone.get(tokens) == alone.get("sluice_rank_worker_tokens_total", rank="0")
    workers = [page.get("sluice_attention_workers") for page in pages]
    assert workers[0] > workers[1] > 0


def test_ranks_of_experts_count_their_own_sequences(ranks):
    made = ranks("tiny-deepseek-v32", 2, *COMPUTES, *ESS)
    for _ in range(3):
        generate(made.leader)
    pages = settled_pages(made)
    parts = check_sums(pages, own_rows=True)
    for name in ("sluice_rank_selecting_rows_total", "sluice_rank_missed_tokens_total", "sluice_rank_link_bytes_total"):
        assert min(parts[name]) > 0, parts
    leader, other = pages
    rows = leader.get("sluice_selecting_rows_total")
    layers = {dict(labels)["layer"] for name, labels in leader.samples if name == "sluice_selected_tokens_total"}
    assert len(layers) > 1
    for layer in layers:
        # Each row selects 64 entries on its rank, except the row of the node's canary, which has two tokens.
        assert leader.get("sluice_selected_tokens_total", layer=layer) == 64 * (rows - 1) + 2
        assert leader.get("sluice_fetched_tokens_total", layer=layer) > \
            other.get("sluice_fetched_tokens_total", layer=layer) > 0
