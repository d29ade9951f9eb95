"""Speculation of a running node: the same answers, counts in the end and in the metrics, and refusals at the start."""

import pytest
from sluice.v1 import decode_pb2
from support.metrics_text import Scrape, wait_for
from support.nodes import BIN, DEVICE, SCALE, TIMEOUT_S, greedy, run, sluice_json, tokens_of

FLAGS = ["--max-context", "512", "--hbm-bytes", "16MiB", "--dram-bytes", "16MiB", "--local-prefill", "always"]
NGRAM = ["--speculation", "ngram", "--speculation-tokens", "4", "--speculation-adaptive=false"]
# A model of random weights falls into a loop, which the drafter sees.
PROMPT = [7, 8, 9] * 12


def answer(node, **sampling):
    request = decode_pb2.GenerateRequest(prompt_token_ids=PROMPT,
                                         sampling=greedy(max_tokens=200, ignore_eos=True, logprobs=1, **sampling))
    tokens, finish = tokens_of(node.decode.Generate(request, timeout=TIMEOUT_S))
    return list(tokens), finish


def test_answers_are_the_same_and_drafts_are_counted(tiny_models, start):
    plain = start("sluice-server", tiny_models("tiny-llama"), *FLAGS)
    want, finish = answer(plain)
    assert finish.usage.drafted_tokens == finish.usage.accepted_tokens == 0
    plain.stop()
    node = start("sluice-server", tiny_models("tiny-llama"), *FLAGS, *NGRAM)
    got, finish = answer(node)
    assert got == want
    assert 0 < finish.usage.accepted_tokens <= finish.usage.drafted_tokens
    names = {"vllm:spec_decode_num_draft_tokens_total": finish.usage.drafted_tokens,
             "vllm:spec_decode_num_accepted_tokens_total": finish.usage.accepted_tokens}

    def counted(now):
        return {name: now.get(name) for name in names} == names

    assert counted(wait_for(node, counted, 5 * SCALE))
    positions = [Scrape(node).get("vllm:spec_decode_num_accepted_tokens_per_pos_total", position=str(i))
                 for i in range(4)]
    assert sum(positions) == finish.usage.accepted_tokens and positions == sorted(positions, reverse=True)
    assert '"speculation ready"' in node.log.read_text()


def test_answers_are_the_same_with_entries_in_two_tiers(tiny_models, start):
    # A pool has a place for three of five tokens, which is more than two rows select.
    flags = [*FLAGS, "--policy", "ess", "--ess-sparse-memory-ratio", "0.6", "--ess-least-places", "8"]
    plain = start("sluice-server", tiny_models("tiny-deepseek-v32"), *flags)
    want, _ = answer(plain)
    plain.stop()
    node = start("sluice-server", tiny_models("tiny-deepseek-v32"), *flags, "--speculation", "ngram",
                 "--speculation-tokens", "1")
    got, finish = answer(node)
    assert got == want
    assert 0 < finish.usage.drafted_tokens


def test_fetching_ahead_does_not_go_with_drafts(tiny_models):
    done = run(BIN / "sluice-server", "--model", tiny_models("tiny-deepseek-v32"), "--device", DEVICE, *FLAGS, *NGRAM,
               "--policy", "ess", "--ess-prefetch", "8")
    assert done.returncode != 0
    assert "ess_prefetch: 8 entries for the next step, but with drafts" in done.stderr


def test_a_next_token_layer_drafts_where_the_checkpoint_has_one(tiny_models, start):
    model = tiny_models("tiny-deepseek-mtp")
    plain = start("sluice-server", model, *FLAGS)
    want, _ = answer(plain)
    plain.stop()
    for speculation in ("mtp", "auto"):
        node = start("sluice-server", model, *FLAGS, "--speculation", speculation)
        got, finish = answer(node)
        assert got == want
        # The layer is made to be often right.
        assert finish.usage.accepted_tokens > 40
        assert '"drafter": "mtp"' in node.log.read_text() or '"drafter":"mtp"' in node.log.read_text()
        node.stop()


def test_a_prompt_that_was_handed_over_is_drafted_from_too(tiny_models, start):
    """The prompt's entries of the next-token layer are missing on the decode node, and so is the layer on the other."""
    model = tiny_models("tiny-deepseek-mtp")
    prefill = start("sluice-prefill", model, "--max-context", "512", "--hbm-bytes", "16MiB")
    ids = ",".join(map(str, PROMPT))
    answers = []
    for flags in ([], ["--speculation", "mtp", "--speculation-tokens", "2"]):
        node = start("sluice-server", model, *FLAGS, *flags)
        got = sluice_json("generate", "--prefill", prefill.address, "--decode", node.address, "--prompt-ids", ids,
                          "--max-tokens", 60)
        answers.append(got["output_ids"])
        if flags:
            assert Scrape(node).get("vllm:spec_decode_num_accepted_tokens_total") > 10
    assert answers[0] == answers[1] and len(answers[0]) == 60


def test_a_model_without_a_next_token_layer(tiny_models, start):
    done = run(BIN / "sluice-server", "--model", tiny_models("tiny-llama"), "--device", DEVICE, *FLAGS,
               "--speculation", "mtp")
    assert done.returncode != 0
    assert "speculation: mtp needs a model with a next-token layer" in done.stderr
    node = start("sluice-server", tiny_models("tiny-llama"), *FLAGS, "--speculation", "auto")
    _, finish = answer(node)
    assert finish.usage.drafted_tokens == 0


@pytest.mark.parametrize("policy", ["scout", "recall", "hgca", "clo", "fluxion"])
def test_a_policy_that_verifies_no_drafts_is_refused_by_name(tiny_models, policy):
    done = run(BIN / "sluice-server", "--model", tiny_models("tiny-llama"), "--device", DEVICE, *FLAGS, *NGRAM,
               "--policy", policy)
    assert done.returncode != 0
    assert f"speculation: expected none with policy {policy}" in done.stderr


def test_the_plan_counts_what_drafts_take(tiny_models):
    def batch(*flags):
        done = run(BIN / "sluice-server", "--model", tiny_models("tiny-llama"), "--device", DEVICE, *FLAGS,
                   "--print-plan", *flags)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert batch(*NGRAM) != batch()
