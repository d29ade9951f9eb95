"""sluice-bench as a program: its command line, its reports, and load on a node with exact counts."""

import json
import re

import pytest
from support.nodes import BIN, FIXTURES, ROOT, run
from support.profiling import profile

BENCH = BIN / "sluice-bench"
FIGURE_KEYS = {"name", "unit", "better", "median", "p10", "p90", "samples", "more"}


def report_of(*args, status: int = 0, **kwargs) -> dict:
    """Returns the JSON report of a run that ends with this exit status."""
    done = run(BENCH, *args, "--json", **kwargs)
    assert done.returncode == status, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["schema"] == "sluice-bench/1" and report["subcommand"] == args[0]
    assert report["machine"]["cores"] >= 1 and report["revision"]
    names = [figure["name"] for figure in report["figures"]]
    assert len(names) == len(set(names))
    for figure in report["figures"]:
        assert set(figure) == FIGURE_KEYS
        assert figure["p10"] <= figure["p90"]
    return report


@pytest.mark.parametrize("command", [[], ["serve"], ["kernels"], ["step"], ["ranks"], ["policies"], ["simulate"],
                                     ["--compare"]])
def test_help_teaches(command):
    done = run(BENCH, *command, "--help")
    assert done.returncode == 0
    assert "sluice-bench" in done.stdout and "--json" in done.stdout
    if command:
        assert "Examples:" in done.stdout and "--help" in done.stdout


@pytest.mark.parametrize("args, words", [
    (["srve"], "serve"), (["serve", "--rat", "3"], "--rate"), (["serve", "--rate"], "--rate"),
    (["serve", "--concurrency", "-1"], "--concurrency"), (["serve", "--prompt", "lognormal:5"], "--prompt"),
    (["serve", "--rate", "1", "--concurrency", "2"], "rate and concurrency"),
    (["serve", "--requests", "1", "--seconds", "2"], "requests and seconds"),
    (["serve", "--phase", "name=a,rate=4x,seconds=1"], "first phase"),
    (["serve", "--phase", "name=a,rate=1,seconds=1", "--requests", "4"], "--phase"),
    (["serve", "stray"], "stray"), (["kernels", "--path", "abacus"], "--path"),
    (["kernels", "--only", "policies", "--context", "1024", "--budget", "1024"], "--budget"),
    (["step"], "--model"), (["step", "--model", "x", "--batches", "0"], "--batches"),
    (["step", "--model", "x", "--speculation-tokens", "9999"], "--speculation-tokens"),
    (["step", "--model", "x", "--speculation-tokens", "3", "--acceptance", "1.5"], "--acceptance"),
    (["ranks"], "--model"), (["ranks", "--model", "x", "--ranks", "0"], "--ranks"),
    (["ranks", "--model", "x", "--divide", "layers"], "--divide"),
    (["ranks", "--model", "x", "--batches", "9999"], "--batches"),
    (["ranks", "--model", "x", "--context", "1"], "--context"),
    (["ranks", "--model", "x", "--policies", "full,scot"], "scout"),
    (["ranks", "--model", "x", "--policies", "scout"], "full and ess"),
    (["ranks", "--model", "x", "--policies", "ess"], "--divide experts"),
    (["ranks", "--model", "x", "--misses", "-1"], "--misses"),
    (["ranks", "--model", "x", "--expert-overlap", "2"], "--expert-overlap"),
    (["ranks", "--model", "x", "--expert-dispatch", "fp4"], "--expert-dispatch"),
    (["ranks", "--model", "x", "--expert-dispatch", "fp8"], "--expert-dispatch"),
    (["ranks", "--model", "x", "--steps", "1"], "--steps"),
    (["ranks", "--model", "x", "--trace-steps", "-1"], "--trace-steps"),
    (["simulate"], "--operators"), (["simulate", "--operators", "x"], "--model"),
    (["simulate", "--operators", "x", "--model", "y"], "--batches"),
    (["simulate", "--operators", "x", "--model", "y", "--hbm-bytes", "1GiB"], "--dram-bytes"),
    (["simulate", "--operators", "x", "--model", "y", "--batches", "1", "--misses", "1:2"], "MEAN:LEAST:MOST"),
    (["simulate", "--policies", "full,full"], "once"), (["simulate", "--scale", "attention"], "NAME=NUMBER"),
    (["policies"], "--model"), (["policies", "--model", "x", "--policies", "full,scot"], "scout"),
    (["policies", "--model", "x", "--quality"], "--texts"),
    (["policies", "--model", "x", "--hbm-bytes", "lots"], "--hbm-bytes"),
    (["policies", "--model", "x", "--batches", "99"], "--max-batch"),
    (["policies", "--model", "x", "--statistics", "4"], "--topic-drift"),
    (["policies", "--model", "x", "--misses", "4"], "latent"),
    (["policies", "--model", "x", "--only-overlap"], "--only-overlap"),
    (["policies", "--model", "x", "--forecast-dram", "lots"], "--forecast-dram"),
    (["policies", "--model", "x", "--traffic", "mixd"], "mixed"),
    (["policies", "--model", "x", "--jump", "8"], "--topic-drift"),
    (["policies", "--model", "x", "--policies", "auto,full", "--traffic", "steady"], "auto"),
    (["--compare", "a.json"], "two reports"),
])
def test_a_bad_command_line_is_refused_by_name(args, words):
    done = run(BENCH, *args)
    assert done.returncode == 2 and words in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize("args, words", [
    (["serve", "--decode", "127.0.0.1:1"], "127.0.0.1:1"),
    (["step", "--model", "/no/such/model"], "/no/such/model"),
    (["ranks", "--model", "/no/such/model"], "/no/such/model"),
    (["--compare", "/no/such/a.json", "/no/such/b.json"], "/no/such/a.json"),
])
def test_what_cannot_be_measured_is_said_in_a_sentence(args, words):
    done = run(BENCH, *args)
    assert done.returncode == 1 and words in done.stderr and done.stderr.count("\n") == 1


def test_every_kernel_of_the_case_table_is_right():
    report = report_of("kernels", "--seconds", "1ms", "--threads", "1", "--arena-mib", "256",
                       timeout=300)
    errors = [f["more"]["relative_error"] for f in report["figures"] if "relative_error" in f["more"]]
    assert len(errors) > 30


def test_the_operators_of_policies_are_timed_as_a_step_launches_them():
    report = report_of("kernels", "--only", "policies", "--threads", "2", "--rows", "2", "--context", "1024",
                       "--budget", "256", "--seconds", "1ms", timeout=300)
    figures = {f["name"]: f for f in report["figures"]}
    assert len(figures) == 14 and all(f["median"] > 0 for f in figures.values())
    assert figures["digest scores, max"]["more"]["bytes"] == 2 * 8 * 32 * 4 * 128
    assert figures["write-through of decode rows"]["more"]["link_bytes"] == 2 * 8 * 2 * 128 * 2


def test_steps_and_a_prefill_of_a_tiny_model(tiny_models):
    report = report_of("step", "--model", tiny_models("tiny-llama"), "--batches", "1,4", "--contexts", "40",
                       "--steps", "8", "--prefill", "64", "--chunk", "32")
    names = [f["name"] for f in report["figures"]]
    assert names[:2] == ["step, batch 1, context 40", "step, batch 4, context 40"]
    assert all(f["median"] > 0 for f in report["figures"])


def test_speculation_is_measured_beside_a_run_without_and_says_what_drafts(tiny_models):
    report = report_of("step", "--model", tiny_models("tiny-llama"), "--batches", "1,3", "--contexts", "40", "--steps",
                       "40", "--speculation-tokens", "3", "--acceptance", "0.7")
    plain, drafted = report["figures"][0], report["figures"][1]
    assert len(report["figures"]) == 4
    assert plain["name"] == "speculation, batch 1, context 40, without drafts" and plain["better"] == "higher"
    assert drafted["name"].endswith("3 drafts by stated probability 0.7, not by a model")
    assert report["shape"]["drafts"] == "3 drafts by stated probability 0.7, not by a model"
    assert plain["more"].keys() < drafted["more"].keys()
    for one in report["figures"][1::2]:
        more = one["more"]
        assert abs(more["acceptance"] - 0.7) < 0.15 and 2 < more["tokens_per_step"] < 3.2
        assert more["stated_acceptance"] == 0.7 and more["ratio"] > 0


def test_speculation_is_measured_where_a_step_gives_more_tokens_than_there_are_steps(tiny_models):
    report = report_of("step", "--model", tiny_models("tiny-llama"), "--batches", "2", "--contexts", "40", "--steps", "4",
                       "--speculation-tokens", "8", "--acceptance", "1")
    assert report["figures"][1]["more"]["acceptance"] == 1
    assert report["figures"][1]["more"]["tokens_per_step"] == 9


def test_steps_of_two_ranks_are_timed_beside_those_of_one_and_without_what_they_exchange(tiny_models):
    report = report_of("ranks", "--model", tiny_models("tiny-llama"), "--ranks", "1,2", "--batches", "1,3", "--context",
                       "40", "--steps", "8", "--trace-steps", "2")
    one, _, two, several = report["figures"]
    assert one["name"] == "1 rank, policy full, 1 sequences" and several["name"] == "2 ranks, policy full, 3 sequences"
    assert one["more"]["times_one_rank"] == 1 and "operations_share" not in one["more"]
    for figure in (two, several):
        more = figure["more"]
        assert more["times_one_rank"] > 0 and more["operations_share"] < 1
        assert more["without_operations_seconds"] > 0
        assert 0 < more["traced_exposed_share"] <= more["traced_share"] < 1


@pytest.mark.parametrize("dispatch", ["bf16", "fp8"])
def test_ranks_of_experts_are_timed_under_both_policies_whole_and_in_halves(dispatch):
    report = report_of("ranks", "--model", ROOT / "configs/models/topic-drift-indexer-small", "--dummy", "--divide",
                       "experts", "--ranks", "2", "--batches", "2", "--context", "1024", "--steps", "4", "--trace-steps", "2",
                       "--policies", "full,ess:least=160:ratio=0.2", "--misses", "8", "--expert-overlap", "0,1",
                       "--expert-dispatch", dispatch, timeout=300)
    assert [f["name"] for f in report["figures"]] == [
        f"2 ranks, policy {policy}, 4 sequences{halves}"
        for policy in ("full", "ess:least=160:ratio=0.2") for halves in ("", ", halves from 1")]
    for trace in report["details"]["traces"]:
        # Three layers with experts send 2 rows to the other rank, and get their sums back in float32.
        row = (1024 + 4 * 8 if dispatch == "fp8" else 4 * 1024) + 2 * 8
        assert trace["exchange_bytes"] == 3 * 2 * (row + 4 * 1024)
        assert 0 < trace["exchange_seconds"] <= trace["collective_seconds"] < trace["step_seconds"]


def test_ranks_that_cannot_load_their_parts_are_an_error_and_the_others_are_measured(tiny_models):
    done = run(BENCH, "ranks", "--model", tiny_models("tiny-llama"), "--ranks", "3,1", "--batches", "1", "--context", "40",
               "--steps", "4")
    assert done.returncode == 1 and "KV heads" in done.stderr and done.stderr.count("\n") == 1
    assert "\n    1 full" in done.stdout


def test_auto_runs_beside_the_policies_that_it_chooses_from(tiny_models):
    report = report_of("policies", "--model", tiny_models("tiny-llama"), "--policies", "auto,full,scout", "--contexts",
                       "192", "--max-batch", "3", "--batches", "3", "--budget", "64", "--dense-layers", "0", "--steps", "2",
                       "--hbm-bytes", "2MiB", "--dram-bytes", "8MiB", "--no-trace", "--auto-quality", "fast")
    (auto,) = report["details"]["auto"]
    assert {c["policy"] for c in auto["candidates"]} == {"full", "scout", "recall", "hgca"}
    assert all(c["reason"] for c in auto["candidates"]) and auto["why"] and auto["of_best"] > 0
    runs = {r["policy"]: r for r in report["details"]["runs"] if r["largest"]}
    assert runs["auto"]["taken"] == auto["taken"] and set(runs) == {"auto", "full", "scout"}


def test_traffics_are_timed_step_by_step(tiny_models):
    report = report_of("policies", "--model", tiny_models("tiny-llama"), "--policies", "full,scout", "--contexts", "40,192",
                       "--max-batch", "4", "--batches", "4", "--budget", "64", "--dense-layers", "0", "--steps", "4",
                       "--hbm-bytes", "4MiB", "--dram-bytes", "16MiB", "--distinct", "1", "--traffic",
                       "steady,mixed,staggered")
    found = {(t["policy"], t["traffic"]): t for t in report["details"]["traffic"]}
    assert len(found) == 6
    for (_, traffic), figures in found.items():
        assert figures["tokens_per_second"] > 0 and figures["tpot_p99_seconds"] >= figures["tpot_p50_seconds"] > 0
        assert figures["steps"] >= 4 * 4 and 0 <= figures["idle_share"] <= 1 and figures["jumps"] == 0
        assert (figures["arrival_over_median"] > 0) == (traffic == "staggered"), figures


def test_policies_are_run_side_by_side(tiny_models, tmp_path):
    out = tmp_path / "run"
    report = report_of("policies", "--model", tiny_models("tiny-llama"), "--policies", "full,scout", "--contexts",
                       "256", "--batches", "1", "--max-batch", "4", "--steps", "2", "--budget", "128", "--hbm-bytes",
                       "4MiB", "--dram-bytes", "16MiB", "--dense-layers", "0", "--out", out, timeout=300)
    runs = report["details"]["runs"]
    assert {run["policy"] for run in runs} == {"full", "scout"}
    assert all(run["tokens_per_second"] > 0 and 0 <= run["idle_share"] < 1 for run in runs)
    scout = next(run for run in runs if run["policy"] == "scout")
    assert all(layer["selected"] > 0 and layer["link_bytes"] > 0 for layer in scout["layers"])
    assert json.loads((out / "policies.json").read_text())["details"]["runs"] == runs
    for run in runs:
        trace = out / f"trace-{run['policy']}-batch-{run['batch']}-context-256.json"
        assert json.loads(trace.read_text())["traceEvents"]


INDEXER = ROOT / "configs" / "models" / "topic-drift-indexer-small"
LATENT = ["policies", "--model", INDEXER, "--topic-drift", "--paths", "4", "--contexts", "1024", "--distinct", "1",
          "--hbm-bytes", "64MiB", "--dram-bytes", "256MiB", "--max-batch", "4"]


def test_intervals_are_measured_on_topics_that_drift_and_a_bench_runs_by_them(tmp_path):
    drift, out = ROOT / "configs" / "models" / "topic-drift-small", tmp_path / "p.json"
    shape = ["--topic-drift", "--dense-layers", "0"]
    profile(drift, out, *shape, "--context", "1024", "--prompts", "2", "--steps", "12", "--budget-tokens", "256")
    layers = json.loads(out.read_text())["layers"]
    for layer in layers:
        assert len(layer["shares"]) == 12 and layer["interval"] >= 1
    # The last steps need tokens that have left the working set that was recalled.
    assert sum(layer["shares"][-1] for layer in layers) > sum(layer["shares"][0] for layer in layers) >= 0
    assert any(layer["interval"] < 12 for layer in layers)
    report = report_of("policies", "--model", drift, *shape, "--policies", "scout,scout:controller=1", "--contexts", "1024",
                       "--batches", "1", "--given-batches", "--budget", "256", "--steps", "6", "--policy-profile", out)
    by_profile, by_controller = report["details"]["runs"]
    assert by_profile["policy"] == "scout" and by_controller["policy"] == "scout:controller=1"
    mean = sum(1 / layer["interval"] for layer in layers) / len(layers)
    assert by_profile["recall_interval"] == pytest.approx(1 / mean, rel=0.25)


def test_places_are_divided_by_a_profile_and_not_without_one(tmp_path):
    even, divided = "ess:ratio=0.2:least=160", "ess:ratio=0.2:least=160:divide=1"
    words = [*LATENT, "--policies", f"full,{even},{divided}", "--batches", "2", "--given-batches", "--steps", "4",
             "--no-trace"]
    refused = report_of(*words, status=1, timeout=300)
    assert {run["policy"] for run in refused["details"]["runs"]} == {"full", even}
    [failure] = refused["details"]["failures"]
    assert failure["policy"] == divided and "sluice-profile --ratios" in failure["status"]
    out = tmp_path / "p.json"
    profile(INDEXER, out, "--dummy", "--topic-drift", "--paths", "4", "--contexts", "1024", "--ratios", "0.16,0.3,0.6",
            "--least-places", "160", "--batches", "2", "--prompts", "1", "--steps", "8", "--hbm-bytes", "64MiB")
    report = report_of(*words, "--policy-profile", out, timeout=300)
    assert "failures" not in report["details"]
    assert [run["policy"] for run in report["details"]["runs"]] == ["full", even, divided]


def test_misses_are_those_that_were_set_and_steps_come_with_and_without_transfers():
    report = report_of(*LATENT, "--policies", "ess-da:ratio=0.2:least=160,ess-dba:ratio=0.2:least=160", "--batches",
                       "2", "--given-batches", "--steps", "6", "--misses", "0,9,64", "--overlap", "--only-overlap",
                       timeout=300)  # four steps of each traced window count; of two, their ends are too large a part
    found = report["details"]["overlap"]
    assert [run["policy"].split(":")[0] for run in found] == ["ess-da", "ess-da", "ess-dba", "ess-dba"]
    assert "runs" not in report["details"]
    # The layer that misses most is the one whose selection moves fastest.
    shares = report["details"]["intra_layer_overlap"][0]["layers"]
    own = found[0]["levels"][0]["misses_by_layer"]
    assert all(0.3 < share < 1 for share in shares)
    assert shares.index(min(shares)) == own.index(max(own))
    for own, asked in (found[0:2], found[2:4]):
        assert [level["forced_misses"] for level in own["levels"]] == [None]
        assert len(set(own["levels"][0]["misses_by_layer"])) > 1, "layers drift at paces of their own"
        assert [level["forced_misses"] for level in asked["levels"]] == [0, 9, 64]
        for level in asked["levels"]:
            assert level["misses_by_layer"] == [level["forced_misses"]] * 4
            assert level["step_seconds"]["median"] > 0 and level["without_seconds"]["median"] > 0
            # Packed entries of 656 bytes, for two sequences in four layers.
            assert level["bytes"] == level["forced_misses"] * 656 * 2 * 4
            if level["forced_misses"] > 0:
                exposed = level["step_seconds"]["median"] - level["without_seconds"]["median"]
                assert level["hidden"] == pytest.approx(1 - exposed / level["alone_seconds"])
                assert level["coverable_seconds"] > 0
        # Each layer has one transfer, or one for each half of the batch.
        calls = 4 if own["policy"].startswith("ess-da") else 8
        for level in own["levels"] + asked["levels"]:
            assert level["inside_calls"] == pytest.approx(calls, rel=0.3)


def test_misses_at_first_and_a_forecast():
    report = report_of(*LATENT, "--policies", "full,ess:ratio=0.2:least=160,ess-no-warm-up:ratio=0.2:least=160,"
                       "offload-naive:ratio=0.2:least=160:row-copies=1", "--batches", "1,2", "--given-batches",
                       "--steps", "8", "--no-trace", "--forecast-dram", "1GiB", timeout=300)
    runs = {(run["policy"].split(":")[0], run["batch"]): run for run in report["details"]["runs"]}
    first = {policy: sum(runs[policy, 2]["misses_first_by_layer"]) for policy in ("ess", "ess-no-warm-up")}
    # Without warm-up the first step misses everything, 128 entries in each layer.
    assert first["ess-no-warm-up"] > first["ess"] + 4 * 128 / 16 / 2
    assert runs["offload-naive", 2]["misses_steady_by_layer"] == [128] * 4
    assert "misses_by_layer" not in runs["full", 2]
    forecasts = {forecast["policy"].split(":")[0]: forecast for forecast in report["details"]["forecasts"]}
    assert set(forecasts) == {"full", "ess", "ess-no-warm-up", "offload-naive"}
    assert forecasts["ess"]["batch"] > forecasts["full"]["batch"]


def test_quality_compares_with_full(tiny_models, tmp_path):
    texts = tmp_path / "texts.json"
    ids = [(i * 37) % 250 + 3 for i in range(300)]
    case = {"name": "p", "kind": "code", "variant": "single", "depth": 0.5, "ids": ids[:200], "answer": [5]}
    texts.write_text(json.dumps({"schema": "sluice-texts/2", "texts": [{"name": "t", "kind": "news", "ids": ids}],
                                 "passkeys": [case]}))
    report = report_of("policies", "--model", tiny_models("tiny-llama"), "--policies", "full,scout,oracle",
                       "--quality", "--texts", texts, "--contexts", "256", "--quality-steps", "8", "--passkeys", "1",
                       "--budget-shares", "50,60", "--dense-layers", "0", "--hbm-bytes", "16MiB", "--dram-bytes",
                       "32MiB", "--out", tmp_path / "run", timeout=300)
    rows = {(row["policy"], row["budget_share"]): row for row in report["details"]["quality"]}
    assert set(rows) == {("full", 1), ("scout", 0.5), ("scout", 0.6), ("oracle", 0.5), ("oracle", 0.6)}
    full, scout = rows["full", 1], rows["scout", 0.5]
    assert full["top1_agreement"] == 1 and full["mean_kl_nats"] == 0 and full["perplexity_change"] == 0
    assert scout["steps"] == 8 and scout["mean_kl_nats"] > 0
    assert [text["name"] for text in scout["texts"]] == ["t"]
    oracle = rows["oracle", 0.5]
    assert scout["top1_below_oracle"] == pytest.approx(oracle["top1_agreement"] - scout["top1_agreement"])
    assert oracle["perplexity_over_oracle"] == 0
    asked, = report["details"]["passkeys"]
    assert (asked["kind"], asked["variant"], asked["tokens"], asked["depth"]) == ("code", "single", 200, 0.5)
    assert len(asked["policies"]) == (5 if asked["full"] else 0)
    written = json.loads((tmp_path / "run" / "policies.json").read_text())
    assert written["details"]["passkeys"] == report["details"]["passkeys"]
    assert report["details"]["seconds"].keys() >= {"prompts", "full"}


def test_serve_counts_every_request_and_token(small):
    before = small.settled()
    report = report_of("serve", "--decode", small.address, "--requests", 12, "--concurrency", 3, "--prompt",
                       40, "--output", 17, "--warmup", 2, "--slo-ttft", "60s")
    warmup, load = report["details"]["phases"]
    assert (warmup["came"], warmup["done"]) == (2, 2)
    assert (load["came"], load["done"], load["refused"], load["failed"]) == (12, 12, 0, 0)
    assert load["tokens"] == 12 * 17 and sum(report["details"]["tokens"]) == 14 * 17
    assert load["ttft_seconds"]["samples"] == 12 and load["good_share"] == 1
    assert 0 < load["ttft_seconds"]["p50"] <= load["latency_seconds"]["p50"]
    # A token takes 1,536 bytes: 3 layers, 2 heads of 64, K and V in bf16.
    assert report["details"]["bytes_pushed"] == 14 * 40 * 1536
    small.wait_until_held(before)


def test_serve_takes_the_same_requests_for_the_same_seed(small):
    def tokens(seed):
        report = report_of("serve", "--decode", small.address, "--rate", 200, "--requests", 10, "--prompt",
                           "lognormal:30:0.5", "--output", "lognormal:8:0.5", "--seed", seed)
        assert report["details"]["phases"][0]["done"] == 10
        return report["details"]["bytes_pushed"], report["details"]["phases"][0]["tokens"]

    assert tokens(5) == tokens(5) != tokens(6)


def test_serve_holds_recorded_caches_to_their_recorded_tokens(pairs, golden):
    decode = pairs("tiny-llama").decode
    kv = FIXTURES / "tiny-llama/golden.safetensors"
    report = report_of("serve", "--decode", decode.address, "--kv", kv, "--case", 2, "--requests", 4)
    assert report["details"]["phases"][0]["done"] == 4
    assert report["details"]["phases"][0]["tokens"] == 4 * len(golden("tiny-llama").tokens(2))
    done = run(BENCH, "serve", "--decode", decode.address, "--kv", FIXTURES / "tiny-qwen3/golden.safetensors")
    assert done.returncode == 1 and "case0" in done.stderr


def test_refusals_are_counted_with_their_reason_or_asked_again(small):
    # A token takes 1,536 bytes: three sequences of 900 tokens fill the node's 4 MiB of HBM, and a few
    # more its 6 MiB of DRAM.
    phases = ["--phase", "name=flood,rate=2000,requests=40,on-refusal=count",
              "--phase", "name=patient,concurrency=20,requests=20,on-refusal=retry"]
    report = report_of("serve", "--decode", small.address, "--prompt", 800, "--output", 100, *phases,
                       timeout=180)
    flood, patient = report["details"]["phases"]
    assert flood["came"] == 40 and flood["done"] + flood["refused"] == 40 and flood["refused"] > 0
    assert flood["refusals_without_retry_info"] == 0 and flood["longest_retry_delay_seconds"] > 0
    assert set(flood["errors"]) == {"RESOURCE_EXHAUSTED DRAM_FULL"}
    assert patient["done"] == 20 and patient["refused"] == 0
    table = run(BENCH, "serve", "--decode", small.address, "--prompt", 20, "--output", 3, "--requests", 2)
    assert re.search(r"2 requests came, 2 done, 0 refused, 0 failed", table.stdout)
    assert "gap between tokens" in table.stdout and "\r" not in table.stderr


def test_a_failed_request_makes_the_run_fail(tiny_models, start):
    # The test has a node of its own, because transfers that the server has opened when the caller gives up stay until
    # their lease ends.
    node = start("sluice-server", tiny_models("tiny-llama"), "--hbm-bytes", "4MiB", "--dram-bytes", "4MiB")
    report = report_of("serve", "--decode", node.address, "--requests", 3, "--output", 200, "--prompt", 10,
                       "--timeout", "1ms", status=1)
    phase = report["details"]["phases"][0]
    assert phase["failed"] == 3 and set(phase["errors"]) == {"DEADLINE_EXCEEDED"}


def test_compare_gives_ratios_with_their_range(tmp_path):
    def write(name, **change):
        report = {"schema": "sluice-bench/1", "subcommand": "step", "command": "c", "revision": "r",
                  "machine": {"cpu": "x", "cores": 2, "memory_bytes": 1}, "shape": {"a": "1"}, "details": {},
                  "figures": [{"name": "step", "unit": "s", "better": "lower", "median": 2.0, "p10": 1.9,
                               "p90": 2.1, "samples": 9, "more": {}}]}
        report["figures"][0].update(change.pop("figure", {}))
        report.update(change)
        path = tmp_path / name
        path.write_text(json.dumps(report))
        return path

    a = write("a.json")
    faster = run(BENCH, "--compare", a, write("b.json", figure={"median": 1.0, "p10": 0.9, "p90": 1.1}))
    assert faster.returncode == 0, faster.stderr
    assert re.search(r"step .* 0\.500 +0\.429-0\.579 +s, better", faster.stdout)
    same = run(BENCH, "--compare", a, a)
    assert same.returncode == 0 and "within the spread" in same.stdout
    other = run(BENCH, "--compare", a, write("c.json", subcommand="serve"))
    assert other.returncode == 1 and "nothing to compare" in other.stderr
    strange = run(BENCH, "--compare", a, write("d.json", shape={"a": "2"}, figure={"name": "else"}))
    assert "shapes differ" in strange.stdout and "0 figures in both, 1 only in A, 1 only in B" in strange.stdout
