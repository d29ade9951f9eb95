"""Servers under policies that keep sequences in the host KV cache."""

import json
import subprocess

import pytest
from support.nodes import (BIN, DEVICE, ENVIRONMENT, SLUICE, TIMEOUT_S, TINY, Node, matching_steps, run,
                           sluice_json)

POLICIES = ["scout", "recall", "hgca", "clo", "fluxion"]
# Tokens may differ where the golden margin is no more than this (test_parity.py, tests/parity/parity_support.h).
MARGIN = 0.15 if DEVICE == "cuda" else 0.1


@pytest.fixture(scope="module")
def servers(tiny_models, start):
    """(policy, model) -> a server whose budget covers every golden context."""
    made = {}

    def get(policy, name):
        if (policy, name) not in made:
            made[policy, name] = start(
                "sluice-server", tiny_models(name), "--policy", policy, "--budget-tokens", "1024", "--dense-layers", "1",
                "--max-context", "1024", "--max-sequences", "4", "--hbm-bytes", "64MiB", "--dram-bytes", "64MiB",
                "--policy-workers", "1", "--policy-worker-deadline-seconds", "60s", "--hgca-beta", "0",
                "--recall-margin", "1000")
        return made[policy, name]

    return get


@pytest.mark.parametrize("first_token", [False, True], ids=["recomputed", "handed-over"])
@pytest.mark.parametrize("case", [0, 1, 2])
@pytest.mark.parametrize("name", TINY)
def test_a_pushed_cache_continues_under_recall_as_in_transformers(servers, golden, name, case, first_token):
    g = golden(name)
    got = sluice_json("push", "--decode", servers("recall", name).address, "--kv", g.path, "--case", case,
                      *(["--first-token"] if first_token else []))
    matching_steps(got["output_ids"], g.tokens(case), g.margins(case), MARGIN)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_a_pushed_cache(servers, golden, policy):
    g = golden("tiny-qwen3")
    got = sluice_json("push", "--decode", servers(policy, "tiny-qwen3").address, "--kv", g.path, "--case", 1,
                      "--first-token")
    assert got["finish_reason"] == "length" and len(got["output_ids"]) == len(g.tokens(1))


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_that_never_preempts_refuses_overcommit(tiny_models, policy):
    done = run(BIN / "sluice-server", "--model", tiny_models("tiny-qwen3"), "--device", DEVICE, "--policy", policy,
               "--overcommit", "2", "--listen", "127.0.0.1:0", "--admin-listen", "")
    assert done.returncode == 1, done.stderr
    assert f"overcommit: expected 1 with policy {policy}" in done.stderr


def test_a_predictor_that_cannot_be_read_is_refused(tiny_models, tmp_path):
    damaged = tmp_path / "damaged.predictor"
    damaged.write_bytes(b"not a predictor")
    for path, why in (("/no/such/file", "there is no such file"), (damaged, "not a predictor")):
        done = run(BIN / "sluice-server", "--model", tiny_models("tiny-qwen3"), "--device", DEVICE, "--policy", "fluxion",
                   "--fluxion-predictor", path, "--listen", "127.0.0.1:0", "--admin-listen", "")
        assert done.returncode == 1, done.stderr
        assert f"fluxion_predictor: {path}" in done.stderr and why in done.stderr, done.stderr


def test_the_plan_has_every_policy(tiny_models):
    done = run(BIN / "sluice-server", "--model", tiny_models("tiny-qwen3"), "--device", DEVICE, "--policy", "scout",
               "--budget-tokens", "128", "--hgca-window-tokens", "64", "--print-plan")
    assert done.returncode == 0, done.stderr
    for policy in POLICIES:
        assert f"policy {policy}:" in done.stdout
    assert "refused:" not in done.stdout
    assert "what policy scout needs beside them" in done.stdout
    assert done.stdout.count("beside its sequences:") == len(POLICIES)


# What HBM holds of the two sequences that are asked for, and the policies that auto may take then.
@pytest.mark.parametrize("quality, hbm, taken", [
    ("exact", "64MiB", {"full"}), ("high", "64MiB", {"full"}), ("exact", "4MiB", {"full"}),
    ("high", "4MiB", {"full", "scout", "recall"}), ("fast", "4MiB", {"full", "scout", "recall", "hgca"})])
def test_auto_takes_a_policy_and_says_why(tiny_models, golden, tmp_path, quality, hbm, taken):
    flags = ["--policy", "auto", "--quality", quality, "--max-context", "512", "--max-sequences", "4",
             "--budget-tokens", "128", "--dense-layers", "1", "--hbm-bytes", hbm, "--dram-bytes", "32MiB",
             "--policy-workers", "1", "--policy-worker-deadline-seconds", "60s"]
    plan = run(BIN / "sluice-server", "--model", tiny_models("tiny-qwen3"), "--device", DEVICE, *flags, "--print-plan")
    assert plan.returncode == 0, plan.stderr
    assert f"policy auto, quality {quality}, 4 sequences of 512 tokens: " in plan.stdout
    checked = run(BIN / "sluice-server", "--model", tiny_models("tiny-qwen3"), "--device", DEVICE, *flags,
                  "--check-config")
    assert f"# policy auto, quality {quality}" in checked.stdout, checked.stdout

    node = Node("sluice-server", tiny_models("tiny-qwen3"), tmp_path, *flags)
    lines = [json.loads(line) for line in node.log.read_text().splitlines()]
    (chosen,) = [line for line in lines if line["message"] == "policy chosen"]
    assert chosen["policy"] in taken and chosen["quality"] == quality and chosen["why"], chosen
    considered = [line for line in lines if line["message"] == "policy considered"]
    assert considered[0]["policy"] == "full" and considered[0]["exact_tokens"] == 512, considered
    assert all(line["why"] for line in considered)
    (ready,) = [line for line in lines if line["message"] == "policy ready"]
    assert ready["policy"] == chosen["policy"]
    g = golden("tiny-qwen3")
    got = sluice_json("push", "--decode", node.address, "--kv", g.path, "--case", 1, "--first-token")
    assert got["finish_reason"] == "length" and len(got["output_ids"]) == len(g.tokens(1))
    assert node.stop() == 0


def test_a_quality_without_auto_is_refused(tiny_models):
    done = run(BIN / "sluice-server", "--model", tiny_models("tiny-qwen3"), "--quality", "high")
    assert done.returncode == 1 and "quality (--quality) is for policy auto" in done.stderr


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_serves_caches_pushed_at_once(servers, golden, policy):
    """Each sequence computes its prompt's last row beside the others' decode rows."""
    server = servers(policy, "tiny-qwen3")
    g = golden("tiny-qwen3")
    pushes = [subprocess.Popen([str(SLUICE), "push", "--decode", server.address, "--kv", str(g.path),
                                "--case", str(i % 3), "--json"], stdout=subprocess.PIPE, env=ENVIRONMENT)
              for i in range(4)]
    for i, push in enumerate(pushes):
        out, _ = push.communicate(timeout=TIMEOUT_S)
        assert push.returncode == 0
        assert len(json.loads(out)["output_ids"]) == len(g.tokens(i % 3))
