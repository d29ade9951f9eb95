"""The programs write to stderr one JSON object a line, with ids in fields, never a prompt, and within bounds."""

import json
import time
import uuid

import pytest
from google.protobuf import duration_pb2
from sluice.v1 import decode_pb2
from support.nodes import SCALE, TIMEOUT_S, Node, error_of, greedy, sluice_json, tokens_of
from support.transfers import Transfer, committed

BASE = {"time", "level", "message"}


def lines(node: Node) -> list[dict]:
    """Returns the node's log. Every line must be a JSON object with a time, a level and a message."""
    records = [json.loads(line) for line in node.log.read_text().splitlines()]
    for record in records:
        assert BASE <= set(record) and record["level"] in ("trace", "debug", "info", "warn", "error")
    return records


def wait_for_line(node: Node, **fields) -> dict:
    """Returns the first line with these fields. The line of a call is written when the call is over."""
    deadline = time.monotonic() + 10 * SCALE
    while time.monotonic() < deadline:
        for record in lines(node):
            if fields.items() <= record.items():
                return record
        time.sleep(0.02)
    raise AssertionError(f"no line with {fields}:\n{node.tail()}")


@pytest.fixture(scope="module")
def node(tiny_models, start):
    return start("sluice-server", tiny_models("tiny-llama"), "--hbm-bytes", "4MiB", "--dram-bytes", "6MiB",
                 "--log-level", "debug")


def generate(node, transfer_id, **request):
    return node.decode.Generate(decode_pb2.GenerateRequest(transfer_id=transfer_id, **request), timeout=TIMEOUT_S)


def test_every_request_that_ends_has_one_line(node, golden):
    name, transfer = f"r-{uuid.uuid4().hex}", committed(node, golden("tiny-llama"))
    tokens_of(generate(node, transfer, request_id=name, sampling=greedy(max_tokens=7, ignore_eos=True)))
    line = wait_for_line(node, request_id=name)
    assert line["message"] == "request ended" and line["level"] == "info"
    assert line["transfer_id"] == transfer and line["sequence_id"] > 0
    assert (line["outcome"], line["reason"], line["error"]) == ("finished_length", "MAX_TOKENS", "")
    assert (line["prompt_tokens"], line["cached_tokens"], line["output_tokens"]) == (33, 33, 7)
    assert 0 <= line["queue_seconds"] <= line["first_token_seconds"] <= line["total_seconds"] < TIMEOUT_S
    assert sum(record.get("request_id") == name for record in lines(node)) == 1


def test_a_request_that_fails_says_why(node, golden):
    transfer = Transfer(node, golden("tiny-llama"))
    name = uuid.uuid4().hex
    stream = generate(node, transfer.id, request_id=name, sampling=greedy(max_tokens=7))
    # Its Generate has arrived once Cancel finds it.
    while not node.decode.Cancel(decode_pb2.CancelRequest(request_id=name), timeout=TIMEOUT_S).found:
        time.sleep(0.01)
    error_of(lambda: stream)
    line = wait_for_line(node, request_id=name)
    assert (line["outcome"], line["reason"], line["output_tokens"]) == ("cancelled", "CANCEL_CALL", 0)
    assert line["error"] == "cancelled by Cancel"


def test_a_refused_request_names_the_field_and_not_what_was_found_there(node):
    name = uuid.uuid4().hex
    error_of(lambda: node.decode.Generate(decode_pb2.GenerateRequest(
        request_id=name, prompt_token_ids=[1, 424242], sampling=greedy(max_tokens=1)), timeout=TIMEOUT_S))
    line = wait_for_line(node, request_id=name)
    assert line["message"] == "request refused"
    assert line["reason"] == "INVALID_ARGUMENT" and line["error"].startswith("prompt_token_ids")
    assert "424242" not in node.log.read_text()


def test_lines_about_a_transfer_carry_its_id(node, golden):
    transfer = Transfer(node, golden("tiny-llama"))
    parts = transfer.parts()
    error_of(lambda: transfer.write(transfer.message(parts[0]), transfer.message(parts[1], crc32c=1)))
    transfer.write(*(transfer.message(p) for p in parts[1:]))
    transfer.commit()
    tokens_of(generate(node, transfer.id, sampling=greedy(max_tokens=2)))
    for message in ("transfer reserved", "transfer stream broke", "transfer resumed", "transfer committed"):
        wait_for_line(node, message=message, transfer_id=transfer.id)
    broke = wait_for_line(node, message="transfer stream broke", transfer_id=transfer.id)
    assert broke["reason"] == "CHECKSUM_MISMATCH" and "layer" in broke["error"]
    aborted = Transfer(node, golden("tiny-llama"))
    aborted.abort()
    wait_for_line(node, message="transfer aborted", transfer_id=aborted.id)
    forgotten = Transfer(node, golden("tiny-llama"), lease=duration_pb2.Duration(nanos=100_000_000))
    wait_for_line(node, message="transfer lease expired", transfer_id=forgotten.id)


def test_names_with_control_characters_stay_one_line(node, golden):
    name = 'a"\n\x1b[31m{"level":"error"}\u2028' + uuid.uuid4().hex
    tokens_of(generate(node, committed(node, golden("tiny-llama")), request_id=name,
                       sampling=greedy(max_tokens=1)))
    wait_for_line(node, request_id=name)


def test_a_flood_of_refused_requests_writes_few_lines(tiny_models, start, golden):
    node = start("sluice-server", tiny_models("tiny-llama"), "--hbm-bytes", "4MiB", "--dram-bytes", "4MiB")
    begun = time.monotonic()
    floods = 200
    for _ in range(floods):
        error_of(lambda: generate(node, "0" * 32, sampling=greedy(max_tokens=1)))
        error_of(Transfer(node, golden("tiny-llama"), reserve=False, max_new_tokens=100000).reserve)
    time.sleep(1.1)  # another line is allowed, which counts those that were left out
    last = uuid.uuid4().hex
    error_of(lambda: generate(node, "0" * 32, request_id=last, sampling=greedy(max_tokens=1)))
    wait_for_line(node, request_id=last)
    bound = 22 + (time.monotonic() - begun)  # 20 lines at once, then one a second
    refused = [r for r in lines(node) if r["message"] == "request refused"]
    assert 20 < len(refused) <= bound
    assert len(refused) + sum(r["suppressed"] for r in refused) == floods + 1
    assert 20 <= sum(r["message"] == "transfer refused" for r in lines(node)) <= bound


def test_no_log_has_the_tokens_or_the_text_of_a_prompt(smollm2, start):
    """Logs everything of a whole run over both nodes. A second run with log_prompts must show the prompts."""
    text = "xylophone marmalade quicksilver"
    flags = ["--hbm-bytes", "256MiB", "--log-level", "trace"]

    def answered(*more):
        decode = start("sluice-server", smollm2, "--dram-bytes", "64MiB", *flags, *more)
        prefill = start("sluice-prefill", smollm2, *flags)
        got = sluice_json("generate", "--prefill", prefill.address, "--decode", decode.address, "--tokenizer",
                          smollm2, "--prompt", text, "--max-tokens", 8, "--temperature", 0)
        ids = " ".join(map(str, got["output_ids"]))
        error_of(lambda: decode.decode.Generate(decode_pb2.GenerateRequest(
            prompt_token_ids=[7, 49999999], sampling=greedy(max_tokens=1)), timeout=TIMEOUT_S))
        wait_for_line(decode, outcome="finished_length")
        return ids, decode.log.read_text() + prefill.log.read_text()

    ids, log = answered()
    for form in (ids, ids.replace(" ", ","), ids.replace(" ", ", "), *text.split(), "49999999"):
        assert form not in log
    ids, log = answered("--log-prompts")
    assert ids in log
