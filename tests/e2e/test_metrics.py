"""Every metric moves when its cause happens, by a known amount, and nothing else is exported."""

import contextlib
import socket
import subprocess
import threading
import time
import uuid

import grpc
import pytest
from google.protobuf import duration_pb2
from sluice.v1 import admin_pb2, common_pb2, decode_pb2, decode_pb2_grpc, ingest_pb2, prefill_pb2, source_pb2
from support.metrics_text import Scrape, exported_names, wait_for
from support.nodes import ROOT, SCALE, TIMEOUT_S, error_of, greedy, tokens_of
from support.transfers import Transfer, committed

MOST_OF_PEER = 64
PROMTOOL = ROOT / ".venv/bin/promtool"
# Routers read these names. promtool rejects the colon of these and of other names of vLLM's.
ROUTERS = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


class Scene:
    """A node with short time limits, and the golden caches of its model."""

    def __init__(self, node, prefill, golden):
        self.node = node
        self.prefill = prefill
        self.golden = golden

    def generate(self, transfer_id=None, sampling=None, **request):
        return self.node.decode.Generate(decode_pb2.GenerateRequest(
            transfer_id=transfer_id, sampling=sampling or greedy(max_tokens=24, ignore_eos=True), **request),
            timeout=TIMEOUT_S)

    def endless(self, **request):
        return self.generate(committed(self.node, self.golden, max_new_tokens=2000),
                             greedy(max_tokens=2000, ignore_eos=True), **request)

    def drop(self, transfer_id):
        self.node.ingest.Abort(ingest_pb2.AbortRequest(transfer_id=transfer_id), timeout=TIMEOUT_S)


@pytest.fixture(scope="module")
def scene(tiny_models, start, golden):
    node = start("sluice-server", tiny_models("tiny-llama"), "--hbm-bytes", "4MiB", "--dram-bytes", "6MiB",
                 "--max-sequences", "2", "--slow-reader-timeout-seconds", "200ms",
                 "--transfer-wait-seconds", "2s", "--local-prefill", "on_failure",
                 "--max-connections-per-peer", str(MOST_OF_PEER), "--kv-transport", "nccl")
    prefill = start("sluice-prefill", tiny_models("tiny-llama"), "--hbm-bytes", "4MiB")
    return Scene(node, prefill, golden("tiny-llama"))


def is_idle(scrape) -> bool:
    return all(scrape.get(gauge) == 0 for gauge in (
        *ROUTERS, "sluice_batch_sequences", "sluice_transfers_open", "sluice_tier_used_bytes",
        "sluice_tier_used_blocks", "sluice_tier_reserved_bytes", "sluice_tier_reserved_blocks"))


def requests(outcome, reason):
    return ("sluice_requests_total", {"outcome": outcome, "reason": reason})


def reserves(outcome, reason):
    return ("sluice_reserves_total", {"outcome": outcome, "reason": reason})


# Causes. Each does something to the node; CAUSES says which metrics must grow, and by how much.

def finish_by_length(s):
    assert len(tokens_of(s.generate(committed(s.node, s.golden)))[0]) == 24


def stop_by_token(s):
    stop = s.golden.tokens(1)[0]
    tokens_of(s.generate(committed(s.node, s.golden), sampling=greedy(max_tokens=24, stop_token_ids=[stop])))


def cancel(s):
    name = uuid.uuid4().hex
    stream = s.endless(request_id=name)
    next(stream)
    assert s.node.decode.Cancel(decode_pb2.CancelRequest(request_id=name), timeout=TIMEOUT_S).found
    assert error_of(lambda: stream).code() == grpc.StatusCode.CANCELLED


def go_away(s):
    stream = s.endless()
    next(stream)
    stream.cancel()


def wait_in_vain(s):
    assert error_of(lambda: s.generate(rendezvous_key=uuid.uuid4().hex)).code() \
        == grpc.StatusCode.DEADLINE_EXCEEDED


def read_slowly(s):
    # The channel takes little ahead of its reader, and tokens with 20 alternatives fill it.
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16384)]
    with grpc.insecure_channel(s.node.address, options=options) as channel:
        stream = decode_pb2_grpc.DecodeStub(channel).Generate(decode_pb2.GenerateRequest(
            transfer_id=committed(s.node, s.golden, max_new_tokens=2000), sampling=common_pb2.SamplingParams(
                temperature=0, max_tokens=2000, ignore_eos=True, logprobs=20)), timeout=TIMEOUT_S)
        next(stream)
        wait_for(s.node, lambda m: m.get("vllm:num_requests_running") == 0, 20 * SCALE)
        assert error_of(lambda: stream).code() == grpc.StatusCode.ABORTED


def ask_nonsense(s):
    error_of(lambda: s.generate(prompt_token_ids=[1], sampling=greedy(max_tokens=4, top_p=7)))


def name_no_transfer(s):
    error_of(lambda: s.generate("0" * 32))


def send_a_malformed_traceparent(s):
    error_of(lambda: s.node.decode.Generate(decode_pb2.GenerateRequest(
        prompt_token_ids=[1], sampling=greedy(max_tokens=1)), timeout=TIMEOUT_S, metadata=[("traceparent", "00-1-2-3")]))


def bring_nothing(s):
    error_of(lambda: s.generate(prompt_token_ids=[1, 2, 3]))


PULLED = [5 + i for i in range(40)]


def pull(s):
    held = s.prefill.prefill.Run(prefill_pb2.RunRequest(prompt_token_ids=PULLED, sampling=greedy(max_tokens=1)),
                                 timeout=TIMEOUT_S)
    tokens_of(s.generate(source=held.source, prompt_token_ids=PULLED))


def pull_from_nobody(s):
    gone = source_pb2.KvSourceRef(address="127.0.0.1:1", source_id="0" * 32)
    tokens_of(s.generate(source=gone, prompt_token_ids=PULLED))


def generate_twice(s):
    transfer = Transfer(s.node, s.golden)
    first = s.generate(transfer.id, request_id=uuid.uuid4().hex)
    wait_for(s.node, lambda m: m.get("vllm:num_requests_waiting") == 1, 10 * SCALE)
    assert error_of(lambda: s.generate(transfer.id)).code() == grpc.StatusCode.ALREADY_EXISTS
    transfer.abort()
    assert error_of(lambda: first).code() == grpc.StatusCode.ABORTED


def name_twice(s):
    name = uuid.uuid4().hex
    stream = s.endless(request_id=name)
    next(stream)
    transfer = committed(s.node, s.golden, case=0)
    assert error_of(lambda: s.generate(transfer, request_id=name)).code() == grpc.StatusCode.ALREADY_EXISTS
    s.drop(transfer)
    stream.cancel()


def poison(s):
    transfer = Transfer(s.node, s.golden)
    part = transfer.parts()[-1]  # no other sequence has the prompt's last block
    transfer.write(transfer.message(part))
    payload = bytearray(transfer.message(part).payload)
    payload[0] ^= 1
    stream = s.generate(transfer.id)
    wait_for(s.node, lambda m: m.get("vllm:num_requests_waiting") == 1, 10 * SCALE)
    error_of(lambda: transfer.write(transfer.message(part, payload=bytes(payload))))
    assert error_of(lambda: stream).code() == grpc.StatusCode.FAILED_PRECONDITION
    transfer.abort()


def reserve_for_another_model(s):
    transfer = Transfer(s.node, s.golden, reserve=False)
    transfer.request.manifest.model_fingerprint = "?"
    error_of(transfer.reserve)


def reserve_too_much(s):
    held = []
    for _ in range(3):  # each takes 2.4 MB of the 6 MiB of DRAM
        transfer = Transfer(s.node, s.golden, reserve=False)
        transfer.request.manifest.prompt_token_ids.extend([5] * 1500)
        transfer.request.manifest.context_length = 1533
        held.append(transfer)
    for transfer in held[:2]:
        transfer.reserve()
    assert error_of(held[2].reserve).code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    for transfer in held[:2]:
        transfer.abort()


def reserve_a_key_twice(s):
    key = uuid.uuid4().hex
    first = Transfer(s.node, s.golden, rendezvous_key=key)
    error_of(Transfer(s.node, s.golden, rendezvous_key=key, reserve=False).reserve)
    first.abort()


def let_a_lease_end(s):
    Transfer(s.node, s.golden, lease=duration_pb2.Duration(nanos=100_000_000))
    wait_for(s.node, lambda m: m.get("sluice_transfers_open") == 0, 10 * SCALE)


def connect_once_too_often(s):
    """Connects from an address from which nothing else here connects."""
    host, port = s.node.address.rsplit(":", 1)
    with contextlib.ExitStack() as opened:
        for _ in range(MOST_OF_PEER + 1):
            opened.enter_context(socket.create_connection((host, int(port)), timeout=TIMEOUT_S,
                                                          source_address=("127.0.0.9", 0)))
        wait_for(s.node, lambda m: m.get("sluice_connections_refused_total", reason="peer") > 0, 5 * SCALE)


def damage_a_chunk_and_resume(s):
    transfer = Transfer(s.node, s.golden)
    parts = transfer.parts()
    error = error_of(lambda: transfer.write(transfer.message(parts[0]), transfer.message(parts[1], crc32c=1)))
    assert error.code() == grpc.StatusCode.DATA_LOSS
    transfer.write(*(transfer.message(p) for p in parts[1:]))
    transfer.commit()
    tokens_of(s.generate(transfer.id))


# Name of the cause -> (cause, [(metric and labels, growth)]).
CAUSES = {
    "a handed-over prompt is decoded to its length": (finish_by_length, [
        (requests("finished_length", "MAX_TOKENS"), 1),
        (reserves("accepted", "NONE"), 1),
        (("sluice_tokens_total", {"kind": "output"}), 24),
        (("sluice_tokens_total", {"kind": "handed_over"}), 33),
        (("sluice_decoded_tokens_total", {"exact": "true"}), 24),
        (("sluice_decoded_tokens_total", {"exact": "false"}), 0),
        (("sluice_time_to_first_token_seconds_count", {}), 1),
        (("sluice_inter_token_latency_seconds_count", {}), 23),
        (("sluice_request_duration_seconds_count", {}), 1),
        (("sluice_queue_seconds_count", {}), 1),
        # No step is surplus: the engine knows which token is the last by its number before the token is chosen.
        (("sluice_step_sequences_count", {}), 24),
        (("sluice_step_sequences_sum", {}), 24),
        *((("sluice_step_seconds_count", {"phase": phase}), 24)
          for phase in ("plan", "launch", "copy", "compute", "sample", "emit", "total")),
        (("sluice_ingest_bytes_total", {}), 33 * 1536),
        (("sluice_ingest_blocks_total", {}), 2 * 3 * 2),
        (("sluice_ingest_seconds_count", {}), 1)]),
    "a stop token": (stop_by_token, [(requests("finished_stop", "STOP_TOKEN"), 1)]),
    "Cancel": (cancel, [(requests("cancelled", "CANCEL_CALL"), 1)]),
    "a caller who goes away": (go_away, [(requests("cancelled", "CALLER_GONE"), 1)]),
    "a transfer that never comes": (wait_in_vain, [(requests("deadline", "TRANSFER_WAIT"), 1)]),
    "a reader who stops reading": (read_slowly, [
        (requests("slow_reader", "SLOW_READER"), 1), (("sluice_slow_readers_total", {}), 1)]),
    "a bad request": (ask_nonsense, [(requests("refused", "INVALID_ARGUMENT"), 1)]),
    "an unknown transfer": (name_no_transfer, [(requests("refused", "TRANSFER_NOT_FOUND"), 1)]),
    "no handoff": (bring_nothing, [(requests("refused", "NO_HANDOFF"), 1)]),
    "a malformed traceparent": (send_a_malformed_traceparent, [
        (requests("refused", "NO_HANDOFF"), 1), (("sluice_malformed_trace_headers_total", {}), 1)]),
    "a second Generate of a transfer, which is aborted": (generate_twice, [
        (requests("refused", "GENERATE_EXISTS"), 1), (requests("error", "TRANSFER_ABORTED"), 1)]),
    "a prompt read from where it is held": (pull, [
        (("sluice_pulls_total", {"outcome": "done", "reason": "NONE"}), 1), (("sluice_pull_seconds_count", {}), 1),
        (("sluice_pull_bytes_total", {"transport": "grpc"}), 1536 * len(PULLED)),
        # The prefill node has no links.
        (("sluice_pull_link_reads_total", {"outcome": "refused"}), 1), (requests("finished_length", "MAX_TOKENS"), 1)]),
    "a source that is gone, and its prompt computed": (pull_from_nobody, [
        (("sluice_pulls_total", {"outcome": "failed", "reason": "SOURCE_UNREACHABLE"}), 1),
        (("sluice_local_prefills_total", {}), 1), (requests("finished_length", "MAX_TOKENS"), 1)]),
    "a request id in use": (name_twice, [
        (requests("refused", "REQUEST_ID_IN_USE"), 1), (requests("cancelled", "CALLER_GONE"), 1)]),
    "a block sent again with other bytes": (poison, [(requests("error", "POISONED"), 1)]),
    "the cache of another model": (reserve_for_another_model, [(reserves("refused", "FINGERPRINT_MISMATCH"), 1)]),
    "more than DRAM holds": (reserve_too_much, [
        (reserves("refused", "DRAM_FULL"), 1), (reserves("accepted", "NONE"), 2)]),
    "a rendezvous key in use": (reserve_a_key_twice, [(reserves("refused", "RENDEZVOUS_KEY_IN_USE"), 1)]),
    "a connection too many of one peer": (connect_once_too_often, [
        (("sluice_connections_refused_total", {"reason": "peer"}), 1)]),
    "a lease that ends": (let_a_lease_end, [(("sluice_leases_expired_total", {}), 1)]),
    "a damaged chunk, sent again on a new stream": (damage_a_chunk_and_resume, [
        (("sluice_ingest_checksum_failures_total", {}), 1), (("sluice_ingest_resumes_total", {}), 1),
        (requests("finished_length", "MAX_TOKENS"), 1)]),
}


@pytest.fixture(scope="module")
def moved():
    """Names that have been seen to move."""
    return set()


@pytest.mark.parametrize("cause", CAUSES)
def test_a_metric_moves_by_its_cause(scene, moved, cause):
    act, growths = CAUSES[cause]
    before = Scrape(scene.node)
    act(scene)

    def grown(now):
        return {key[0] + str(key[1]): now.get(key[0], **key[1]) - before.get(key[0], **key[1])
                for key, _ in growths}

    wanted = {key[0] + str(key[1]): growth for key, growth in growths}
    after = wait_for(scene.node, lambda now: grown(now) == wanted, 5 * SCALE)
    assert grown(after) == wanted
    # A request ends once, with one reason.
    ends = sum(g for (name, _), g in growths if name == "sluice_requests_total")
    assert after.get("sluice_requests_total") - before.get("sluice_requests_total") == ends
    moved |= after.moved_since(before)
    wait_for(scene.node, is_idle, 5 * SCALE)


def test_gauges_say_what_is_there_now(scene, moved):
    idle = wait_for(scene.node, is_idle, 5 * SCALE)
    assert is_idle(idle)
    streams = [scene.endless() for _ in range(3)]  # the batch has room for two
    readers = [threading.Thread(target=lambda s=s: error_of(lambda: s)) for s in streams]
    for reader in readers:
        reader.start()
    open_transfer = Transfer(scene.node, scene.golden)
    open_transfer.write_all()

    def full(now):
        return now.get("sluice_batch_sequences") >= 1 and now.get("vllm:num_requests_waiting") >= 1

    busy = wait_for(scene.node, full, 5 * SCALE)
    assert full(busy)
    assert busy.get("vllm:num_requests_running") == busy.get("sluice_batch_sequences")
    assert 0 < busy.get("vllm:kv_cache_usage_perc") <= 1
    assert busy.get("sluice_transfers_open") >= 1
    for tier in ("dram", "hbm"):
        for unit in ("bytes", "blocks"):
            used, reserved, capacity = (busy.get(f"sluice_tier_{what}_{unit}", tier=tier, kind="kv")
                                        for what in ("used", "reserved", "capacity"))
            assert 0 < used <= reserved <= capacity, (tier, unit)
        blocks = busy.get("sluice_tier_capacity_blocks", tier=tier)
        # A block is 32 tokens of one of 2 heads of one of 3 layers; a token takes 1536 bytes.
        assert busy.get("sluice_tier_capacity_bytes", tier=tier) / blocks == 1536 * 32 / 6
    for stream in streams:
        stream.cancel()
    for reader in readers:
        reader.join(TIMEOUT_S)
    open_transfer.abort()
    assert is_idle(wait_for(scene.node, is_idle, 5 * SCALE))
    moved |= busy.moved_since(idle)


def test_the_process_and_the_build_are_told(scene):
    scrape = Scrape(scene.node)
    (labels,) = [dict(have) for name, have in scrape.samples if name == "sluice_build_info"]
    assert scrape.get("sluice_build_info") == 1
    assert labels["device"] == "cpu" and labels["policy"] == "full"
    model = scene.node.admin.GetModel(admin_pb2.GetModelRequest(), timeout=TIMEOUT_S)
    assert scrape.get("sluice_exact_limit_tokens") == model.exact_tokens == model.model.max_context
    assert labels["kernels"] and labels["model"] and labels["version"].count(".") == 2
    assert abs(scrape.get("process_resident_memory_bytes") / scene.node.rss_bytes() - 1) < 0.2
    assert abs(time.time() - scrape.get("process_start_time_seconds")) < 3600
    assert 10 < scrape.get("process_open_fds") < scrape.get("process_max_fds")
    assert scrape.get("process_cpu_seconds_total") > 0


def test_endpoint_pickers_are_told_the_caches_and_that_there_are_no_adapters(scene):
    def labels_of(node, metric):
        scrape = Scrape(node)
        (labels,) = [dict(have) for name, have in scrape.samples if name == metric]
        return labels, scrape.get(metric)

    # A block of vLLM's is one of every layer and head; a node's own are of one of 2 heads of one of 3 layers.
    pools = {tier: int(Scrape(scene.node).get("sluice_tier_capacity_blocks", tier=tier)) for tier in ("hbm", "dram")}
    labels, value = labels_of(scene.node, "vllm:cache_config_info")
    assert value == 1 and labels == {
        "block_size": "32", "num_gpu_blocks": str(pools["hbm"] // 6), "num_cpu_blocks": str(pools["dram"] // 6),
        "cache_dtype": "bf16", "enable_prefix_caching": "True", "engine": "0"}
    assert labels["num_gpu_blocks"] == str((4 << 20) // (32 * 1536))
    labels, _ = labels_of(scene.prefill, "vllm:cache_config_info")
    assert (labels["block_size"], labels["num_gpu_blocks"]) == ("32", str((4 << 20) // (32 * 1536)))
    for node in (scene.node, scene.prefill):
        labels, value = labels_of(node, "vllm:lora_requests_info")
        assert labels == {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
        assert abs(time.time() - value) < 3600


def test_cached_prefixes_make_room(scene, moved):
    tokens_of(scene.generate(committed(scene.node, scene.golden)))
    before = wait_for(scene.node, lambda m: m.get("sluice_prefix_cache_tokens") > 0, 10 * SCALE)
    held = []
    for tokens in (1500, 1500, 1050):  # all of DRAM
        held.append(Transfer(scene.node, scene.golden, reserve=False))
        held[-1].request.manifest.prompt_token_ids[:] = [7] * tokens
        held[-1].request.manifest.context_length = tokens
        held[-1].reserve()
    after = Scrape(scene.node)
    assert after.get("sluice_prefix_cache_evicted_tokens_total") > before.get("sluice_prefix_cache_evicted_tokens_total")
    assert after.get("sluice_prefix_cache_tokens") < before.get("sluice_prefix_cache_tokens")
    for transfer in held:
        transfer.abort()
    moved |= after.moved_since(before)


def test_exactly_the_names_of_the_header_are_exported_and_each_has_moved(scene, moved):
    assert set(Scrape(scene.node).types) == exported_names()
    if len(moved) < 10:
        pytest.skip("the causes have not run: run the whole file")
    still = {name for name in exported_names() if not name.startswith("process_") and not name.endswith("_info")
             and "capacity" not in name and name != "sluice_exact_limit_tokens"}
    # Preemption needs overcommit, and dropped drafts a broken model, so the tests of the engine count them; those of
    # test_speculation.py count drafts, those of test_telemetry.py spans, and those of test_kv_events.py events.
    sparse = {name for name in still if name.startswith((
        "sluice_attention_worker", "sluice_selected_", "sluice_missed_", "sluice_fetched_", "sluice_selecting_",
        "sluice_link_", "sluice_resident_", "sluice_ess_", "sluice_rehearsed_", "vllm:spec_decode_", "sluice_otel_",
        "sluice_kv_event"))}
    engine = {"sluice_preemptions_total", "sluice_preempted_seconds", "sluice_dropped_drafts_total",
              "sluice_draft_limit"}
    ranks = {name for name in still if name.startswith("sluice_rank")}  # those of test_rank_caches.py, test_rank_metrics.py
    pushes = {name for name in still if name.startswith("sluice_push_")}  # a prefill node's; test_push_links.py counts them
    assert still - moved == engine | ranks | sparse | pushes


def test_promtool_finds_nothing_to_say_about_a_live_node(scene):
    if not PROMTOOL.exists():
        pytest.skip("no .venv/bin/promtool: tools/setup puts it there")
    lines = [line for line in Scrape(scene.node).text.splitlines(keepends=True)
             if "vllm:" not in line]
    done = subprocess.run([PROMTOOL, "check", "metrics"], input="".join(lines), capture_output=True, text=True,
                          check=False, timeout=TIMEOUT_S)
    assert done.returncode == 0 and done.stdout + done.stderr == ""
