"""The texts of sluice-bench policies are cut from documents without overlap, and depend on the seed alone."""

import json

import pytest

from sluice_client import texts
from sluice_client.cli import main
from sluice_client.errors import ToolError


class Words:
    """A tokenizer with one id for each word, in the order of appearance."""

    def __init__(self):
        self.known = []

    def encode(self, text):
        for word in text.split():
            if word not in self.known:
                self.known.append(word)
        return [self.known.index(word) for word in text.split()]

    encode_plain = encode

    def decode(self, ids):
        return " ".join(self.known[i] for i in ids)


@pytest.fixture
def document(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text(" ".join(f"w{i}" for i in range(4000)))
    return path


def make(document, **changes):
    arguments = {"texts": 2, "tokens": 300, "passkeys": 4, "lengths": [400, 500], "seed": 7} | changes
    return texts.make(Words(), [document], **arguments)


def test_no_two_texts_share_a_token_of_text(document):
    made = make(document)
    first, second = made["texts"]
    assert len(first["ids"]) == len(second["ids"]) == 300
    assert not set(first["ids"]) & set(second["ids"])


def test_the_same_seed_makes_the_same_texts_and_another_makes_other_keys(document):
    assert make(document) == make(document)
    assert make(document, seed=8)["texts"] == make(document)["texts"]

    def keys(seed):
        words = Words()
        made = texts.make(words, [document], 2, 300, 4, [400, 500], seed)
        return [words.decode(case["answer"]) for case in made["passkeys"]]
    assert len(set(keys(7) + keys(8))) == 8


def test_a_pass_key_is_hidden_at_its_depth_and_asked_for(document):
    words = Words()
    made = texts.make(words, [document], 0, 0, 4, [400], 7)
    depths = []
    for case in made["passkeys"]:
        said = words.decode(case["ids"]).split()
        key = words.decode(case["answer"])
        assert said.count(key) == 1 and said.count(f"{key}.") == 1
        depths.append(next(i for i, word in enumerate(said) if word.startswith(key)) / len(said))
        assert said[-4:] == ["The", "pass", "key", "is"]
    assert depths == sorted(depths) and depths[0] < 0.3 and depths[-1] > 0.6


def test_documents_that_are_too_short_are_said_so(document):
    with pytest.raises(ToolError, match="too short"):
        make(document, tokens=5000)


def test_a_file_that_is_not_there_is_named(tmp_path, capsys):
    tokenizer = tmp_path / "none"
    assert main(["texts", "--tokenizer", str(tokenizer), "--out", str(tmp_path / "o")]) == 1
    assert "tokenizer.json" in capsys.readouterr().err


def test_the_file_has_its_schema(document):
    assert json.loads(json.dumps(make(document)))["schema"] == texts.SCHEMA
