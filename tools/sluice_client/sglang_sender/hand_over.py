"""The hand-over of one prompt by one rank: reserves, sends chunks as SGLang computes them, commits or aborts.

The first rank reserves and commits; the others learn the transfer from it and send their own heads. Calls to the decode
node run on threads of their own, so that SGLang's scheduler never waits for it.
"""

import logging
import time
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from enum import IntEnum

from sluice_client.hand_off.parts import Part, Target
from sluice_client.hand_off.reservation import Reservation
from sluice_client.hand_off.sender import Cache, Sender
from sluice_client.hand_off.settings import CONNECTOR
from sluice_client.hand_off.shape import EngineShape
from sluice_client.sglang_sender.ranks import Ranks
from sluice_client.sglang_sender.settings import Settings, read_wish

_log = logging.getLogger(__name__)


class State(IntEnum):
    """The values of SGLang's KVPoll. The ranks go by the least of theirs."""

    FAILED = 0
    BOOTSTRAPPING = 1  # waits for room
    WAITING_FOR_INPUT = 2  # computes, and sends what is computed
    TRANSFERRING = 3  # computed; not all is sent and committed
    SUCCESS = 4


@dataclass(frozen=True)
class Engine:
    """What the hand-overs of one SGLang have in common."""

    settings: Settings
    shape: EngineShape
    ranks: Ranks
    caches: list[Cache]
    page_size: int
    calls: Executor


def _unfit(req) -> str:
    """Returns why a request's caches cannot go on at a decode node, or the empty string."""
    if not req.origin_input_ids or any(getattr(req, name, None) is not None
                                       for name in ("input_embeds", "positional_embed_overrides")):
        return "prompts of embeddings have no token ids to hand over"
    if getattr(req, "lora_id", None) is not None:
        return "the decode node has no adapters (LoRA)"
    if getattr(req, "multimodal_inputs", None) is not None:
        return "the decode node takes no images or other media"
    return ""


class HandOver:
    """Only the scheduler's thread may call it. `req` is SGLang's request, whose prompt no longer changes."""

    def __init__(self, engine: Engine, req):
        self._engine = engine
        self._req = req
        self._prompt = list(req.origin_input_ids)
        self._reservation: Reservation | None = None  # of the first rank
        self._target: Target | None = None
        self._sender: Sender | None = None
        self._commit: Future | None = None
        self._pages: list[int] = []
        self._computed = 0  # tokens whose pages SGLang has named
        self._planned = 0  # tokens that the sender was told to send
        self._begun = self._ended = 0.0
        self._state = State.BOOTSTRAPPING
        self.error = ""
        try:
            wish, problem = read_wish(req, engine.settings), _unfit(req)
        except ValueError as error:
            wish, problem = None, str(error)
        if problem:
            self._fail(problem)
        elif engine.ranks.rank == 0:
            self._reservation = Reservation(engine.calls, engine.settings, engine.shape, str(req.rid), self._prompt, wish)

    def poll(self) -> State:
        """Returns the state, after a look at what the threads have done."""
        if self._state is State.BOOTSTRAPPING:
            self._take_answer()
        elif self._sender is not None and self._sender.error and self._state is not State.FAILED:
            self._fail(self._sender.error)
        elif self._state is State.WAITING_FOR_INPUT and self._reservation is not None:
            self._reservation.keep()
        elif self._state is State.TRANSFERRING:
            self._conclude()
        return self._state

    def send(self, pages: list[int], tokens: int) -> None:
        """Sends the next `tokens` of the prompt, which lie in `pages` when what the caller's stream has now is done."""
        if self._state is not State.WAITING_FOR_INPUT:
            return
        if self._computed % self._engine.page_size:
            self._fail(f"a chunk begins at token {self._computed}, within a page of {self._engine.page_size}")
            return
        self._begun = self._begun or time.monotonic()
        self._pages += pages
        self._computed += tokens
        length = len(self._prompt)
        end = min(self._computed, length)
        if end < length:
            end -= end % self._target.block_tokens
        self._plan(end)
        if self._computed >= length:
            if self._sender is not None:
                self._sender.end()
            self._state = State.TRANSFERRING
        elif self._reservation is not None:
            self._reservation.keep()

    def abort(self, reason: str) -> None:
        """Gives the hand-over up, unless it has succeeded."""
        if self._state not in (State.SUCCESS, State.FAILED):
            self._fail(reason)

    def seconds(self) -> float | None:
        """Returns how long the transfer took from the first chunk on, or None."""
        return self._ended - self._begun if self._state is State.SUCCESS and self._begun else None

    def _take_answer(self) -> None:
        answer = None
        if self._reservation is not None and self._reservation.answered():
            answer = self._reservation.error() or self._reservation.target()
        answer = self._engine.ranks.agree(answer)
        if isinstance(answer, str):
            self._fail(answer)
        elif answer is not None:
            self._target, self._state = answer, State.WAITING_FOR_INPUT

    def _plan(self, end: int) -> None:
        engine, rank = self._engine, self._engine.ranks.rank
        if end <= self._planned or not engine.shape.sends(rank):
            return
        if self._sender is None:
            self._sender = Sender(self._target, engine.settings.streams, engine.shape.heads_of(rank))
        part = Part(str(self._req.rid), self._target, self._planned, end, tuple(self._pages))
        for cache in engine.caches:
            self._sender.add(cache, part)
        self._planned = end

    def _conclude(self) -> None:
        """Goes on once this rank has sent its heads: the first one commits, the others have succeeded."""
        if self._sender is not None and not self._sender.done():
            return
        if self._reservation is not None:
            if self._commit is None:
                self._commit = self._reservation.conclude(list(self._req.output_ids),
                                                          others_send=self._engine.ranks.number > 1)
            if not self._commit.done():
                return
            if self._commit.result():
                self._fail(self._commit.result())
                return
        self._state, self._ended = State.SUCCESS, time.monotonic()
        # SGLang puts it into the answer's meta_info, with an entry for each output token.
        answer = {"connector": CONNECTOR, "transfer_id": self._target.transfer_id, "decode": self._target.decode}
        self._req.customized_info = {**(getattr(self._req, "customized_info", None) or {}),
                                     "sluice": [answer] * len(self._req.output_ids)}

    def _fail(self, reason: str) -> None:
        _log.warning("%s: request %s is not handed over: %s", CONNECTOR, self._req.rid, reason)
        self._state, self.error = State.FAILED, reason
        if self._sender is not None:
            self._sender.stop()
        if self._reservation is not None:
            self._reservation.abort(reason)
