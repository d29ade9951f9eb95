"""Plots of policies: the points that are drawn from a report, and the drawing itself where matplotlib is installed."""

import json

import pytest

from sluice_client import plot_latent, plot_policies
from sluice_client.cli import main


def run_of(policy, context, batch, tokens, largest=False):
    return {"policy": policy, "context": context, "batch": batch, "tokens_per_second": tokens,
            "largest": largest, "layers": [{"cpu_share": 0.05}, {"cpu_share": 0.1}]}


RUNS = [run_of("full", 512, 1, 10), run_of("full", 512, 2, 15, True), run_of("full", 1024, 1, 8, True),
        run_of("scout", 512, 1, 9), run_of("scout", 512, 4, 30, True), run_of("scout", 1024, 1, 9),
        run_of("scout", 1024, 4, 25, True)]
TRACE = {"name": "full, batch 1", "step_seconds": 1.0, "kernels_seconds": 0.75,
         "kernels": [{"name": f"k{i}", "seconds": 0.05} for i in range(15)]}


def report():
    return {"subcommand": "policies", "shape": {"model": "m"}, "machine": {"cpu": "C", "cores": 2},
            "details": {"runs": RUNS, "traces": [TRACE]}}


def test_a_line_is_a_policy_at_its_largest_batch():
    assert plot_policies.largest(RUNS) == {"full": [(512, 15), (1024, 8)], "scout": [(512, 30), (1024, 25)]}


def test_a_line_over_batches_is_of_one_context():
    assert plot_policies.series(RUNS, "batch", "context")[("scout", 512)] == [(1, 9), (4, 30)]


def test_a_step_is_split_into_operators_and_what_had_none():
    parts = plot_policies.split_of(TRACE)
    assert sum(seconds for _, seconds in parts) == pytest.approx(1.0)
    assert parts[-1] == ("no kernel", pytest.approx(0.25)) and parts[-2][0] == "other operators"


def test_a_folder_without_a_report_is_said_so(tmp_path, capsys):
    assert main(["plot-policies", "--run", str(tmp_path)]) == 1
    assert "policies.json" in capsys.readouterr().err


def passkey_of(full, found):
    return {"tokens": 1200, "depth": 0.4, "variant": "multi", "full": full,
            "policies": [{"policy": "full", "budget_share": 1, "found": True},
                         {"policy": "scout", "budget_share": 0.25, "found": found}] if full else []}


def test_pass_keys_that_full_finds_are_drawn_for_each_policy_and_budget(tmp_path, capsys):
    cases = [passkey_of(True, False), passkey_of(True, True), passkey_of(False, False)]
    assert plot_policies.keys_by_policy(cases) == {
        ("scout", 0.25): [(1200, 0.4, "multi", False), (1200, 0.4, "multi", True)]}
    pytest.importorskip("matplotlib")
    (tmp_path / "policies.json").write_text(json.dumps(report() | {"details": {"passkeys": cases}}))
    assert main(["plot-policies", "--run", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "pass-keys.png")]


def test_plots_are_png_files(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "policies.json").write_text(json.dumps(report()))
    assert main(["plot-policies", "--run", str(tmp_path)]) == 0
    for name in ("throughput-over-context", "throughput-over-batch", "cpu-share-by-layer", "step-by-operator"):
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"


def latent_run(policy, batch, tokens, misses, context=512, largest=True):
    return run_of(policy, context, batch, tokens, largest) | {
        "misses_by_layer": misses, "misses_first_by_layer": [2 * m for m in misses],
        "misses_steady_by_layer": misses, "first_steps": 16}


LATENT = [run_of("full", 512, 5, 10, True), latent_run("ess:ratio=0.5:least=8", 9, 15, [10, 30]),
          latent_run("ess:ratio=0.2:least=8", 19, 20, [40, 80]),
          latent_run("ess:ratio=0.2:least=8", 4, 6, [1, 2], largest=False),
          latent_run("ess:least=8", 5, 9, [0, 0])]
OVERLAP = [{"policy": "ess-da", "context": 512, "batch": 4,
            "levels": [{"misses": 0, "hidden": 1, "bytes": 0}, {"misses": 80, "hidden": 0.9, "bytes": 9},
                       {"misses": 20, "hidden": 0.95, "bytes": 3}]}]


def test_a_curve_over_the_ratio_begins_at_full_and_leaves_auto_out():
    assert plot_latent.over_ratio(LATENT, lambda run: run["batch"]) == {
        ("full", 512): [(1.0, 5)], ("ess:least=8", 512): [(0.2, 19), (0.5, 9)]}
    assert plot_latent.ratio_of("ess:ratio=0") is None and plot_latent.ratio_of("ess") is None


def test_misses_by_layer_are_those_of_the_largest_batch():
    found = plot_latent.by_layer(LATENT)
    assert found[("ess:ratio=0.2:least=8", 512)] == [40, 80] and ("full", 512) not in found
    assert plot_latent.first_steps(LATENT)[0] == ("ess:ratio=0.5:least=8, 512, batch 9", 40, 20)


def test_what_moves_nothing_is_no_point_of_what_is_hidden():
    assert plot_latent.hidden(OVERLAP) == {"ess-da, 512, batch 4": [(20, 95), (80, pytest.approx(90))]}


def test_plots_of_latent_caches_are_png_files(tmp_path):
    pytest.importorskip("matplotlib")
    of = report()
    of["details"] = {"runs": LATENT, "traces": [TRACE], "overlap": OVERLAP,
                     "intra_layer_overlap": [{"context": 512, "layers": [0.9, 0.8]}]}
    (tmp_path / "policies.json").write_text(json.dumps(of))
    assert main(["plot-policies", "--run", str(tmp_path)]) == 0
    of["details"] = {"overlap": OVERLAP}
    for name in ("throughput-over-ratio", "batch-over-ratio", "misses-over-ratio", "misses-by-layer",
                 "misses-of-first-steps", "transfers-hidden", "intra-layer-overlap", "throughput-over-batch"):
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
    only = tmp_path / "only"
    only.mkdir()
    (only / "policies.json").write_text(json.dumps(of))
    assert main(["plot-policies", "--run", str(only)]) == 0
    assert [path.name for path in only.glob("*.png")] == ["transfers-hidden.png"]
