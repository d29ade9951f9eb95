"""A decode node and engines in front of it, for all tests of this folder."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "e2e"))

from engine_lab import ENGINES, Vllm  # noqa: E402
from support.nodes import BIN, FIXTURES, SMOLLM2, Node, run  # noqa: E402


@pytest.fixture(scope="session")
def smollm2():
    if not (ENGINES / "vllm/bin/python").exists():
        pytest.skip("no vLLM: tools/test --engines installs it")
    return SMOLLM2


@pytest.fixture(scope="session")
def chats():
    """The golden cases of the real model: ids, tokens, margins."""
    return json.loads((FIXTURES / "smollm2-135m-instruct/golden.json").read_text())


@pytest.fixture(scope="session")
def decode(smollm2, tmp_path_factory):
    node = Node("sluice-server", smollm2, tmp_path_factory.mktemp("decode"), "--hbm-bytes", "512MiB", "--dram-bytes",
                "512MiB", "--max-sequences", "16", "--block-tokens", "32", "--lease-seconds", "60",
                "--local-prefill", "on_failure")
    yield node
    assert node.stop() == 0, node.tail()


@pytest.fixture(scope="session")
def vllm(smollm2, decode, tmp_path_factory):
    """vLLM with the connector. It computes prompts in chunks of 256 tokens."""
    engine = Vllm(smollm2, tmp_path_factory.mktemp("vllm"), {"decode": decode.address, "reserve_seconds": 5},
                  "--max-model-len", "8192", "--max-num-batched-tokens", "256", "--max-num-seqs", "16")
    yield engine.wait()
    engine.stop()


@pytest.fixture(autouse=True)
def memory_comes_back(request):
    """Checks that the decode node holds nothing after each test."""
    yield
    if "decode" in request.fixturenames:
        node = request.getfixturevalue("decode")
        tiers = [t for t in node.settled(60) if isinstance(t, tuple)]
        node.wait_until_held((*((tier, kind, 0, 0) for tier, kind, _, _ in tiers), 0, 0, 0), 30)


@pytest.fixture(scope="session")
def tiny_node(tmp_path_factory):
    """A decode node of another model."""
    folder = tmp_path_factory.mktemp("tiny")
    assert run(BIN / "sluice-make-fixture", "tiny-llama", folder / "model").returncode == 0
    node = Node("sluice-server", folder / "model", folder, "--hbm-bytes", "64MiB", "--dram-bytes", "64MiB")
    yield node
    node.stop()
