"""Short forms of the long runs in tests/bench. Their bounds leave room for a busy machine. The long forms have the
product's bounds and need a quiet machine.
"""

import sys

import pytest
from support.nodes import ROOT, SCALE, run

TINY = ["--threads", 1, "--prompt", 64, "--hbm-bytes", "16MiB"]


def long_run(script, *args, timeout=300 * SCALE):
    return run(sys.executable, ROOT / "tests/bench" / script, *args, timeout=timeout)


def test_a_soak_loses_nothing_and_does_not_grow(tiny_models):
    done = long_run("soak.py", "--model", tiny_models("tiny-llama"), *TINY, "--dram-bytes", "16MiB", "--streams",
                    16, "--output", 100, "--seconds", 10, "--settle", 5)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("holds ") == 5 and "0 failed" in done.stdout


def test_an_overload_is_refused_and_harms_nobody(tiny_models):
    # A token takes 1,536 bytes, so DRAM holds 10 prompts and HBM 9 whole sequences. The test only asks that there is
    # any speed, because other work on the machine changes it tenfold. Whether the batch is full again does not depend
    # on the speed. The load is twelve times what full load finished, so that there is a surplus also where other work
    # slowed the node down only while full load was measured.
    done = long_run("overload.py", "--model", tiny_models("tiny-llama"), *TINY, "--dram-bytes", "1MiB",
                    "--streams", 8, "--max-waiting", 4, "--factor", 12, "--output", 1000, "--warm-seconds", 2,
                    "--full-seconds", 4, "--seconds", 6, "--after-seconds", 5, "--gap-ratio", 20, "--speed-share", 0.01,
                    "--batch-share", 0.6)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("holds ") == 7
    assert "RESOURCE_EXHAUSTED" in done.stdout


@pytest.mark.parametrize("script, args, words", [
    ("soak.py", ["--settle", 10, "--seconds", 10], "--settle"),
    ("overload.py", ["--after-seconds", 1], "--after-seconds"),
])
def test_a_long_run_that_could_say_nothing_is_refused(script, args, words):
    done = long_run(script, *args)
    assert done.returncode == 2 and words in done.stderr


@pytest.mark.parametrize("script", ["soak.py", "overload.py"])
def test_a_long_run_explains_itself(script):
    done = long_run(script, "--help")
    assert done.returncode == 0 and "tests/bench/" + script in done.stdout
    for words in ("--model", "--streams", "--seconds", "exit status"):
        assert words in done.stdout


def test_a_broken_bound_makes_a_soak_fail(tiny_models):
    done = long_run("soak.py", "--model", tiny_models("tiny-llama"), *TINY, "--dram-bytes", "16MiB", "--streams",
                    2, "--output", 20, "--seconds", 2, "--settle", 1, "--growth-mb", -1000)
    assert done.returncode == 1 and "BROKEN  resident memory grows" in done.stdout


@pytest.mark.parametrize("what", [["--streams", 48, "--seconds", 4], ["--rounds", 1, "--streams", 4]],
                         ids=["many callers", "a rolling update"])
def test_behind_the_router_no_answer_is_wrong_and_none_fails(what):
    done = long_run("behind_router.py", *what)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "holds   no request fails: 0" in done.stdout
