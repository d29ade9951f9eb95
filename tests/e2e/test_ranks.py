"""A model that several processes divide among them (tensor_parallel, expert_parallel): answers, ends, refusals."""

import json
import os
import signal
import subprocess
import threading
import time

import grpc
import pytest
from sluice.v1 import admin_pb2, common_pb2, decode_pb2
from sluice_client import rpc
from support.nodes import (BIN, DEVICE, ENVIRONMENT, FLOAT32_KERNELS, TIMEOUT_S, Node, error_of, free_port, greedy, run,
                           tokens_of)
from support.pki import Pki, write_access
from support.rank_lab import END_S, FLUSH_S, TRANSPORTS, Ranks, skip_without_gpus, starting_ranks
from support.rank_lab import EXACT as SHARED

Code = grpc.StatusCode
COMPUTES = ["--local-prefill", "always"]
EXACT = [*SHARED, *COMPUTES]
PROMPTS = [[(7 * i * j + 3) % 500 for i in range(n)] for j, n in enumerate((1, 5, 40, 200), start=1)]


@pytest.fixture(name="ranks", params=TRANSPORTS)
def _ranks(request, tiny_models, tmp_path):
    yield from starting_ranks(tiny_models, tmp_path, request.param)


@pytest.fixture(name="by_grpc")
def _by_grpc(tiny_models, tmp_path):
    yield from starting_ranks(tiny_models, tmp_path, "grpc")


def requests():
    """Greedy and sampled requests, of short and long prompts."""
    for i, prompt in enumerate(PROMPTS):
        yield decode_pb2.GenerateRequest(prompt_token_ids=prompt, sampling=greedy(max_tokens=40, ignore_eos=True))
        yield decode_pb2.GenerateRequest(
            prompt_token_ids=prompt, sampling=common_pb2.SamplingParams(
                temperature=0.8, top_k=20, seed=100 + i, max_tokens=40, ignore_eos=True,
                repetition_penalty=1.2))


def answers(node):
    """Returns the tokens of all requests, which run together."""
    calls = [node.decode.Generate(request, timeout=TIMEOUT_S) for request in requests()]
    return [[token.id for token in tokens_of(call)[0]] for call in calls]


@pytest.mark.parametrize("name,size,flags", [
    ("tiny-llama", 2, ()), ("tiny-qwen2", 2, ()), ("tiny-qwen3", 2, ()), ("tiny-llama", 4, ()),
    ("tiny-llama", 2, ("--policy", "scout", "--budget-tokens", "64")),
    ("tiny-llama", 2, ("--policy", "recall", "--budget-tokens", "64")),
    ("tiny-llama", 2, ("--policy", "hgca", "--hgca-window-tokens", "64")),
    ("tiny-llama", 2, ("--policy", "clo", "--budget-tokens", "96", "--clo-persistent-share", "0.4")),
    ("tiny-llama", 2, ("--policy", "fluxion", "--budget-tokens", "96")),
    ("tiny-deepseek-v32", 2, ()), ("tiny-deepseek-v32-fp8", 4, ()),
    ("tiny-deepseek-v32", 2, ("--expert-overlap", "1")),
    ("tiny-deepseek-v32", 2, ("--expert-redundancy", "1", "--expert-overlap", "1")),
    ("tiny-deepseek-v32-fp8", 4, ("--expert-redundancy", "2")),
    ("tiny-deepseek-v32", 4, ("--policy", "ess", "--ess-sparse-memory-ratio", "0.3")),
])
def test_ranks_answer_as_one_node(name, size, flags, ranks, start, tiny_models):
    flags = ("--prefix-cache=false", *flags)  # a sparse policy computes other rows behind a prefix
    skip_without_gpus(size)
    copies = flags.index("--expert-redundancy") if "--expert-redundancy" in flags else len(flags)
    one = answers(start("sluice-server", tiny_models(name), *EXACT, *flags[:copies], *flags[copies + 2:]))
    node = ranks(name, size, *COMPUTES, *flags)
    several = answers(node.leader)
    if DEVICE == "cuda":  # bf16 rounds otherwise where a sum has another order: texts part at near ties
        same = [a == b for a, b in zip(several, one)]
        assert sum(same) >= len(same) / 2, same
    else:
        assert several == one
    assert answers(node.leader) == several
    node.leader.settled()
    node.leader.process.terminate()
    assert node.statuses() == [0] * size


def test_ranks_count_choices_and_experts_are_placed_by_them(ranks, tmp_path):
    flags = (*COMPUTES, "--prefix-cache=false")
    node = ranks("tiny-deepseek-v32", 2, *flags, "--expert-load-out", str(tmp_path / "load"))
    expected = answers(node.leader)
    node.leader.settled()
    node.leader.process.terminate()
    assert node.statuses() == [0, 0]
    files = [tmp_path / f"load.{rank}" for rank in (0, 1)]
    counted = [json.loads(file.read_text())["choices"] for file in files]
    # Two layers have experts, and each row chooses two. Both ranks had sequences.
    rows = 2 * sum(len(prompt) + 39 for prompt in PROMPTS)
    sums = [{layer: sum(numbers) for layer, numbers in choices.items()} for choices in counted]
    assert all(set(of) == {"1", "2"} and of["1"] == of["2"] > 0 for of in sums), sums
    assert 2 * rows <= sums[0]["1"] + sums[1]["1"] <= 2 * rows + 100, (sums, rows)
    copies = ranks("tiny-deepseek-v32", 2, *flags, "--expert-redundancy", "2", "--expert-load",
                   ",".join(map(str, files)))
    got = answers(copies.leader)
    if DEVICE == "cuda":
        assert sum(a == b for a, b in zip(got, expected)) >= len(expected) / 2
    else:
        assert got == expected


def test_a_load_that_cannot_be_written_ends_the_start(ranks):
    with pytest.raises(AssertionError) as started:
        ranks("tiny-deepseek-v32", 2, *COMPUTES, "--expert-load-out", "/nowhere/load")
    assert "expert_load_out: cannot write /nowhere/load.0: No such file or directory" in str(started.value)


def test_a_rank_with_another_load_of_experts_is_refused(ranks, tmp_path, monkeypatch):
    for name, first in (("a", 0), ("b", 100)):
        (tmp_path / name).mkdir()
        layer = [first, 1, 2, 3, 4, 5, 6, 7]
        (tmp_path / name / "load").write_text(json.dumps({"choices": {"1": layer, "2": layer}}))
    monkeypatch.chdir(tmp_path / "a")
    with pytest.raises(AssertionError) as started:
        ranks("tiny-deepseek-v32", 2, *COMPUTES, "--expert-load", "load", places={1: tmp_path / "b"})
    assert "rank 1 " in str(started.value)
    assert "expert_load: rank 1 has other experts than rank 0 expects" in (tmp_path / "0" / "rank1.log").read_text()


def test_the_node_describes_the_whole_model(ranks, start, tiny_models):
    one = start("sluice-server", tiny_models("tiny-llama"), *EXACT)
    node = ranks("tiny-llama", 2, *COMPUTES)
    expected, found = (n.admin.GetModel(admin_pb2.GetModelRequest(), timeout=TIMEOUT_S).model
                       for n in (one, node.leader))
    assert (found.fingerprint, found.heads, found.kv_heads) == (expected.fingerprint, expected.heads,
                                                                expected.kv_heads)
    # Norms are on both ranks; all else is divided.
    assert expected.weight_bytes / 2 < found.weight_bytes < expected.weight_bytes * 0.52


def long_stream(node):
    """Returns a stream that has begun and does not end by itself soon."""
    call = node.decode.Generate(decode_pb2.GenerateRequest(
        prompt_token_ids=[1, 2, 3], sampling=greedy(max_tokens=4000, ignore_eos=True)), timeout=TIMEOUT_S)
    next(call)
    return call


@pytest.mark.parametrize("name,size,victim", [
    ("tiny-llama", 2, 1), ("tiny-llama", 4, 2),
    # Each rank of experts: all take part in every step, with sequences or without.
    ("tiny-deepseek-v32", 2, 1), *(("tiny-deepseek-v32", 4, victim) for victim in (1, 2, 3)),
])
def test_a_killed_rank_ends_streams_and_the_other_ranks(name, size, victim, ranks):
    skip_without_gpus(size)
    node = ranks(name, size, *COMPUTES)
    streams = [long_stream(node.leader) for _ in range(3)]
    errors = []
    readers = [threading.Thread(target=lambda s=s: errors.append(error_of(lambda: s))) for s in streams]
    for reader in readers:
        reader.start()
    begin = time.monotonic()
    node.followers[victim - 1].kill()
    for reader in readers:
        reader.join(END_S)
    assert time.monotonic() - begin < END_S
    assert [(e.code(), rpc.reason_of(e)) for e in errors] == [(Code.UNAVAILABLE, "RANK_LOST")] * 3
    assert f"rank {victim} " in errors[0].details()
    expected = [1] * size
    expected[victim] = -signal.SIGKILL
    assert node.statuses(seconds=FLUSH_S) == expected  # callers get 6 s to take their errors


def test_a_rank_that_is_killed_while_nothing_runs_ends_the_node(ranks):
    node = ranks("tiny-llama", 2, *COMPUTES)
    node.followers[0].kill()
    assert node.statuses(seconds=FLUSH_S) == [1, -signal.SIGKILL]
    assert "rank 1 " in node.leader.tail()


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-deepseek-v32"])
def test_the_other_ranks_end_with_the_leader(name, ranks):
    node = ranks(name, 4 if DEVICE == "cpu" else 2, *COMPUTES)
    stream = long_stream(node.leader)
    node.leader.process.kill()
    statuses = node.statuses()
    assert statuses[0] == -signal.SIGKILL and set(statuses[1:]) == {1}
    assert "rank 0 " in node.logs[0].read_text()
    assert error_of(lambda: stream).code() == Code.UNAVAILABLE


def test_a_signal_to_another_rank_waits_for_the_leader(ranks):
    node = ranks("tiny-llama", 2, *COMPUTES)
    node.followers[0].send_signal(signal.SIGTERM)
    assert len(answers(node.leader)) == 2 * len(PROMPTS)
    assert node.followers[0].poll() is None
    node.leader.process.terminate()
    assert node.statuses() == [0, 0]


@pytest.mark.parametrize("flags,said", [
    (["--tensor-parallel", "2"], "leader: 2 ranks need a name"),
    (["--tensor-parallel", "2", "--rank", "2", "--leader", "a:1"], "rank: must be below tensor_parallel"),
    (["--rank", "1"], "rank: must be below tensor_parallel"),
    (["--tensor-parallel", "2", "--leader", "a:1", "--policy", "ess"], "policy is ess"),
    (["--tensor-parallel", "2", "--leader", "a:1", "--speculation", "ngram"], "speculation to none"),
    (["--tensor-parallel", "3", "--leader", "a:1"], "KV heads"),
    (["--tensor-parallel", "2", "--leader", "a:1", "--kv-transport", "nccl"], "kv_transport to grpc"),
    (["--expert-parallel", "2", "--leader", "a:1", *COMPUTES], "no experts that ranks could divide"),
    (["--expert-parallel", "2", "--tensor-parallel", "2", "--leader", "a:1"], "tensor_parallel to 1"),
    (["--expert-parallel", "2", "--leader", "a:1", "--policy", "scout"], "policies full, ess, and policy is scout"),
    (["--expert-redundancy", "2"], "expert_redundancy: it is for ranks that divide the experts"),
    (["--expert-load", "x", "--tensor-parallel", "2", "--leader", "a:1"], "set expert_parallel to their number"),
    (["--expert-load-out", "x"], "expert_load_out: it is for ranks that divide the experts"),
    (["--expert-parallel", "2", "--leader", "a:1", "--expert-load", "x", *COMPUTES], "has no experts: leave it out"),
])
def test_settings_that_ranks_cannot_have_are_refused(flags, said, tiny_models):
    done = run(BIN / "sluice-server", "--model", tiny_models("tiny-llama"), "--device", "cpu", "--print-plan", *flags)
    assert done.returncode == 1 and said in done.stderr, done


def test_the_plan_shows_each_rank(tiny_models):
    done = run(BIN / "sluice-server", "--model", tiny_models("tiny-llama"), "--device", "cpu", *EXACT, "--print-plan",
               "--tensor-parallel", "2", "--leader", "a:1")
    assert done.returncode == 0, done.stderr
    assert "0 of 2: heads 0 to 1 of 4, KV heads 0 to 0 of 2" in done.stdout
    assert "1 of 2: heads 2 to 3 of 4, KV heads 1 to 1 of 2" in done.stdout
    # Three layers, 8 rows, 128 float32 elements a row, and two sums a layer.
    assert "6 all-reduces of 24.0 KiB" in done.stdout


def test_the_plan_shows_ranks_of_experts(tiny_models):
    plan = [BIN / "sluice-server", "--model", tiny_models("tiny-deepseek-v32"), "--device", "cpu", "--kernels",
            FLOAT32_KERNELS, "--kv-dtype", "float32", *EXACT[-10:], "--print-plan", "--leader", "a:1",
            "--expert-parallel"]
    done = run(*plan, "4")
    assert done.returncode == 0, done.stderr
    assert "0 of 4: experts 0 to 1 of 8" in done.stdout and "3 of 4: experts 6 to 7 of 8" in done.stdout
    # Two layers have experts; 4 ranks of 8 rows, each of 192 float32 elements and 2 choices with their weights.
    assert "4 all-to-alls, 2 out of up to 24.5 KiB and as many back of up to 24.0 KiB" in done.stdout
    table = done.stdout.split("GPUs that the checkpoint takes")[1].splitlines()[2:]
    assert [line.split()[0] for line in table] == ["1", "2", "4", "8"]
    refused = run(*plan, "3")
    assert refused.returncode == 1 and "8 experts, which 3 ranks cannot divide evenly" in refused.stderr


def weights_of(plan):
    """Returns the words of rank 0's line, and the bytes of weights that they end with, in MiB."""
    line = next(line for line in plan.splitlines() if " 0 of 4: " in line)
    return line, float(line.split(": ")[-1].removesuffix(" MiB of weights"))


def test_the_plan_counts_copies_of_experts(tiny_models, tmp_path):
    plan = [BIN / "sluice-server", "--model", tiny_models("tiny-deepseek-v32"), "--device", "cpu", "--kernels",
            FLOAT32_KERNELS, "--kv-dtype", "float32", *EXACT[-10:], "--print-plan", "--leader", "a:1",
            "--expert-parallel", "4"]
    none, copies = run(*plan), run(*plan, "--expert-redundancy", "3")
    assert copies.returncode == 0, copies.stderr
    assert "1 of 4: experts 2 to 3 of 8, copies of 3 others from 4 on, all other weights" in copies.stdout
    assert "3 of 4: experts 6 to 7 of 8, copies of 3 others from 0 on, all other weights" in copies.stdout
    # Three experts of two layers, each of three matrices of 64 x 192 in bf16.
    more = weights_of(copies.stdout)[1] - weights_of(none.stdout)[1]
    config = json.loads((tiny_models("tiny-deepseek-v32") / "config.json").read_text())
    matrix = config["hidden_size"] * config["moe_intermediate_size"] * 2
    assert abs(more - 3 * 2 * 3 * matrix / 2**20) < 0.1, more
    table = copies.stdout.split("GPUs that the checkpoint takes")[1].splitlines()[2:]
    assert [line.split()[0] for line in table] == ["1", "2", "4", "8"]
    # In order, rank 0 has 800 of 1400 choices of one layer, which is 2.29 times the mean, and of the other as many as all.
    load = tmp_path / "load"
    load.write_text(json.dumps({"choices": {"1": [700, 100, 100, 100, 100, 100, 100, 100], "2": [10] * 8}}))
    placed = run(*plan, "--expert-redundancy", "2", "--expert-load", load)
    assert placed.returncode == 0, placed.stderr
    assert "3 of 4: 4 of 8 experts, all other weights" in placed.stdout
    assert "the busiest rank of a layer has 1." in placed.stdout and "and 1.64 times with" in placed.stdout
    for flags, said in ((["--expert-redundancy", "7"], "copies of up to 6 more, but expert_redundancy is 7"),
                        (["--expert-load", "/nowhere"], "expert_load: /nowhere")):
        refused = run(*plan, *flags)
        assert refused.returncode == 1 and said in refused.stderr, refused


# A name that only ranks of one host can share, and one at which rank 0 listens: for each a loopback address of its own.
@pytest.mark.parametrize("transport,flags", [("shm", []), ("grpc", ["--rank-transport", "grpc"])])
def test_a_leader_worker_set_gives_the_ranks_their_names(transport, flags, tiny_models, tmp_path):
    model = tiny_models("tiny-llama")
    base = [str(BIN / "sluice-server"), "--model", str(model), "--device", DEVICE, *EXACT, *flags,
            "--tensor-parallel", "2"]
    host = f"127.{os.getpid() % 250 + 1}.{free_port() % 250}.{1 + TRANSPORTS.index(transport)}"
    env = ENVIRONMENT | {"LWS_LEADER_ADDRESS": host}
    log = (tmp_path / "follower.log").open("w")
    follower = subprocess.Popen([*base, "--admin-listen", "127.0.0.1:0"], stdout=log,
                                stderr=subprocess.STDOUT, env=env | Ranks.env(1) | {"LWS_WORKER_INDEX": "1"})
    node = Node("sluice-server", model, tmp_path, *base[5:], env=env | Ranks.env(0) | {"LWS_WORKER_INDEX": "0"})
    try:
        tokens, _ = tokens_of(node.decode.Generate(next(iter(requests())), timeout=TIMEOUT_S))
        assert len(tokens) == 40
        assert f'"transport":"{transport}"' in node.log.read_text()
    finally:
        assert node.stop() == 0
        assert follower.wait(END_S) == 0


# ---- Between hosts ----

def follower_of(model, *flags):
    """Runs a rank that is refused; returns how it ended."""
    return run(BIN / "sluice-server", "--model", model, "--device", DEVICE, *SHARED, *COMPUTES, "--tensor-parallel", "2",
               "--rank", "1", "--rank-transport", "grpc", *flags)


def test_ranks_prove_who_they_are(by_grpc, tiny_models, tmp_path):
    pki = Pki(tmp_path / "pki")
    cert, key = pki.issue("decode-0")
    stranger = pki.issue("stranger")
    access = write_access(tmp_path / "access.json", certificates=[
        {"identity": "cn:decode-0", "roles": ["decode"]}, {"identity": "cn:router", "roles": ["router", "operator"]}])

    def tls(pair):
        return ["--tls-cert", str(pair[0]), "--tls-key", str(pair[1]), "--tls-ca", str(pki.ca), "--access-file", str(access)]

    leader = f"127.0.0.1:{free_port()}"
    ended = []
    refused = threading.Thread(target=lambda: ended.append(
        follower_of(tiny_models("tiny-llama"), "--leader", leader, *tls(stranger))))
    refused.start()  # waits for a leader, which does not know it
    node = by_grpc("tiny-llama", 2, *COMPUTES, *tls((cert, key)), leader=leader, credentials=pki.credentials("router"))
    refused.join(TIMEOUT_S)
    assert ended[0].returncode == 1 and "stranger" in ended[0].stderr, ended[0]
    assert len(answers(node.leader)) == 2 * len(PROMPTS)
    node.leader.process.terminate()
    assert node.statuses() == [0, 0]


def test_a_rank_with_another_model_is_refused(by_grpc, tiny_models):
    with pytest.raises(AssertionError) as started:
        by_grpc("tiny-llama", 2, *COMPUTES, models={1: tiny_models("tiny-qwen3")})
    assert "rank 1 " in str(started.value)


def test_a_rank_without_a_leader_gives_up(tiny_models):
    done = follower_of(tiny_models("tiny-llama"), "--leader", "127.0.0.1:1x")
    assert done.returncode == 1 and "leader" in done.stderr, done
