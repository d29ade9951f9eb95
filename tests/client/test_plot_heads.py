"""The map of heads of policy clo: what is drawn where, and what is refused."""

import json
import math

import pytest

from sluice_client import plot_heads
from sluice_client.cli import main

CLO = {"kv_heads": 2, "gates": [1, 1, 1, 1], "similarities": [0.9, 0.8, 0.7, 0.6], "misses": [0.1, 0.2, 0.3, 0.4],
       "persistence_order": [0, 1, 3]}


def written(folder, clo):
    path = folder / "heads.json"
    path.write_text(json.dumps({"clo": clo}))
    return str(path)


def test_a_layer_is_a_row():
    assert plot_heads.by_layer([1, 2, 3, 4, 5, 6], 2) == [[1, 2], [3, 4], [5, 6]]


def test_a_head_is_persistent_from_the_share_of_those_before_it():
    found = plot_heads.places(CLO["persistence_order"], 4)
    assert found[0] == 0 and found[1] == 25 and found[3] == 50 and math.isnan(found[2])


@pytest.mark.parametrize("clo", [{}, {**CLO, "misses": []}, {k: v for k, v in CLO.items() if k != "persistence_order"}])
def test_a_profile_without_heads_is_refused_with_the_command_that_makes_them(tmp_path, capsys, clo):
    assert main(["plot-heads", "--profile", written(tmp_path, clo)]) == 1
    assert "sluice-profile --clo" in capsys.readouterr().err


def test_a_file_that_is_none_is_named(tmp_path, capsys):
    path = str(tmp_path / "none.json")
    assert main(["plot-heads", "--profile", path]) == 1
    assert path in capsys.readouterr().err


def test_the_map_is_a_png_file(tmp_path):
    pytest.importorskip("matplotlib")
    path = written(tmp_path, CLO)
    assert main(["plot-heads", "--profile", path]) == 0
    assert (tmp_path / "heads.json.png").read_bytes()[:4] == b"\x89PNG"
    out = tmp_path / "other.png"
    assert main(["plot-heads", "--profile", path, "--out", str(out)]) == 0
    assert out.read_bytes()[:4] == b"\x89PNG"
