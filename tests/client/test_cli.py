"""tools/sluice as its users meet it: output, exit status, and what it says on errors."""

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import grpc
import numpy as np
import pytest
from fake_node import DIM, HEADS, LAYERS
from google.protobuf import duration_pb2
from google.rpc import error_details_pb2
from safetensors.numpy import save_file
from sluice.v1 import decode_pb2

SLUICE = Path(__file__).resolve().parents[2] / "tools" / "sluice"
KEYS = ["prompt_ids", "output_ids", "output_text", "logprobs", "top_logprobs", "finish_reason",
        "ttft_seconds", "itl_seconds"]


def sluice(*args, **kwargs):
    return subprocess.run([SLUICE, *map(str, args)], capture_output=True, text=True, timeout=60, **kwargs)


def test_json_has_the_keys_that_scripts_read(node):
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


def test_logprobs_are_per_token(node):
    out = sluice("generate", "--decode", node.address, "--prompt-ids", "1", "--logprobs", 1, "--json")
    got = json.loads(out.stdout)
    assert got["logprobs"] == [-0.625, -0.75, -0.875]
    assert got["top_logprobs"] == [[[5, -0.625]], [[6, -0.75]], [[7, -0.875]]]


def test_prefill_gets_the_decode_address_and_generate_the_transfer(node):
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


def test_without_temperature_it_is_greedy(node):
    sluice("generate", "--decode", node.address, "--prompt-ids", "4")
    s = node.requests[-1].sampling
    assert s.HasField("temperature") and s.temperature == 0


def test_text_streams_and_ends_before_the_stop_string(node, byte_tokenizer):
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


def test_chat_prompt_goes_through_the_template(node, byte_tokenizer):
    from sluice_client.text import Text
    out = sluice("generate", "--decode", node.address, "--tokenizer", byte_tokenizer, "--chat",
                 "--prompt", "hi", "--system", "be", "--json")
    assert out.returncode == 0, out.stderr
    assert json.loads(out.stdout)["prompt_ids"] == Text(byte_tokenizer).encode(
        "<s>[system]be[user]hi[assistant]")


def test_chat_sends_the_whole_history(node, byte_tokenizer):
    from sluice_client.text import Text
    text = Text(byte_tokenizer)
    node.answer = [text.encode("yes")]
    out = sluice("chat", "--prefill", node.address, "--decode", node.address, "--tokenizer",
                 byte_tokenizer, input="one\ntwo\n/exit\n")
    assert out.returncode == 0, out.stderr
    assert out.stdout == "yes\nyes\n"
    prompts = [text.decode(list(r.prompt_token_ids)) for r in node.requests[::2]]
    assert prompts == ["<s>[user]one[assistant]", "<s>[user]one[assistant]yes[user]two[assistant]"]


# Becomes the command behind it, which heeds Ctrl-C (who is started in a shell's background inherits a SIGINT
# that is ignored) and, with "tty" first, has standard input as its terminal. By a program of its own: in
# preexec_fn it would run in a copy of this process, among locks of gRPC's threads that nobody gives back.
AT_A_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGINT, signal.SIG_DFL)
if sys.argv[1] == "tty":
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[2], sys.argv[2:])
"""


def heeding_ctrl_c(kind, *command):
    return [sys.executable, "-c", AT_A_TERMINAL, kind, *map(str, command)]


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


def read_until(terminal, words, seconds=20):
    """What the terminal shows up to `words`."""
    shown, deadline = "", time.monotonic() + seconds
    while words not in shown:
        ready, _, _ = select.select([terminal], [], [], max(0, deadline - time.monotonic()))
        assert ready, shown
        shown += os.read(terminal, 4096).decode()
    return shown


def test_ctrl_c_in_a_chat_stops_the_answer_and_goes_on(node, byte_tokenizer):
    from sluice_client.text import Text
    text = Text(byte_tokenizer)
    node.answer, node.hang = [text.encode("partly")], True
    terminal, side = pty.openpty()
    process = subprocess.Popen(
        heeding_ctrl_c("tty", SLUICE, "chat", "--decode", node.address, "--tokenizer", byte_tokenizer),
        stdin=side, stdout=side, stderr=side, start_new_session=True)
    os.close(side)
    try:
        read_until(terminal, "> ")
        os.write(terminal, b"one\n")
        read_until(terminal, "partly")
        os.write(terminal, b"\x03")
        read_until(terminal, "[stopped]")
        assert node.cancelled.wait(10)
        node.hang = False
        os.write(terminal, b"two\n")
        read_until(terminal, "tokens")
        os.write(terminal, b"/exit\n")
        assert process.wait(10) == 0
    finally:
        process.kill()
    assert text.decode(list(node.requests[-1].prompt_token_ids)) == (
        "<s>[user]one[assistant]partly[user]two[assistant]")


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
def test_an_error_is_one_sentence_and_exit_status_1(node, refusal, words):
    node.refusal = refusal
    out = sluice("generate", "--decode", node.address, "--prompt-ids", "1", "--json")
    assert out.returncode == 1 and out.stdout == ""
    assert len(out.stderr.splitlines()) == 1
    assert all(w in out.stderr for w in [node.address, *words]), out.stderr


def test_nobody_at_the_address_is_said(node):
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
def test_a_wrong_command_line_exits_with_2(args):
    out = sluice(*args)
    assert out.returncode == 2 and "usage:" in out.stderr


@pytest.mark.parametrize("command", ["generate", "chat", "push", "status", "drain", "resume"])
def test_help_shows_an_example(command):
    out = sluice(command, "--help")
    assert out.returncode == 0 and f"  tools/sluice {command} " in out.stdout.split("example")[1]


def recorded(tmp_path, layers=LAYERS, tokens=11):
    tensors = {"case0.prompt": np.arange(tokens, dtype=np.int32), "case0.tokens": np.array([7, 8], np.int32)}
    for layer in range(layers):
        for part in "kv":
            tensors[f"case0.{part}.{layer}"] = np.ones((tokens, HEADS, DIM), np.float32)
    save_file(tensors, tmp_path / "kv.safetensors")
    return tmp_path / "kv.safetensors"


@pytest.mark.parametrize("first_token", [False, True])
def test_push_sends_the_case_and_generates_from_it(node, tmp_path, first_token):
    extra = ["--first-token"] if first_token else []
    out = sluice("push", "--decode", node.address, "--kv", recorded(tmp_path), "--case", 0, "--json", *extra)
    assert out.returncode == 0, out.stderr
    got = json.loads(out.stdout)
    assert list(got) == KEYS and got["prompt_ids"] == list(range(11)) and got["output_ids"] == [5, 6, 7]
    assert [t.id for t in node.committed.first_tokens] == ([7] if first_token else [])
    assert node.manifest.max_new_tokens == 2
    assert len(node.blocks) == LAYERS * HEADS * 2
    assert node.requests[-1].transfer_id == "ab" * 16


def test_push_names_a_case_or_a_layer_that_is_not_there(node, tmp_path):
    out = sluice("push", "--decode", node.address, "--kv", recorded(tmp_path), "--case", 3)
    assert out.returncode == 1 and "no case3.prompt: it has case0" in out.stderr
    out = sluice("push", "--decode", node.address, "--kv", recorded(tmp_path, layers=1), "--case", 0)
    assert out.returncode == 1 and "caches of 1 layers" in out.stderr and "has 2" in out.stderr


def test_status_shows_model_and_capacity(node):
    out = sluice("status", "--decode", node.address)
    assert out.returncode == 0, out.stderr
    for words in ("fake (llama)", "[#--------------...............]", "512 MiB reserved of 1 GiB",
                  "1 running", "r1  running", "and 2 more"):
        assert words in out.stdout, out.stdout
    got = json.loads(sluice("status", "--decode", node.address, "--json").stdout)
    assert got["model"]["model"]["fingerprint"] == "f1" and got["sequences"]["total"] == 3


def test_drain_waits_until_nothing_runs_and_resume_opens_again(node):
    out = sluice("drain", "--decode", node.address, "--timeout", "2.5")
    assert out.returncode == 0 and "nothing runs or waits" in out.stdout, out.stderr
    assert node.draining == 0 and node.drained_within.ToTimedelta().total_seconds() == 2.5
    out = sluice("drain", "--decode", node.address, "--no-wait", "--json")
    assert json.loads(out.stdout) == {"idle": False, "running": 2, "waiting": 0, "was_draining": True}
    assert node.drained_within is None
    assert "takes work again" in sluice("resume", "--decode", node.address).stdout
    assert json.loads(sluice("resume", "--decode", node.address, "--json").stdout) == {"was_draining": False}
