"""Chat completions through the real router smg: a prefill node computes and holds prompts, two decode nodes read them
and go on.
"""

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from google.protobuf import duration_pb2
from sluice.v1 import admin_pb2
from support.nodes import FIXTURES, FLOAT32_KERNELS, SCALE, matching_steps
from support.router_lab import GATEWAYS, Lab, add_token_texts, ids_of, text_of

MARGIN = 0.15  # bf16 caches and activations
WINDOW = 8     # sequences that a node decodes at once
# Cases whose every step is certain in float32 (test_parity.py allows a margin of 0.05 there): one ends by itself, one
# does not.
CHATS = {c["tokens"][-1] == 2: c
         for c in json.loads((FIXTURES / "smollm2-135m-instruct/golden.json").read_text())
         if c["chat"] and min(c["margins"]) > 0.05}
LONG = {"max_tokens": 3000, "ignore_eos": True}
# A tiny model is too fast to be interrupted in mid-stream, so that steps of these nodes take at least 5 ms.
PACED = ("--allow-failpoints", "--failpoints", "engine.step=delay(5ms)")
MEMORY = ("--hbm-bytes", "64MiB", "--dram-bytes", "64MiB", "--threads", "1")


@pytest.fixture(scope="module")
def model(tiny_models, tmp_path_factory):
    return add_token_texts(tiny_models("tiny-llama"), tmp_path_factory.mktemp("text") / "tiny")


@pytest.fixture(scope="module", params=GATEWAYS)
def lab(model, tmp_path_factory, request):
    with Lab(model, tmp_path_factory.mktemp("lab"), *MEMORY, "--max-sequences", str(WINDOW),
             gateway=request.param) as made:
        yield made


@pytest.fixture(scope="module", params=GATEWAYS)
def paced(model, tmp_path_factory, request):
    with Lab(model, tmp_path_factory.mktemp("paced"), *MEMORY, *PACED, gateway=request.param) as made:
        yield made


@pytest.fixture(autouse=True)
def memory_comes_back(request):
    """Checks that both nodes hold nothing a moment after each test."""
    yield
    for name in {"lab", "paced"} & set(request.fixturenames):
        for node in request.getfixturevalue(name).decodes:
            tiers = [t for t in node.settled() if isinstance(t, tuple)]
            node.wait_until_held((*((tier, kind, 0, 0) for tier, kind, _, _ in tiers), 0, 0, 0))


def check(reply, g, case: int, steps: int | None = None) -> None:
    """Checks that `reply` is the golden continuation of the case's prompt."""
    assert reply.whole, reply
    steps = steps or len(g.tokens(case))
    found = ids_of(reply.text)
    assert len(found) == steps and reply.finish == "length", reply
    matching_steps(found, g.tokens(case)[:steps], g.margins(case), MARGIN)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("case", [0, 1, 2])
def test_a_chat_is_answered_with_the_golden_text(lab, golden, case, stream):
    g = golden("tiny-llama")
    reply = lab.router.ask(text_of(g.prompt(case)), stream=stream, max_tokens=24, ignore_eos=True)
    check(reply, g, case)
    if not stream:
        assert reply.usage["prompt_tokens"] == len(g.prompt(case)) and reply.usage["completion_tokens"] == 24


def test_a_real_model_answers_chats_as_in_transformers(smollm2, tmp_path):
    with Lab(smollm2, tmp_path, "--hbm-bytes", "128MiB", "--dram-bytes", "128MiB", "--kv-dtype", "float32", "--kernels",
             FLOAT32_KERNELS, decodes=1) as lab:
        for stops in (True, False):
            reply = lab.router.ask(CHATS[stops]["text"], stream=stops, max_tokens=48)
            assert reply.whole and reply.text == CHATS[stops]["output"].removesuffix("<|im_end|>"), reply
            assert reply.finish == ("stop" if stops else "length")


def test_a_burst_of_four_times_the_decode_window_is_answered_whole(lab, golden):
    g = golden("tiny-llama")
    count = 4 * WINDOW * len(lab.decodes)
    replies = lab.ask_all(count, lambda i: lab.router.ask(text_of(g.prompt(1)), stream=bool(i % 2), max_tokens=24,
                                                          ignore_eos=True), threads=count)
    for reply in replies:
        check(reply, g, 1)


def test_200_mixed_requests_have_no_wrong_answer(lab, golden):
    """Sends three prompts with lengths from 1 to 24, streamed and not; some end by a stop token, are refused, or hang
    up.
    """
    g = golden("tiny-llama")
    expected = {}

    def ask(i):
        case, steps, prompt = i % 3, 1 + i % 24, text_of(g.prompt(i % 3))
        if i % 20 == 7:
            refused = lab.router.ask(prompt, stream=bool(i % 2), max_tokens=4, response_format={"type": "json_object"})
            assert refused.status == 400, refused
        elif i % 20 == 13:
            lab.router.ask(prompt, stream=True, on_piece=lambda r: r.pieces == 2, **LONG)
        elif i % 20 == 17:
            stopped = lab.router.ask(prompt, stream=bool(i % 2), max_tokens=24, ignore_eos=True,
                                     stop=[f"<{expected[case][10]}>"])
            end = expected[case].index(expected[case][10])
            assert stopped.whole and ids_of(stopped.text) == expected[case][:end] and stopped.finish == "stop", stopped
        else:
            reply = lab.router.ask(prompt, stream=bool(i % 2), max_tokens=steps, ignore_eos=True)
            check(reply, g, case, steps)
            assert ids_of(reply.text) == expected[case][:steps]

    for case in range(3):
        expected[case] = ids_of(lab.router.ask(text_of(g.prompt(case)), max_tokens=24, ignore_eos=True).text)
    lab.ask_all(200, ask, threads=24)


def test_a_streamed_answer_comes_while_it_is_computed(paced, golden):
    g = golden("tiny-llama")
    reply = paced.router.ask(text_of(g.prompt(0)), stream=True, max_tokens=24, ignore_eos=True)
    check(reply, g, 0)
    # Steps that take less than a message may share one; these take 5 ms.
    assert reply.pieces > 1 and reply.first_s < reply.seconds - 0.02, reply


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
def test_a_caller_that_hangs_up_ends_its_sequence(paced, golden, stream):
    prompt = text_of(golden("tiny-llama").prompt(1))
    if stream:
        paced.router.ask(prompt, stream=True, on_piece=lambda r: r.pieces == 3, **LONG)
    else:
        reply = paced.router.ask(prompt, timeout=1, **LONG)
        assert "Timeout" in reply.error, reply
    # The whole stream would take 15 s more.
    for node in paced.decodes:
        node.settled(5 * SCALE)


# Requests that smg passes on and Sluice refuses. smg's circuit opens after 10 failures.
REFUSED = [{"response_format": {"type": "json_object"}}, {"regex": "a+"}, {"ebnf": 'root ::= "a"'},
           {"max_tokens": 100000}]
# smg asks an SGLang engine for each of several answers by itself.
REFUSED_BY = {"vllm": [*REFUSED, {"n": 2}], "sglang": REFUSED}


def test_a_bad_request_is_a_400_and_never_opens_the_circuit(lab, golden):
    g = golden("tiny-llama")
    refused = REFUSED_BY[lab.gateway]
    for i in range(40):
        reply = lab.router.ask(text_of(g.prompt(1)), stream=bool(i % 2), **{"max_tokens": 4, **refused[i % len(refused)]})
        assert reply.status == 400 and "sampling_params." in reply.error, reply
    assert all(w["is_healthy"] for w in lab.router.workers())
    for _ in range(4):
        check(lab.router.ask(text_of(g.prompt(1)), max_tokens=24, ignore_eos=True), g, 1)


def busy_node(lab) -> int:
    """Returns the node that runs the only sequence."""
    deadline = time.monotonic() + 5 * SCALE
    while time.monotonic() < deadline:
        for i, node in enumerate(lab.decodes):
            if node.capacity().running:
                return i
    raise AssertionError("nothing runs")


class Stream:
    """A long stream in the background, which has begun when the constructor returns."""

    def __init__(self, lab, prompt: str, **fields):
        self.begun = threading.Event()
        self.reply = None
        self.thread = threading.Thread(target=self.run, args=(lab, prompt, fields))
        self.thread.start()
        assert self.begun.wait(30 * SCALE)

    def run(self, lab, prompt, fields):
        self.reply = lab.router.ask(prompt, stream=True, on_piece=lambda _: self.begun.set(), **{**LONG, **fields})
        self.begun.set()

    def end(self):
        self.thread.join(60 * SCALE)
        assert not self.thread.is_alive()
        return self.reply


def check_some(lab, g, count: int = 6) -> None:
    """Checks that both nodes, or the one that is left, give right answers."""
    for i in range(count):
        check(lab.router.ask(text_of(g.prompt(1)), stream=bool(i % 2), max_tokens=24, ignore_eos=True), g, 1)


@pytest.mark.parametrize("gateway", GATEWAYS)
def test_a_node_killed_in_mid_stream_ends_that_stream_alone(model, golden, tmp_path, gateway):
    g = golden("tiny-llama")
    with Lab(model, tmp_path, *MEMORY, *PACED, gateway=gateway) as lab:
        stream = Stream(lab, text_of(g.prompt(1)))
        dead = busy_node(lab)
        lab.decodes[dead].process.kill()
        reply = stream.end()
        # Its tokens are lost, and the caller is told: no answer looks complete.
        assert reply.error and not reply.whole, reply
        check_some(lab, g)
        lab.decodes[dead].process.wait()
        lab.decodes[dead] = lab.start_decode(dead)
        lab.wait_until_healthy()
        check_some(lab, g)


def test_a_node_drained_in_mid_stream_finishes_it(paced, golden):
    g = golden("tiny-llama")
    stream = Stream(paced, text_of(g.prompt(1)), max_tokens=400)
    drained = paced.decodes[busy_node(paced)]
    drained.admin.Drain(admin_pb2.DrainRequest(timeout=duration_pb2.Duration(seconds=int(60 * SCALE))), timeout=10)
    try:
        check_some(paced, g)  # requests go to the other node, by smg's retry as long as smg has not noticed
        reply = stream.end()
        assert reply.whole and len(ids_of(reply.text)) == 400, reply
    finally:
        drained.admin.Resume(admin_pb2.ResumeRequest(), timeout=10)
    paced.wait_until_healthy()


@pytest.mark.parametrize("gateway", GATEWAYS)
def test_nodes_restarted_in_turn_under_load_fail_no_stream(model, golden, tmp_path, gateway):
    """Each node gets SIGTERM, finishes its sequences, and comes back on its port; callers notice nothing."""
    g = golden("tiny-llama")
    stop = threading.Event()

    def load(i):
        count = 0
        while not stop.is_set():
            check(lab.router.ask(text_of(g.prompt(1)), stream=bool(i % 2), max_tokens=24, ignore_eos=True), g, 1)
            count += 1
        return count

    # By default smg tries a request six times within half a second, and on a busy machine all of them may meet the node
    # that is draining before smg asks for its health again.
    with Lab(model, tmp_path, *MEMORY, *PACED, "--drain-timeout-seconds", f"{60 * SCALE}s",
             router_flags=("--cb-timeout-duration-secs", "1", "--retry-max-retries", "15"), gateway=gateway) as lab:
        with ThreadPoolExecutor(4) as pool:
            loads = [pool.submit(load, i) for i in range(4)]
            try:
                for index in range(len(lab.decodes)):
                    lab.restart(index)
                    lab.wait_until_healthy()
            finally:
                stop.set()
            counts = [load.result() for load in loads]
    assert lab.statuses == [0, 0] and all(counts), (lab.statuses, counts)
