"""The scheduler's half of the connector: reserves room for prompts, plans what the ranks send, and commits.

Calls to the decode node run on threads of their own, so that the scheduler never waits for it. A prompt whose room is
being reserved waits in vLLM's queue; others run.
"""

import hashlib
import logging
import secrets
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum

import grpc

from sluice_client import rpc
from sluice_client.errors import ToolError
from sluice_client.push_streams import PushError
from sluice_client.pusher import Pusher
from sluice_client.vllm_connector.engine import EngineShape, check_node
from sluice_client.vllm_connector.plan import Held, Part, StepPlan, Target
from sluice_client.vllm_connector.settings import CONNECTOR, Settings, Wish, read_wish

_log = logging.getLogger(__name__)
_WORKERS = 16  # calls to decode nodes at the same time
_MOST_ERROR = 512  # characters of an error that travel with an answer
_RETRIED = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED,
            # The name of an earlier try of the same request may still be in use.
            grpc.StatusCode.ALREADY_EXISTS)
_RETRY_S = 0.2
# Output tokens that a decode node takes with a commit; a prefill leg asks vLLM for one.
_MOST_FIRST_TOKENS = 16
# In the ids of the prompts with which the gateway's service warms vLLM up; no decode leg comes for them.
_WARM_UP = "smg-warmup-"


class _State(Enum):
    RESERVING = 1
    RESERVED = 2  # or to be held
    SENDING = 3  # vLLM has finished, and the ranks have not; or the prompt is held
    REFUSED = 4


@dataclass
class _HandOff:
    request_id: str
    prompt: list[int]
    wish: Wish | None
    state: _State
    # The thread that reserves stops once this is set: nobody waits for it any more.
    given_up: threading.Event = field(default_factory=threading.Event)
    reservation: Future | None = None
    pusher: Pusher | None = None
    target: Target | None = None
    block_tokens: int = 1  # of the decode node: chunks begin at a block
    error: str = ""
    blocks: list[int] = field(default_factory=list)
    planned: int = 0  # tokens that the ranks were told to send
    outputs: list[int] = field(default_factory=list)
    held: Held | None = None  # once a step computes the prompt's end, with mode "hold"


class HandOffs:
    """All prompts that are being handed over. Only vLLM's scheduler may call it, on one thread."""

    def __init__(self, settings: Settings, shape: EngineShape):
        self._settings = settings
        self._shape = shape
        self._live: dict[str, _HandOff] = {}
        self._ended: list[str] = []
        self._dropped: list[str] = []
        self._calls = ThreadPoolExecutor(_WORKERS, thread_name_prefix="sluice-calls")

    def may_run(self, request) -> bool:
        """Returns whether vLLM may admit the request now: it is not handed over, or there is an answer to its Reserve."""
        hand_off = self._live.get(request.request_id)
        if hand_off is None:
            hand_off = self._begin(request)
            if hand_off is None:
                return True
        if hand_off.state is _State.RESERVING and hand_off.reservation.done():
            self._take_reservation(hand_off)
        return hand_off.state is not _State.RESERVING

    def plan(self, step) -> StepPlan:
        """Returns what the ranks send in a step of vLLM's scheduler."""
        for request_id in step.preempted_req_ids or ():
            # Its blocks go to others. Computed again, it may differ in a bit, so its transfer begins anew.
            self._give_up(request_id, "the prefill node preempted the prompt")
        plan = StepPlan()
        for new in step.scheduled_new_reqs:
            self._add(plan, new.req_id, new.block_ids[0], True, new.num_computed_tokens, step)
        cached = step.scheduled_cached_reqs
        for i, request_id in enumerate(cached.req_ids):
            blocks = cached.new_block_ids[i]
            self._add(plan, request_id, blocks[0] if blocks else (), request_id in cached.resumed_req_ids,
                      cached.num_computed_tokens[i], step)
        plan.ended, self._ended = self._ended, []
        plan.dropped, self._dropped = self._dropped, []
        return plan

    def finish(self, request) -> tuple[bool, dict | None]:
        """Takes the end of a request. Returns whether vLLM must keep its blocks, and what the router passes on."""
        hand_off = self._live.get(request.request_id)
        if hand_off is None:
            return False, None
        if hand_off.state is _State.REFUSED:
            del self._live[request.request_id]
            return False, {"connector": CONNECTOR, "error": hand_off.error[:_MOST_ERROR]}
        if hand_off.state is not _State.RESERVED or hand_off.planned < len(hand_off.prompt):
            self._give_up(request.request_id, "the request ended before its prompt was computed")
            return False, None
        hand_off.state = _State.SENDING
        self._ended.append(request.request_id)
        if hand_off.held is not None:
            # As sluice-prefill answers it.
            return True, {"connector": CONNECTOR, "address": self._settings.advertise or self._settings.listen,
                          "source_id": hand_off.held.source_id, "prompt_digest": hand_off.held.digest,
                          "model_fingerprint": self._settings.fingerprint}
        hand_off.outputs = list(request.output_token_ids)[:_MOST_FIRST_TOKENS]
        return True, {"connector": CONNECTOR, "transfer_id": hand_off.target.transfer_id,
                      "decode": hand_off.target.decode}

    def sent(self, request_ids, errors: dict[str, str]) -> None:
        """Takes which requests all ranks have sent, and why some could not send theirs."""
        for request_id, error in errors.items():
            hand_off = self._live.get(request_id)
            if hand_off is not None and not hand_off.error:
                hand_off.error = error
        for request_id in request_ids:
            hand_off = self._live.pop(request_id, None)
            if hand_off is not None and hand_off.reservation is not None:
                self._calls.submit(self._conclude, hand_off)

    def sending(self) -> bool:
        """Returns whether vLLM must go on with its steps although no request runs: ranks tell in them what they sent."""
        return bool(self._ended or self._dropped) or any(
            hand_off.state is _State.SENDING for hand_off in self._live.values())

    def close(self) -> None:
        """Aborts what is not committed."""
        for request_id in list(self._live):
            self._give_up(request_id, "the prefill node shuts down")
        self._calls.shutdown(wait=True)

    def _begin(self, request) -> _HandOff | None:
        """Begins a hand-off, or returns None for a request that is vLLM's own."""
        if _WARM_UP in request.request_id:
            return None
        try:
            wish = read_wish(request.kv_transfer_params, self._settings)
            if wish is None:
                return None
            problem = self._unfit(request)
        except ValueError as error:
            wish, problem = None, str(error)
        hand_off = _HandOff(request.request_id, list(request.prompt_token_ids or ()), wish, _State.RESERVING)
        self._live[request.request_id] = hand_off
        if problem:
            self._refuse(hand_off, problem)
        elif self._settings.mode == "hold":
            hand_off.state = _State.RESERVED
        else:
            hand_off.reservation = self._calls.submit(self._reserve, hand_off)
        return hand_off

    def _hold(self, hand_off: _HandOff) -> Held:
        digest = hashlib.sha256(b"".join(i.to_bytes(4, "little") for i in hand_off.prompt)).hexdigest()
        hand_off.held = Held(hand_off.request_id, secrets.token_hex(16), hand_off.wish.tenant, digest,
                             len(hand_off.prompt), tuple(hand_off.blocks))
        return hand_off.held

    def _unfit(self, request) -> str:
        """Returns why a request's caches cannot go on at a decode node, or the empty string."""
        if not request.prompt_token_ids:
            return "prompts of embeddings have no token ids to hand over"
        if getattr(request, "lora_request", None) is not None:
            return "the decode node has no adapters (LoRA)"
        if getattr(request, "mm_features", None):
            return "the decode node takes no images or other media"
        return ""

    def _refuse(self, hand_off: _HandOff, error: str) -> None:
        _log.warning("%s: request %s is not handed over: %s", CONNECTOR, hand_off.request_id, error)
        hand_off.state, hand_off.error = _State.REFUSED, error

    def _reserve(self, hand_off: _HandOff) -> None:
        """Reserves room, and tries again while the node has none. Runs on a thread of its own."""
        until = time.monotonic() + self._settings.reserve_seconds
        while True:
            try:
                self._try_reserve(hand_off)
                return
            except PushError as error:
                answer = error.rpc_error
                left = until - time.monotonic()
                if answer is None or answer.code() not in _RETRIED or left <= 0 or hand_off.given_up.is_set():
                    raise
                hand_off.given_up.wait(min(left, rpc.retry_seconds(answer) or _RETRY_S))

    def _try_reserve(self, hand_off: _HandOff) -> None:
        wish = hand_off.wish
        pusher = Pusher(wish.decode, self._settings.streams)
        try:
            problem = check_node(self._shape, pusher.model, self._settings.fingerprint, wish.decode)
            if problem:
                raise PushError(problem)
            most = min(pusher.model.max_context, self._shape.max_context) - len(hand_off.prompt)
            pusher.reserve(hand_off.prompt, max_new_tokens=max(1, min(wish.max_new_tokens, most)),
                           fingerprint=self._settings.fingerprint or None, tenant=wish.tenant,
                           rendezvous_key=wish.rendezvous_key)
        except BaseException:
            pusher.close()
            raise
        hand_off.pusher = pusher

    def _take_reservation(self, hand_off: _HandOff) -> None:
        error = hand_off.reservation.exception()
        if error is not None:
            self._refuse(hand_off, str(error) if isinstance(error, ToolError) else repr(error))
            return
        pusher = hand_off.pusher
        hand_off.target = Target(hand_off.wish.decode, pusher.transfer_id, pusher.context_length,
                                 pusher.max_chunk_bytes, pusher.cached_tokens)
        # Kinds of one model have blocks of as many tokens.
        hand_off.block_tokens = pusher.model.cache_kinds[0].block_tokens
        hand_off.state = _State.RESERVED

    def _add(self, plan: StepPlan, request_id: str, blocks, whole: bool, computed: int, step) -> None:
        hand_off = self._live.get(request_id)
        if hand_off is None or hand_off.state is not _State.RESERVED:
            return
        hand_off.blocks = [*([] if whole else hand_off.blocks), *blocks]
        length = len(hand_off.prompt)
        end = min(computed + step.num_scheduled_tokens[request_id], length)
        if self._settings.mode == "hold":
            if end == length and hand_off.held is None:
                plan.held.append(self._hold(hand_off))
            hand_off.planned = end
            return
        if end < length:
            end -= end % hand_off.block_tokens
        if end <= hand_off.planned:
            return
        plan.parts.append(Part(request_id, hand_off.target, hand_off.planned, end, tuple(hand_off.blocks)))
        hand_off.planned = end

    def _give_up(self, request_id: str, reason: str) -> None:
        hand_off = self._live.pop(request_id, None)
        if hand_off is None:
            return
        hand_off.given_up.set()
        self._dropped.append(request_id)
        if hand_off.reservation is not None:
            self._calls.submit(self._abort, hand_off, reason)

    def _abort(self, hand_off: _HandOff, reason: str) -> None:
        """Aborts the transfer once its reservation is answered. Runs on a thread of its own."""
        if hand_off.reservation.exception() is not None:
            return
        try:
            hand_off.pusher.abort(reason)
        except PushError as error:  # Its lease ends it.
            _log.warning("%s: request %s: %s", CONNECTOR, hand_off.request_id, error)
        finally:
            hand_off.pusher.close()

    def _conclude(self, hand_off: _HandOff) -> None:
        """Commits what was sent, or aborts what could not be. Runs on a thread of its own."""
        if hand_off.error:
            _log.warning("%s: request %s was not handed over: %s", CONNECTOR, hand_off.request_id, hand_off.error)
            self._abort(hand_off, hand_off.error)
            return
        try:
            hand_off.pusher.commit(hand_off.outputs)
            hand_off.pusher.close()
        except PushError as error:
            _log.warning("%s: request %s was not handed over: %s", CONNECTOR, hand_off.request_id, error)
            self._abort(hand_off, str(error))
