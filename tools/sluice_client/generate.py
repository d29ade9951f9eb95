"""Generates from a prompt: one node prefills, the other decodes. The command `generate` is here too."""

import contextlib
import json
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Callable

import grpc

from sluice.v1 import common_pb2, decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc
from sluice_client import rpc
from sluice_client.errors import ToolError
from sluice_client.text import IncrementalDecoder, StopFilter, Text

_FINISH_NAMES = {decode_pb2.FINISH_REASON_STOP: "stop", decode_pb2.FINISH_REASON_LENGTH: "length"}


@contextlib.contextmanager
def _cancelled_by_ctrl_c(call: grpc.Call) -> Iterator[None]:
    """Lets Ctrl-C cancel `call`, and raises KeyboardInterrupt once the call has ended by that.

    A KeyboardInterrupt in the midst of gRPC's waiting may leave its locks in a state in which the next call fails. Only
    the main thread gets one; anywhere else, and where the caller has a handler of its own, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread() or (
            signal.getsignal(signal.SIGINT) is not signal.default_int_handler):
        yield
        return
    pressed = False

    def on_interrupt(*_) -> None:
        nonlocal pressed
        pressed = True
        call.cancel()

    signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield
    except grpc.RpcError:
        if not pressed:
            raise
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt


@dataclass
class Result:
    """The result of one generation. Times are taken by this process's clock."""

    prompt_ids: list[int]
    output_ids: list[int] = field(default_factory=list)
    # One for each output token; None if log-probabilities were not asked for.
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None
    finish_reason: str = ""
    stop_string: str | None = None
    cached_tokens: int = 0
    reused_tokens: int = 0
    # Output tokens, from the first on, that were computed with attention to every token before them.
    exact_tokens: int = 0
    # Drafts of tokens that the node verified, and those of them that became output tokens.
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    # Id of the sequence that the node keeps for another turn; empty if it keeps none.
    sequence_id: str = ""
    # Time from sending the request (to the prefill node, if there is one) to the first token.
    ttft_seconds: float | None = None
    # Gaps between the arrivals of output tokens, one less than there are tokens.
    itl_seconds: list[float] = field(default_factory=list)

    def add(self, token: common_pb2.Token, want_logprobs: bool) -> None:
        self.output_ids.append(token.id)
        if want_logprobs:
            self.logprobs = self.logprobs or []
            self.logprobs.append(token.logprob if token.HasField("logprob") else None)
            self.top_logprobs = self.top_logprobs or []
            self.top_logprobs.append([(t.token_id, t.logprob) for t in token.top_logprobs])


def prefill(address: str, decode_address: str, prompt_ids: list[int], sampling: common_pb2.SamplingParams,
            timeout: float | None = None) -> prefill_pb2.RunResponse:
    """Lets the prefill node compute the prompt and push its caches, or hold them where `decode_address` is empty."""
    with rpc.open_channel(address) as channel:
        try:
            return prefill_pb2_grpc.PrefillStub(channel).Run(prefill_pb2.RunRequest(
                prompt_token_ids=prompt_ids, sampling=sampling, decode_address=decode_address), timeout=timeout)
        except grpc.RpcError as error:
            raise rpc.CallError(error, address) from error


def generate(decode_address: str, prompt_ids: list[int], sampling: common_pb2.SamplingParams, *,
             prefill_address: str | None = None, pull: bool = False, transfer_id: str | None = None,
             sequence_id: str | None = None, keep_seconds: float | None = None,
             on_token: Callable[[int], None] | None = None,
             timeout: float | None = None) -> Result:
    """Generates one sequence; calls `on_token` with each id as it comes.

    With `prefill_address` the prefill node computes the prompt. It pushes the caches to the decode node or, with
    `pull`, holds them until the decode node reads them. With `transfer_id` the caches were handed over before. With
    neither, the decode node computes the prompt (its `local_prefill`). With `sequence_id` the prompt is appended to a
    sequence that the decode node keeps. `keep_seconds` asks the node to keep this sequence for another turn; then
    Result.sequence_id names it. An exception in the middle (KeyboardInterrupt too) cancels the sequence. Raises
    ToolError.
    """
    result = Result(prompt_ids=list(prompt_ids))
    started = time.monotonic()
    if prefill_address and not sequence_id:
        handed = prefill(prefill_address, "" if pull else decode_address, prompt_ids, sampling, timeout)
        transfer_id = handed.transfer_id
    request = decode_pb2.GenerateRequest(sampling=sampling)
    if keep_seconds:
        request.keep.FromNanoseconds(int(keep_seconds * 1e9))
    if sequence_id:
        request.sequence_id = sequence_id
        request.prompt_token_ids.extend(prompt_ids)
    elif transfer_id:
        request.transfer_id = transfer_id
    else:
        if prefill_address:
            request.source.CopyFrom(handed.source)
        request.prompt_token_ids.extend(prompt_ids)
    last = started
    with rpc.open_channel(decode_address) as channel:
        call = decode_pb2_grpc.DecodeStub(channel).Generate(request, timeout=timeout)
        try:
            with _cancelled_by_ctrl_c(call):
                for message in call:
                    now = time.monotonic()
                    for token in message.tokens:
                        if result.ttft_seconds is None:
                            result.ttft_seconds = now - started
                        else:
                            result.itl_seconds.append(now - last)
                        last = now
                        result.add(token, sampling.HasField("logprobs"))
                        if on_token:
                            on_token(token.id)
                    if message.HasField("finish"):
                        _finish(result, message.finish)
        except grpc.RpcError as error:
            raise rpc.CallError(error, decode_address) from error
        finally:
            call.cancel()  # No effect on a stream that has ended.
    if not result.finish_reason:
        raise ToolError(f"{decode_address} ended the stream without saying why")
    return result


def _finish(result: Result, finish: decode_pb2.Finish) -> None:
    result.finish_reason = _FINISH_NAMES.get(finish.reason, "unknown")
    if finish.HasField("stop_string"):
        result.stop_string = finish.stop_string
    result.cached_tokens = finish.usage.cached_tokens
    result.reused_tokens = finish.usage.reused_tokens
    result.exact_tokens = finish.usage.exact_tokens
    result.drafted_tokens = finish.usage.drafted_tokens
    result.accepted_tokens = finish.usage.accepted_tokens
    result.sequence_id = finish.sequence_id


class TextOutput:
    """Turns ids into text as they come, up to the first stop string, and calls `write` with each piece."""

    def __init__(self, text: Text, stops: list[str], write: Callable[[str], None] | None):
        self._decoder = IncrementalDecoder(text)
        self._stops = StopFilter(stops)
        self._write = write
        self.said = ""

    def add(self, token_id: int) -> None:
        self._say(self._stops.add(self._decoder.add(token_id)))

    def finish(self) -> str:
        """Writes the text that was held back; returns the whole text."""
        self._say(self._stops.add(self._decoder.finish()))
        self._say(self._stops.finish())
        return self.said

    def _say(self, piece: str) -> None:
        self.said += piece
        if piece and self._write:
            self._write(piece)


def to_terminal(piece: str) -> None:
    sys.stdout.write(piece)
    sys.stdout.flush()


def sampling_from(args) -> common_pb2.SamplingParams:
    """Returns the SamplingParams of the command line. Only `temperature` is set where no flag was given."""
    sampling = common_pb2.SamplingParams(temperature=args.temperature, ignore_eos=args.ignore_eos)
    for name in ("max_tokens", "top_k", "top_p", "seed", "logprobs"):
        value = getattr(args, name)
        if value is not None:
            setattr(sampling, name, value)
    sampling.stop.extend(args.stop)
    return sampling


def as_json(result: Result, output_text: str | None) -> str:
    """Returns the object of --json, on one line."""
    kept = {"sequence_id": result.sequence_id} if result.sequence_id else {}
    return json.dumps({
        "prompt_ids": result.prompt_ids,
        "output_ids": result.output_ids,
        "output_text": output_text,
        "logprobs": result.logprobs,
        "top_logprobs": result.top_logprobs,
        "finish_reason": result.finish_reason,
        "exact_tokens": result.exact_tokens,
        "drafted_tokens": result.drafted_tokens,
        "accepted_tokens": result.accepted_tokens,
        "ttft_seconds": result.ttft_seconds,
        "itl_seconds": result.itl_seconds,
        **kept,
    })


def summary(result: Result) -> str:
    """Returns one line of figures: the tokens, the time to the first one, the rate of the others, and from
    where on the policy approximated.
    """
    tokens = f"{len(result.output_ids)} tokens"
    if result.ttft_seconds is None:
        return tokens
    line = f"{tokens}, first after {result.ttft_seconds:.3f} s"
    seconds = sum(result.itl_seconds)
    if seconds > 0:
        line += f", then {len(result.itl_seconds) / seconds:.1f} tokens/s"
    if result.exact_tokens < len(result.output_ids):
        line += f", exact for the first {result.exact_tokens}"
    if result.drafted_tokens > 0:
        line += f", {result.accepted_tokens} of {result.drafted_tokens} drafts accepted"
    return f"{line} ({result.finish_reason})"


def prompt_from(args, text: Text | None) -> list[int]:
    if args.prompt_ids is not None:
        return args.prompt_ids
    if args.chat:
        system = [{"role": "system", "content": args.system}] if args.system else []
        return text.encode_chat(system + [{"role": "user", "content": args.prompt}])
    return text.encode(args.prompt)


def run(args) -> int:
    """The command `generate`."""
    text = Text(args.tokenizer) if args.tokenizer else None
    sampling = sampling_from(args)
    output = TextOutput(text, args.stop, None if args.json else to_terminal) if text else None

    def on_token(token_id: int) -> None:
        if output:
            output.add(token_id)
        elif not args.json:
            to_terminal(f"{token_id} ")

    try:
        result = generate(args.decode, prompt_from(args, text), sampling,
                          prefill_address=args.prefill, pull=args.pull, sequence_id=args.sequence,
                          keep_seconds=args.keep, on_token=on_token)
    except BaseException:
        if output and output.said and not args.json:
            print()  # The error message begins on a line of its own.
        raise
    output_text = output.finish() if output else None
    if args.json:
        print(as_json(result, output_text))
    else:
        print()
        print(summary(result), file=sys.stderr)
        if result.sequence_id:
            print(f"kept: --sequence {result.sequence_id}", file=sys.stderr)
        elif args.keep:
            print("not kept: the node has no room for the sequence", file=sys.stderr)
    return 0
