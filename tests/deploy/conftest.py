"""Fixtures of the tests that compare deploy/ with the programs."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

from support.nodes import BIN, SMOLLM2, Node, run  # noqa: E402


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """The directory of a tiny model."""
    model = tmp_path_factory.mktemp("model")
    done = run(BIN / "sluice-make-fixture", "tiny-llama", model, env=os.environ)
    assert done.returncode == 0, done.stderr
    return model


@pytest.fixture(scope="module")
def pair(tmp_path_factory, tiny_model):
    """(decode node, prefill node) of a tiny model."""
    model = tiny_model
    nodes = [Node("sluice-server", model, tmp_path_factory.mktemp("node"), "--hbm-bytes", "4MiB", "--dram-bytes",
                  "4MiB"),
             Node("sluice-prefill", model, tmp_path_factory.mktemp("node"), "--hbm-bytes", "4MiB")]
    yield nodes
    for node in nodes:
        node.stop()


@pytest.fixture(scope="session")
def smollm2_tokenizer():
    """A directory with a tokenizer."""
    if not (SMOLLM2 / "tokenizer.json").is_file():
        pytest.skip(f"no model in {SMOLLM2}: tools/fetch-model smollm2-135m-instruct {SMOLLM2}")
    return SMOLLM2
