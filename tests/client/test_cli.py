"""tools/sluice as its users meet it: output, exit status, and what it says on errors."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from fake_node import DIM, HEADS, LAYERS, FakeNode
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2
from safetensors.numpy import save_file
from sluice.v1 import decode_pb2
from sluice_client import status
from terminal import heeding_ctrl_c

SLUICE = Path(__file__).resolve().parents[2] / "tools" / "sluice"
KEYS = ["prompt_ids", "output_ids", "output_text", "logprobs", "top_logprobs", "finish_reason",
        "exact_tokens", "drafted_tokens", "accepted_tokens", "ttft_seconds", "itl_seconds"]


def test_json_has_the_keys_that_scripts_read(sluice, node):
    out = sluice("generate", "--decode", node.address, "--prompt-ids", "1,2,3", "--json")
    assert out.returncode == 0, out.stderr
    got = json.loads(out.stdout)
    assert list(got) == KEYS
    assert got["prompt_ids"] == [1, 2, 3] and got["output_ids"] == [5, 6, 7]
    assert got["output_text"] is None and got["logprobs"] is None and got["top_logprobs"] is None
    assert got["finish_reason"] == "length"
    assert got["ttft_seconds"] > 0 and len(got["itl_seconds"]) == 2
    request = node.requests[-1]
    assert list(request.prompt_token_ids) == [1, 2, 3] and not request.HasField("transfer_id")


def test_logprobs_are_per_token(sluice, node):
    out = sluice("generate", "--decode", node.address, "--prompt-ids", "1", "--logprobs", 1, "--json")
    got = json.loads(out.stdout)
    assert got["logprobs"] == [-0.625, -0.75, -0.875]
    assert got["top_logprobs"] == [[[5, -0.625]], [[6, -0.75]], [[7, -0.875]]]


@pytest.mark.parametrize("exact", [3, 2, 0])
def test_generate_says_from_where_on_a_policy_approximated(sluice, node, exact):
    node.exact_tokens = exact
    out = sluice("generate", "--decode", node.address, "--prompt-ids", "1,2,3")
    assert out.returncode == 0, out.stderr
    assert (f"exact for the first {exact}" in out.stderr) == (exact < 3)


def test_generate_says_how_many_drafts_were_accepted(sluice, node):
    out = sluice("generate", "--decode", node.address, "--prompt-ids", "1,2,3")
    assert "drafts" not in out.stderr
    node.finish.usage.drafted_tokens, node.finish.usage.accepted_tokens = 6, 2
    out = sluice("generate", "--decode", node.address, "--prompt-ids", "1,2,3")
    assert "2 of 6 drafts accepted" in out.stderr
    out = sluice("generate", "--decode", node.address, "--prompt-ids", "1,2,3", "--json")
    got = json.loads(out.stdout)
    assert (got["drafted_tokens"], got["accepted_tokens"]) == (6, 2)


def test_prefill_gets_the_decode_address_and_generate_the_transfer(sluice, node):
    out = sluice("generate", "--prefill", node.address, "--decode", node.address, "--prompt-ids", "4,5",
                 "--max-tokens", 7, "--temperature", 0.5, "--top-k", 3, "--top-p", 0.75, "--seed", 9,
                 "--stop", "x", "--stop", "y", "--ignore-eos", "--json")
    assert out.returncode == 0, out.stderr
    run, generate = node.requests
    assert run.decode_address == node.address and list(run.prompt_token_ids) == [4, 5]
    assert generate.transfer_id == "cd" * 16 and not generate.prompt_token_ids
    assert run.sampling == generate.sampling
    s = run.sampling
    assert (s.max_tokens, s.temperature, s.top_k, s.top_p, s.seed) == (7, 0.5, 3, 0.75, 9)
    assert list(s.stop) == ["x", "y"] and s.ignore_eos


def test_without_temperature_it_is_greedy(sluice, node):
    sluice("generate", "--decode", node.address, "--prompt-ids", "4")
    s = node.requests[-1].sampling
    assert s.HasField("temperature") and s.temperature == 0


def test_text_streams_and_ends_before_the_stop_string(sluice, node, byte_tokenizer):
    from sluice_client.text import Text
    ids = Text(byte_tokenizer).encode("Grüße und STOP")
    node.answer = [[i] for i in ids]
    node.finish = decode_pb2.Finish(reason=decode_pb2.FINISH_REASON_STOP, stop_string="STOP")
    args = ["generate", "--decode", node.address, "--tokenizer", byte_tokenizer, "--prompt", "hi",
            "--stop", "STOP"]
    assert sluice(*args).stdout == "Grüße und \n"
    got = json.loads(sluice(*args, "--json").stdout)
    assert got["output_text"] == "Grüße und " and got["output_ids"] == ids
    assert got["finish_reason"] == "stop"


def test_chat_prompt_goes_through_the_template(sluice, node, byte_tokenizer):
    from sluice_client.text import Text
    out = sluice("generate", "--decode", node.address, "--tokenizer", byte_tokenizer, "--chat",
                 "--prompt", "hi", "--system", "be", "--json")
    assert out.returncode == 0, out.stderr
    assert json.loads(out.stdout)["prompt_ids"] == Text(byte_tokenizer).encode(
        "<s>[system]be[user]hi[assistant]")


def test_ctrl_c_cancels_the_sequence(node):
    node.hang = True
    process = subprocess.Popen(
        heeding_ctrl_c("pipes", SLUICE, "generate", "--decode", node.address, "--prompt-ids", "1"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 20
    while not node.requests and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert process.wait(10) == 130
    assert b"Traceback" not in process.stderr.read()
    assert node.cancelled.wait(10)


@pytest.mark.parametrize("refusal, words", [
    ((grpc.StatusCode.INVALID_ARGUMENT, "bad request", error_details_pb2.BadRequest(field_violations=[
        error_details_pb2.BadRequest.FieldViolation(field="sampling.top_p", description="must be in (0, 1]")
    ])), ["INVALID_ARGUMENT", "sampling.top_p", "must be in (0, 1]"]),
    ((grpc.StatusCode.RESOURCE_EXHAUSTED, "no room", error_details_pb2.RetryInfo(
        retry_delay=duration_pb2.Duration(seconds=1, nanos=500000000))),
     ["RESOURCE_EXHAUSTED: no room", "try again in 1.5 s"]),
    ((grpc.StatusCode.ABORTED, "reader", error_details_pb2.ErrorInfo(reason="SLOW_READER")),
     ["ABORTED", "reason SLOW_READER"]),
])
def test_an_error_is_one_sentence_and_exit_status_1(sluice, node, refusal, words):
    node.refusal = refusal
    out = sluice("generate", "--decode", node.address, "--prompt-ids", "1", "--json")
    assert out.returncode == 1 and out.stdout == ""
    assert len(out.stderr.splitlines()) == 1
    assert all(w in out.stderr for w in [node.address, *words]), out.stderr


def test_nobody_at_the_address_is_said(sluice):
    out = sluice("status", "--decode", "127.0.0.1:1")
    assert out.returncode == 1 and "no server answers at 127.0.0.1:1" in out.stderr


@pytest.mark.parametrize("args", [
    [], ["generate"], ["nonsense"], ["generate", "--decode", "a:1"],
    ["generate", "--decode", "a:1", "--prompt", "x"],
    ["generate", "--decode", "a:1", "--prompt-ids", "1,x"],
    ["generate", "--decode", "a:1", "--prompt-ids", "1", "--chat"],
    ["generate", "--decode", "a:1", "--prompt-ids", "1", "--max-tokens", "-1"],
    ["push", "--decode", "a:1", "--kv", "f"], ["drain"], ["drain", "--decode", "a:1", "--timeout", "-1"],
    ["drain", "--decode", "a:1", "--timeout", "x"], ["resume"],
])
def test_a_wrong_command_line_exits_with_2(sluice, args):
    out = sluice(*args)
    assert out.returncode == 2 and "usage:" in out.stderr


@pytest.mark.parametrize("command", ["generate", "chat", "push", "status", "drain", "resume", "doctor"])
def test_help_shows_an_example(sluice, command):
    out = sluice(command, "--help")
    assert out.returncode == 0 and f"  tools/sluice {command}" in out.stdout.split("example")[1]


def test_the_command_itself_runs_and_passes_its_status_on(node):
    done = subprocess.run([SLUICE, "status"], env=os.environ | {"SLUICE_DECODE": node.address},
                          capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "fake (llama)" in done.stdout
    assert subprocess.run([SLUICE, "nonsense"], capture_output=True, timeout=60, check=False).returncode == 2


def test_the_environment_names_the_nodes_where_no_flag_does(sluice, node, monkeypatch):
    monkeypatch.setenv("SLUICE_DECODE", node.address)
    assert sluice("generate", "--prompt-ids", "1").returncode == 0
    assert not node.requests[-1].HasField("transfer_id")
    monkeypatch.setenv("SLUICE_PREFILL", node.address)
    assert sluice("generate", "--prompt-ids", "1").returncode == 0
    assert node.requests[-1].transfer_id == "cd" * 16
    out = sluice("generate", "--prompt-ids", "1", "--decode", "127.0.0.1:1", "--prefill", "")
    assert out.returncode == 1 and "no server answers at 127.0.0.1:1" in out.stderr
    for command in (["drain", "--no-wait"], ["resume"], ["status"]):
        assert sluice(*command).returncode == 0


@pytest.mark.parametrize("command", [["generate", "--prompt-ids", "1"], ["chat", "--tokenizer", "d"], ["drain"],
                                     ["push", "--kv", "f", "--case", "1"], ["resume"], ["status"],
                                     ["failpoint", "list"], ["trace", "--out", "f"]])
def test_a_missing_node_is_asked_for_by_both_its_names(sluice, command):
    out = sluice(*command)
    assert out.returncode == 2 and "--decode ADDR" in out.stderr and "SLUICE_DECODE" in out.stderr
    if command == ["status"]:
        assert "--prefill ADDR" in out.stderr and "SLUICE_PREFILL" in out.stderr


def recorded(tmp_path, layers=LAYERS, tokens=11):
    tensors = {"case0.prompt": np.arange(tokens, dtype=np.int32), "case0.tokens": np.array([7, 8], np.int32)}
    for layer in range(layers):
        for part in "kv":
            tensors[f"case0.{part}.{layer}"] = np.ones((tokens, HEADS, DIM), np.float32)
    save_file(tensors, tmp_path / "kv.safetensors")
    return tmp_path / "kv.safetensors"


@pytest.mark.parametrize("first_token", [False, True])
def test_push_sends_the_case_and_generates_from_it(sluice, node, tmp_path, first_token):
    extra = ["--first-token"] if first_token else []
    out = sluice("push", "--decode", node.address, "--kv", recorded(tmp_path), "--case", 0, "--json", *extra)
    assert out.returncode == 0, out.stderr
    got = json.loads(out.stdout)
    assert list(got) == KEYS and got["prompt_ids"] == list(range(11)) and got["output_ids"] == [5, 6, 7]
    assert [t.id for t in node.committed.first_tokens] == ([7] if first_token else [])
    assert node.manifest.max_new_tokens == 2
    assert len(node.blocks) == LAYERS * HEADS * 2
    assert node.requests[-1].transfer_id == "ab" * 16


def test_push_names_a_case_or_a_layer_that_is_not_there(sluice, node, tmp_path):
    out = sluice("push", "--decode", node.address, "--kv", recorded(tmp_path), "--case", 3)
    assert out.returncode == 1 and "no case3.prompt: it has case0" in out.stderr
    out = sluice("push", "--decode", node.address, "--kv", recorded(tmp_path, layers=1), "--case", 0)
    assert out.returncode == 1 and "caches of 1 layers" in out.stderr and "has 2" in out.stderr


def test_status_shows_model_and_capacity(sluice, node):
    out = sluice("status", "--decode", node.address)
    assert out.returncode == 0, out.stderr
    for words in ("fake (llama)", "[#--------------...............]", "512 MiB reserved of 1 GiB",
                  "1 running", "r1  running", "and 2 more"):
        assert words in out.stdout, out.stdout
    got = json.loads(sluice("status", "--decode", node.address, "--json").stdout)
    assert got["model"]["model"]["fingerprint"] == "f1" and got["sequences"]["total"] == 3


def test_status_of_a_prefill_node_shows_what_it_serves(sluice):
    old, new = FakeNode(has_admin=False), FakeNode()
    try:
        out = sluice("status", "--prefill", old.address)
        assert out.returncode == 0, out.stderr
        assert f"fake (llama) at {old.address}" in out.stdout and "does not say how full it is" in out.stdout
        got = json.loads(sluice("status", "--prefill", old.address, "--json").stdout)
        assert got["capacity"] is None and got["model"]["model"]["fingerprint"] == "f1"
        new.is_prefill = True
        out = sluice("status", "--prefill", new.address)
        assert "1 running" in out.stdout and "r1" not in out.stdout, out.stderr
        both = sluice("status", "--decode", new.address, "--prefill", old.address)
        assert both.stdout.index(new.address) < both.stdout.index(old.address)
    finally:
        old.server.stop(None)
        new.server.stop(None)


def test_status_shows_how_much_a_prefill_node_holds():
    model = {"name": "m", "architecture": "llama", "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 8,
             "max_context": 64, "weight_bytes": "1024"}
    held = {"capacity_bytes": "1024", "used_bytes": "512", "prompts": 2, "expired": 1}
    capacity = {"tiers": [], "running": 3, "waiting": 4, "draining": False, "ready": False, "held": held}
    found = {"model": {"model": model, "role": "prefill"}, "capacity": capacity, "sequences": None}
    text = status.as_text(found, "a:1")
    for words in ("m (llama) at a:1  NOT READY", "role prefill", "[###############...............] 512 B used of",
                  "2 prompts, 1 expired", "3 computed or pushed, 4 waiting"):
        assert words in text


def test_status_shows_the_node_of_the_flag_alone(sluice, node, monkeypatch):
    monkeypatch.setenv("SLUICE_DECODE", "127.0.0.1:1")
    assert sluice("status", "--prefill", node.address).returncode == 0


def test_drain_waits_until_nothing_runs_and_resume_opens_again(sluice, node):
    out = sluice("drain", "--decode", node.address, "--timeout", "2.5")
    assert out.returncode == 0 and "nothing runs or waits" in out.stdout, out.stderr
    assert node.draining == 0 and node.drained_within.ToTimedelta().total_seconds() == 2.5
    out = sluice("drain", "--decode", node.address, "--no-wait", "--json")
    assert json.loads(out.stdout) == {"idle": False, "running": 2, "waiting": 0, "was_draining": True}
    assert node.drained_within is None
    assert "takes work again" in sluice("resume", "--decode", node.address).stdout
    assert json.loads(sluice("resume", "--decode", node.address, "--json").stdout) == {"was_draining": False}
