"""The texts of sluice-bench policies: pass keys lie where a case says, and everything depends on the seed alone."""

import gzip
import json
from dataclasses import replace

import pytest

from sluice_client import text_sources, texts
from sluice_client.cli import main
from sluice_client.errors import ToolError
from sluice_client.text_sources import Source


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
def sources(tmp_path):
    """Two texts of two kinds, whose words tell which text they come from."""
    found = []
    for kind, letter in (("licence", "a"), ("news", "b")):
        path = tmp_path / f"{letter}.txt"
        path.write_text(" ".join(f"{letter}{i}" for i in range(1200)))
        found.append(Source(kind, letter, ((str(path),),)))
    return found


def make(sources, words=None, **changes):
    arguments = {"tokens": 600, "rounds": 6, "lengths": (500, 1000), "seed": 7} | changes
    return texts.make(words or Words(), sources, **arguments)


def test_each_text_is_long_enough_and_has_every_variant(sources):
    made = make(sources)
    assert [(text["name"], text["kind"], len(text["ids"])) for text in made["texts"]] == [
        ("a", "licence", 600), ("b", "news", 600)]
    for kind in ("licence", "news"):
        variants = [case["variant"] for case in made["passkeys"] if case["kind"] == kind]
        assert sorted(variants) == ["multi", "single", "single", "single", "single", "topic"]


def test_the_first_cases_have_all_kinds_alike(sources):
    kinds = [case["kind"] for case in make(sources)["passkeys"]]
    assert kinds == ["licence", "news"] * 6


def test_lengths_and_depths_fill_their_ranges_for_each_text(sources):
    made = make(sources)
    for kind in ("licence", "news"):
        cases = [case for case in made["passkeys"] if case["kind"] == kind]
        assert sorted(int((case["depth"] - 0.1) / 0.8 * 6) for case in cases) == list(range(6))
        lengths = sorted(len(case["ids"]) for case in cases)
        assert 400 <= lengths[0] < 600 and 850 < lengths[-1] <= 1000


def test_the_same_seed_makes_the_same_file_and_another_makes_other_keys(sources):
    assert make(sources) == make(sources)
    assert make(sources, seed=8)["texts"] == make(sources)["texts"]

    def keys(seed):
        words = Words()
        return [words.decode(case["answer"]) for case in make(sources, words, seed=seed)["passkeys"]]
    assert len(set(keys(7) + keys(8))) == 24


def test_a_key_lies_at_its_depth_and_is_asked_for(sources):
    words = Words()
    for case in make(sources, words)["passkeys"]:
        said = words.decode(case["ids"]).split()
        key = words.decode(case["answer"])
        at = [i for i, word in enumerate(said) if word.rstrip(".") == key]
        assert len(at) == 2  # It is said twice, in one place.
        assert at[0] / len(said) == pytest.approx(case["depth"], abs=0.06), case["name"]
        if case["variant"] == "multi":
            assert said[-6:-2] == ["The", "pass", "key", "of"] and said[-1] == "is"
            assert said[at[0] - 2] == said[-2]
            assert sum(word.rstrip(".").isdigit() for word in said) == 8  # four keys, each said twice
        else:
            assert said[-4:] == ["The", "pass", "key", "is"]


def test_after_a_topic_change_the_key_lies_in_the_old_text(sources):
    words = Words()
    cases = [case for case in make(sources, words)["passkeys"] if case["variant"] == "topic"]
    assert len(cases) == 2
    for case in cases:
        said = words.decode(case["ids"]).split()
        before, after = ("a", "b") if case["kind"] == "licence" else ("b", "a")
        last_old = max(i for i, word in enumerate(said) if word[0] == before and word[1:].isdigit())
        first_new = min(i for i, word in enumerate(said) if word[0] == after and word[1:].isdigit())
        assert said.index(words.decode(case["answer"])) < last_old < first_new


def test_a_text_that_is_too_short_is_named(sources):
    with pytest.raises(ToolError, match="'a' .licence. has 1200 tokens, and 5000 are needed"):
        make(sources, tokens=5000)


def test_a_machine_without_the_files_is_told_which(sources):
    with pytest.raises(ToolError, match="lacks the text 'x'.*\n  /none/a, /none/b\n  /none/c"):
        Source("news", "x", (("/none/a", "/none/b"), ("/none/c",))).files()


def test_the_first_set_of_files_that_is_whole_is_taken(tmp_path):
    (tmp_path / "b").write_text("b")
    source = Source("news", "x", ((str(tmp_path / "a"), str(tmp_path / "b")), (str(tmp_path / "b"),)))
    assert source.files() == [tmp_path / "b"] and source.text() == "b"


def test_documentation_is_read_without_code_and_markup(tmp_path):
    pod = tmp_path / "a.pm"
    pod.write_text("package A;\n=head1 NAME\n\nA - has C<code>\n\n=over 4\n\n=item one\n\nB<bold>\n\n=cut\nsub f {}\n")
    said = text_sources.pod(pod)
    assert "A - has code" in said and "one\n" in said and "bold" in said
    assert not any(word in said for word in ("package", "sub f", "=head1", "=over", "=cut"))
    assert "Question: one\n\nAnswer:" in text_sources.questions(pod)
    session = tmp_path / "a.py"
    session.write_text('def f():\n    """Says.\n\n    >>> f()\n    1\n    """\n\ndef g():\n    """Nothing."""\n')
    assert text_sources.sessions(session) == "Says.\n\n>>> f()\n1"
    packed = tmp_path / "n.gz"
    packed.write_bytes(gzip.compress(b"a \t b"))
    assert text_sources.plain(packed) == "a b"


def test_every_kind_has_three_texts_and_licences_are_named():
    kinds = [source.kind for source in text_sources.SOURCES]
    assert kinds == list(text_sources.KINDS) * 3
    for source in text_sources.SOURCES:
        if source.kind == "licence":
            assert all(pattern.rsplit("/", 1)[1] in source.name for pattern in source.sets[0])


def test_a_debian_machine_has_the_texts():
    """The texts are long enough for 8,192 tokens even where a token is four characters."""
    lacking = []
    for source in text_sources.SOURCES:
        try:
            assert len(source.text()) > 36_000, source.name
            # Also without /usr/share/doc.
            assert len(replace(source, sets=source.sets[-1:]).text()) > 36_000, source.name
        except ToolError as error:
            lacking.append(str(error))
    if lacking:
        pytest.skip("\n".join(lacking))


def test_a_file_that_is_not_there_is_named(tmp_path, capsys):
    tokenizer = tmp_path / "none"
    assert main(["texts", "--tokenizer", str(tokenizer), "--out", str(tmp_path / "o")]) == 1
    assert "tokenizer.json" in capsys.readouterr().err
    with pytest.raises(ToolError, match="--text .*/missing: there is no such file"):
        list(text_sources.given([str(tmp_path / "missing")]))


def test_the_file_has_its_schema(sources):
    assert json.loads(json.dumps(make(sources)))["schema"] == texts.SCHEMA
