"""sluice-profile of a latent model: misses, stage times, and the schedules that policy ess derives from them."""

import json

import pytest
from sluice.v1 import decode_pb2
from support.latent_lab import EXACT
from support.metrics_text import Scrape
from support.nodes import BIN, DEVICE, ROOT, TIMEOUT_S, greedy, run, tokens_of
from support.profiling import profile

LATENT = ["--contexts", "120,300", "--batches", "1,3", "--ratios", "0.3,1", "--least-places", "0", "--steps", "16",
          "--prompts", "2", "--device", DEVICE]


def test_misses_and_stage_times_of_a_latent_model(tiny_models, tmp_path):
    out = tmp_path / "p.json"
    text = profile(tiny_models("tiny-deepseek-v32-fp8"), out, *LATENT)
    assert "attention" in text and "GB/s" in text and str(out) in text
    made = json.loads(out.read_text())
    assert [(p["context"], p["batch"]) for p in made["misses"]] == [
        (context, batch) for context in (120, 300) for _ in range(2) for batch in (1, 3)]
    for point in made["misses"]:
        assert len(point["by_layer"]) == 3 and 0 < point["ratio"] <= 1
        if point["ratio"] == 1:  # all entries have KV slots, and only new ones are fetched
            assert max(point["by_layer"]) < 3
        else:
            assert min(point["by_layer"]) > 3
    stages = made["stages"]
    assert stages["device"] == DEVICE and stages["branch_us"] >= 0
    for stage in ("transfer", "prepare", "attend", "index", "admit"):
        assert stages[stage]["fixed_us"] + stages[stage]["each_us"] > 0


def test_topic_drift_has_as_many_paths_as_the_model_has_room_for(tmp_path):
    model = ROOT / "configs" / "models" / "topic-drift-indexer-small"
    drifts = ["--dummy", "--topic-drift", "--contexts", "512", "--batches", "1", "--ratios", "0.3,0.6",
              "--least-places", "160", "--steps", "8", "--prompts", "1", "--device", DEVICE]
    out = tmp_path / "p.json"
    assert "8 paths need a hidden_size" in profile(model, out, *drifts, status=1)
    profile(model, out, *drifts, "--paths", "4")
    few, many = json.loads(out.read_text())["misses"]
    assert few["ratio"] < many["ratio"] < 1 and sum(few["by_layer"]) > sum(many["by_layer"])
    assert len({round(misses, 3) for misses in few["by_layer"]}) == 4, "layers drift at paces of their own"


@pytest.mark.parametrize("flags, words", [
    (["--ratios", "0"], "--ratios"), (["--ratios", "0.2,2"], "--ratios"), (["--skew"], "--skew"),
    (["--no-intervals", "--skew"], "--skew"), (["--hbm-bytes", "many"], "--hbm-bytes"),
    (["--contexts", "100000"], "--contexts"),
])
def test_what_a_latent_model_cannot_be_asked_for(tiny_models, tmp_path, flags, words):
    out = tmp_path / "p.json"
    assert words in profile(tiny_models("tiny-deepseek-v32"), out, *flags, status=1)
    assert not out.exists()


# KV slots for 512 entries, more than the sequences of those tests have.
SERVED = ["--kv-dtype", "fp8", "--policy", "ess", "--ess-sparse-memory-ratio", "0.01", "--ess-least-places", "512",
          "--max-context", "1024", "--max-sequences", "16", "--hbm-bytes", "64MiB", "--dram-bytes", "64MiB"]


@pytest.fixture
def expecting(tiny_models, tmp_path):
    """expecting(by_layer, **changed) -> the file of a real profile with other misses and stage times."""
    def make(by_layer, **changed):
        out = tmp_path / "p.json"
        profile(tiny_models("tiny-deepseek-v32"), out, *LATENT)
        made = json.loads(out.read_text())
        made["misses"] = [{"context": 1000, "ratio": 0.5, "batch": 16, "by_layer": by_layer, **changed}]
        line = {"fixed_us": 1, "each_us": 0}
        made["stages"] = {"device": DEVICE, "transfer": {"fixed_us": 0, "each_us": 0.1}, "prepare": line,
                          "attend": {"fixed_us": 50, "each_us": 0}, "index": line, "admit": line, "branch_us": 10}
        out.write_text(json.dumps(made))
        return out

    return make


def twelve_at_once(node):
    """Returns the tokens of so many prompts."""
    calls = [node.decode.Generate(decode_pb2.GenerateRequest(
        prompt_token_ids=[2 + (i * 7 + c) % 500 for i in range(40)],
        sampling=greedy(max_tokens=400, ignore_eos=True)), timeout=TIMEOUT_S) for c in range(12)]
    return [[token.id for token in tokens_of(call)[0]] for call in calls]


def test_ess_takes_its_schedules_from_its_profile_and_then_from_what_it_sees(tiny_models, start, expecting):
    """The profile says that layer 0 misses nothing and layer 2 much, while in truth every entry has a KV slot."""
    model = tiny_models("tiny-deepseek-v32")
    flags = [*SERVED, "--policy-profile", expecting([0, 40, 60])]
    plan = run(BIN / "sluice-server", "--model", model, "--device", DEVICE, *flags, "--print-plan")
    assert plan.returncode == 0, plan.stderr
    assert "none 0, da 1-2 with max_sequences" in plan.stdout
    node = start("sluice-server", model, *flags, "--local-prefill", "always")
    got = twelve_at_once(node)
    assert all(len(ids) == 400 for ids in got)
    # The node looks at what it sees every so many steps. Once, on a busy machine, one round brought no change yet.
    for _ in range(5):
        found = Scrape(node)
        if found.get("sluice_ess_schedule_changes_total") >= 1:
            break
        twelve_at_once(node)
    assert found.get("sluice_ess_schedule_changes_total") >= 1
    assert found.get("sluice_ess_schedule_layers") == 3
    log = node.log.read_text()
    assert "new overlap schedules" in log
    # A GPU records its steps, and records them anew for another schedule. Neither changes a bit.
    assert ("a step was recorded again" in log) == (DEVICE == "cuda")
    plain = start("sluice-server", model, *SERVED, "--ess-overlap", "none", "--local-prefill", "always")
    assert twelve_at_once(plain) == got
    assert Scrape(plain).get("sluice_ess_schedule_changes_total") == 0


@pytest.mark.parametrize("by_layer, changed, words", [
    ([0, 40], {}, ["misses of 2 layers", "sluice-profile"]),
    ([0, 40, 60], {"ratio": "much"}, ["misses[0]: ratio"]),
])
def test_a_profile_that_is_wrong_is_refused_at_start(tiny_models, expecting, by_layer, changed, words):
    done = run(BIN / "sluice-server", "--model", tiny_models("tiny-deepseek-v32"), "--device", DEVICE, *SERVED,
               "--policy-profile", expecting(by_layer, **changed), "--listen", "127.0.0.1:0", "--admin-listen", "")
    assert done.returncode == 1 and all(text in done.stderr for text in words), done.stderr


# Pools are smaller than a sequence, so that there is something to divide.
DIVIDED = [*EXACT, "--policy", "ess", "--ess-least-places", "96", "--max-context", "1024",
           "--max-sequences", "4", "--hbm-bytes", "64MiB", "--dram-bytes", "64MiB"]


@pytest.fixture(scope="module")
def curves(tiny_models, tmp_path_factory):
    """curves(*ratios) -> the file of a real profile in which layer 2 alone gains from more KV slots."""
    real = tmp_path_factory.mktemp("curves") / "p.json"
    profile(tiny_models("tiny-deepseek-v32"), real, *LATENT)

    def make(*ratios):
        made = json.loads(real.read_text())
        made["misses"] = [{"context": 1000, "ratio": ratio, "batch": 4, "by_layer": [3, 3, 60 * (1 - ratio)]}
                          for ratio in ratios]
        out = real.with_name(f"{'-'.join(map(str, ratios))}.json")
        out.write_text(json.dumps(made))
        return out

    return make


def test_places_divided_by_a_profile_serve_the_same_tokens(tiny_models, start, curves):
    model = tiny_models("tiny-deepseek-v32")
    flags = [*DIVIDED, "--ess-sparse-memory-ratio", "0.3", "--policy-profile", curves(0.1, 0.9)]
    plan = run(BIN / "sluice-server", "--model", model, "--device", DEVICE, *flags, "--print-plan")
    assert plan.returncode == 0 and "beneath the fetching, by layer" in plan.stdout, plan.stdout + plan.stderr
    node = start("sluice-server", model, *flags, "--local-prefill", "always")
    log = node.log.read_text()
    assert "KV slots are divided among layers by the profile" in log
    even = start("sluice-server", model, "--local-prefill", "always", *flags, "--ess-divide-places", "off")
    assert "KV slots are divided" not in even.log.read_text()
    asked = {"prompt_token_ids": [2 + i * 7 % 500 for i in range(300)],
             "sampling": greedy(max_tokens=40, ignore_eos=True)}
    answers = [[token.id for token in tokens_of(of.decode.Generate(
        decode_pb2.GenerateRequest(**asked), timeout=TIMEOUT_S))[0]] for of in (node, even)]
    assert [len(ids) for ids in answers] == [40, 40]
    # Pools of other sizes give other lists, whose sums differ only by rounding; rounding to bf16 on a GPU may turn a
    # tie.
    assert DEVICE != "cpu" or answers[0] == answers[1]


def test_where_there_is_nothing_to_divide_the_log_says_so(tiny_models, start, curves):
    node = start("sluice-server", tiny_models("tiny-deepseek-v32"), *DIVIDED, "--ess-sparse-memory-ratio", "0.3",
                 "--policy-profile", curves(0.4, 0.9))
    log = node.log.read_text()
    assert "KV slots are not divided among layers" in log and "ess_divide_places" in log


@pytest.mark.parametrize("ratios, flags, words", [
    ((0.1, 0.9), [], "ess_sparse_memory_ratio 0 (auto)"),
    ((0.1, 1), ["--ess-sparse-memory-ratio", "0.3"], "found 1: measure them with sluice-profile --ratios A,B,..."),
    ((), ["--ess-sparse-memory-ratio", "0.3"], "found 0: measure them with sluice-profile --ratios A,B,..."),
])
def test_places_that_cannot_be_divided_are_refused_at_start(tiny_models, curves, ratios, flags, words):
    known = ["--policy-profile", curves(*ratios)] if ratios else []
    done = run(BIN / "sluice-server", "--model", tiny_models("tiny-deepseek-v32"), "--device", DEVICE, *DIVIDED, *flags,
               *known, "--ess-divide-places", "on", "--listen", "127.0.0.1:0", "--admin-listen", "")
    assert done.returncode == 1 and "ess_divide_places: " in done.stderr and words in done.stderr, done.stderr
