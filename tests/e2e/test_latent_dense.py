"""deepseek_v3, the family without its indexer, on both nodes: one kind of caches, which attention reads whole."""

import grpc
import pytest
from sluice.v1 import admin_pb2, common_pb2, ingest_pb2
from sluice_client import status
from sluice_client.pusher import Pusher, PushError
from support.latent_lab import (EXACT, FAST, KERNELS, MARGIN, MEMORY, NAMES, PACKED, answer, decoded, long_prompt,
                                prefilled, without_indexer)
from support.nodes import BIN, DEVICE, Pair, error_of, matching_steps, run

SERVER, PREFILL = MEMORY, [*MEMORY[:2], *MEMORY[-2:]]
# The fixtures' indexer selects everything of so few tokens, so transformers' answers hold without an indexer.
DENSE_CASES = [0, 1]


@pytest.fixture(scope="module")
def models(tiny_models, tmp_path_factory):
    """name -> the directory of the fixture without its indexer."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = without_indexer(tiny_models(name), tmp_path_factory.mktemp(name) / "deepseek-v3")
        return made[name]

    return get


@pytest.fixture(scope="module")
def pair(models, start):
    """pair(name, form) -> both nodes."""
    made = {}

    def get(name, form=EXACT):
        key = (name, *form)
        if key not in made:
            made[key] = Pair(start("sluice-server", models(name), *SERVER, *form),
                             start("sluice-prefill", models(name), *PREFILL, *form))
        return made[key]

    return get


@pytest.mark.parametrize("case", DENSE_CASES)
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_prefilled_elsewhere_continues_as_in_transformers(pair, golden, name, case):
    g = golden(name)
    matching_steps(answer(pair(name), g.prompt(case)), g.tokens(case), g.margins(case), MARGIN)


@pytest.mark.parametrize("form", [PACKED, FAST], ids=["float32", "fastest"])
def test_a_long_prompt_is_served_in_the_packed_form_and_attended_to_whole(pair, form):
    p, prompt = pair(NAMES[1], form), long_prompt()
    first = prefilled(p, prompt)
    ids, finish = decoded(p.decode, transfer_id=first.transfer_id)
    assert len(ids) == 24 and ids[0] == first.first_token.id and finish.usage.cached_tokens == len(prompt)
    assert answer(p, prompt) == ids
    # The first token counts: a selection of 64 of 700 tokens would hardly see it.
    other = [*prompt]
    other[0] = 2 + (prompt[0] - 1) % 510
    assert other != prompt and answer(p, other) != ids


@pytest.mark.parametrize("name", NAMES)
def test_recorded_entries_are_pushed_without_index_keys(pair, golden, name):
    g, node = golden(name), pair(name, ["--kv-dtype", "bf16", *KERNELS]).decode
    for case in DENSE_CASES:
        with Pusher(node.address) as pusher:
            assert list(pusher.kinds) == ["latent"]
            pusher.reserve(g.prompt(case), max_new_tokens=24)
            parts = [[g.file[f"case{case}.{part}.{layer}"] for part in ("latent", "rope", "index")]
                     for layer in range(pusher.model.layers)]
            with pytest.raises(PushError, match="keeps latent, given latent, index"):
                pusher.write_latent_layer(0, *parts[0])
            for layer, (latent, rope, _) in enumerate(parts):
                pusher.write_latent_layer(layer, latent, rope)
            ids = decoded(node, transfer_id=pusher.commit())[0]
        matching_steps(ids, g.tokens(case), g.margins(case), max(MARGIN, 0.1))


def test_a_conversation_goes_on(pair):
    p = pair(NAMES[0])
    prompt, turn = long_prompt(90), long_prompt(40)
    ids, finish = decoded(p.decode, 8, 30, transfer_id=prefilled(p, prompt, 8).transfer_id)
    went_on, _ = decoded(p.decode, 8, sequence_id=finish.sequence_id, prompt_token_ids=turn)
    if DEVICE == "cpu":
        assert went_on == answer(p, [*prompt, *ids, *turn], 8)


def test_a_policy_that_needs_a_selection_refuses_it_at_start(models):
    done = run(BIN / "sluice-server", "--model", models(NAMES[0]), "--device", DEVICE, *SERVER, "--policy", "ess",
               "--listen", "127.0.0.1:0", "--admin-listen", "")
    assert done.returncode == 1
    assert "policy: ess is for models with latent caches and an indexer" in done.stderr
    assert "deepseek_v3 has latent caches and no indexer: take one of full" in done.stderr


def test_the_plan_has_policy_full_alone(models):
    done = run(BIN / "sluice-server", "--model", models(NAMES[0]), "--device", DEVICE, *SERVER, "--print-plan")
    assert done.returncode == 0, done.stderr
    assert "policy full:" in done.stdout and "policy ess" not in done.stdout and "indexer" not in done.stdout


def test_the_two_models_take_no_caches_of_each_other(pair, tiny_models, start):
    dense = pair(NAMES[0])
    sparse = start("sluice-prefill", tiny_models(NAMES[0]), *PREFILL, *EXACT)
    error = error_of(lambda: prefilled(Pair(dense.decode, sparse), [5] * 40))
    assert error.code() in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)
    assert "fingerprint" in error.details() or "cache_kinds" in error.details()


def test_a_manifest_with_index_keys_is_refused(pair):
    node = pair(NAMES[0]).decode
    model = node.admin.GetModel(admin_pb2.GetModelRequest()).model
    assert model.architecture == "deepseek_v3"
    kinds = [*model.cache_kinds, common_pb2.CacheKind(name="index", element_type=model.cache_kinds[0].element_type,
                                                      heads=1, block_tokens=32, part_bytes=[512], bytes_per_token=512)]
    manifest = ingest_pb2.Manifest(model_fingerprint=model.fingerprint, cache_kinds=kinds, context_length=40,
                                   prompt_token_ids=[5] * 40, max_new_tokens=8)
    error = error_of(lambda: node.ingest.Reserve(ingest_pb2.ReserveRequest(manifest=manifest)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "manifest.cache_kinds" in error.details()
    text = status.as_text(status.read(node.channel, node.address, 5), node.address)
    assert "(deepseek_v3)" in text and "index" not in text
