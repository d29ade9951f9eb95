"""How far a policy is exact: in a request's end, in the metrics, in the plan and in the client's words."""

import pytest
from sluice.v1 import decode_pb2
from support.metrics_text import Scrape, wait_for
from support.nodes import BIN, DEVICE, SCALE, SLUICE, TIMEOUT_S, greedy, run, sluice_json, tokens_of

# budget_tokens and its ring of two blocks of 32; budget_tokens and one block; the window; as scout; budget_tokens and 384.
LIMITS = {"scout": 96 + 64, "recall": 96 + 32, "hgca": 96, "clo": 96 + 64, "fluxion": 96 + 384, "full": 512}
FLAGS = ["--budget-tokens", "96", "--hgca-window-tokens", "96", "--dense-layers", "1", "--block-tokens", "32",
         "--max-context", "512"]


@pytest.fixture(scope="module", params=LIMITS)
def served(request, tiny_models, start):
    node = start("sluice-server", tiny_models("tiny-llama"), "--policy", request.param, *FLAGS, "--hbm-bytes", "16MiB",
                 "--dram-bytes", "16MiB", "--policy-worker-deadline-seconds", "60s", "--local-prefill", "always")
    return node, LIMITS[request.param]


def test_the_end_and_the_metrics_say_how_many_tokens_are_exact(served):
    node, limit = served
    counter = "sluice_decoded_tokens_total"
    before = Scrape(node)
    assert before.get("sluice_exact_limit_tokens") == limit
    exact = approximate = 0
    for prompt, tokens in ((20, 16), (80, 60), (200, 12)):
        request = decode_pb2.GenerateRequest(prompt_token_ids=[3 + i % 90 for i in range(prompt)],
                                             sampling=greedy(max_tokens=tokens, ignore_eos=True))
        got, finish = tokens_of(node.decode.Generate(request, timeout=TIMEOUT_S))
        # The first token comes from a row of the prompt, which attends to everything.
        wanted = min(tokens, max(1, limit - prompt + 1))
        assert len(got) == tokens and finish.usage.exact_tokens == wanted
        exact += wanted
        approximate += tokens - wanted

    def grown(now):
        return [now.get(counter, exact=kind) - before.get(counter, exact=kind) for kind in ("true", "false")]

    after = wait_for(node, lambda now: grown(now) == [exact, approximate], 5 * SCALE)
    assert grown(after) == [exact, approximate]


def test_the_client_says_from_where_on_it_is_approximate(served):
    node, limit = served
    prompt = [3 + i % 90 for i in range(80)]
    flags = ["generate", "--decode", node.address, "--prompt-ids", ",".join(map(str, prompt)), "--max-tokens", "60",
             "--temperature", "0", "--ignore-eos"]
    exact = min(60, limit - 80 + 1)
    assert sluice_json(*flags)["exact_tokens"] == exact
    done = run(SLUICE, *flags)
    assert done.returncode == 0, done.stderr
    assert (f"exact for the first {exact}" in done.stderr) == (exact < 60)
    status = run(SLUICE, "status", "--decode", node.address)
    assert (f"exact up to {limit} tokens" in status.stdout) == (limit < 512)


def test_the_plan_says_up_to_how_many_tokens_each_policy_is_exact(tiny_models):
    done = run(BIN / "sluice-server", "--model", tiny_models("tiny-llama"), "--device", DEVICE, *FLAGS, "--print-plan")
    assert done.returncode == 0, done.stderr
    for policy in ("scout", "recall", "hgca"):
        lines = done.stdout.split(f"policy {policy}:")[1].split("\n\n")[0]
        assert f"exact: sequences of up to {LIMITS[policy]} tokens" in lines
