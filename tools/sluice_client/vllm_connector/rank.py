"""A rank's half of the connector: sends this rank's heads of each prompt, layer by layer.

Every prompt has a thread, which reads vLLM's blocks and puts them in the streams of a Pusher. A step never waits for
it. Blocks do not change while they are read: vLLM keeps them until the scheduler's half has heard that they are sent,
and a preempted prompt is dropped before its blocks are another's.
"""

import logging
import queue
import threading

from sluice_client import layout
from sluice_client.errors import ToolError
from sluice_client.pusher import Pusher
from sluice_client.vllm_connector.caches import LayerCache, layer_caches
from sluice_client.vllm_connector.engine import EngineShape
from sluice_client.vllm_connector.plan import Part, StepPlan, Target
from sluice_client.vllm_connector.settings import CONNECTOR, Settings
from sluice_client.vllm_connector.source import PromptSource

_log = logging.getLogger(__name__)


class _Sender(threading.Thread):
    """Sends one prompt's caches."""

    def __init__(self, target: Target, streams: int, heads: tuple[int, int]):
        super().__init__(daemon=True, name="sluice-sender")
        self._target = target
        self._streams = streams
        self._heads = heads
        self._tasks: queue.SimpleQueue = queue.SimpleQueue()
        self._dropped = threading.Event()
        self._open = True  # neither end() nor drop() has been seen
        self.error = ""
        self.start()

    def add(self, cache: LayerCache, part: Part) -> None:
        """Sends a part of a layer, whose bytes are there when what the caller's stream has now is done."""
        self._tasks.put((cache, part, cache.mark()))

    def end(self) -> None:
        """Takes no more parts; done() follows."""
        self._tasks.put(None)

    def drop(self) -> None:
        """Stops without a word to the node. Returns when no block is read any more."""
        self._dropped.set()
        self._tasks.put(None)
        self.join()

    def done(self) -> bool:
        return not self.is_alive()

    def run(self) -> None:
        try:
            self._send()
        except ToolError as error:
            self.error = str(error)
        except Exception as error:
            _log.exception("%s: a prompt was not sent", CONNECTOR)
            self.error = f"the prefill node could not read its caches: {error!r}"
        # The thread lives until end() or drop(), and sends nothing more.
        while self._open:
            self._open = self._tasks.get() is not None

    def _send(self) -> None:
        pusher = Pusher(self._target.decode, self._streams)
        try:
            pusher.attach(self._target.transfer_id, self._target.context_length, self._target.max_chunk_bytes,
                          self._target.cached_tokens)
            while (task := self._tasks.get()) is not None:
                if not self._dropped.is_set():
                    self._write(pusher, *task)
            self._open = False
            if self._dropped.is_set():
                pusher.abandon()
            else:
                pusher.settle()
        finally:
            pusher.abandon()
            pusher.close()

    def _write(self, pusher: Pusher, cache: LayerCache, part: Part, mark) -> None:
        kind = pusher.kinds.get(cache.kind)
        if kind is None:
            raise ToolError(f"{self._target.decode}: its model has no cache '{cache.kind}', which vLLM's has")
        step = pusher.chunk_tokens(kind, self._heads[1] - self._heads[0])
        known = self._target.cached_tokens // kind.block_tokens * kind.block_tokens
        for begin in range(max(part.begin, known), part.end, step):
            tokens = (begin, min(begin + step, part.end))

            def payload(tokens=tokens):
                return layout.pack(kind, cache.read(kind, part.blocks, *tokens, mark))

            pusher.write_chunk(cache.layer, kind.name, self._heads, tokens, payload)


class Rank:
    """What this rank sends. Only the thread of its model runner may call it."""

    def __init__(self, settings: Settings, shape: EngineShape, vllm_config, kv_cache_config):
        self._settings = settings
        self._shape = shape
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        rank = vllm_config.parallel_config.rank % shape.ranks
        own = shape.kv_heads * shape.replicas // shape.ranks
        self._heads = (rank // shape.replicas * own, (rank // shape.replicas + 1) * own)
        # The first of the ranks with the same heads sends them.
        self._sends = rank % shape.replicas == 0
        self._caches: dict[str, list[LayerCache]] = {}
        self._senders: dict[str, _Sender] = {}
        self._ending: set[str] = set()
        self._errors: dict[str, str] = {}
        self._source: PromptSource | None = None  # with mode "hold", of the first rank
        if settings.mode == "hold" and shape.ranks > shape.replicas:
            raise ValueError(f'{CONNECTOR}: mode "hold" needs all heads on each rank, and tensor_parallel_size '
                             f'{shape.ranks} divides them: give kv_connector_extra_config.mode "push"')

    def register(self, kv_caches: dict) -> None:
        """Takes the engine's caches. Raises ValueError for a form that it cannot send."""
        self._caches = layer_caches(kv_caches, self._vllm_config, self._kv_cache_config)
        if self._settings.mode == "hold" and self._sends:
            caches = [cache for of_layer in self._caches.values() for cache in of_layer]
            self._source = PromptSource(self._settings, self._shape, caches)

    def save(self, layer_name: str, parts: list[Part]) -> None:
        """Sends the parts of a layer that the step has just computed."""
        for cache in self._caches.get(layer_name, ()) if self._sends else ():
            for part in parts:
                self._sender_of(part).add(cache, part)

    def end(self, plan: StepPlan) -> None:
        """Takes the end of a step."""
        self.drop(plan.dropped)
        for held in plan.held if self._source is not None else ():
            self._source.hold(held)
        for request_id in plan.ended:
            self._ending.add(request_id)
            if request_id in self._senders:
                self._senders[request_id].end()

    def drop(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            sender = self._senders.pop(request_id, None)
            self._ending.discard(request_id)
            if sender is not None:
                sender.drop()
            if self._source is not None:
                self._source.drop(request_id)

    def finished(self) -> set[str]:
        """Returns the ended requests of which this rank has sent its part, or that nobody reads any more, each once."""
        done = {r for r in self._ending if r not in self._senders or self._senders[r].done()}
        if self._source is not None:
            done = {r for r in done if self._source.over(r)}
        for request_id in done:
            self._ending.discard(request_id)
            sender = self._senders.pop(request_id, None)
            if sender is not None and sender.error:
                self._errors[request_id] = sender.error
        return done

    def take_errors(self) -> dict[str, str]:
        """Returns why requests that finished() has named could not be sent."""
        errors, self._errors = self._errors, {}
        return errors

    def close(self) -> None:
        self.drop(list(self._senders))
        if self._source is not None:
            self._source.close()

    def _sender_of(self, part: Part) -> _Sender:
        if part.request_id not in self._senders:
            self._senders[part.request_id] = _Sender(part.target, self._settings.streams, self._heads)
        return self._senders[part.request_id]
