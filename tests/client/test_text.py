"""Text that comes token by token, and chat templates."""

import random

import pytest
from sluice_client.errors import ToolError
from sluice_client.text import IncrementalDecoder, StopFilter, Text

SAMPLES = ["plain ascii", "naïve café — ünïcödé", "日本語のテキスト", "👩‍👩‍👧 emoji 🎉 end", "a\n\n\tb", "é"]


@pytest.mark.parametrize("sample", SAMPLES)
def test_pieces_are_whole_characters_and_join_to_the_text(byte_tokenizer, sample):
    text = Text(byte_tokenizer)
    decoder = IncrementalDecoder(text)
    pieces = [decoder.add(i) for i in text.encode(sample)]
    assert all("\ufffd" not in p for p in pieces)
    assert "".join(pieces) + decoder.finish() == sample


def test_the_pieces_of_any_ids_join_to_what_the_ids_decode_to_at_once(byte_tokenizer):
    text = Text(byte_tokenizer)
    rng = random.Random(3)
    choices = [*range(60), text.encode("<|end|>")[0], *text.encode("é日👩")]
    for n in range(500):
        ids = [rng.choice(choices) if n % 2 else rng.randrange(257) for _ in range(rng.randrange(1, 12))]
        decoder = IncrementalDecoder(text)
        assert "".join(map(decoder.add, ids)) + decoder.finish() == text.decode(ids), ids


def test_an_incomplete_last_character_is_said_at_the_end(byte_tokenizer):
    text = Text(byte_tokenizer)
    decoder = IncrementalDecoder(text)
    said = "".join(decoder.add(i) for i in text.encode("aé")[:-1])
    assert said == "a"
    assert decoder.finish() == "\ufffd"


def test_special_tokens_are_not_said(byte_tokenizer):
    text = Text(byte_tokenizer)
    decoder = IncrementalDecoder(text)
    ids = text.encode("ab<|end|>")
    assert len(ids) == 3
    assert "".join(decoder.add(i) for i in ids) + decoder.finish() == "ab"


def test_chat_template_gets_messages_and_special_tokens(byte_tokenizer):
    text = Text(byte_tokenizer)
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    assert text.render_chat(messages) == "<s>[system]S[user]U[assistant]"
    assert text.decode(text.encode_chat(messages)) == "<s>[system]S[user]U[assistant]"


def test_a_directory_without_tokenizer_is_named(tmp_path):
    with pytest.raises(ToolError, match=f"no tokenizer.json in {tmp_path}"):
        Text(tmp_path)


def test_a_template_that_is_not_there_is_named(byte_tokenizer, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes((byte_tokenizer / "tokenizer.json").read_bytes())
    with pytest.raises(ToolError, match="no chat template"):
        Text(tmp_path).encode_chat([])


@pytest.mark.parametrize("stops, whole, expected", [
    (["END"], "one END two", "one "),
    (["END"], "one EN two", "one EN two"),
    (["aab"], "aaaab", "aa"),
    (["xyz", "two"], "one two xyz", "one "),
    ([], "anything", "anything"),
    (["tail"], "tai", "tai"),
    (["t"], "tail", ""),
])
def test_text_is_cut_at_the_first_stop_string_however_it_is_split(stops, whole, expected):
    rng = random.Random(7)
    for _ in range(50):
        stop_filter, said, at = StopFilter(stops), "", 0
        while at < len(whole):
            step = rng.randint(1, 4)
            said += stop_filter.add(whole[at:at + step])
            assert expected.startswith(said)
            at += step
        assert said + stop_filter.finish() == expected
