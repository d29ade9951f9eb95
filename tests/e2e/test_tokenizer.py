"""The tokenizer and chat template that tools/fetch-model writes give the ids that transformers gave."""

import json

import pytest
from sluice_client.text import IncrementalDecoder, Text
from support.nodes import FIXTURES

CASES = json.loads((FIXTURES / "smollm2-135m-instruct/golden.json").read_text())


@pytest.mark.parametrize("case", [c for c in CASES if c["chat"]], ids=lambda c: c["text"][:20])
def test_chat_prompts_encode_to_the_golden_ids(smollm2, case):
    assert Text(smollm2).encode_chat([{"role": "user", "content": case["text"]}]) == case["ids"]


@pytest.mark.parametrize("case", CASES, ids=lambda c: str(len(c["ids"])))
def test_tokens_decode_to_the_golden_output(smollm2, case):
    text = Text(smollm2)
    expected = case["output"].removesuffix("<|im_end|>")
    assert text.decode(case["tokens"]) == expected
    decoder = IncrementalDecoder(text)
    assert "".join(decoder.add(t) for t in case["tokens"]) + decoder.finish() == expected


@pytest.mark.parametrize("case", [c for c in CASES if not c["chat"]], ids=lambda c: str(len(c["ids"])))
def test_long_prompts_survive_decoding_and_encoding(smollm2, case):
    text = Text(smollm2)
    # The ids begin in the middle of a text, so that the first token may be split in another way.
    assert text.encode(text.decode(case["ids"]))[5:] == case["ids"][5:]
