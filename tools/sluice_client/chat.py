"""The command `chat`: a conversation, the whole of which is sent with every turn."""

import readline  # noqa: F401 - gives input() history and line editing.
import sys

from sluice_client import generate as gen
from sluice_client.errors import ToolError
from sluice_client.text import Text

_HELP = """  /exit or Ctrl-D  leave
  /reset           forget the conversation
  /help            this
  Ctrl-C           stop the running answer"""


def answer(args, text: Text, messages: list[dict[str, str]]) -> str:
    """Streams the assistant's next message; Ctrl-C keeps what came."""
    output = gen.TextOutput(text, args.stop, gen.to_terminal)
    try:
        result = gen.generate(args.decode, text.encode_chat(messages), gen.sampling_from(args),
                              prefill_address=args.prefill, on_token=output.add)
        said = output.finish()
        note = gen.summary(result)
    except KeyboardInterrupt:
        said, note = output.finish(), "stopped"
    print()
    if sys.stdout.isatty():
        print(f"\x1b[2m[{note}]\x1b[0m")
    return said


def run(args) -> int:
    """The command `chat`."""
    text = Text(args.tokenizer)
    system = [{"role": "system", "content": args.system}] if args.system else []
    text.encode_chat(system + [{"role": "user", "content": ""}])  # Fail now if there is no template.
    messages = list(system)
    if sys.stdin.isatty():
        print("Type a message; /help lists what else there is.")
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D leaves)")
            continue
        if line == "/exit":
            return 0
        if line == "/help":
            print(_HELP)
        elif line == "/reset":
            messages = list(system)
        elif line:
            messages.append({"role": "user", "content": line})
            try:
                messages.append({"role": "assistant", "content": answer(args, text, messages)})
            except ToolError as error:
                messages.pop()
                print(f"\ntools/sluice chat: {error}", file=sys.stderr)
                if not sys.stdin.isatty():
                    return 1
