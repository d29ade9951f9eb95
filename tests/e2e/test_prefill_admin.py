"""The admin port of sluice-prefill, which probes and Prometheus read."""

import grpc
import pytest
from sluice.v1 import admin_pb2, prefill_pb2, source_pb2, source_pb2_grpc
from sluice_client import rpc
from support.metrics_text import Scrape, exported_names, wait_for
from support.nodes import SLUICE, TIMEOUT_S, error_of, greedy, run


@pytest.fixture(scope="module")
def pair(tiny_models, start):
    model = tiny_models("tiny-llama")
    return (start("sluice-server", model, "--hbm-bytes", "4MiB", "--dram-bytes", "4MiB"),
            start("sluice-prefill", model, "--hbm-bytes", "4MiB"))


def run_of(decode, prompt):
    return prefill_pb2.RunRequest(prompt_token_ids=prompt, decode_address=decode.address, rendezvous_key="room",
                                  sampling=greedy(max_tokens=4))


def test_it_answers_probes_and_exports_the_names_of_the_header(pair):
    _, prefill = pair
    assert prefill.http("/healthz")[0] == 200 and prefill.http("/readyz")[0] == 200
    assert prefill.http("/nothing")[0] == 404
    scrape = Scrape(prefill)
    # It has no tiers: it holds only the caches of the prompts that it computes.
    assert set(scrape.types) == {name for name in exported_names()
                                 if not name.startswith(("sluice_tier_", "sluice_rank_"))}
    assert scrape.get("sluice_build_info", device="cpu", policy="") == 1


def test_prompts_are_counted_by_how_they_end(pair):
    decode, prefill = pair
    before = Scrape(prefill)
    prefill.prefill.Run(run_of(decode, [1, 2, 3, 4, 5]), timeout=TIMEOUT_S)
    error_of(lambda: prefill.prefill.Run(run_of(decode, []), timeout=TIMEOUT_S))
    after = wait_for(prefill, lambda s: s.get("sluice_requests_total") == before.get("sluice_requests_total") + 2, 5)
    def moved(name, **labels):
        return after.get(name, **labels) - before.get(name, **labels)
    assert moved("sluice_requests_total", outcome="handed_over", reason="PUSHED") == 1
    assert moved("sluice_requests_total", outcome="refused", reason="INVALID_ARGUMENT") == 1
    assert moved("sluice_requests_total") == 2
    assert moved("sluice_tokens_total", kind="prompt") == 5
    assert moved("sluice_queue_seconds_count") == 1
    assert after.get("vllm:num_requests_running") == 0 and after.get("vllm:num_requests_waiting") == 0


def test_without_the_setting_there_is_no_port(tiny_models, start):
    node = start("sluice-prefill", tiny_models("tiny-llama"), "--hbm-bytes", "4MiB", admin=False)
    assert set(node.addresses) == {"listen", "pid"}


def test_admin_says_what_a_prefill_node_runs_and_holds(pair):
    decode, prefill = pair
    model = prefill.admin.GetModel(admin_pb2.GetModelRequest(), timeout=TIMEOUT_S)
    assert (model.role, model.device, model.policy) == ("prefill", "cpu", "")
    assert model.model == prefill.prefill.GetModel(prefill_pb2.GetPrefillModelRequest(), timeout=TIMEOUT_S).model
    assert decode.admin.GetModel(admin_pb2.GetModelRequest(), timeout=TIMEOUT_S).role == "decode"
    before = prefill.capacity()
    assert before.ready and not before.draining and (before.running, before.waiting) == (0, 0)
    assert before.held.capacity_bytes > 0 and not before.tiers
    ran = prefill.prefill.Run(prefill_pb2.RunRequest(prompt_token_ids=range(3, 40), sampling=greedy(max_tokens=4)),
                              timeout=TIMEOUT_S)
    held = prefill.capacity().held
    tokens = 37 * sum(k.heads * k.bytes_per_token for k in model.model.cache_kinds) * model.model.layers
    assert (held.prompts, held.used_bytes) == (before.held.prompts + 1, before.held.used_bytes + tokens)
    source = source_pb2_grpc.KvSourceStub(prefill.channel)
    assert source.Release(source_pb2.ReleaseRequest(source_id=ran.source.source_id), timeout=TIMEOUT_S).found
    assert prefill.capacity().held == before.held
    assert decode.capacity().ready and not decode.capacity().HasField("held")


@pytest.mark.parametrize("call", ["ListSequences", "ListFailpoints", "SetFailpoints", "Drain", "Resume", "Trace"])
def test_admin_of_a_prefill_node_refuses_what_only_a_decode_node_has(pair, call):
    request = getattr(admin_pb2, f"{call}Request")()
    answer = error_of(lambda: list(pair[1].admin.Trace(request, timeout=TIMEOUT_S)) if call == "Trace"
                      else getattr(pair[1].admin, call)(request, timeout=TIMEOUT_S))
    assert answer.code() == grpc.StatusCode.FAILED_PRECONDITION and rpc.reason_of(answer) == "PREFILL_NODE"
    assert answer.details().startswith(f"{call}: ") and "decode node" in answer.details()


def test_status_and_doctor_show_a_prefill_node(pair):
    decode, prefill = pair
    done = run(SLUICE, "status", "--decode", decode.address, "--prefill", prefill.address)
    assert done.returncode == 0, done.stderr
    assert f"at {decode.address}" in done.stdout and f"at {prefill.address}" in done.stdout
    done = run(SLUICE, "doctor", "--decode", decode.address, "--prefill", prefill.address)
    assert f"{decode.address} and {prefill.address} run the same model with caches of the same form" in done.stdout
