"""Plots of policies: what is drawn from a report; drawing itself where matplotlib is there."""

import json

import pytest

from sluice_client import plot_policies
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


def test_plots_are_png_files(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "policies.json").write_text(json.dumps(report()))
    assert main(["plot-policies", "--run", str(tmp_path)]) == 0
    for name in ("throughput-over-context", "throughput-over-batch", "cpu-share-by-layer", "step-by-operator"):
        assert (tmp_path / f"{name}.png").read_bytes()[:4] == b"\x89PNG"
