"""The command `texts`: real text as token ids, for `sluice-bench policies --quality`.

It writes long texts of four kinds (text_sources.py), and pass keys that are hidden in them. A case is one of three
variants: `single` hides one key; `multi` hides several, each with the name of a city, and asks for one; `topic` hides
the key in a text that then goes on as a text of another kind. The result depends on the files and the seed alone.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from sluice_client import text_sources
from sluice_client.errors import ToolError
from sluice_client.text import Text

SCHEMA = "sluice-texts/2"
# The question is a text that goes on, not a chat: a small model continues with text that it has read before, where
# it would not answer a question about it. SmolLM2-135M finds 8 of 8 keys in 2,000 to 7,800 tokens this way, and one
# of four where a chat asks for them.
_NEEDLE = "\n\nThe pass key{label} is {key}. Remember it: {key} is the pass key{label}.\n\n"
_QUESTION = "\n\nThe pass key{label} is"
_CITIES = ("Oslo", "Lima", "Cairo", "Delhi")
# Number of tokens of a needle and of the question, with some to spare.
_NEEDLE_TOKENS = 40
# Variants by (round + text) modulo 6. Over six rounds each text has every variant that often, and after every round
# the kinds are equally frequent, so that the first cases of a file are a fair sample of all.
_VARIANTS = ("single", "single", "multi", "single", "topic", "single")


def _hide(body: str, depth: float, needle: str) -> str:
    """Returns `body` with the needle at the first blank from the share `depth` on."""
    at = body.find(" ", int(len(body) * depth))
    at = len(body) if at < 0 else at
    return body[:at] + needle + body[at:]


def _cut(text: Text, ids: list[int], count: int, rng: random.Random) -> str:
    """Returns `count` tokens of a text, from a random place."""
    start = rng.randrange(len(ids) - count + 1)
    return text.decode(ids[start:start + count])


def passkey(text: Text, variant: str, source: dict, other: dict, length: int, depth: float,
            rng: random.Random) -> dict:
    """Returns a case of about `length` tokens whose asked key lies at the share `depth` of all of it."""
    keys = [str(key) for key in rng.sample(range(10_000, 100_000), len(_CITIES))]
    label = ""
    filler = length - _NEEDLE_TOKENS * (len(keys) + 1 if variant == "multi" else 2)
    if variant == "topic":
        # The first text is a little longer than where the key lies; the rest is of another kind.
        first = int(filler * min(depth + 0.1, 0.9))
        body = _cut(text, source["ids"], first, rng)
        body = _hide(body, depth * filler / first, _NEEDLE.format(label="", key=keys[0]))
        body += "\n\n" + _cut(text, other["ids"], filler - first, rng)
    else:
        body = _cut(text, source["ids"], filler, rng)
        hidden = [(depth, 0)]
        if variant == "multi":
            hidden += [(0.1 + (depth - 0.1 + 0.8 * i / len(keys)) % 0.8, i) for i in range(1, len(keys))]
            cities = rng.sample(_CITIES, len(keys))
            label = f" of {cities[0]}"
        # The deepest is hidden first, so that the places of the others do not move.
        for at, i in sorted(hidden, reverse=True):
            body = _hide(body, at, _NEEDLE.format(label=f" of {cities[i]}" if label else "", key=keys[i]))
    prompt = body + _QUESTION.format(label=label)
    ids = text.encode_plain(prompt)
    whole = text.encode_plain(prompt + f" {keys[0]}")
    if whole[:len(ids)] != ids:
        raise ToolError("this tokenizer joins the answer to the question")
    return {"name": f"{variant}, {source['name']}, {len(ids)} tokens, depth {depth:.2f}", "kind": source["kind"],
            "variant": variant, "depth": round(depth, 4), "ids": ids, "answer": whole[len(ids):]}


def _places(count: int, rng: random.Random) -> list[float]:
    """Returns one place in each of `count` equal parts of 0 to 1, in a random order."""
    return [(part + rng.random()) / count for part in rng.sample(range(count), count)]


def _other_kind(texts: list[dict], t: int) -> dict:
    """Returns the next text of another kind; if all are of one kind, the next text."""
    after = texts[t + 1:] + texts[:t]
    return next((text for text in after if text["kind"] != texts[t]["kind"]), (after or texts)[0])


def make(text: Text, sources: Sequence[text_sources.Source], tokens: int, rounds: int, lengths: tuple[int, int],
         seed: int) -> dict:
    out = {"schema": SCHEMA, "texts": [], "passkeys": []}
    needed = max(tokens, lengths[1] if rounds else 0)
    for source in sources:
        ids = text.encode(source.text())
        if len(ids) < needed:
            raise ToolError(f"the text '{source.name}' ({source.kind}) has {len(ids)} tokens, and {needed} are "
                            "needed: take shorter ones (--tokens, --passkey-tokens), or longer documents (--text FILE)")
        out["texts"].append({"name": source.name, "kind": source.kind, "ids": ids[:needed]})
    # The cases of a text fill the ranges of lengths and of depths evenly, each in an order of its own.
    orders = [(_places(rounds, rng), _places(rounds, rng))
              for rng in (random.Random(f"{seed}/order/{t}") for t in range(len(out["texts"])))]
    for r in range(rounds):
        for t, source in enumerate(out["texts"]):
            length = lengths[0] + round((lengths[1] - lengths[0]) * orders[t][0][r])
            depth = 0.1 + 0.8 * orders[t][1][r]
            variant = _VARIANTS[(r + t) % len(_VARIANTS)]
            out["passkeys"].append(passkey(text, variant, source, _other_kind(out["texts"], t), length, depth,
                                           random.Random(f"{seed}/{r}/{t}")))
    for made in out["texts"]:
        del made["ids"][tokens:]
    return out


def run(args) -> int:
    if len(args.passkey_tokens) != 2 or not 400 <= args.passkey_tokens[0] <= args.passkey_tokens[1]:
        raise ToolError("--passkey-tokens takes two lengths of at least 400 tokens, the shortest and the longest, "
                        "such as 1200,7800")
    text = Text(args.tokenizer)
    sources = list(text_sources.given(args.text)) or text_sources.SOURCES
    made = make(text, sources[:args.texts], args.tokens, args.passkeys_per_text, tuple(args.passkey_tokens), args.seed)
    try:
        Path(args.out).write_text(json.dumps(made))
    except OSError as error:
        raise ToolError(f"--out {args.out}: {error}") from error
    for source in sources[:args.texts]:
        print(f"{source.kind}: {source.name} ({', '.join(path.name for path in source.files())})")
    variants = [case["variant"] for case in made["passkeys"]]
    print(f"{args.out}: {len(made['texts'])} texts of {args.tokens} tokens; {len(variants)} pass keys: "
          + ", ".join(f"{variants.count(v)} {v}" for v in dict.fromkeys(_VARIANTS)))
    return 0
