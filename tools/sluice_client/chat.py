"""The command `chat`: a conversation, which the decode node keeps between two messages."""

import contextlib
import readline  # noqa: F401 - gives input() history and line editing.
import sys
from dataclasses import dataclass

import grpc

from sluice.v1 import decode_pb2, decode_pb2_grpc
from sluice_client import generate as gen
from sluice_client import rpc
from sluice_client.errors import ToolError
from sluice_client.text import Text

_FORGET_TIMEOUT_S = 5.0
_HELP = """  /exit or Ctrl-D  leave
  /reset           forget the conversation
  /help            list these commands
  Ctrl-C           stop the running answer"""


@dataclass(frozen=True)
class Kept:
    """The sequence that the decode node keeps, and the text of all its tokens."""

    sequence_id: str
    text: str
    tokens: int


class Conversation:
    """The messages so far, and what of them the decode node keeps."""

    def __init__(self, args, text: Text):
        self._args = args
        self._text = text
        self._messages = [{"role": "system", "content": args.system}] if args.system else []
        self._keep_s = args.keep
        self._kept: Kept | None = None

    def check_template(self) -> None:
        """Raises ToolError where the model has no chat template."""
        self._text.encode_chat([*self._messages, {"role": "user", "content": ""}])

    def reset(self) -> None:
        """Forgets all messages but the system's, here and at the node."""
        self.forget()
        del self._messages[1 if self._args.system else 0:]

    def forget(self) -> None:
        """Gives the memory of the kept sequence back. The node does so itself once the time is over."""
        kept, self._kept = self._kept, None
        if kept:
            with contextlib.suppress(grpc.RpcError), rpc.open_channel(self._args.decode) as channel:
                decode_pb2_grpc.DecodeStub(channel).Forget(
                    decode_pb2.ForgetRequest(sequence_id=kept.sequence_id), timeout=_FORGET_TIMEOUT_S)

    def answer(self, message: str) -> None:
        """Streams the answer to a message. Ctrl-C keeps what came; an error takes the message back."""
        self._messages.append({"role": "user", "content": message})
        try:
            self._messages.append({"role": "assistant", "content": self._stream_answer()})
        except ToolError:
            self._messages.pop()
            self.forget()
            raise

    def _stream_answer(self) -> str:
        output = gen.TextOutput(self._text, self._args.stop, gen.to_terminal)
        rendered = self._text.render_chat(self._messages)
        try:
            result = self._generate(rendered, output)
            said = output.finish()
            note = gen.summary(result)
        except KeyboardInterrupt:
            self._kept = None  # The node ends a sequence whose caller leaves.
            said, note = output.finish(), "stopped"
        print()
        if sys.stdout.isatty():
            print(f"\x1b[2m[{note}]\x1b[0m")
        return said

    def _generate(self, rendered: str, output: gen.TextOutput) -> gen.Result:
        """Has the conversation answered: by what is new where the node keeps the rest, else by all of it."""
        kept, why = self._kept, "the node keeps nothing of it"
        if kept and not rendered.startswith(kept.text):
            self.forget()
            kept, why = None, "the text of what was said before has changed since"
        if kept:
            appended = self._text.encode_plain(rendered[len(kept.text):])
            try:
                result = self._call(appended, output, sequence_id=kept.sequence_id)
                self._note(f"sent {len(appended)} new tokens; the node kept {kept.tokens} "
                           f"(sequence {kept.sequence_id})")
                self._remember(result, rendered, kept.tokens + len(appended))
                return result
            except rpc.CallError as error:
                if error.code != grpc.StatusCode.NOT_FOUND:
                    raise
                self._kept, why = None, "the node no longer keeps it"
        prompt = self._text.encode_plain(rendered)
        result = self._call(prompt, output, prefill_address=self._args.prefill)
        self._note(f"sent the whole conversation, {len(prompt)} tokens: {why}")
        self._remember(result, rendered, len(prompt))
        return result

    def _call(self, ids: list[int], output: gen.TextOutput, **how) -> gen.Result:
        def generate() -> gen.Result:
            return gen.generate(self._args.decode, ids, gen.sampling_from(self._args), on_token=output.add,
                                keep_seconds=self._keep_s, **how)
        try:
            return generate()
        except rpc.CallError as error:
            if "keep" not in error.fields or not self._keep_s:
                raise
            self._note(f"the node does not keep sequences for {self._keep_s:g} s, so the whole conversation is sent "
                       "each time: give a shorter --keep")
            self._keep_s = 0.0
        return generate()

    def _remember(self, result: gen.Result, rendered: str, prompt_tokens: int) -> None:
        self._kept = Kept(result.sequence_id, rendered + self._text.decode_with_special(result.output_ids),
                          prompt_tokens + len(result.output_ids)) if result.sequence_id else None

    def _note(self, note: str) -> None:
        if self._args.verbose:
            print(f"\n[{note}]", end="", file=sys.stderr, flush=True)


def _ask() -> str | None:
    """Returns the next line, an empty one after Ctrl-C, or None at the end of the input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        print()
        return None
    except KeyboardInterrupt:
        print("\n(/exit or Ctrl-D leaves)")
        return ""


def run(args) -> int:
    """The command `chat`."""
    conversation = Conversation(args, Text(args.tokenizer))
    conversation.check_template()
    if sys.stdin.isatty():
        print("Type a message; /help lists the commands.")
    try:
        while (line := _ask()) is not None and line != "/exit":
            if line == "/help":
                print(_HELP)
            elif line == "/reset":
                conversation.reset()
            elif line:
                try:
                    conversation.answer(line)
                except ToolError as error:
                    print(f"\ntools/sluice chat: {error}", file=sys.stderr)
                    if not sys.stdin.isatty():
                        return 1
        return 0
    finally:
        conversation.forget()
