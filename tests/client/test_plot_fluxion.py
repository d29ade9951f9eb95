"""The pictures of policy fluxion's labels and predictors: what is drawn where, and what is refused."""

import json
import math

import pytest

from sluice_client import plot_fluxion, plot_fluxion_figures
from sluice_client.cli import main


def head(layer, number, samples=4, streaming=0, told=None, budget=0.25):
    budgets = None if streaming == samples else [0, budget, budget, budget, budget]
    return {"layer": layer, "head": number, "samples": samples, "streaming": streaming, "told": told, "right": told,
            "budgets": budgets, "line": budgets and {"at_one": 0.0, "slope": 0.05, "r2": 0.8}}


LINE = {"samples": 8, "r2_percentiles": [0.5, 0.75, 1.0], "r2_good": 0.9, "good": 0.25}
SUMMARY = {"format": "sluice-fluxion-summary", "version": 1, "model_fingerprint": "a", "tau": 0.1, "documents": 2,
           "samples": 12, "streaming": 5, "told": 6, "right": 9, "blocks": [1, 16, 32, 64, 128],
           "budgets": {name: [0, 0.1, 0.2, 0.3, 0.4] for name in ("first", "median", "third")},
           "fitted": LINE, "pinned": LINE,
           "heads": [head(0, 0, streaming=4, told=4), head(0, 1, streaming=1, told=2), head(1, 0, told=0)]}
SOURCE = {"name": "fixed (16, 0.05)", "bytes": 200, "heads": 50, "violations": 4}
CHECK = {"format": "sluice-fluxion-check", "version": 1, "model_fingerprint": "a", "tau": 0.1, "cpu_tokens": 1000,
         "sources": [SOURCE, {**SOURCE, "name": "oracle", "bytes": 90, "violations": 0}]}

BOX = [0.0, 0.1, 0.2, 0.3, 0.5]
KEPT = [{"share": 0.95, "tokens": 0.07, "large": 0.25, "percentiles": [i / 200 for i in range(101)]}]
Z = {"head": 1, "mean": 0.5, "deviation": 0.25, "skewness": 0.1, "excess_kurtosis": -0.2, "largest_gap": 0.3,
     "histogram_end": 4.0, "histogram": [0.1, 0.3, 0.4, 0.2], "quantiles": [-1.1, 0.0, 1.2],
     "normal_quantiles": [-1.0, 0.0, 1.0]}
BUDGET = {"read": 0.1, "tokens": 0.05, "streaming": 0.5, "row_error": 0.08, "quality": None}
QUALITY = {"quality": {"rows": 4, "top1": 1.0, "kl": 0.01, "perplexity_change": 0.02, "budget": BUDGET}}
FIGURES = {"format": "sluice-fluxion-figures", "version": 1, "model_fingerprint": "a", "tau": 0.1, "rows": 2,
           "samples": 8, "large_error": 0.2, "own_deviation": 0.1, "scores": {"all": KEPT, "beside": KEPT},
           "layers": [{"layer": i, "value_lengths": {"first": 0.1, "sink": 0.5, "others": 1.5}, "sink_scores": BOX,
                       "skewness": BOX, "excess_kurtosis": BOX, "largest_gap": BOX, "lse_error": BOX}
                      for i in range(2)],
           "contribution": [],
           "examples": [{"layer": i, "document": 1, "position": 900, "z": Z, "heads": [
               {"head": j, "own_budget": 0.5, "budget": 0.1, "output": [0.1, -0.2]} for j in range(2)]}
               for i in range(2)],
           "fixed": BUDGET, "taus": [{**BUDGET, "tau": 0.02}, {**BUDGET, "tau": 0.1}]}
WITH_QUALITY = {**FIGURES, "fixed": {**BUDGET, **QUALITY}, "taus": [{**of, **QUALITY} for of in FIGURES["taus"]]}


def written(folder, name, root):
    path = folder / name
    path.write_text(json.dumps(root))
    return str(path)


def test_a_layer_is_a_row_and_a_head_without_samples_has_no_share():
    found = plot_fluxion.shares(SUMMARY["heads"], "streaming")
    assert found[0] == [100, 25] and found[1][0] == 0 and math.isnan(found[1][1])
    assert plot_fluxion.shares(SUMMARY["heads"], "told")[0] == [100, 50]


def test_single_heads_go_evenly_from_the_least_budget_to_the_largest():
    heads = [head(0, i, budget=(i * 7 % 11) / 20) for i in range(11)]
    found = plot_fluxion.single_heads(heads, 3)
    assert [of["budgets"][1] for of in found] == [0, 0.25, 0.5]


def test_heads_that_mostly_stream_are_not_drawn_by_themselves():
    heads = [head(0, 0, streaming=4), head(0, 1, streaming=3), head(0, 2, streaming=2)]
    assert [of["head"] for of in plot_fluxion.single_heads(heads, 6)] == [2]


def test_fits_of_heads_are_those_that_have_a_line():
    heads = [head(0, 0, streaming=4), head(0, 1), {**head(0, 2), "line": {"at_one": 1, "slope": 0, "r2": None}},
             {**head(0, 3), "line": {"at_one": 1, "slope": 1, "r2": 0.5}}]
    assert plot_fluxion.head_fits(heads, 0.75) == ([0.5, 0.8], 0.5)
    assert plot_fluxion.head_fits([], 0.75) == ([], 0)


def test_bytes_are_shares_of_the_first_line():
    assert plot_fluxion.points(CHECK) == [("fixed (16, 0.05)", 1, 8), ("oracle", 0.45, 0)]


@pytest.mark.parametrize("summary, check, count", [
    (SUMMARY, CHECK, 5), (SUMMARY, None, 4), (None, CHECK, 1), ({**SUMMARY, "told": None}, None, 3),
    ({**SUMMARY, "streaming": 12, "fitted": {**LINE, "samples": 0}}, None, 2)])
def test_there_is_a_panel_for_what_is_known(summary, check, count):
    assert len(plot_fluxion.panels(summary, check)) == count


def test_boxes_are_the_quartiles_of_a_layer_in_percent():
    assert plot_fluxion_figures.boxes(FIGURES["layers"], "sink_scores", 100)[1] == {
        "whislo": 0, "q1": 10, "med": 20, "q3": 30, "whishi": 50, "label": "1"}


def test_densities_of_a_histogram_have_an_area_of_one():
    middles, width, densities = plot_fluxion_figures.bins(Z)
    assert middles == [-3, -1, 1, 3] and width == 2
    assert sum(densities) * width == pytest.approx(1)


def test_figures_have_three_panels_for_each_layer_that_is_shown_and_five_others():
    assert len(plot_fluxion.panels(None, None, FIGURES)) == 5 + 3 * 2
    assert len(plot_fluxion.panels(SUMMARY, CHECK, {**FIGURES, "examples": [None]})) == 5 + 5
    assert len(plot_fluxion.panels(None, None, WITH_QUALITY)) == 6 + 3 * 2


@pytest.mark.parametrize("flag, root, command", [
    ("--figures", CHECK, "fluxion figures --json"), ("--figures", {**FIGURES, "layers": []}, "fluxion figures --json"),
    ("--summary", {}, "fluxion summary --json"), ("--summary", [], "fluxion summary --json"),
    ("--summary", CHECK, "fluxion summary --json"), ("--summary", {**SUMMARY, "version": 2}, "fluxion summary --json"),
    ("--summary", {**SUMMARY, "heads": []}, "fluxion summary --json"), ("--check", SUMMARY, "fluxion check --json"),
    ("--check", {**CHECK, "sources": []}, "fluxion check --json"),
    ("--check", {**CHECK, "sources": [{**SOURCE, "bytes": 0}]}, "--fixed-share above 0")])
def test_a_file_of_something_else_is_refused_with_the_command_that_makes_one(tmp_path, capsys, flag, root, command):
    assert main(["plot-fluxion", flag, written(tmp_path, "x.json", root)]) == 1
    assert command in capsys.readouterr().err


def test_a_file_that_is_none_is_named(tmp_path, capsys):
    path = str(tmp_path / "none.json")
    assert main(["plot-fluxion", "--check", path]) == 1
    assert path in capsys.readouterr().err
    (tmp_path / "none.json").write_text("{")
    assert main(["plot-fluxion", "--check", path]) == 1
    assert path in capsys.readouterr().err


def test_two_models_are_not_drawn_into_one_picture(tmp_path, capsys):
    summary = written(tmp_path, "s.json", SUMMARY)
    check = written(tmp_path, "c.json", {**CHECK, "model_fingerprint": "b"})
    assert main(["plot-fluxion", "--summary", summary, "--check", check]) == 1
    assert "another model" in capsys.readouterr().err
    figures = written(tmp_path, "f.json", FIGURES)
    assert main(["plot-fluxion", "--check", check, "--figures", figures]) == 1
    assert f"{figures} is of another model than {check}" in capsys.readouterr().err


def test_nothing_to_draw_is_a_wrong_command_line(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["plot-fluxion"])
    assert ended.value.code == 2
    assert "--summary FILE" in capsys.readouterr().err


def test_the_picture_is_a_png_file(tmp_path):
    pytest.importorskip("matplotlib")
    summary, check = written(tmp_path, "s.json", SUMMARY), written(tmp_path, "c.json", CHECK)
    assert main(["plot-fluxion", "--check", check]) == 0
    assert (tmp_path / "c.json.png").read_bytes()[:4] == b"\x89PNG"
    figures = written(tmp_path, "f.json", WITH_QUALITY)
    assert main(["plot-fluxion", "--figures", figures]) == 0
    assert (tmp_path / "f.json.png").read_bytes()[:4] == b"\x89PNG"
    out = tmp_path / "other.png"
    assert main(["plot-fluxion", "--summary", summary, "--check", check, "--out", str(out)]) == 0
    assert out.read_bytes()[:4] == b"\x89PNG"
