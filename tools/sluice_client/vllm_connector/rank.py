"""A rank's half of the connector: sends this rank's heads of each prompt, layer by layer.

Every prompt has a thread, which reads vLLM's blocks and puts them in the streams of a Pusher. A step never waits for
it. Blocks do not change while they are read: vLLM keeps them until the scheduler's half has heard that they are sent,
and a preempted prompt is dropped before its blocks are another's.
"""

from sluice_client.hand_off.caches import LayerCache
from sluice_client.hand_off.parts import Part
from sluice_client.hand_off.sender import Sender
from sluice_client.hand_off.settings import CONNECTOR
from sluice_client.hand_off.shape import EngineShape
from sluice_client.vllm_connector.caches import layer_caches
from sluice_client.vllm_connector.plan import StepPlan
from sluice_client.vllm_connector.settings import Settings
from sluice_client.vllm_connector.source import PromptSource


class Rank:
    """What this rank sends. Only the thread of its model runner may call it."""

    def __init__(self, settings: Settings, shape: EngineShape, vllm_config, kv_cache_config):
        self._settings = settings
        self._shape = shape
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        rank = vllm_config.parallel_config.rank % shape.ranks
        self._heads = shape.heads_of(rank)
        self._sends = shape.sends(rank)
        self._caches: dict[str, list[LayerCache]] = {}
        self._senders: dict[str, Sender] = {}
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

    def _sender_of(self, part: Part) -> Sender:
        if part.request_id not in self._senders:
            self._senders[part.request_id] = Sender(part.target, self._settings.streams, self._heads)
        return self._senders[part.request_id]
