"""Generate with good requests: sampling, stops, log-probabilities, handoffs, endings."""

import threading
import time
import uuid

import grpc
import numpy as np
import pytest
from sluice.v1 import admin_pb2, common_pb2, decode_pb2, prefill_pb2
from support.nodes import SCALE, TIMEOUT_S, error_of, greedy, matching_steps, sluice_json, tokens_of
from support.transfers import Transfer, committed

EOS = 2
# Error of golden bf16 caches with activations rounded to bf16: 2.5 % of logits that lie within about 10.
LOGPROB_TOLERANCE = 0.3


@pytest.fixture(autouse=True)
def memory_comes_back(small):
    """Checks that each test leaves the small node as it found it."""
    before = small.settled()
    yield
    small.wait_until_held(before)


def decode(node, transfer_id, sampling, **kwargs):
    """Returns (ids, finish) of a committed transfer."""
    tokens, finish = tokens_of(node.decode.Generate(decode_pb2.GenerateRequest(
        transfer_id=transfer_id, sampling=sampling, **kwargs), timeout=TIMEOUT_S))
    return [t.id for t in tokens], finish


def decode_golden(node, golden, sampling, case=1, **kwargs):
    return decode(node, committed(node, golden, case), sampling, **kwargs)


def test_usage_says_what_was_used(small, golden):
    g = golden("tiny-llama")
    ids, finish = decode_golden(small, g, greedy(max_tokens=7))
    assert len(ids) == 7 and finish.reason == decode_pb2.FINISH_REASON_LENGTH
    assert finish.usage.prompt_tokens == 33 and finish.usage.completion_tokens == 7
    assert finish.usage.cached_tokens in (32, 33)  # the last position is computed again


def test_without_max_tokens_the_reservation_is_the_limit(small, golden):
    ids, finish = decode_golden(small, golden("tiny-llama"), greedy(ignore_eos=True))
    assert len(ids) == 24 and finish.reason == decode_pb2.FINISH_REASON_LENGTH


def test_the_same_seed_gives_the_same_tokens_and_another_gives_others(small, golden):
    g = golden("tiny-llama")

    def sample(seed):
        return decode_golden(small, g, common_pb2.SamplingParams(
            temperature=1.5, seed=seed, max_tokens=24, ignore_eos=True))[0]

    first = sample(11)
    assert sample(11) == first
    assert sample(12) != first


def test_top_k_of_one_is_greedy_at_any_temperature(small, golden):
    g = golden("tiny-llama")
    expected = decode_golden(small, g, greedy(max_tokens=24))[0]
    for settings in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        got = decode_golden(small, g, common_pb2.SamplingParams(
            temperature=2, seed=1, max_tokens=24, **settings))[0]
        assert got == expected, settings


def test_logit_bias_forces_and_forbids_a_token(small, golden):
    g = golden("tiny-llama")
    assert decode_golden(small, g, greedy(max_tokens=5, logit_bias={77: 100}))[0] == [77] * 5
    best = g.tokens(1)[0]
    assert decode_golden(small, g, greedy(max_tokens=1, logit_bias={best: -100}))[0] != [best]


def test_a_frequency_penalty_grows_until_another_token_wins(small, golden):
    g = golden("tiny-llama")
    bias = {77: 100.0, 78: 95.0}
    for penalty, both in ((0.0, False), (2.0, True)):
        got = decode_golden(small, g, greedy(max_tokens=24, logit_bias={77: 100.0} if not both else bias,
                                             frequency_penalty=penalty))[0]
        assert set(got) == ({77, 78} if both else {77}), penalty


def test_eos_ends_the_sequence_unless_ignored(small, golden):
    g = golden("tiny-llama")
    ids, finish = decode_golden(small, g, greedy(max_tokens=5, logit_bias={EOS: 100}))
    assert ids == [EOS] and finish.reason == decode_pb2.FINISH_REASON_STOP and finish.stop_token_id == EOS
    ids, finish = decode_golden(small, g, greedy(max_tokens=5, logit_bias={EOS: 100}, ignore_eos=True))
    assert ids == [EOS] * 5 and finish.reason == decode_pb2.FINISH_REASON_LENGTH


def test_a_stop_token_id_ends_the_sequence_and_is_its_last_token(small, golden):
    g = golden("tiny-llama")
    expected = decode_golden(small, g, greedy(max_tokens=24))[0]
    stop = expected[5]
    ids, finish = decode_golden(small, g, greedy(max_tokens=24, stop_token_ids=[stop]))
    assert ids == expected[:expected.index(stop) + 1]
    assert finish.reason == decode_pb2.FINISH_REASON_STOP and finish.stop_token_id == stop


def test_min_tokens_keeps_stop_tokens_away(small, golden):
    ids, finish = decode_golden(small, golden("tiny-llama"),
                                greedy(max_tokens=10, min_tokens=4, logit_bias={EOS: 100}))
    assert len(ids) == 5 and EOS not in ids[:4] and ids[4] == EOS
    assert finish.reason == decode_pb2.FINISH_REASON_STOP


def test_logprobs_are_those_of_the_raw_logits(small, golden):
    g = golden("tiny-llama")
    expected = g.logprobs(1)
    # Temperature and bias must not show in the log-probabilities.
    tokens, _ = tokens_of(small.decode.Generate(decode_pb2.GenerateRequest(
        transfer_id=committed(small, g), sampling=common_pb2.SamplingParams(
            temperature=0.01, seed=1, max_tokens=24, logprobs=5)), timeout=TIMEOUT_S))
    steps = matching_steps([t.id for t in tokens], g.tokens(1), g.margins(1), 0.2)
    assert steps > 0
    for step, token in enumerate(tokens[:steps]):
        top = [(t.token_id, t.logprob) for t in token.top_logprobs]
        assert len(top) == 5 and top == sorted(top, key=lambda t: -t[1])
        assert abs(token.logprob - expected[step, token.id]) < LOGPROB_TOLERANCE
        assert np.allclose([p for _, p in top], np.sort(expected[step])[::-1][:5], atol=LOGPROB_TOLERANCE)
        assert (token.id, token.logprob) in top


def test_no_logprobs_unless_asked(small, golden):
    tokens, _ = tokens_of(small.decode.Generate(decode_pb2.GenerateRequest(
        transfer_id=committed(small, golden("tiny-llama")), sampling=greedy(max_tokens=3)),
        timeout=TIMEOUT_S))
    assert all(not t.HasField("logprob") and not t.top_logprobs for t in tokens)


def test_a_handed_over_first_token_comes_first_and_is_built_upon(small, golden):
    g = golden("tiny-llama")
    # The model would not choose this token, so it can come from the handoff only.
    first = (g.tokens(1)[0] + 1) % 512
    ids, finish = decode(small, committed(small, g, first_tokens=[first]), greedy(max_tokens=8))
    assert ids[0] == first and len(ids) == 8 and finish.usage.completion_tokens == 8
    # The tokens are the same as if it were the prompt's last token, whose cache was not sent.
    extended = committed(small, g, prompt=[*g.prompt(1), first])
    assert decode(small, extended, greedy(max_tokens=7))[0] == ids[1:]


def test_pending_prompt_tokens_are_computed_by_the_decode_node(small, golden):
    g = golden("tiny-llama")
    whole = decode(small, committed(small, g), greedy(max_tokens=24))[0]
    # The prompt has 33 tokens, of which one whole block is sent.
    part = decode(small, committed(small, g, context_length=32), greedy(max_tokens=24))[0]
    matching_steps(part, whole, g.margins(1), 0.1)


def test_a_kept_sequence_goes_on_with_what_is_appended(small, golden):
    g = golden("tiny-llama")
    request = decode_pb2.GenerateRequest(transfer_id=committed(small, g), sampling=greedy(max_tokens=8))
    request.keep.FromSeconds(30)
    tokens, finish = tokens_of(small.decode.Generate(request, timeout=TIMEOUT_S))
    assert len(finish.sequence_id) == 32
    appended = [7, 8, 9]
    turn = decode_pb2.GenerateRequest(sequence_id=finish.sequence_id, prompt_token_ids=appended,
                                      sampling=greedy(max_tokens=8))
    ids, second = tokens_of(small.decode.Generate(turn, timeout=TIMEOUT_S))
    assert second.usage.prompt_tokens == len(g.prompt(1)) + 8 + 3
    assert second.usage.cached_tokens == len(g.prompt(1)) + 8 - 1
    assert len(ids) == 8 and not second.sequence_id
    with pytest.raises(grpc.RpcError) as gone:
        list(small.decode.Generate(turn, timeout=TIMEOUT_S))
    assert gone.value.code() == grpc.StatusCode.NOT_FOUND
    # The tokens are those of one prompt with both turns, except where two tokens are nearly equally probable.
    whole = committed(small, g, prompt=[*g.prompt(1), *[t.id for t in tokens], *appended])
    again, _ = decode(small, whole, greedy(max_tokens=8))
    assert again[0] == ids[0].id
    kept = decode_pb2.GenerateRequest(transfer_id=committed(small, g), sampling=greedy(max_tokens=2))
    kept.keep.FromSeconds(30)
    sequence_id = tokens_of(small.decode.Generate(kept, timeout=TIMEOUT_S))[1].sequence_id
    forget = decode_pb2.ForgetRequest(sequence_id=sequence_id)
    assert small.decode.Forget(forget, timeout=TIMEOUT_S).found
    assert not small.decode.Forget(forget, timeout=TIMEOUT_S).found


def test_a_handed_over_eos_ends_the_sequence_at_once(small, golden):
    transfer = committed(small, golden("tiny-llama"), first_tokens=[EOS])
    ids, finish = decode(small, transfer, greedy(max_tokens=8))
    assert ids == [EOS] and finish.reason == decode_pb2.FINISH_REASON_STOP


def test_prefill_says_the_first_token_and_its_timings_or_skips_it(pairs, golden):
    pair, g = pairs("tiny-qwen3"), golden("tiny-qwen3")
    seen = []
    for skip in (False, True):
        answer = pair.prefill.prefill.Run(prefill_pb2.RunRequest(
            prompt_token_ids=g.prompt(1), sampling=greedy(max_tokens=24), skip_first_token=skip,
            decode_address=pair.decode.address), timeout=TIMEOUT_S)
        assert answer.HasField("first_token") != skip
        assert answer.timings.bytes_pushed > 0 and answer.timings.total.ToNanoseconds() > 0
        ids, _ = decode(pair.decode, answer.transfer_id, greedy(max_tokens=24))
        matching_steps(ids, g.tokens(1), g.margins(1), 0.1)
        if not skip:
            assert ids[0] == answer.first_token.id
        seen.append(ids)
    assert seen[0][0] == seen[1][0]


def test_generate_may_come_before_its_transfer(small, golden):
    g, key = golden("tiny-llama"), uuid.uuid4().hex
    stream = small.decode.Generate(decode_pb2.GenerateRequest(
        rendezvous_key=key, tenant="a", sampling=greedy(max_tokens=24)), timeout=TIMEOUT_S)
    deadline = time.monotonic() + 10 * SCALE
    while small.capacity().waiting == 0 and time.monotonic() < deadline:
        time.sleep(0.01)
    listed = small.admin.ListSequences(admin_pb2.ListSequencesRequest()).sequences
    assert [s.state for s in listed] == [admin_pb2.SequenceInfo.STATE_AWAITING_TRANSFER]
    transfer = Transfer(small, g, rendezvous_key=key, reserve=False)
    transfer.request.manifest.tenant = "a"
    transfer.reserve()
    transfer.write_all()
    transfer.commit()
    tokens, _ = tokens_of(stream)
    matching_steps([t.id for t in tokens], g.tokens(1), g.margins(1), 0.1)


def test_generate_may_come_during_its_transfer(small, golden):
    g = golden("tiny-llama")
    transfer = Transfer(small, g)
    parts = transfer.parts()
    transfer.write(*(transfer.message(p) for p in parts[:3]))
    stream = small.decode.Generate(decode_pb2.GenerateRequest(
        transfer_id=transfer.id, sampling=greedy(max_tokens=24)), timeout=TIMEOUT_S)
    time.sleep(0.1)
    transfer.write(*(transfer.message(p) for p in parts[3:]))
    transfer.commit()
    tokens, _ = tokens_of(stream)
    matching_steps([t.id for t in tokens], g.tokens(1), g.margins(1), 0.1)


def test_a_rendezvous_key_belongs_to_its_tenant(small, golden):
    key = uuid.uuid4().hex
    transfer = Transfer(small, golden("tiny-llama"), rendezvous_key=key, reserve=False)
    transfer.request.manifest.tenant = "a"
    transfer.reserve()
    transfer.write_all()
    transfer.commit()
    stranger = error_of(lambda: small.decode.Generate(decode_pb2.GenerateRequest(
        rendezvous_key=key, tenant="b", sampling=greedy(max_tokens=4)), timeout=0.3))
    assert stranger.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    tokens, _ = tokens_of(small.decode.Generate(decode_pb2.GenerateRequest(
        rendezvous_key=key, tenant="a", sampling=greedy(max_tokens=4)), timeout=TIMEOUT_S))
    assert len(tokens) == 4


def endless(node, golden, **kwargs):
    """Returns a stream of 2000 tokens, and its request id."""
    request_id = uuid.uuid4().hex
    return request_id, node.decode.Generate(decode_pb2.GenerateRequest(
        request_id=request_id, transfer_id=committed(node, golden, max_new_tokens=2000),
        sampling=greedy(max_tokens=2000, ignore_eos=True)), **kwargs)


def test_cancel_ends_the_stream_and_is_idempotent(small, golden):
    request_id, stream = endless(small, golden("tiny-llama"), timeout=TIMEOUT_S)
    next(stream)
    request = decode_pb2.CancelRequest(request_id=request_id)
    assert small.decode.Cancel(request, timeout=TIMEOUT_S).found
    assert error_of(lambda: stream).code() == grpc.StatusCode.CANCELLED
    assert not small.decode.Cancel(request, timeout=TIMEOUT_S).found


def test_cancel_reaches_a_sequence_that_waits_for_its_transfer(small):
    stream = small.decode.Generate(decode_pb2.GenerateRequest(
        request_id="waits", rendezvous_key=uuid.uuid4().hex, sampling=greedy(max_tokens=4)),
        timeout=TIMEOUT_S)
    deadline = time.monotonic() + 10 * SCALE
    found = False
    while not found and time.monotonic() < deadline:
        found = small.decode.Cancel(decode_pb2.CancelRequest(request_id="waits"), timeout=TIMEOUT_S).found
    assert found
    assert error_of(lambda: stream).code() == grpc.StatusCode.CANCELLED


def test_a_client_that_goes_away_frees_its_memory(small, golden):
    _, stream = endless(small, golden("tiny-llama"), timeout=TIMEOUT_S)
    next(stream)
    stream.cancel()


def test_a_deadline_ends_a_running_sequence(small, golden):
    _, stream = endless(small, golden("tiny-llama"), timeout=0.03)
    assert error_of(lambda: stream).code() == grpc.StatusCode.DEADLINE_EXCEEDED


def test_a_request_id_is_unique_among_those_alive(small, golden):
    request_id, stream = endless(small, golden("tiny-llama"), timeout=TIMEOUT_S)
    next(stream)
    transfer = committed(small, golden("tiny-llama"), case=0, max_new_tokens=4)
    twin = error_of(lambda: small.decode.Generate(decode_pb2.GenerateRequest(
        request_id=request_id, transfer_id=transfer, sampling=greedy(max_tokens=4)), timeout=TIMEOUT_S))
    assert twin.code() == grpc.StatusCode.ALREADY_EXISTS
    stream.cancel()
    assert len(decode(small, transfer, greedy(max_tokens=4))[0]) == 4


def test_more_sequences_than_the_batch_holds_wait_and_all_finish(small, golden):
    g = golden("tiny-llama")
    results = []

    def one():
        results.append(decode_golden(small, g, greedy(max_tokens=24), case=0)[0])

    threads = [threading.Thread(target=one) for _ in range(10)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(TIMEOUT_S)
    assert len(results) == 10 and all(r == results[0] for r in results)


def test_local_prefill_gives_what_a_prefill_node_gives(tiny_models, start, golden):
    node = start("sluice-server", tiny_models("tiny-qwen2"), "--local-prefill", "always", "--hbm-bytes", "8MiB",
                 "--dram-bytes", "8MiB", "--chunk-tokens", "100")
    g = golden("tiny-qwen2")
    for case in range(3):
        got = sluice_json("generate", "--decode", node.address, "--prompt-ids",
                          ",".join(map(str, g.prompt(case))), "--max-tokens", 24)
        matching_steps(got["output_ids"], g.tokens(case), g.margins(case), 0.1)
    assert node.stop() == 0


def test_stop_strings_end_the_text_before_them(smollm2_pair, smollm2):
    args = ["generate", *smollm2_pair.flags(), "--tokenizer", smollm2, "--chat", "--prompt",
            "Why is the sky blue?", "--max-tokens", 40]
    whole = sluice_json(*args)
    stop = whole["output_text"][40:52]  # it straddles tokens, whatever they are
    got = sluice_json(*args, "--stop", "never in there", "--stop", stop)
    assert got["finish_reason"] == "stop"
    assert got["output_text"] == whole["output_text"][:whole["output_text"].index(stop)]
    assert got["output_ids"] == whole["output_ids"][:len(got["output_ids"])]
    assert len(got["output_ids"]) < len(whole["output_ids"])


def test_a_prefill_node_of_another_model_is_told(pairs, golden):
    error = error_of(lambda: pairs("tiny-qwen2").prefill.prefill.Run(prefill_pb2.RunRequest(
        prompt_token_ids=[5, 6], sampling=greedy(max_tokens=4),
        decode_address=pairs("tiny-llama").decode.address), timeout=TIMEOUT_S))
    assert error.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert "FINGERPRINT" in str(error.trailing_metadata()) or "fingerprint" in error.details()
    assert pairs("tiny-llama").decode.address in error.details()


def test_a_prefill_node_names_the_decode_node_it_cannot_reach(pairs):
    error = error_of(lambda: pairs("tiny-llama").prefill.prefill.Run(prefill_pb2.RunRequest(
        prompt_token_ids=[5, 6], sampling=greedy(max_tokens=4), decode_address="127.0.0.1:1"),
        timeout=TIMEOUT_S))
    assert error.code() == grpc.StatusCode.UNAVAILABLE and "127.0.0.1:1" in error.details()


def test_prefill_gives_up_with_its_caller_and_leaves_no_transfer(pairs):
    pair = pairs("tiny-llama")
    before = pair.decode.settled()
    error = error_of(lambda: prefill_run_with_deadline(pair))
    assert error.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    pair.decode.wait_until_held(before, 10 * SCALE)


def prefill_run_with_deadline(pair):
    """The time of a prompt of 4000 tokens is far longer than a hundredth of a second."""
    return pair.prefill.prefill.Run(prefill_pb2.RunRequest(
        prompt_token_ids=[5] * 4000, sampling=greedy(max_tokens=4),
        decode_address=pair.decode.address), timeout=0.01)
