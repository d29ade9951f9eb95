"""The command `texts`: real text as token ids, for `sluice-bench policies --quality`.

It writes long documents, and documents with pass keys hidden in them. The documents are those that a Debian machine
carries (licences, news and manuals of packages) and this project's own, or the files of --text. They are cut one
after the other from the joined stream, so that no two cases share a token of text. The result depends on the files
and the seed alone.
"""

import gzip
import json
import random
import re
from pathlib import Path

from sluice_client.errors import ToolError
from sluice_client.text import Text

SCHEMA = "sluice-texts/1"
_ROOT = Path(__file__).resolve().parents[2]
_DOCUMENTS = [
    "/usr/share/common-licenses/*", "/usr/share/doc/systemd/NEWS.gz", "/usr/share/doc/python3*/NEWS.gz",
    "/usr/share/doc/*/NEWS.gz", "/usr/share/perl/*/pod/*.pod", "/usr/share/perl/*/*/*.pod",
]
_OWN = ["README.md", "kernels/README.md", "kernels/cpu/README.md", "kernels/cuda/README.md",
        "tests/fixtures/README.md"]
# The question is a text that goes on, not a chat: a small model continues with text that it has read before, where
# it would not answer a question about it. SmolLM2-135M finds 8 of 8 keys in 2,000 to 7,800 tokens this way, and one
# of four where a chat asks for them.
_NEEDLE = "\n\nThe pass key is {key}. Remember it: {key} is the pass key.\n\n"
_QUESTION = "\n\nThe pass key is"
# Maximum number of tokens in a prompt beside the filler.
_NEEDLE_TOKENS = 60
# Maximum number of characters from one document, so that the stream has variety.
_MOST_CHARACTERS = 40_000


def documents(patterns: list[str] | None = None) -> list[Path]:
    """Returns the files, each once, in a fixed order. Links to another file are left out."""
    if patterns is not None:
        return [Path(p) for p in patterns]
    found = [_ROOT / name for name in _OWN]
    for pattern in _DOCUMENTS:
        found += sorted(Path("/").glob(pattern.lstrip("/")))
    kept = {p.resolve(): p for p in reversed(found) if p.is_file() and not p.is_symlink()}
    return list(reversed(kept.values()))


def read(path: Path) -> str:
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (OSError, EOFError) as error:
        raise ToolError(f"{path}: {error}") from error
    return re.sub(r"[ \t]+", " ", data.decode("utf-8", "replace"))[:_MOST_CHARACTERS]


class Stream:
    """The tokens of the documents, which are cut from front to back."""

    def __init__(self, text: Text, paths: list[Path]):
        self._text = text
        self._paths = list(paths)
        self._ids: list[int] = []
        self._name = ""

    def take(self, count: int) -> tuple[str, list[int]]:
        """Returns the name of the document in which the next `count` tokens begin, and the tokens."""
        name = self._name if self._ids else ""
        while len(self._ids) < count:
            if not self._paths:
                raise ToolError("the documents are too short for so many tokens: add --text FILE, or take "
                                "fewer or shorter cases")
            path = self._paths.pop(0)
            self._ids += self._text.encode(read(path) + "\n\n")
            self._name = path.name
            name = name or self._name
        taken, self._ids = self._ids[:count], self._ids[count:]
        return name, taken


def passkey(text: Text, filler: list[int], depth: float, key: str, length: int) -> dict:
    """Returns a text of about `length` tokens that hides `key` at the share `depth`, and asks for it at the end."""
    body = text.decode(filler[:length - _NEEDLE_TOKENS])
    at = body.find(" ", int(len(body) * depth))
    body = body[:at] + _NEEDLE.format(key=key) + body[at:]
    prompt = body + _QUESTION
    ids = text.encode_plain(prompt)
    whole = text.encode_plain(prompt + f" {key}")
    if whole[:len(ids)] != ids:
        raise ToolError("this tokenizer joins the answer to the question")
    return {"name": f"{len(ids)} tokens, depth {depth:.2f}", "ids": ids, "answer": whole[len(ids):]}


def make(text: Text, paths: list[Path], texts: int, tokens: int, passkeys: int, lengths: list[int],
         seed: int) -> dict:
    stream = Stream(text, paths)
    rng = random.Random(seed)
    out = {"schema": SCHEMA, "texts": [], "passkeys": []}
    for _ in range(texts):
        name, ids = stream.take(tokens)
        out["texts"].append({"name": name, "ids": ids})
    for i in range(passkeys):
        length = lengths[i % len(lengths)]
        _, filler = stream.take(length)
        depth = 0.05 + 0.9 * (i + 0.5) / passkeys
        key = str(rng.randrange(10_000, 100_000))
        out["passkeys"].append(passkey(text, filler, depth, key, length))
    return out


def run(args) -> int:
    text = Text(args.tokenizer)
    made = make(text, documents(args.text or None), args.texts, args.tokens, args.passkeys, args.passkey_tokens,
                args.seed)
    try:
        Path(args.out).write_text(json.dumps(made))
    except OSError as error:
        raise ToolError(f"--out {args.out}: {error}") from error
    print(f"{args.out}: {len(made['texts'])} texts of {args.tokens} tokens, {len(made['passkeys'])} pass keys")
    return 0
