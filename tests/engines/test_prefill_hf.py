"""Hugging Face transformers as a prefill node: its own greedy tokens are what the decode node must go on with."""

import json

import pytest
from engine_lab import ENGINES
from support.nodes import BIN, FLOAT32_KERNELS, Golden, Node, matching_steps, run

TINY = ["tiny-llama", "tiny-qwen2", "tiny-qwen3", "tiny-deepseek-v32"]


def prefill(model, node, prompt, tokens, *flags):
    done = run(ENGINES / "vllm/bin/sluice", "prefill-hf", model, "--decode", node.address, "--prompt-ids",
               ",".join(map(str, prompt)), "--max-tokens", tokens, "--ignore-eos", "--json", *flags, timeout=200)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)["output_ids"]


@pytest.mark.parametrize("name", TINY)
def test_every_family_goes_on_from_transformers_caches(smollm2, name, tmp_path):
    assert run(BIN / "sluice-make-fixture", name, tmp_path / "model").returncode == 0
    golden = Golden(name)
    node = Node("sluice-server", tmp_path / "model", tmp_path, "--hbm-bytes", "64MiB", "--dram-bytes", "64MiB",
                "--kv-dtype", "float32", "--kernels", FLOAT32_KERNELS)
    try:
        for case in (0, 1):
            found = prefill(tmp_path / "model", node, golden.prompt(case), len(golden.tokens(case)))
            matching_steps(found, golden.tokens(case), golden.margins(case), 0.05)
    finally:
        assert node.stop() == 0


def test_the_real_model_and_another_one(smollm2, decode, tiny_node, chats):
    case = chats[1]
    found = prefill(smollm2, decode, case["ids"], len(case["tokens"]))
    matching_steps(found, case["tokens"], case["margins"], 0.05)
    done = run(ENGINES / "vllm/bin/sluice", "prefill-hf", smollm2, "--decode", tiny_node.address, "--prompt-ids", "1",
               timeout=200)
    assert done.returncode == 1 and "another model" in done.stderr
    done = run(ENGINES / "vllm/bin/sluice", "prefill-hf", "/nowhere", "--decode", decode.address, "--prompt-ids", "1",
               timeout=200)
    assert done.returncode == 1 and "/nowhere" in done.stderr
