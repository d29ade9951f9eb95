"""A server under policy scout."""

import pytest
from support.nodes import DEVICE, matching_steps, sluice_json

# Tokens may differ where the golden margin is no more than this (test_parity.py, tests/parity/parity_support.h).
MARGIN = 0.15 if DEVICE == "cuda" else 0.1
NAME = "tiny-qwen3"


@pytest.fixture(scope="module")
def server(tiny_models, start):
    """A node whose budget and KV slots cover every golden context: the result is attention with the real queries
    alone.
    """
    return start("sluice-server", tiny_models(NAME), "--policy", "scout", "--budget-tokens", "1024",
                 "--dense-layers", "0", "--max-context", "1024", "--max-sequences", "4", "--hbm-bytes", "64MiB",
                 "--dram-bytes", "64MiB", "--policy-workers", "2", "--policy-worker-deadline-seconds", "60s")


@pytest.mark.parametrize("first_token", [False, True], ids=["recomputed", "handed-over"])
@pytest.mark.parametrize("case", [0, 1, 2])
def test_a_pushed_golden_cache_continues_as_in_transformers(server, golden, case, first_token):
    g = golden(NAME)
    got = sluice_json("push", "--decode", server.address, "--kv", g.path, "--case", case,
                      *(["--first-token"] if first_token else []))
    assert got["finish_reason"] == "length"
    matching_steps(got["output_ids"], g.tokens(case), g.margins(case), MARGIN)
