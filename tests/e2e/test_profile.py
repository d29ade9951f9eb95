"""sluice-profile as a program: its command line, its profiles, and a node that reads them."""

import json

import pytest
from support.nodes import BIN, SLUICE, run
from support.profiling import PROFILE, profile


def test_help_teaches():
    done = run(PROFILE, "--help")
    assert done.returncode == 0
    for words in ("--share-limit", "--skew", "Examples:", "--policy-profile"):
        assert words in done.stdout


@pytest.mark.parametrize("args, words", [
    ([], "--model"), (["--model", "m"], "--out"), (["--model", "m", "--out", "o", "--step", "3"], "--steps"),
    (["--model", "m", "--out", "o", "--no-intervals"], "--skew"),
    (["--model", "m", "--out", "o", "--share-limit", "2"], "--share-limit"),
    (["--model", "m", "--out", "o", "stray"], "stray"),
    (["--model", "m", "--out", "o", "--topic-drift", "--traffic", "t"], "--traffic"),
])
def test_a_bad_command_line_is_refused_by_name(args, words):
    done = run(PROFILE, *args)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1


def test_what_cannot_be_profiled_is_said_in_a_sentence(tiny_models, tmp_path):
    model, out = tiny_models("tiny-llama"), tmp_path / "p.json"
    assert "/no/such/model" in profile("/no/such/model", out, status=1)
    assert "/no/such/traffic" in profile(model, out, "--traffic", "/no/such/traffic", status=1)
    traffic = tmp_path / "traffic.jsonl"
    traffic.write_text("[1, 2]\n[1, 999999]\n")
    assert "traffic.jsonl:2" in profile(model, out, "--traffic", traffic, status=1)
    assert "--context" in profile(model, out, "--context", 100_000, status=1)
    assert "budget_tokens" in profile(model, out, "--budget-tokens", 8, status=1)
    assert not out.exists()
    assert "/no/such/dir" in profile(model, "/no/such/dir/p.json", "--skew", "--no-intervals", "--prompts", "1",
                                     "--context", "80", status=1)


def test_a_profile_has_intervals_that_keep_to_the_limit(tiny_models, tmp_path):
    out = tmp_path / "p.json"
    traffic = tmp_path / "traffic.txt"
    traffic.write_text("\n".join(" ".join(str(3 + (i * 7919 + p * 104729) % 500) for i in range(200 + 40 * p))
                                 for p in range(3)))
    text = profile(tiny_models("tiny-qwen3"), out, "--traffic", traffic, "--steps", "24", "--budget-tokens", "128",
                   "--dense-layers", "1", "--share-limit", "0.3")
    assert "mean" in text and str(out) in text
    made = json.loads(out.read_text())
    assert (made["format"], made["version"]) == ("sluice-policy-profile", 1)
    assert (made["block_tokens"], made["budget_tokens"], made["share_limit"]) == (32, 128, 0.3)
    assert made["layers"][0] == {"interval": 0, "shares": []}
    for layer in made["layers"][1:]:
        assert len(layer["shares"]) == 24 and 1 <= layer["interval"] <= 24
        assert all(0 <= share <= 1 for share in layer["shares"])
        assert layer["interval"] == 1 or max(layer["shares"][:layer["interval"]]) < 0.3
        if layer["interval"] < 24:
            assert max(layer["shares"][:layer["interval"] + 1]) >= 0.3
    assert any(share > 0 for layer in made["layers"] for share in layer["shares"])
    again = tmp_path / "again.json"
    profile(tiny_models("tiny-qwen3"), again, "--traffic", traffic, "--steps", "24", "--budget-tokens", "128",
            "--dense-layers", "1", "--share-limit", "0.3")
    assert again.read_text() == out.read_text()  # the profile has no times in it


def test_heads_of_clo_become_persistent_until_what_others_miss_is_hidden(tiny_models, tmp_path):
    out = tmp_path / "heads.json"
    traffic = tmp_path / "traffic.txt"
    traffic.write_text(" ".join(str(3 + i * 7919 % 500) for i in range(300)))
    flags = ("--traffic", traffic, "--clo", "--no-intervals")
    profile(tiny_models("tiny-qwen3"), out, *flags)
    clo = json.loads(out.read_text())["clo"]
    heads, kv_heads, order = len(clo["misses"]), clo["kv_heads"], clo["persistence_order"]
    assert heads == len(clo["similarities"]) and all(0 <= miss <= 1 for miss in clo["misses"])
    assert len(clo["label_similarities"]) == heads
    assert len(clo["predicted"]) == heads // kv_heads and all(-1 <= cosine <= 1 for cosine in clo["predicted"])
    assert clo["prefetchable"] == 0 and sorted(order) == list(range(heads))
    assert order[:kv_heads] == list(range(kv_heads))  # layer 0 first

    text = profile(tiny_models("tiny-qwen3"), out, *flags, "--clo-batch", "64", "--clo-context", "4096")
    assert "64 sequences of 4096 tokens" in text and "the link carries" in text
    timed = json.loads(out.read_text())["clo"]
    assert timed["prefetchable"] > 0
    chosen = timed["persistence_order"]
    assert chosen == order[:len(chosen)]
    for first in range(kv_heads, heads, kv_heads):
        others = [head for head in range(first, first + kv_heads) if head not in chosen]
        assert sum(timed["misses"][head] for head in others) <= timed["prefetchable"] + 1e-6


def test_a_node_serves_with_its_profile_and_refuses_another_ones(tiny_models, start, golden, tmp_path):
    model = tiny_models("tiny-llama")
    out = tmp_path / "p.json"
    shape = ["--budget-tokens", "128", "--dense-layers", "1"]
    profile(model, out, *shape, "--prompts", "2", "--context", "200", "--steps", "8", "--skew")
    memory = ["--hbm-bytes", "32MiB", "--dram-bytes", "32MiB", "--local-prefill", "always"]
    prompt = golden("tiny-llama").prompt(1)
    answers = {}
    for policy in ("scout", "recall", "full"):
        node = start("sluice-server", model, "--policy", policy, "--policy-profile", out, *shape, *memory,
                     "--policy-worker-deadline-seconds", "60s")
        done = run(SLUICE, "generate", "--decode", node.address, "--prompt-ids", ",".join(map(str, prompt)),
                   "--max-tokens", "8", "--temperature", "0", "--json")
        assert done.returncode == 0, done.stderr
        answers[policy] = json.loads(done.stdout)["output_ids"]
    # The whole prompt fits the budget.
    assert answers["scout"] == answers["recall"] == answers["full"]

    def refused(directory, *flags):
        done = run(BIN / "sluice-server", "--model", directory, "--listen", "127.0.0.1:0", "--admin-listen", "",
                   "--policy-profile", out, *memory, *flags)
        assert done.returncode == 1
        return done.stderr

    assert "fingerprint" in refused(tiny_models("tiny-qwen3"), "--policy", "scout", *shape)
    assert "budget_tokens" in refused(model, "--policy", "scout", "--budget-tokens", "256")
    (tmp_path / "p.json.projection").write_bytes(b"short")
    assert "p.json.projection" in refused(model, "--policy", "recall", *shape)
