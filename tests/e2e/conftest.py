"""Models and nodes, started once for all tests that can share them."""

import os
import signal

import pytest
from support.nodes import BIN, FLOAT32_KERNELS, SMOLLM2, Golden, Node, Pair, run

@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    """name -> directory with the weights of a tiny model."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            done = run(BIN / "sluice-make-fixture", name, made[name], env=os.environ)
            assert done.returncode == 0, done.stderr
        return made[name]

    return get


def starting(tmp_path_factory):
    """start(program, model, *flags) -> Node. All nodes are stopped at the end."""
    nodes = []

    def begin(program, model, *flags, **kwargs):
        nodes.append(Node(program, model, tmp_path_factory.mktemp("node"), *flags, **kwargs))
        return nodes[-1]

    yield begin
    for node in nodes:
        status = node.stop()
        # A test may have killed the node; nothing else may have ended it before.
        assert status in (0, -signal.SIGKILL), f"{node.program} ended with {status}:\n{node.tail()}"


# `start` is for the nodes of one file's tests; few nodes are shared by several files.
start = pytest.fixture(scope="module", name="start")(starting)
start_shared = pytest.fixture(scope="session", name="start_shared")(starting)


@pytest.fixture(scope="session")
def pairs(tiny_models, start_shared):
    """name -> Pair of nodes of a tiny model."""
    made = {}

    def get(name):
        if name not in made:
            model = tiny_models(name)
            hbm = ["--hbm-bytes", "64MiB"]
            # Tests hand the same prompts over again and again, and count what lands.
            made[name] = Pair(start_shared("sluice-server", model, *hbm, "--dram-bytes", "64MiB",
                                           "--prefix-cache=false"),
                              start_shared("sluice-prefill", model, *hbm))
        return made[name]

    return get


@pytest.fixture(scope="session")
def smollm2():
    """The directory of the real model."""
    if not (SMOLLM2 / "model.safetensors").is_file():
        pytest.skip(f"no model in {SMOLLM2}: tools/fetch-model smollm2-135m-instruct {SMOLLM2}")
    return SMOLLM2


@pytest.fixture(scope="session")
def smollm2_pairs(smollm2, start_shared):
    """precision -> Pair of nodes of the real model.

    "default" is what users get: the processor's best kernels and bf16 caches. "float32" keeps caches and activations
    in float32.
    """
    made = {}

    def get(precision):
        if precision not in made:
            flags = ["--hbm-bytes", "256MiB"]
            if precision == "float32":
                flags = ["--hbm-bytes", "512MiB", "--kv-dtype", "float32", "--kernels", FLOAT32_KERNELS]
            made[precision] = Pair(start_shared("sluice-server", smollm2, "--dram-bytes", "256MiB", *flags),
                                   start_shared("sluice-prefill", smollm2, *flags))
        return made[precision]

    return get


@pytest.fixture(scope="session")
def smollm2_pair(smollm2_pairs):
    return smollm2_pairs("default")


@pytest.fixture(scope="session")
def small(tiny_models, start_shared):
    """A decode node of tiny-llama that is soon full: a token takes 1536 bytes, and HBM holds 2730 tokens."""
    return start_shared("sluice-server", tiny_models("tiny-llama"), "--hbm-bytes", "4MiB", "--dram-bytes", "6MiB",
                 "--max-sequences", "4", "--prefix-cache=false")


@pytest.fixture(scope="session")
def golden():
    """name -> Golden of a tiny model."""
    made = {}
    return lambda name: made.setdefault(name, Golden(name))
