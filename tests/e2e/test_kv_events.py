"""KV events: what routers hear of a node's prefix cache, in vLLM's form, and that nobody waits for them."""

import time

import pytest
import zmq
from sluice.v1 import decode_pb2
from support.failpoint_lab import Stream
from support.kv_events import Subscriber, replay
from support.metrics_text import Scrape, wait_for
from support.nodes import BIN, FIXTURES, SCALE, TIMEOUT_S, free_port, greedy, run, tokens_of
from support.rank_lab import starting_ranks

BLOCK = 32
NODE = ["--hbm-bytes", "8MiB", "--local-prefill", "always"]


def ids(count: int, seed: int) -> list[int]:
    return [(i * i * 7 + i * 3 + seed * 31) % 250 + 3 for i in range(count)]


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models("tiny-llama")


class Published:
    """A node whose events are published, and its endpoints as subscribers see them."""

    def __init__(self, start, model, *flags, dram="16MiB"):
        ports = free_port(), free_port()
        self.endpoint, self.replay = (f"tcp://127.0.0.1:{port}" for port in ports)
        self.node = start("sluice-server", model, *NODE, "--dram-bytes", dram,
                          "--kv-events-endpoint", f"tcp://*:{ports[0]}",
                          "--kv-events-replay-endpoint", f"tcp://*:{ports[1]}", *flags)

    def generate(self, prompt, tokens=4, tenant=""):
        return tokens_of(self.node.decode.Generate(decode_pb2.GenerateRequest(
            prompt_token_ids=prompt, sampling=greedy(max_tokens=tokens, ignore_eos=True), tenant=tenant),
            timeout=TIMEOUT_S))

    def subscribe(self, **kwargs) -> Subscriber:
        """Returns a subscriber that has missed nothing: the first batches come from the replay endpoint."""
        made = Subscriber(self.endpoint, **kwargs)
        time.sleep(0.5 * SCALE)  # until the subscription is there
        for sequence, payload in replay(self.replay, 0, **kwargs):
            made.take(sequence, payload)
        return made


@pytest.mark.parametrize("schema", ["maps", "arrays"])
def test_a_router_hears_of_blocks_with_their_tokens_and_parents(start, model, schema):
    form = {"topic": "kv@node@tiny", "array_like": schema == "arrays"}
    published = Published(start, model, "--kv-events-topic", "kv@node@tiny", "--kv-events-schema", schema)
    router = published.subscribe(**form)
    # The canary's prompt is too short for a block.
    assert router.cleared == 1 and not router.blocks and [sequence for sequence, _ in router.batches] == [0]
    first = ids(200, 1)
    answer, _ = published.generate(first)
    whole = (first + [token.id for token in answer])[:192]
    assert router.read(lambda r: len(r.blocks) == 6), router.blocks
    assert router.prompts() == {tuple(whole)}
    second = first[:96] + ids(100, 2)
    published.generate(second)
    assert router.read(lambda r: len(r.blocks) == 9)
    assert router.prompts() == {tuple(whole), tuple(second[:192])}
    # Another tenant's blocks of the same tokens are other blocks.
    published.generate(first, tenant="alice")
    assert router.read(lambda r: len(r.blocks) == 15)
    assert router.prompts() == {tuple(whole), tuple(second[:192])}
    # The same again leaves nothing new.
    published.generate(first)
    published.node.settled()
    assert not router.read(lambda r: len(r.blocks) != 15, 0.3)
    assert Scrape(published.node).get("sluice_kv_event_batches_total") == len(router.batches)
    for start_at in (0, 1, len(router.batches) - 1, len(router.batches)):
        assert replay(published.replay, start_at, **form) == router.batches[start_at:]
    router.close()


@pytest.fixture(name="ranks")
def _ranks(tiny_models, tmp_path):
    yield from starting_ranks(tiny_models, tmp_path, "auto")


def test_blocks_of_ranks_of_experts_are_published_once(ranks):
    def start(_program, name, *flags):
        settings = dict(zip(flags[::2], flags[1::2], strict=True))
        hbm, dram = settings.pop("--hbm-bytes"), settings.pop("--dram-bytes")
        return ranks(name, 2, *[word for setting in settings.items() for word in setting], hbm=hbm, dram=dram).leader

    published = Published(start, "tiny-deepseek-v32", dram="64MiB")
    router = published.subscribe()
    first, second = ids(170, 1), ids(64, 1) + ids(140, 2)
    running = Stream(published.node, prompt_token_ids=first, sampling=greedy(max_tokens=300, ignore_eos=True))
    running.wait_for_tokens(2)
    _, finish = published.generate(second)
    assert finish.usage.cached_tokens == 0  # its rank is the other, which has no block of the first prompt
    running.end()
    assert router.read(lambda r: len(r.prompts()) == 2)
    published.node.settled()
    assert {prompt[:160] for prompt in router.prompts()} == {tuple(first[:160]), tuple(second[:160])}
    stored = [hash_ for _, payload in router.batches for event in router.decoder.decode(payload).events
              if type(event).__name__ == "BlockStored" for hash_ in event.block_hashes]
    assert len(stored) == len(set(stored)) == len(router.blocks)
    router.close()


def test_two_nodes_of_one_model_name_blocks_alike(start, model):
    names = []
    for _ in range(2):
        published = Published(start, model)
        router = published.subscribe()
        published.generate(ids(100, 3), tenant="alice")
        assert router.read(lambda r: len(r.blocks) == 3)
        names.append(router.blocks)
        router.close()
    assert names[0] == names[1]


def test_a_router_hears_of_blocks_that_have_to_go(start, model):
    published = Published(start, model, dram="6MiB")
    router = published.subscribe()
    for seed in range(40):
        prompt = ids(800, 100 + seed)
        published.generate(prompt)
        assert router.read(lambda r: tuple(prompt) in r.prompts())  # a sequence leaves its blocks after its end
        if (scrape := Scrape(published.node)).get("sluice_prefix_cache_evicted_tokens_total") > 800:
            break
    assert scrape.get("sluice_prefix_cache_evicted_tokens_total") > 800
    assert router.read(lambda r: len(r.blocks) * BLOCK == scrape.get("sluice_prefix_cache_tokens"))
    assert any(b"BlockRemoved" in payload for _, payload in router.batches) and router.cleared == 1
    # The newest blocks are here, as the router believes; the oldest may go to make room for the request itself.
    assert tuple(ids(800, 100)) not in router.prompts()
    _, finish = published.generate([*prompt, 5], tokens=1)
    assert finish.usage.reused_tokens == len(prompt)
    router.close()


def test_a_subscriber_and_a_replay_client_that_never_read_hold_nobody_up(start, model):
    published = Published(start, model)
    context = zmq.Context()
    hanging = context.socket(zmq.SUB)
    hanging.rcvhwm = 1
    hanging.subscribe(b"")
    hanging.connect(published.endpoint)
    asking = context.socket(zmq.DEALER)
    asking.rcvhwm = 1
    asking.connect(published.replay)
    router = published.subscribe()
    begin = time.monotonic()
    for seed in range(60):
        published.generate(ids(400, 1000 + seed), tokens=1)
        for _ in range(20):
            asking.send_multipart((b"", bytes(8)))
    assert time.monotonic() - begin < 60 * SCALE
    published.node.settled()
    scrape = wait_for(published.node, lambda m: m.get("sluice_kv_event_batches_total") > 60, 10 * SCALE)
    assert scrape.get("sluice_kv_events_dropped_total") == 0
    assert scrape.get("sluice_kv_events_begun_anew_total") == 1
    assert router.read(lambda r: len(r.batches) >= scrape.get("sluice_kv_event_batches_total"))
    # Others need not wait until the hanging client's answer is given up.
    begin = time.monotonic()
    assert replay(published.replay, 0) == router.batches
    assert time.monotonic() - begin < 10 * SCALE
    begin = time.monotonic()
    assert published.node.stop() == 0
    assert time.monotonic() - begin < 8 * SCALE
    context.destroy(linger=0)
    router.close()


def test_a_router_may_be_called_instead(start, model):
    """As llm-d's routers do: they listen, and the nodes come to them."""
    port = free_port()
    router = Subscriber()
    router.socket.bind(f"tcp://127.0.0.1:{port}")
    node = start("sluice-server", model, *NODE, "--dram-bytes", "16MiB", "--kv-events-endpoint",
                 f"tcp://127.0.0.1:{port}")
    router.read(lambda r: False, 0.5)  # a socket that is called subscribes when it is read
    tokens_of(node.decode.Generate(decode_pb2.GenerateRequest(
        prompt_token_ids=ids(100, 4), sampling=greedy(max_tokens=1)), timeout=TIMEOUT_S))
    assert router.read(lambda r: len(r.blocks) == 3)
    router.close()


@pytest.mark.parametrize(("flags", "says"), [
    (["--kv-events-endpoint", "5557"], "kv_events_endpoint: 5557 cannot be used"),
    (["--kv-events-endpoint", "tcp://*:port"], "give one such as tcp://*:5557"),
    (["--kv-events-endpoint", "ipc:///no/such/folder/events"], "kv_events_endpoint: ipc:///no/such/folder"),
    (["--kv-events-endpoint", "tcp://*:*", "--kv-events-replay-endpoint", "udp://*:1"], "kv_events_replay_endpoint"),
    (["--kv-events-replay-endpoint", "tcp://*:*"], "give kv_events_endpoint too"),
    (["--kv-events-endpoint", "tcp://*:*", "--prefix-cache=false"], "set prefix_cache to true"),
    (["--kv-events-buffer-steps", "0"], "kv_events_buffer_steps"),
    (["--kv-events-schema", "json"], "kv_events_schema"),
])
def test_a_bad_setting_is_refused_by_its_name_and_with_a_remedy(flags, says):
    done = run(BIN / "sluice-server", "--model", FIXTURES / "tiny-llama", "--listen", "127.0.0.1:0",
               "--admin-listen", "127.0.0.1:0", *flags)
    assert done.returncode == 1 and says in done.stderr, done.stderr


def test_an_endpoint_that_another_has_is_an_error_at_once(start, model):
    published = Published(start, model)
    taken = published.endpoint.rpartition(":")[2]
    done = run(BIN / "sluice-server", "--model", model, "--listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0",
               "--kv-events-endpoint", f"tcp://*:{taken}")
    assert done.returncode == 1 and "Address already in use" in done.stderr and "give a free port" in done.stderr
