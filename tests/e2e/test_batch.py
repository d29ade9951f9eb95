"""A sequence's tokens do not depend on what else is in the batch."""

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from sluice.v1 import common_pb2
from sluice_client.generate import generate, prefill
from support.nodes import FIXTURES, TINY, greedy

SEQUENCES = 16


def workload(name, vocabulary):
    """Returns 16 (prompt, sampling) of different lengths, half of them sampled with seeds."""
    rng = random.Random(name)
    work = []
    for i in range(SEQUENCES):
        prompt = [rng.randrange(3, vocabulary) for _ in range(1 + 19 * i)]
        settings = dict(max_tokens=60 + 4 * (SEQUENCES - i), ignore_eos=True, logprobs=0)
        if i % 2:
            settings.update(temperature=0.9, top_p=0.95, top_k=50, seed=i, repetition_penalty=1.1)
        else:
            settings.update(temperature=0)
        work.append((prompt, common_pb2.SamplingParams(**settings)))
    return work


def run_one(pair, prompt, sampling, barrier=None):
    """Hands the prompt over, waits for the others, and decodes; returns ids and log-probabilities."""
    transfer = prefill(pair.prefill.address, pair.decode.address, prompt, sampling).transfer_id
    if barrier:
        barrier.wait(60)
    result = generate(pair.decode.address, prompt, sampling, transfer_id=transfer)
    return result.output_ids, result.logprobs


def run_together(pair, work):
    """Runs all at once; returns their results and the largest number that was seen running."""
    barrier, done, most = threading.Barrier(len(work)), threading.Event(), [0]

    def watch():
        while not done.is_set():
            most[0] = max(most[0], pair.decode.capacity().running)
            time.sleep(0.002)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with ThreadPoolExecutor(len(work)) as pool:
            results = list(pool.map(lambda w: run_one(pair, *w, barrier), work))
    finally:
        done.set()
        watcher.join()
    return results, most[0]


@pytest.mark.parametrize("name", TINY)
def test_sixteen_sequences_together_give_what_each_gives_alone(pairs, name):
    pair = pairs(name)
    work = workload(name, 512)
    alone = [run_one(pair, *w) for w in work]
    together, most = run_together(pair, work)
    assert most > 1
    for i, (a, b) in enumerate(zip(alone, together)):
        assert a == b, f"sequence {i}"


def test_chats_with_a_real_model_together_give_what_each_gives_alone(smollm2_pair):
    cases = json.loads((FIXTURES / "smollm2-135m-instruct/golden.json").read_text())
    work = [(c["ids"], greedy(max_tokens=24, logprobs=0)) for c in cases if c["chat"]]
    alone = [run_one(smollm2_pair, *w) for w in work]
    together, most = run_together(smollm2_pair, work)
    assert most > 1
    assert together == alone
