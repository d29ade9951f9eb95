"""Tests of deploy/: what the manifests say against what the programs say."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

from nodes import BIN, Node, run  # noqa: E402


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(decode node, prefill node) of a tiny model."""
    model = tmp_path_factory.mktemp("model")
    done = run(BIN / "sluice-make-fixture", "tiny-llama", model, env=os.environ)
    assert done.returncode == 0, done.stderr
    nodes = [Node("sluice-server", model, tmp_path_factory.mktemp("node"), "--hbm-bytes", "4MiB", "--dram-bytes",
                  "4MiB"),
             Node("sluice-prefill", model, tmp_path_factory.mktemp("node"), "--hbm-bytes", "4MiB")]
    yield nodes
    for node in nodes:
        node.stop()
