"""The table of bad input: calls, configurations, model directories.

Each case has its exact status and names what is wrong. After each case a node that has run from the start serves a
good request, and holds what it held before. The tables are in support/bad_*.py.
"""

import shutil

import pytest
from sluice.v1 import decode_pb2
from sluice_client import rpc
from support.bad_calls import Site
from support.bad_configs import CONFIGS
from support.bad_decode import DECODE_CALLS
from support.bad_facade import FACADE_CALLS
from support.bad_ingest import INGEST_CALLS
from support.bad_models import MODELS
from support.bad_pull import PULL_CALLS
from support.bad_wire import WIRE_CALLS
from support.nodes import BIN, ENVIRONMENT, TIMEOUT_S, error_of, greedy, run, tokens_of
from support.transfers import Transfer, committed

CALLS = [*DECODE_CALLS, *INGEST_CALLS, *WIRE_CALLS, *FACADE_CALLS, *PULL_CALLS]


@pytest.fixture(scope="module")
def small(tiny_models, start):
    """A node with ordinary settings but a longer lease: the transfer below outlives the table on a slow machine too.
    """
    return start("sluice-server", tiny_models("tiny-llama"), "--hbm-bytes", "4MiB", "--dram-bytes", "6MiB",
                 "--max-sequences", "4", "--lease-seconds", "3600s")


@pytest.fixture(scope="module")
def ready(small, golden):
    """A committed transfer that bad requests must leave alone. A good request uses it up at the end."""
    before = small.settled()
    transfer = committed(small, golden("tiny-llama"))
    yield transfer
    tokens, _ = tokens_of(small.decode.Generate(decode_pb2.GenerateRequest(
        transfer_id=transfer, sampling=greedy(max_tokens=24)), timeout=TIMEOUT_S))
    assert len(tokens) == 24
    small.wait_until_held(before)


@pytest.fixture(scope="module")
def site(small, pairs, golden, ready):
    return Site(small, pairs("tiny-llama").prefill, golden("tiny-llama"), ready)


@pytest.fixture
def unharmed(small, golden):
    """Checks after a case that capacity is as it was and that the next request works."""
    before = small.settled()
    yield
    small.wait_until_held(before)
    transfer = Transfer(small, golden("tiny-llama"), case=0, max_new_tokens=2)
    transfer.write_all()
    transfer.commit()
    tokens, _ = tokens_of(small.decode.Generate(decode_pb2.GenerateRequest(
        transfer_id=transfer.id, sampling=greedy(ignore_eos=True)), timeout=TIMEOUT_S))
    assert len(tokens) == 2
    small.wait_until_held(before)


@pytest.mark.parametrize("case", CALLS, ids=lambda c: c.name)
def test_a_bad_call_has_its_status_and_names_its_fault(site, unharmed, case):
    try:
        error = error_of(lambda: case.call(site))
    finally:
        site.clean()
    assert error.code() == case.code, error.details()
    details = rpc.details_of(error)
    violations = details["BadRequest"].field_violations if "BadRequest" in details else []
    assert [v.field for v in violations] == ([case.field] if case.field else []), error.details()
    assert all(v.description and v.field in error.details() for v in violations)
    assert rpc.reason_of(error) == case.reason
    assert case.words in error.details()
    if case.reason and error.code().name == "RESOURCE_EXHAUSTED":
        assert 0 < rpc.retry_seconds(error) < 3600


def sentence_of(program, *flags, env=ENVIRONMENT):
    """Returns the output of a program that must fail: one line and status 1, without a crash."""
    done = run(BIN / program, *flags, env=env)
    assert done.returncode == 1, (done.returncode, done.stderr[-2000:])
    # A node that got as far as its log has written JSON lines.
    lines = [line for line in done.stderr.splitlines() if not line.startswith("{")]
    assert len(lines) == 1 and lines[0].startswith(f"{program}: "), lines
    assert len(lines[0]) < 2000
    return lines[0]


@pytest.mark.parametrize("case", CONFIGS, ids=lambda c: c.name)
def test_a_bad_configuration_is_one_sentence_that_names_the_setting(unharmed, tmp_path, case):
    sentence = sentence_of(case.program, *case.arguments(tmp_path), env={**ENVIRONMENT, **case.env})
    assert case.words.replace("{file}", str(tmp_path / "c.yaml")) in sentence


@pytest.mark.parametrize("case", MODELS, ids=lambda c: c.name)
def test_a_bad_model_directory_is_one_sentence_that_names_the_file(unharmed, tiny_models, tmp_path, case):
    model = tmp_path / "model"
    shutil.copytree(tiny_models("tiny-llama"), model)
    case.change(model)
    settings = {"--model": model, "--listen": "127.0.0.1:0", "--hbm-bytes": "4MiB"}
    if case.program == "sluice-server":
        settings |= {"--admin-listen": "127.0.0.1:0", "--dram-bytes": "4MiB"}
    settings |= dict(zip(case.flags[::2], case.flags[1::2]))
    sentence = sentence_of(case.program, *(part for setting in settings.items() for part in setting))
    assert case.words.replace("{dir}", str(model)) in sentence


def test_the_table_is_long(capsys):
    tables = {"calls": CALLS, "configurations": CONFIGS, "model directories": MODELS}
    with capsys.disabled():
        print(f"\n{sum(map(len, tables.values()))} cases of bad input: "
              + ", ".join(f"{len(table)} {name}" for name, table in tables.items()))
    names = [case.name for table in tables.values() for case in table]
    assert len(set(names)) == len(names)
    assert len(names) >= 150
