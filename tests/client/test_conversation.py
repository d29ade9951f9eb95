"""tools/sluice chat: the node keeps the conversation, and is sent only what is new wherever it does."""

import os
import pty
import subprocess
from pathlib import Path

import grpc
import pytest
from sluice.v1 import decode_pb2
from sluice_client.text import Text
from terminal import heeding_ctrl_c, read_until

SLUICE = Path(__file__).resolve().parents[2] / "tools" / "sluice"
WHOLE = "<s>[user]one[assistant]yes[user]two[assistant]"


@pytest.fixture
def text(byte_tokenizer):
    return Text(byte_tokenizer)


@pytest.fixture
def chat(sluice, node, byte_tokenizer, text):
    """chat(lines, *flags) holds a conversation with a node that answers yes to everything."""
    node.answer = [text.encode("yes")]

    def hold(*lines, flags=()):
        return sluice("chat", "--decode", node.address, "--tokenizer", byte_tokenizer, "--verbose", *flags,
                      input="".join(f"{line}\n" for line in lines))
    return hold


def prompts(node, text):
    return [text.decode(list(r.prompt_token_ids)) for r in node.requests]


def test_the_second_message_appends_to_the_sequence_that_the_node_keeps(chat, node, text):
    out = chat("one", "two", "three", "/exit")
    assert out.returncode == 0 and out.stdout == "yes\nyes\nyes\n"
    assert prompts(node, text) == ["<s>[user]one[assistant]", "[user]two[assistant]", "[user]three[assistant]"]
    assert [r.sequence_id for r in node.requests] == ["", f"{1:032x}", f"{2:032x}"]
    assert all(r.keep.seconds == 60 for r in node.requests)
    assert "sent the whole conversation, 23 tokens: the node keeps nothing of it" in out.stderr
    assert "sent 20 new tokens; the node kept 26" in out.stderr


def test_only_the_first_message_goes_by_the_prefill_node(sluice, node, byte_tokenizer, text):
    node.answer = [text.encode("yes")]
    sluice("chat", "--prefill", node.address, "--decode", node.address, "--tokenizer", byte_tokenizer,
           input="one\ntwo\n")
    run, first, second = node.requests
    assert run.decode_address == node.address and first.transfer_id == "cd" * 16
    assert second.HasField("sequence_id") and text.decode(list(second.prompt_token_ids)) == "[user]two[assistant]"


def test_without_verbose_nothing_is_said_of_it(sluice, node, byte_tokenizer):
    out = sluice("chat", "--decode", node.address, "--tokenizer", byte_tokenizer, input="one\ntwo\n")
    assert out.returncode == 0 and out.stderr == ""


def test_a_node_that_lost_the_sequence_is_sent_the_whole_conversation(chat, node, text):
    node.loses_sequences = True
    out = chat("one", "two")
    assert out.returncode == 0 and out.stdout == "yes\nyes\n\n"
    assert prompts(node, text) == ["<s>[user]one[assistant]", "[user]two[assistant]", WHOLE]
    assert "46 tokens: the node no longer keeps it" in out.stderr


def test_a_node_that_keeps_nothing_so_long_is_sent_everything_each_time(chat, node, text):
    node.longest_keep_s = 5
    out = chat("one", "two")
    assert out.returncode == 0 and out.stdout == "yes\nyes\n\n"
    assert prompts(node, text) == ["<s>[user]one[assistant]", "<s>[user]one[assistant]", WHOLE]
    assert "give a shorter --keep" in out.stderr and not node.kept


def test_keep_0_sends_everything_each_time(chat, node, text):
    chat("one", "two", flags=["--keep", "0"])
    assert prompts(node, text) == ["<s>[user]one[assistant]", WHOLE]
    assert not any(r.HasField("keep") for r in node.requests)


def test_an_answer_that_was_cut_is_sent_as_it_was_said(chat, node, text):
    node.answer = [text.encode("yes STOP")]
    node.finish = decode_pb2.Finish(reason=decode_pb2.FINISH_REASON_STOP, stop_string="STOP")
    out = chat("one", "two", flags=["--stop", "STOP"])
    assert prompts(node, text) == ["<s>[user]one[assistant]", "<s>[user]one[assistant]yes [user]two[assistant]"]
    assert "has changed since" in out.stderr


@pytest.mark.parametrize("last", ["/reset", "/exit", ""])
def test_leaving_or_a_reset_gives_the_memory_back(chat, node, last):
    chat("one", last)
    assert node.kept_so_far == 1 and node.kept == []


def test_a_refused_message_is_taken_back_and_the_next_one_starts_from_the_whole(node, byte_tokenizer, text):
    """On a terminal, where the conversation goes on after an error."""
    node.answer = [text.encode("yes")]
    terminal, process = start_on_terminal(node, byte_tokenizer)
    try:
        read_until(terminal, "> ")
        os.write(terminal, b"one\n")
        read_until(terminal, "tokens")
        node.refusal = (grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
        os.write(terminal, b"bad\n")
        read_until(terminal, "no room")
        assert node.kept == []
        node.refusal = None
        os.write(terminal, b"two\n")
        read_until(terminal, "tokens")
        os.write(terminal, b"/exit\n")
        assert process.wait(10) == 0
    finally:
        process.kill()
    assert prompts(node, text)[-1] == WHOLE


def start_on_terminal(node, byte_tokenizer):
    terminal, side = pty.openpty()
    process = subprocess.Popen(
        heeding_ctrl_c("tty", SLUICE, "chat", "--decode", node.address, "--tokenizer", byte_tokenizer),
        stdin=side, stdout=side, stderr=side, start_new_session=True)
    os.close(side)
    return terminal, process


def test_ctrl_c_stops_the_answer_and_goes_on(node, byte_tokenizer, text):
    node.answer, node.hang = [text.encode("partly")], True
    terminal, process = start_on_terminal(node, byte_tokenizer)
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
    assert prompts(node, text)[-1] == "<s>[user]one[assistant]partly[user]two[assistant]"
