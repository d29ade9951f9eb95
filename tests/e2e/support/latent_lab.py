"""Settings and helpers of the tests of the DeepSeek-V3.2 family on both nodes: forms of caches, policies, requests."""

import json
import random
import struct

import pytest
from sluice.v1 import decode_pb2, prefill_pb2
from sluice_client.pusher import Pusher
from support.nodes import DEVICE, FLOAT32_KERNELS, TIMEOUT_S, Pair, greedy, tokens_of

NAMES = ["tiny-deepseek-v32", "tiny-deepseek-v32-fp8"]
CASES = [0, 1, 2]
# On the CPU activations are float32; a GPU rounds them to bf16.
KERNELS = ["--kernels", FLOAT32_KERNELS] if DEVICE == "cpu" else []
EXACT = ["--kv-dtype", "float32", *KERNELS]
# The kernels that sum in the order in which the golden tokens were made; several times slower than KERNELS.
GOLDEN = ["--kv-dtype", "float32", *(["--kernels", "reference"] if DEVICE == "cpu" else [])]
PACKED = ["--kv-dtype", "fp8", *KERNELS]
FAST = ["--kv-dtype", "fp8"]
# A token may differ where the golden margin is no more than this. One flipped selection near the cut changes
# everything after it (the fixtures' README), so case 2 is compared with transformers' tokens in float32 alone.
MARGIN = 0.02 if DEVICE == "cpu" else 0.15
MEMORY = ["--hbm-bytes", "64MiB", "--dram-bytes", "64MiB", "--max-sequences", "4", "--max-context", "1024"]
FULL = ["--policy", "full"]
# SCARCE has KV slots for as many entries as a row selects and a few more, so that the entries of 200 tokens do not
# fit. SPARE has all that HBM has room for.
SCARCE = ["--policy", "ess", "--ess-sparse-memory-ratio", "0.01", "--ess-least-places", "96"]
SPARE = ["--policy", "ess"]
AHEAD = [*SCARCE, "--ess-prefetch", "8", "--ess-overlap", "dba"]
POLICIES = {"full": FULL, "scarce": SCARCE, "spare": SPARE}


@pytest.fixture(scope="module")
def nodes(tiny_models, start):
    """nodes(program, name, *flags) -> a node that is shared by all who ask for the same."""
    made = {}

    def get(program, name, *flags):
        key = (program, name, *flags)
        if key not in made:
            # Recorded caches and computed ones of one prompt have other bits, so they are not mixed.
            memory = [*MEMORY, "--prefix-cache=false"] if program == "sluice-server" else [*MEMORY[:2], *MEMORY[-2:]]
            made[key] = start(program, tiny_models(name), *memory, *flags)
        return made[key]

    return get


@pytest.fixture(scope="module")
def pair(nodes):
    """pair(name, form, policy) -> a decode node under a policy and a prefill node, with the same form of caches."""
    def get(name, form=EXACT, policy="full"):
        return Pair(nodes("sluice-server", name, *form, *POLICIES[policy]), nodes("sluice-prefill", name, *form))

    return get


def prefilled(pair, prompt, max_tokens=24, **fields):
    """Returns the prefill node's answer once the prompt's caches are at the decode node."""
    return pair.prefill.prefill.Run(prefill_pb2.RunRequest(
        prompt_token_ids=prompt, decode_address=pair.decode.address,
        sampling=greedy(max_tokens=max_tokens, ignore_eos=True), **fields), timeout=TIMEOUT_S)


def decoded(node, max_tokens=24, keep_seconds=0, **fields):
    """Returns the token ids and the Finish of a Generate."""
    request = decode_pb2.GenerateRequest(sampling=greedy(max_tokens=max_tokens, ignore_eos=True), **fields)
    if keep_seconds:
        request.keep.FromSeconds(keep_seconds)
    tokens, finish = tokens_of(node.decode.Generate(request, timeout=TIMEOUT_S))
    return [t.id for t in tokens], finish


def answer(pair, prompt, max_tokens=24):
    return decoded(pair.decode, max_tokens, transfer_id=prefilled(pair, prompt, max_tokens).transfer_id)[0]


def pushed(node, g, case, **committed):
    """Pushes the recorded caches of a case; returns the transfer's id."""
    with Pusher(node.address) as pusher:
        pusher.reserve(g.prompt(case), max_new_tokens=24)
        for layer in range(pusher.model.layers):
            pusher.write_latent_layer(layer, *(g.file[f"case{case}.{p}.{layer}"] for p in ("latent", "rope", "index")))
        return pusher.commit(**committed)


def assert_same(got, expected):
    """Compares the tokens of two ways to compute the same attention. In bf16 a flipped selection makes another text.
    """
    if DEVICE == "cpu":
        assert got == expected
    else:
        assert len(got) == len(expected) and got[0] == expected[0]


def long_prompt(length=700):
    """Returns a prompt of many chunks and selections."""
    return [random.Random(length).randrange(2, 512) for _ in range(length)]


def without_indexer(source, target):
    """Writes the model in `source` to the folder `target` as a deepseek_v3 with the same weights and no indexer."""
    target.mkdir()
    config = json.loads((source / "config.json").read_text())
    for key in ("index_head_dim", "index_n_heads", "index_topk", "layer_types"):
        del config[key]
    config.update(model_type="deepseek_v3", architectures=["DeepseekV3ForCausalLM"])
    (target / "config.json").write_text(json.dumps(config))
    stored = (source / "model.safetensors").read_bytes()
    size, = struct.unpack_from("<Q", stored)
    header, data = json.loads(stored[8:8 + size]), stored[8 + size:]
    kept, pieces, at = {}, [], 0
    for name, entry in header.items():
        if name == "__metadata__" or ".indexer." in name:
            continue
        begin, end = entry["data_offsets"]
        kept[name] = {**entry, "data_offsets": [at, at + end - begin]}
        pieces.append(data[begin:end])
        at += end - begin
    text = json.dumps(kept).encode()
    (target / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"".join(pieces))
    return target
