"""The profile that a node under ess makes of its first traffic, and uses at its next start."""

import json
import time

import pytest
from support.latent_lab import KERNELS, MEMORY, NAMES, SCARCE, decoded
from support.nodes import TIMEOUT_S

PROMPT = [(7 * i * i + 3 * i + 5) % 500 for i in range(120)]


@pytest.fixture(name="serve")
def _serve(start, tiny_models):
    """serve(folder) -> a node of its own, whose profiles lie in the folder."""
    return lambda folder: start("sluice-server", tiny_models(NAMES[1]), *MEMORY, *KERNELS, *SCARCE, "--local-prefill",
                                "always", "--policy-profile-folder", str(folder))


def await_line(node, text):
    deadline = time.monotonic() + TIMEOUT_S
    while text not in node.log.read_text():
        assert time.monotonic() < deadline, node.tail()
        time.sleep(0.05)


def test_the_first_traffic_makes_a_profile_that_the_next_start_uses(serve, tmp_path):
    folder = tmp_path / "profiles"
    node = serve(folder)
    assert not list(folder.iterdir())
    for _ in range(2):
        decoded(node, prompt_token_ids=PROMPT, max_tokens=300)
    await_line(node, "made a profile")
    assert node.stop() == 0
    (made,) = folder.iterdir()
    misses = json.loads(made.read_text())["misses"]
    assert len({point["ratio"] for point in misses}) >= 2
    assert all(len(point["by_layer"]) > 1 and 120 < point["context"] < 420 for point in misses)

    again = serve(folder)
    await_line(again, "earlier start's traffic is used")
    decoded(again, prompt_token_ids=PROMPT, max_tokens=20)
    assert again.stop() == 0

    made.write_text("{")
    await_line(serve(folder), "made anew")


def test_a_folder_that_cannot_be_written_is_no_error(serve, tmp_path):
    (tmp_path / "file").write_text("")
    node = serve(tmp_path / "file" / "folder")
    await_line(node, "set policy_profile_folder")
    decoded(node, prompt_token_ids=PROMPT, max_tokens=5)
