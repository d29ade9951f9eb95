"""sluice-bench ingest measures what it says, on a small scale; figures need a quiet machine."""

import json
from pathlib import Path

from support.nodes import BIN, run

PEERS = ["discard", "copy", "ingest", "pull"]


def test_ingest_is_measured_beside_raw_grpc_and_beside_a_decode(tiny_models):
    done = run(BIN / "sluice-bench", "ingest", "--rounds", "2", "--transfer-mib", "8", "--chunks", "256,1024",
               "--streams", "2", "--model", tiny_models("tiny-llama"), "--window", "0.2s", "--rate", "20e6",
               "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["subcommand"] == "ingest"
    figures = {f["name"]: f for f in report["figures"]}
    for chunk in (256, 1024):
        for peer in PEERS:
            figure = figures[f"{peer}, chunks of {chunk} KiB"]
            assert figure["unit"] == "B/s" and figure["samples"] == 2
            assert 1e6 < figure["p10"] <= figure["median"] <= figure["p90"]
            assert figure["more"]["server_cpu_seconds_per_gb"] > 0
            assert figure["more"]["sender_cpu_seconds_per_gb"] > 0
        assert figures[f"discard, chunks of {chunk} KiB"]["more"]["of_discard"] == 1
        assert figures[f"copy, chunks of {chunk} KiB"]["more"]["of_copy"] == 1
        assert figures[f"ingest, chunks of {chunk} KiB"]["more"]["of_ingest"] == 1
    for name in ("decode alone", "decode beside ingest", "decode beside a spin load"):
        assert figures[name]["median"] > 0
    # At a set pace the bytes sent are the bytes asked for, or fewer where the machine was busy.
    assert 1e6 < figures["decode beside ingest"]["more"]["ingest_bytes_per_second"] < 30e6


def test_its_table_names_command_machine_and_shape():
    done = run(BIN / "sluice-bench", "ingest", "--rounds", "1", "--transfer-mib", "4", "--chunks", "128")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("command   sluice-bench ingest") and lines[1].startswith("machine ")
    assert "chunks_kib=128" in done.stdout
    assert [line.split()[0] for line in lines[-4:]] == PEERS


def test_all_of_it_goes_over_mtls_where_asked_and_leaves_nothing_behind():
    before = set(Path("/tmp").glob("sluice-bench.*"))
    command = ["ingest", "--rounds", "1", "--transfer-mib", "4", "--chunks", "128", "--json"]
    plain, tls = (run(BIN / "sluice-bench", *command, *more) for more in ([], ["--tls"]))
    assert plain.returncode == 0 and tls.returncode == 0, plain.stderr + tls.stderr
    reports = [json.loads(done.stdout) for done in (plain, tls)]
    assert [r["shape"]["tls"] for r in reports] == ["none", "mTLS"]
    assert [f["name"] for f in reports[1]["figures"]] == [f"{p}, chunks of 128 KiB" for p in PEERS]
    assert set(Path("/tmp").glob("sluice-bench.*")) == before
    done = run(BIN / "sluice-bench", "ingest", "--tls", "--model", "x")
    assert done.returncode == 1 and "--tls measures no decode" in done.stderr


def test_a_model_that_is_not_there_is_named(tmp_path):
    done = run(BIN / "sluice-bench", "ingest", "--rounds", "1", "--transfer-mib", "4", "--chunks", "128",
               "--model", tmp_path / "none")
    assert done.returncode == 1
    assert "none" in done.stderr
