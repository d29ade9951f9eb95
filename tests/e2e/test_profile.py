"""sluice-profile as a program: its command line, its profiles, and a node that reads them."""

import json

import pytest
from metrics_text import Scrape
from nodes import BIN, DEVICE, SLUICE, TIMEOUT_S, greedy, run, tokens_of
from sluice.v1 import decode_pb2

PROFILE = BIN / "sluice-profile"


def profile(model, out, *flags: str, status: int = 0) -> str:
    """Its standard output, or its error."""
    done = run(PROFILE, "--model", model, "--out", out, *flags, timeout=300)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stderr if status else done.stdout


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
    assert again.read_text() == out.read_text()  # what is measured is no time


def test_a_node_serves_with_its_profile_and_refuses_another_ones(tiny_models, start, golden, tmp_path):
    model = tiny_models("tiny-llama")
    out = tmp_path / "p.json"
    shape = ["--budget-tokens", "128", "--dense-layers", "1"]
    profile(model, out, *shape, "--prompts", "2", "--context", "200", "--steps", "8", "--skew")
    memory = ["--hbm-bytes", "32MiB", "--dram-bytes", "32MiB", "--local-prefill"]
    prompt = golden("tiny-llama").prompt(1)
    answers = {}
    for policy in ("scout", "recall", "full"):
        node = start("sluice-server", model, "--policy", policy, "--policy-profile", out, *shape, *memory,
                     "--policy-worker-deadline-seconds", "60s")
        done = run(SLUICE, "generate", "--decode", node.address, "--prompt-ids", ",".join(map(str, prompt)),
                   "--max-tokens", "8", "--temperature", "0", "--json")
        assert done.returncode == 0, done.stderr
        answers[policy] = json.loads(done.stdout)["output_ids"]
    # Everything fits the budget.
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


LATENT = ["--contexts", "120,300", "--batches", "1,3", "--ratios", "0.3,1", "--least-places", "0", "--steps", "16",
          "--prompts", "2", "--device", DEVICE]


def test_misses_and_stage_times_of_a_latent_model(tiny_models, tmp_path):
    out = tmp_path / "p.json"
    text = profile(tiny_models("tiny-deepseek-v32-fp8"), out, *LATENT)
    assert "Attn0" in text and "GB/s" in text and str(out) in text
    made = json.loads(out.read_text())
    assert [(p["context"], p["batch"]) for p in made["misses"]] == [
        (context, batch) for context in (120, 300) for _ in range(2) for batch in (1, 3)]
    for point in made["misses"]:
        assert len(point["by_layer"]) == 3 and 0 < point["ratio"] <= 1
        if point["ratio"] == 1:  # all have places, and only what was never there is fetched
            assert max(point["by_layer"]) < 3
        else:
            assert min(point["by_layer"]) > 3
    stages = made["stages"]
    assert stages["device"] == DEVICE and stages["branch_us"] >= 0
    for stage in ("transfer", "prepare", "attend", "index", "admit", "merge"):
        assert stages[stage]["fixed_us"] + stages[stage]["each_us"] > 0


@pytest.mark.parametrize("flags, words", [
    (["--ratios", "0"], "--ratios"), (["--ratios", "0.2,2"], "--ratios"), (["--skew"], "--skew"),
    (["--no-intervals", "--skew"], "--skew"), (["--hbm-bytes", "many"], "--hbm-bytes"),
    (["--contexts", "100000"], "--contexts"), (["--hbm-bytes", "400KiB"], "--hbm-bytes"), (["--dram-bytes", "400KiB"], "--dram-bytes"),
])
def test_what_a_latent_model_cannot_be_asked_for(tiny_models, tmp_path, flags, words):
    out = tmp_path / "p.json"
    assert words in profile(tiny_models("tiny-deepseek-v32"), out, *LATENT, *flags, status=1)
    assert not out.exists()


def test_other_models_have_no_misses(tiny_models, tmp_path):
    assert "latent" in profile(tiny_models("tiny-llama"), tmp_path / "p.json", "--device", "cuda", status=1)
    assert "latent" in profile(tiny_models("tiny-llama"), tmp_path / "p.json", "--topic-drift", status=1)


def test_ess_takes_its_schedules_from_its_profile_and_then_from_what_it_sees(tiny_models, start, tmp_path):
    """A profile that says layer 0 misses nothing and layer 2 much; in truth all that is there has a place."""
    model, out = tiny_models("tiny-deepseek-v32"), tmp_path / "p.json"
    profile(model, out, *LATENT)
    made = json.loads(out.read_text())
    made["misses"] = [{"context": 1000, "ratio": 0.5, "batch": 16, "by_layer": [0, 40, 60]}]
    line = {"fixed_us": 1, "each_us": 0}
    made["stages"] = {"device": DEVICE, "transfer": {"fixed_us": 0, "each_us": 0.1}, "prepare": line,
                      "attend": {"fixed_us": 50, "each_us": 0}, "index": line, "admit": line, "merge": line,
                      "branch_us": 3}
    out.write_text(json.dumps(made))
    flags = ["--kv-dtype", "fp8", "--policy", "ess", "--policy-profile", out,
             "--ess-sparse-memory-ratio", "0.01", "--ess-least-places", "512", "--max-context", "1024",
             "--max-sequences", "16", "--hbm-bytes", "64MiB", "--dram-bytes", "64MiB"]
    plan = run(BIN / "sluice-server", "--model", model, "--device", DEVICE, *flags, "--print-plan")
    assert plan.returncode == 0, plan.stderr
    assert "none 0, da 1-2 with max_sequences" in plan.stdout
    node = start("sluice-server", model, *flags, "--local-prefill")
    calls = [node.decode.Generate(decode_pb2.GenerateRequest(
        prompt_token_ids=[2 + (i * 7 + c) % 500 for i in range(40)],
        sampling=greedy(max_tokens=400, ignore_eos=True)), timeout=TIMEOUT_S) for c in range(12)]
    assert all(len(tokens_of(call)[0]) == 400 for call in calls)
    found = Scrape(node)
    assert found.get("sluice_ess_schedule_changes_total") >= 1
    assert found.get("sluice_ess_schedule_layers") == 3
    assert "other schedules" in node.log.read_text()

    made["misses"][0]["by_layer"].pop()
    out.write_text(json.dumps(made))
    done = run(BIN / "sluice-server", "--model", model, "--device", DEVICE, *flags, "--listen", "127.0.0.1:0", "--admin-listen", "")
    assert done.returncode == 1 and "misses of 2 layers" in done.stderr and "sluice-profile" in done.stderr
    made["misses"][0]["ratio"] = "much"
    out.write_text(json.dumps(made))
    done = run(BIN / "sluice-server", "--model", model, "--device", DEVICE, *flags, "--listen", "127.0.0.1:0", "--admin-listen", "")
    assert done.returncode == 1 and "misses[0]: ratio" in done.stderr
