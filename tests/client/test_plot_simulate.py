"""The picture of forecasts: what is drawn, and what is refused."""

import json

import pytest

from sluice_client import plot_simulate
from sluice_client.cli import main

STEPS = [{"policy": "full", "context": 32768, "batch": 8, "tokens_per_second": 500, "parts_us": {"head": 400, "a": 1000}},
         {"policy": "ess", "context": 32768, "batch": 16, "tokens_per_second": 800, "parts_us": {"a": 3000, "b": 900}},
         {"policy": "ess", "context": 32768, "batch": 4, "tokens_per_second": 300, "parts_us": {"a": 2000, "b": 0}}]


def written(folder, report):
    path = folder / "simulate.json"
    path.write_text(json.dumps(report))
    return str(path)


def report_of(steps):
    return {"subcommand": "simulate", "details": {"steps": steps}}


def test_parts_are_milliseconds_the_largest_first():
    assert list(plot_simulate.parts_of(STEPS).items()) == [("a", [1, 3, 2]), ("b", [0, 0.9, 0]), ("head", [0.4, 0, 0])]


def test_a_line_goes_through_the_batches_of_a_policy():
    assert plot_simulate.series(STEPS) == {"full, 32768": [(8, 500)], "ess, 32768": [(4, 300), (16, 800)]}


@pytest.mark.parametrize("report", [{}, report_of([]), {**report_of(STEPS), "subcommand": "policies"}])
def test_a_report_without_forecasts_is_refused_with_the_command_that_makes_them(tmp_path, capsys, report):
    assert main(["plot-simulate", "--report", written(tmp_path, report)]) == 1
    assert "sluice-bench simulate --json" in capsys.readouterr().err


def test_a_file_that_is_none_is_named(tmp_path, capsys):
    path = str(tmp_path / "none.json")
    assert main(["plot-simulate", "--report", path]) == 1
    assert path in capsys.readouterr().err


def test_the_picture_is_a_png_file(tmp_path):
    pytest.importorskip("matplotlib")
    assert main(["plot-simulate", "--report", written(tmp_path, report_of(STEPS))]) == 0
    assert (tmp_path / "simulate.json.png").read_bytes()[:4] == b"\x89PNG"
