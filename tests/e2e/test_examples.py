"""The configurations that an operator starts from, configs/*.yaml."""

import pytest
from support.nodes import BIN, ROOT, run

EXAMPLES = sorted((ROOT / "configs").glob("*.yaml"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_is_read_and_is_of_its_program(example):
    program = f"sluice-{example.stem.split('-')[0]}"
    assert f"{program} --config configs/{example.name}" in example.read_text()
    done = run(BIN / program, "--config", example, "--check-config")
    assert done.returncode == 0, done.stderr
    assert f"{example}:" in done.stdout


def test_what_the_example_of_deepseek_promises_fits():
    """The plan needs the geometry alone."""
    example = ROOT / "configs/server-deepseek-v3.2.yaml"
    done = run(BIN / "sluice-server", "--config", example, "--model", ROOT / "configs/models/deepseek-v3.2-ep32",
               "--load-format", "dummy", "--device", "cpu", "--print-plan", timeout=300)
    assert done.returncode == 0, done.stderr
    plan = done.stdout[done.stdout.index("policy ess:"):]
    running = {int(line.split()[0]): int(line.split()[-1]) for line in plan.splitlines() if line.split()[:1] and line.split()[0].isdigit()}
    assert running[32768] == 150  # limited by max_sequences
