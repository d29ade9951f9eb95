"""The scheduler's half of the connector: reserves room for prompts, plans what the ranks send, and commits.

Calls to the decode node run on threads of their own, so that the scheduler never waits for it. A prompt whose room is
being reserved waits in vLLM's queue; others run.
"""

import hashlib
import logging
import secrets
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import Enum

from sluice_client.hand_off.parts import Part, Target
from sluice_client.hand_off.reservation import WORKERS, Reservation
from sluice_client.hand_off.settings import CONNECTOR, Wish
from sluice_client.hand_off.shape import EngineShape
from sluice_client.vllm_connector.plan import Held, StepPlan
from sluice_client.vllm_connector.settings import Settings, read_wish

_log = logging.getLogger(__name__)
_MOST_ERROR = 512  # characters of an error that travel with an answer
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
    reservation: Reservation | None = None
    target: Target | None = None
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
        self._calls = ThreadPoolExecutor(WORKERS, thread_name_prefix="sluice-calls")

    def may_run(self, request) -> bool:
        """Returns whether vLLM may admit the request now: it is not handed over, or there is an answer to its Reserve."""
        hand_off = self._live.get(request.request_id)
        if hand_off is None:
            hand_off = self._begin(request)
            if hand_off is None:
                return True
        if hand_off.state is _State.RESERVING and hand_off.reservation.answered():
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
        for hand_off in self._live.values():
            if hand_off.reservation is not None and hand_off.planned < len(hand_off.prompt):
                hand_off.reservation.keep()
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
        hand_off.outputs = list(request.output_token_ids)
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
                hand_off.reservation.conclude(hand_off.outputs, hand_off.error)

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
            hand_off.reservation = Reservation(self._calls, self._settings, self._shape, request.request_id,
                                               hand_off.prompt, wish)
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

    def _take_reservation(self, hand_off: _HandOff) -> None:
        error = hand_off.reservation.error()
        if error:
            self._refuse(hand_off, error)
            return
        hand_off.target = hand_off.reservation.target()
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
            end -= end % hand_off.target.block_tokens
        if end <= hand_off.planned:
            return
        plan.parts.append(Part(request_id, hand_off.target, hand_off.planned, end, tuple(hand_off.blocks)))
        hand_off.planned = end

    def _give_up(self, request_id: str, reason: str) -> None:
        hand_off = self._live.pop(request_id, None)
        if hand_off is None:
            return
        self._dropped.append(request_id)
        if hand_off.reservation is not None:
            hand_off.reservation.abort(reason)
