"""sluice-bench simulate as a program: forecasts from the recorded times of operators, and what it refuses."""

import json

import pytest
from support.nodes import BIN, ROOT, run

BENCH = BIN / "sluice-bench"
OPERATORS = ROOT / "tests/bench/simulate/h200_operators.json"
EP32 = ROOT / "configs/models/deepseek-v3.2-ep32"


def simulate(*args, operators=OPERATORS, model=EP32):
    return run(BENCH, "simulate", "--operators", str(operators), "--model", str(model), *args)


def report_of(*args) -> dict:
    done = simulate(*args, "--json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_forecast_as_a_table_and_as_a_report(tmp_path):
    args = ["--batches", "1,76", "--misses", "189:21:572"]
    done = simulate(*args)
    assert done.returncode == 0, done.stderr
    assert "forecast, context 32768" in done.stdout and "one NVIDIA H200" in done.stdout
    report = report_of(*args)
    assert report["schema"] == "sluice-bench/1" and report["subcommand"] == "simulate"
    assert report["details"]["forecast"] is True
    steps = {(step["policy"], step["batch"]): step for step in report["details"]["steps"]}
    assert set(steps) == {("full", 1), ("full", 76), ("ess", 1), ("ess", 76)}
    for step in steps.values():
        assert sum(step["parts_us"].values()) == pytest.approx(step["step_seconds"] * 1e6)
        assert step["tokens_per_second"] == pytest.approx(step["batch"] / step["step_seconds"])
        assert not step["extrapolated"]
    assert steps["ess", 76]["step_seconds"] == pytest.approx(0.048, rel=0.1)  # ess/measured.md
    figures = {figure["name"] for figure in report["figures"]}
    assert "ess, context 32768, batch 76, step" in figures
    assert "ess, context 32768, batch 76, tokens per second" in figures


def test_the_batch_that_fits_and_drawn_misses():
    report = report_of("--hbm-bytes", "40200MiB", "--dram-bytes", "108GiB", "--policies", "ess")
    step, = report["details"]["steps"]
    assert step["batch"] == 78 and step["bound"] == "HBM"
    assert len(step["misses"]) == 61
    mean = sum(step["misses"]) / 61
    assert mean == pytest.approx(190, rel=0.1)  # ess/measured.md, batch and throughput by ratio
    assert min(step["misses"]) < 40 and max(step["misses"]) == pytest.approx(590, rel=0.15)
    done = simulate("--hbm-bytes", "40200MiB", "--dram-bytes", "108GiB", "--policies", "full", "--batches", "27")
    assert done.returncode == 0 and "does not fit: HBM holds 26" in done.stdout


def test_drafts_exchange_and_two_batches():
    args = ["--batches", "40", "--misses", "0", "--policies", "full"]
    plain = report_of(*args)["details"]["steps"][0]
    drafts = report_of(*args, "--drafts", "1", "--acceptance", "0.5")["details"]["steps"][0]
    assert drafts["rows"] == 80
    assert drafts["tokens_per_second"] == pytest.approx(1.5 * 40 / drafts["step_seconds"])
    exchange = report_of(*args, "--all-to-all-us", "100")["details"]["steps"][0]
    assert exchange["step_seconds"] - plain["step_seconds"] == pytest.approx(58 * 100e-6)
    both = report_of(*args, "--all-to-all-us", "100", "--two-batch")["details"]["steps"][0]
    assert both["parts_us"]["all-to-all"] == 0  # Half a layer takes longer than the exchange.


def test_scales_and_constants_of_another_machine():
    args = ["--batches", "8", "--misses", "0", "--policies", "full"]
    plain = report_of(*args)["details"]["steps"][0]
    scaled = report_of(*args, "--scale", "attention=2", "--constant", "step_gap_us=1023")["details"]["steps"][0]
    added = plain["parts_us"]["attention"] + 1000
    assert scaled["step_seconds"] * 1e6 == pytest.approx(plain["step_seconds"] * 1e6 + added)


def test_what_was_not_measured_is_named(tmp_path):
    done = simulate("--batches", "200", "--misses", "0")
    assert done.returncode == 1
    assert "product.input is wanted at 200 (rows), but was measured from 1 to 128" in done.stderr
    done = simulate("--batches", "200", "--misses", "0", "--extrapolate")
    assert done.returncode == 0 and "outside what was measured, along the last line: " in done.stdout
    times = json.loads(OPERATORS.read_text())
    del times["operator_times"]["operators"]["top_k"]
    lacking = tmp_path / "lacking.json"
    lacking.write_text(json.dumps(times))
    done = simulate("--batches", "1", "--misses", "0", operators=lacking)
    assert done.returncode == 1 and f"{lacking}: there is no operator top_k" in done.stderr
    done = simulate("--batches", "1", model=ROOT / "configs/models/qwen3-8b")
    assert done.returncode == 1 and "latent caches and an indexer" in done.stderr
    done = simulate("--batches", "1", "--misses", str(tmp_path / "none.json"))
    assert done.returncode == 1 and "none.json" in done.stderr


SMALL = ROOT / "configs/models/topic-drift-indexer-small"


def time_operators(*more, model=SMALL, contexts="512,1024", misses="0,16,64"):
    return run(BENCH, "kernels", "--only", "step", "--model", str(model), "--step-rows", "1,2,4", "--contexts", contexts,
               "--misses", misses, "--sequences", "4", "--seconds", "0.002", "--threads", "2", *more, timeout=120)


def test_times_of_operators_that_one_run_measures_make_forecasts(tmp_path):
    times = tmp_path / "operators.json"
    done = time_operators("--json", str(times))
    assert done.returncode == 0, done.stderr
    report = json.loads(times.read_text())
    measured = report["details"]["operator_times"]
    recorded = json.loads(OPERATORS.read_text())["operator_times"]
    assert set(measured["operators"]) == set(recorded["operators"])  # Nothing lacks, and nothing is superfluous.
    assert set(measured["constants"]) == set(recorded["constants"])
    assert measured["geometry"]["hidden_size"] == 1024 and "threads 2" in measured["machine"]
    for name, operator in measured["operators"].items():
        counts = [count for count, _ in operator["points"]]
        assert counts == sorted(set(counts)), name
        assert all(us > 0 for _, us in operator["points"]), name
    assert len(report["figures"]) == sum(len(operator["points"]) for operator in measured["operators"].values())
    args = ["--contexts", "4096", "--batches", "1,4", "--misses", "16", "--least-places", "2049"]
    done = simulate(*args, operators=times, model=SMALL)
    assert done.returncode == 1 and "was measured from" in done.stderr  # 4 x 4,096 keys are too many.
    done = simulate(*args, "--extrapolate", "--json", operators=times, model=SMALL)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["details"]["steps"]) == 4
    done = simulate("--batches", "1", operators=times)
    assert done.returncode == 1 and "but the model has" in done.stderr  # Another model's.


@pytest.mark.parametrize("shape, words", [
    ({"contexts": "256"}, "four times what a row selects"), ({"misses": "129"}, "128 entries"),
    ({"model": ROOT / "configs/models/qwen3-8b"}, "latent caches and an indexer"),
])
def test_shapes_whose_operators_cannot_be_timed(shape, words):
    done = time_operators(**shape)
    assert done.returncode == 1 and words in done.stderr


def test_step_needs_a_model():
    done = run(BENCH, "kernels", "--only", "step")
    assert done.returncode == 2 and "--model" in done.stderr
