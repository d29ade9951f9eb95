"""A prompt's transfer as the process sees it that opens it, commits it and aborts it.

Calls to the decode node run on threads of their own, so that an engine's scheduler never waits for it.
"""

import logging
import threading
import time
from concurrent.futures import Executor, Future

import grpc

from sluice_client import rpc
from sluice_client.errors import ToolError
from sluice_client.hand_off.parts import Target
from sluice_client.hand_off.settings import CONNECTOR, Settings, Wish
from sluice_client.hand_off.shape import EngineShape, check_node
from sluice_client.push_streams import PushError
from sluice_client.pusher import Pusher

_log = logging.getLogger(__name__)
# Calls to decode nodes at the same time.
WORKERS = 16
# Output tokens that a decode node takes with a commit.
MOST_FIRST_TOKENS = 16
_RETRIED = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED,
            # The name of an earlier try of the same request may still be in use.
            grpc.StatusCode.ALREADY_EXISTS)
_RETRY_S = 0.2
# The part of a lease after which it is renewed.
_RENEWED_PART = 0.25
# How often, and for how long without any progress, a commit looks for the blocks of other ranks.
_LANDED_POLL_S = 0.01
_LANDED_STALL_S = 60.0


class Reservation:
    """Reserves room from the start on. One thread may call it."""

    def __init__(self, calls: Executor, settings: Settings, shape: EngineShape, request_id: str, prompt: list[int],
                 wish: Wish):
        self._calls = calls
        self._settings = settings
        self._shape = shape
        self._request_id = request_id
        self._prompt = prompt
        self._wish = wish
        # Calls that run for the reservation stop once this is set: nobody waits for them any more.
        self._given_up = threading.Event()
        self._concluding = False
        self._renewed = time.monotonic()
        self._pusher: Pusher | None = None
        self._answer: Future = calls.submit(self._reserve)

    def answered(self) -> bool:
        """Returns whether the decode node has reserved the room, or will not."""
        return self._answer.done()

    def error(self) -> str:
        """Returns why there is no room, once it is answered, or the empty string."""
        error = self._answer.exception()
        if error is None:
            return ""
        return str(error) if isinstance(error, ToolError) else repr(error)

    def target(self) -> Target:
        """Returns the transfer of a reservation that is answered without an error."""
        pusher = self._pusher
        # Kinds of one model have blocks of as many tokens.
        return Target(self._wish.decode, pusher.transfer_id, pusher.context_length, pusher.max_chunk_bytes,
                      pusher.cached_tokens, pusher.model.cache_kinds[0].block_tokens,
                      tuple((port.address, port.head_begin, port.head_end) for port in pusher.rank_ports))

    def keep(self) -> None:
        """Renews the lease if that is due. An engine calls it often while it has not computed the prompt's end: a prompt
        may wait in its queue, and nothing is sent of what the decode node has already.

        If the last block lands while a renewal is under way, the renewal commits, and the decode node chooses the first
        token itself.
        """
        pusher, now = self._pusher, time.monotonic()
        if not self.answered() or pusher is None or now - self._renewed < pusher.lease_seconds * _RENEWED_PART:
            return
        if pusher.lease_seconds and pusher.cached_tokens < pusher.context_length:
            self._renewed = now
            self._calls.submit(self._renew)

    def abort(self, reason: str) -> None:
        """Gives the transfer up, once its reservation is answered. It does nothing after a commit."""
        self._given_up.set()
        if not self._concluding:  # The thread that concludes aborts.
            self._calls.submit(self._abort, reason)

    def conclude(self, first_tokens: list[int], error: str = "", *, others_send: bool = False) -> Future:
        """Commits what was sent, or aborts what could not be because of `error`. The future's result is why it could
        not be handed over, or the empty string.

        With `others_send` other ranks may still be sending: their blocks are waited for.
        """
        self._concluding = True
        return self._calls.submit(self._conclude, first_tokens[:MOST_FIRST_TOKENS], error, others_send)

    def _reserve(self) -> None:
        """Reserves room, and tries again while the node has none."""
        until = time.monotonic() + self._settings.reserve_seconds
        while True:
            try:
                self._try_reserve()
                return
            except PushError as error:
                answer = error.rpc_error
                left = until - time.monotonic()
                if answer is None or answer.code() not in _RETRIED or left <= 0 or self._given_up.is_set():
                    raise
                self._given_up.wait(min(left, rpc.retry_seconds(answer) or _RETRY_S))

    def _try_reserve(self) -> None:
        wish, fingerprint = self._wish, self._settings.fingerprint
        pusher = Pusher(wish.decode, self._settings.streams)
        try:
            problem = check_node(self._shape, pusher.model, fingerprint, wish.decode)
            if problem:
                raise PushError(problem)
            most = min(pusher.model.max_context, self._shape.max_context) - len(self._prompt)
            pusher.reserve(self._prompt, max_new_tokens=max(1, min(wish.max_new_tokens, most)),
                           fingerprint=fingerprint or None, tenant=wish.tenant, rendezvous_key=wish.rendezvous_key)
        except BaseException:
            pusher.close()
            raise
        self._pusher, self._renewed = pusher, time.monotonic()

    def _renew(self) -> None:
        if self._given_up.is_set() or self._concluding:
            return
        try:
            self._pusher.renew()
        except PushError as error:  # What is sent next says what became of the transfer.
            _log.warning("%s: request %s: %s", CONNECTOR, self._request_id, error)

    def _abort(self, reason: str) -> None:
        if self._answer.exception() is not None:
            return
        try:
            self._pusher.abort(reason)
        except PushError as error:  # Its lease ends it.
            _log.warning("%s: request %s: %s", CONNECTOR, self._request_id, error)
        finally:
            self._pusher.close()

    def _conclude(self, first_tokens: list[int], error: str, others_send: bool) -> str:
        if not error:
            try:
                if others_send:
                    self._await_landed()
                if self._given_up.is_set():
                    raise PushError("the request was given up")
                self._pusher.commit(first_tokens)
                self._pusher.close()
                return ""
            except PushError as refusal:
                error = str(refusal)
        _log.warning("%s: request %s was not handed over: %s", CONNECTOR, self._request_id, error)
        self._abort(error)
        return error

    def _await_landed(self) -> None:
        """Waits until no block is missing. Raises PushError if nothing lands for long, or the transfer is given up."""
        landed, until = -1, 0.0
        while not self._given_up.is_set():
            transfer = self._pusher.transfer()
            if transfer.missing.count == 0:
                return
            if transfer.blocks_landed != landed:
                landed, until = transfer.blocks_landed, time.monotonic() + _LANDED_STALL_S
            if time.monotonic() > until:
                raise PushError(f"{transfer.missing.count} blocks of other ranks have not come for {_LANDED_STALL_S:g} s")
            self._given_up.wait(_LANDED_POLL_S)
