"""The programs as processes: command line, addresses, health, metrics, memory, shutdown."""

import json
import re
import threading

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from sluice.v1 import admin_pb2, decode_pb2, ingest_pb2
from sluice_client import rpc
from support.metrics_text import Scrape, wait_for
from support.nodes import BIN, DEVICE, TIMEOUT_S, Node, greedy, run, sluice_json, tokens_of
from support.transfers import committed

PROGRAMS = ["sluice-server", "sluice-prefill"]
MIB = 1 << 20
LONG = 1500  # tokens of a stream that still runs when a drain begins, and ends well within its 30 s


def test_the_address_file_says_where_to_call(small):
    for name in ("listen", "admin_listen"):
        assert re.fullmatch(r"127\.0\.0\.1:[1-9][0-9]*", small.addresses[name])
    assert small.addresses["pid"] == small.process.pid
    assert small.addresses["listen"] in small.log.read_text()


def test_health_and_readiness(small):
    assert small.http("/healthz")[0] == 200
    assert small.http("/readyz")[0] == 200
    assert small.http("/nonsense")[0] == 404
    health = health_pb2_grpc.HealthStub(small.channel)
    for service in ("", "sluice.v1.Decode", "sluice.v1.KvIngest"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=TIMEOUT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING, service


def test_reflection_lists_the_services(small, pairs):
    database = ProtoReflectionDescriptorDatabase(small.channel)
    assert {"sluice.v1.KvIngest", "sluice.v1.Decode", "sluice.v1.Admin",
            "grpc.health.v1.Health"} <= set(database.get_services())
    prefill = ProtoReflectionDescriptorDatabase(pairs("tiny-llama").prefill.channel)
    assert "sluice.v1.Prefill" in prefill.get_services()


def idle(scrape: Scrape) -> bool:
    return all(scrape.get(f"vllm:{gauge}") == 0
               for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"))


def test_metrics_count_what_was_done(small, golden):
    before = wait_for(small, idle, TIMEOUT_S)
    tokens, _ = tokens_of(small.decode.Generate(decode_pb2.GenerateRequest(
        transfer_id=committed(small, golden("tiny-llama")), sampling=greedy(max_tokens=24, ignore_eos=True)),
        timeout=TIMEOUT_S))
    after = wait_for(small, idle, TIMEOUT_S)
    assert idle(before) and idle(after)
    for name, labels, growth in (
            ("sluice_tokens_total", {"kind": "output"}, len(tokens)),
            ("sluice_tokens_total", {"kind": "handed_over"}, 33),
            ("sluice_requests_total", {"outcome": "finished_length"}, 1),
            ("sluice_ingest_bytes_total", {}, 33 * 1536),
            ("sluice_time_to_first_token_seconds_count", {}, 1),
            ("sluice_inter_token_latency_seconds_count", {}, len(tokens) - 1)):
        assert after.get(name, **labels) - before.get(name, **labels) == growth, (name, labels)
    assert after.get("sluice_tier_capacity_bytes", tier="hbm") > 4e6


def test_memory_is_weights_and_arenas_and_at_most_150_mb(small, tiny_models):
    weights = (tiny_models("tiny-llama") / "model.safetensors").stat().st_size
    assert small.rss_bytes() < weights + 10 * MIB + 150e6


def test_memory_with_a_real_model(smollm2_pair, smollm2):
    sluice_json("generate", *smollm2_pair.flags(), "--prompt-ids", ",".join(["9"] * 500), "--max-tokens", 4)
    weights = (smollm2 / "model.safetensors").stat().st_size
    assert smollm2_pair.decode.rss_bytes() < weights + 512 * MIB + 150e6


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_teaches(program):
    done = run(BIN / program, "--help")
    assert done.returncode == 0
    for words in ("--model", "--listen", "--hbm-bytes", "SLUICE_", "xamples"):
        assert words in done.stdout


def test_check_config_shows_what_flag_environment_and_file_make(tiny_models, tmp_path):
    config = tmp_path / "c.yaml"
    config.write_text(f"model: {tiny_models('tiny-llama')}\nmax_sequences: 5\nthreads: 3\nhbm_bytes: 7MiB\n")
    done = run(BIN / "sluice-server", "--config", config, "--check-config", "--max-sequences", "6",
               env={"SLUICE_MAX_SEQUENCES": "4", "SLUICE_THREADS": "2", "PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    for pattern in (r"max_sequences: 6\b.*--max-sequences", r"threads: 2\b.*SLUICE_THREADS", r"hbm_bytes: (7MiB|7340032).*c\.yaml"):
        assert re.search(pattern, done.stdout), done.stdout


def test_the_checked_configuration_reads_back_as_the_same_one(tmp_path):
    """With a policy's settings under its name, which is the form of files."""
    first = run(BIN / "sluice-server", "--model", "m", "--ess-sparse-memory-ratio", "0.2", "--check-config")
    assert first.returncode == 0 and "\ness:\n  sparse_memory_ratio: 0.2 " in first.stdout, first.stdout
    assert "hbm_bytes: auto" in first.stdout and 'device: "auto"' in first.stdout
    config = tmp_path / "c.yaml"
    config.write_text(first.stdout)
    again = run(BIN / "sluice-server", "--config", config, "--check-config")
    assert again.returncode == 0, again.stderr

    def values(text):
        return [line.split("  # ")[0].rstrip() for line in text.splitlines()]

    assert values(again.stdout) == values(first.stdout)


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_node_chooses_its_device_and_memory_and_says_why(tiny_models, tmp_path, program):
    memory = {"hbm_bytes", "dram_bytes" if program == "sluice-server" else "hold_bytes"}
    if DEVICE == "cuda":  # others use the GPU, and to pin DRAM takes long
        memory.discard("dram_bytes")
    node = Node(program, tiny_models("tiny-llama"), tmp_path,
                *(word for name in memory for word in (f"--{name.replace('_', '-')}", "auto")))
    assert node.stop() == 0
    lines = [json.loads(line) for line in node.log.read_text().splitlines()]
    (device,) = [line for line in lines if line["message"] == "device chosen"]
    assert device["device"] == DEVICE and device["why"] == "as configured"
    chosen = {line["setting"]: line for line in lines if line["message"] == "memory for KV caches"}
    assert memory <= set(chosen)
    for name in memory:
        assert chosen[name]["bytes"] > MIB and chosen[name]["why"].startswith("auto: "), chosen


def test_print_plan_says_what_fits(tiny_models):
    done = run(BIN / "sluice-server", "--model", tiny_models("tiny-llama"), "--hbm-bytes", "4MiB",
               "--print-plan")
    assert done.returncode == 0, done.stderr
    assert "1.5 KiB a token" in done.stdout and re.search(r"HBM +4.0 MiB +2[67][0-9]{2} tokens", done.stdout)


def test_a_port_in_use_is_named(small, tiny_models):
    done = run(BIN / "sluice-server", "--model", tiny_models("tiny-llama"), "--listen", small.address,
               "--admin-listen", "127.0.0.1:0", "--hbm-bytes", "4MiB", "--dram-bytes", "4MiB")
    assert done.returncode == 1 and small.address in done.stderr


def test_sigterm_finishes_what_runs_and_refuses_what_comes(tiny_models, start, golden):
    node = start("sluice-server", tiny_models("tiny-llama"), "--hbm-bytes", "8MiB", "--dram-bytes", "8MiB")
    stream = node.decode.Generate(decode_pb2.GenerateRequest(
        transfer_id=committed(node, golden("tiny-llama"), max_new_tokens=LONG),
        sampling=greedy(max_tokens=LONG, ignore_eos=True)), timeout=TIMEOUT_S)
    first = next(stream)
    node.process.terminate()
    refusals = []

    def ask():
        while True:
            try:
                node.ingest.Reserve(hopeless_reserve(), timeout=1)
            except grpc.RpcError as error:
                refusals.append(error.code())
                if error.code() == grpc.StatusCode.UNAVAILABLE:
                    return

    asker = threading.Thread(target=ask)
    asker.start()
    tokens, finish = tokens_of(stream)
    assert len(first.tokens) + len(tokens) == LONG
    assert finish.reason == decode_pb2.FINISH_REASON_LENGTH
    asker.join(TIMEOUT_S)
    assert refusals[-1] == grpc.StatusCode.UNAVAILABLE
    assert node.process.wait(TIMEOUT_S) == 0


def serving(node) -> bool:
    answer = health_pb2_grpc.HealthStub(node.channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
    return answer.status == health_pb2.HealthCheckResponse.SERVING


def test_drain_and_resume_open_and_close_the_node(tiny_models, start, golden):
    node = start("sluice-server", tiny_models("tiny-llama"), "--hbm-bytes", "8MiB", "--dram-bytes", "8MiB")
    empty = node.held()

    def long_stream(name):
        stream = node.decode.Generate(decode_pb2.GenerateRequest(
            request_id=name, transfer_id=committed(node, golden("tiny-llama"), max_new_tokens=LONG),
            sampling=greedy(max_tokens=LONG, ignore_eos=True)), timeout=TIMEOUT_S)
        next(stream)
        return stream

    def refusal(call):
        with pytest.raises(grpc.RpcError) as raised:
            call()
        return raised.value.code(), rpc.reason_of(raised.value)

    # There is nothing to resume.
    assert sluice_json("resume", "--decode", node.address) == {"was_draining": False}
    stream = long_stream("finished")
    answer = node.admin.Drain(admin_pb2.DrainRequest(), timeout=TIMEOUT_S)
    assert not answer.was_draining and answer.running == 1 and answer.timeout.seconds in (29, 30)
    assert not serving(node) and node.http("/readyz")[0] == 503 and node.capacity().draining
    unavailable = (grpc.StatusCode.UNAVAILABLE, "DRAINING")
    assert refusal(lambda: node.ingest.Reserve(hopeless_reserve(), timeout=TIMEOUT_S)) == unavailable
    assert refusal(lambda: next(node.decode.Generate(decode_pb2.GenerateRequest(
        rendezvous_key="k", sampling=greedy(max_tokens=1)), timeout=TIMEOUT_S))) == unavailable
    tokens, finish = tokens_of(stream)
    assert finish.reason == decode_pb2.FINISH_REASON_LENGTH and len(tokens) > LONG * 2 // 3
    got = sluice_json("drain", "--decode", node.address)
    assert got == {"idle": True, "running": 0, "waiting": 0, "was_draining": True}

    assert sluice_json("resume", "--decode", node.address) == {"was_draining": True}
    assert serving(node) and node.http("/readyz")[0] == 200 and not node.capacity().draining
    # A sequence that runs when the drain is resumed goes on to its end.
    stream = long_stream("resumed")
    node.admin.Drain(admin_pb2.DrainRequest(timeout={"nanos": 400_000_000}), timeout=TIMEOUT_S)
    node.admin.Resume(admin_pb2.ResumeRequest(), timeout=TIMEOUT_S)
    assert tokens_of(stream)[1].reason == decode_pb2.FINISH_REASON_LENGTH
    # The time is over.
    stream = long_stream("ended")
    node.admin.Drain(admin_pb2.DrainRequest(timeout={}), timeout=TIMEOUT_S)
    assert refusal(lambda: tokens_of(stream)) == unavailable
    node.wait_until_held(empty)
    for bad in ({"seconds": -1}, {"seconds": 86401}, {"nanos": 1_000_000_000}):
        with pytest.raises(grpc.RpcError) as raised:
            node.admin.Drain(admin_pb2.DrainRequest(timeout=bad), timeout=TIMEOUT_S)
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT and "timeout" in raised.value.details()


def test_sigterm_during_a_drain_takes_over_and_is_final(tiny_models, start, golden):
    node = start("sluice-server", tiny_models("tiny-llama"), "--hbm-bytes", "8MiB", "--dram-bytes", "8MiB",
                 "--drain-timeout-seconds", "30")
    stream = node.decode.Generate(decode_pb2.GenerateRequest(
        transfer_id=committed(node, golden("tiny-llama"), max_new_tokens=LONG),
        sampling=greedy(max_tokens=LONG, ignore_eos=True)), timeout=TIMEOUT_S)
    next(stream)
    node.admin.Drain(admin_pb2.DrainRequest(timeout={"seconds": 86400}), timeout=TIMEOUT_S)
    node.process.terminate()
    while True:
        try:
            node.admin.Resume(admin_pb2.ResumeRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            assert (error.code(), rpc.reason_of(error)) == (grpc.StatusCode.FAILED_PRECONDITION, "STOPPING")
            break
    assert node.admin.Drain(admin_pb2.DrainRequest(timeout={}), timeout=TIMEOUT_S).was_draining
    # Running sequences are finished all the same.
    assert tokens_of(stream)[1].reason == decode_pb2.FINISH_REASON_LENGTH
    assert node.process.wait(TIMEOUT_S) == 0


def hopeless_reserve():
    """A Reserve that is refused for its manifest while the node serves, and because of the drain afterwards."""
    return ingest_pb2.ReserveRequest(manifest=ingest_pb2.Manifest(model_fingerprint="?"))


@pytest.mark.parametrize("program", PROGRAMS)
def test_sigterm_at_rest_ends_at_once(tiny_models, tmp_path, program):
    flags = ["--hbm-bytes", "4MiB"] + (["--dram-bytes", "4MiB"] if program == "sluice-server" else [])
    node = Node(program, tiny_models("tiny-llama"), tmp_path, *flags)
    assert node.stop(timeout=5) == 0


def test_logs_are_json_off_a_terminal(small):
    lines = small.log.read_text().splitlines()
    assert lines and all(isinstance(json.loads(line), dict) for line in lines)


def test_a_server_without_admin_port_serves(tiny_models, tmp_path, golden):
    node = Node("sluice-server", tiny_models("tiny-llama"), tmp_path, "--hbm-bytes", "4MiB", "--dram-bytes",
                "4MiB", "--admin-listen", "", admin=False)
    got = sluice_json("push", "--decode", node.address, "--kv", golden("tiny-llama").path, "--case", 0)
    assert len(got["output_ids"]) == 24
    assert node.stop() == 0
