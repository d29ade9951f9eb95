"""The pictures of policy fluxion's labels and predictors: what is drawn where, and what is refused."""

import json
import math

import pytest

from sluice_client import plot_fluxion
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


@pytest.mark.parametrize("flag, root, command", [
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
    out = tmp_path / "other.png"
    assert main(["plot-fluxion", "--summary", summary, "--check", check, "--out", str(out)]) == 0
    assert out.read_bytes()[:4] == b"\x89PNG"
