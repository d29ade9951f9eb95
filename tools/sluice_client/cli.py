"""The command line of tools/sluice. What a command does is in the module of its name."""

import argparse
import importlib
import sys

from sluice_client import rpc
from sluice_client.errors import ToolError

_DESCRIPTION = """Talks to Sluice: a prefill node computes a prompt and hands its KV cache to a decode node,
which generates.

  generate  one prompt in, its continuation out, streaming
  chat      a conversation on the terminal
  push      a recorded KV cache (safetensors) in, its continuation out
  status    what a decode node runs and how full it is
  failpoint faults that a decode node can be made to have, for tests of what survives them
  drain     takes a decode node out of service: what runs is finished, nothing new is taken
  resume    takes it back into service
  trace     what its last steps did, as a file for ui.perfetto.dev
  texts     real text as token ids, for sluice-bench policies --quality
  plot-policies
            plots of what sluice-bench policies --out left
"""

_GENERATE_EXAMPLES = """examples:
  tools/sluice generate --prefill 127.0.0.1:7100 --decode 127.0.0.1:7000 \\
      --tokenizer models/smollm2-135m-instruct --chat --prompt "Why is the sky blue?"
  tools/sluice generate --prefill 127.0.0.1:7100 --decode 127.0.0.1:7000 \\
      --prompt-ids 1,2,3 --max-tokens 16 --json

Without --prefill the decode node computes the prompt itself, if it was started with --local-prefill always.
--json prints one object: prompt_ids, output_ids, output_text (null without --tokenizer),
logprobs and top_logprobs (null without --logprobs), finish_reason ("stop" or "length"),
ttft_seconds (from sending to the first token), itl_seconds (gaps between the tokens).
Exit status: 0, 1 for an error, 2 for a wrong command line.
"""

_CHAT_EXAMPLES = """example:
  tools/sluice chat --prefill 127.0.0.1:7100 --decode 127.0.0.1:7000 \\
      --tokenizer models/smollm2-135m-instruct --system "Answer briefly."

Ctrl-C stops the running answer, /exit or Ctrl-D leaves.
"""

_PUSH_EXAMPLES = """example:
  tools/sluice push --decode 127.0.0.1:7000 --kv tests/fixtures/tiny-llama/golden.safetensors --case 1

The file holds, for case C: caseC.prompt (int32 ids) and for every layer L caseC.k.L and caseC.v.L
([tokens, kv_heads, head_dim], K after RoPE); of a model with latent caches (DeepSeek) caseC.latent.L
([tokens, rank] after kv_a_layernorm), caseC.rope.L ([tokens, rope] after RoPE, pairs side by side) and,
with an indexer, caseC.index.L ([tokens, 128] after RoPE), which go in the node's form. Greedy. Output and
--json as for generate.
"""

_STATUS_EXAMPLES = """examples:
  tools/sluice status --decode 127.0.0.1:7000
  tools/sluice status --decode 127.0.0.1:7000 --watch
In the bars # is in use, - is promised to sequences, . is free.
"""

_FAILPOINT_EXAMPLES = """examples:
  tools/sluice failpoint list --decode 127.0.0.1:7000
  tools/sluice failpoint set --decode 127.0.0.1:7000 kv.reserve=error*1 'kv.copy=delay(50ms)'
  tools/sluice failpoint clear --decode 127.0.0.1:7000

A term is NAME=ACTION[%PROBABILITY][*COUNT][@SKIP]; ACTION is error, delay(TIME), jump(TIME) or off.
set and clear need a node that was started with --allow-failpoints.
"""

_DRAIN_EXAMPLES = """examples:
  tools/sluice drain --decode 127.0.0.1:7000
  tools/sluice drain --decode 127.0.0.1:7000 --timeout 120 --no-wait
Waits until nothing runs or waits there; what is left after the time ends with UNAVAILABLE.
--json prints one object: idle, running, waiting, was_draining.
Exit status: 0, 1 for an error (also when somebody resumed the node meanwhile), 2 for a wrong command line.
"""

_TRACE_EXAMPLES = """example:
  tools/sluice trace --decode 127.0.0.1:7000 --steps 200 --out trace.json
"""

_RESUME_EXAMPLES = """example:
  tools/sluice resume --decode 127.0.0.1:7000
"""

_PLOT_EXAMPLES = """example:
  build/release/bin/sluice-bench policies --model models/smollm2-135m-instruct --out policies-run
  tools/sluice plot-policies --run policies-run
Needs matplotlib: .venv/bin/pip install matplotlib
"""

_TEXTS_EXAMPLES = """examples:
  tools/sluice texts --tokenizer models/smollm2-135m-instruct --out texts.json
  build/release/bin/sluice-bench policies --model models/smollm2-135m-instruct --quality --texts texts.json

Without --text: the licences, news and manuals that this machine's packages carry, and the project's own
documents. No two cases share text.
"""


def _ids(text: str) -> list[int]:
    try:
        ids = [int(part) for part in text.split(",")] if text.strip() else []
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"'{text}' is not a list of token ids such as 1,2,3") from None
    if any(not 0 <= i < 1 << 32 for i in ids):
        raise argparse.ArgumentTypeError("a token id lies between 0 and 4294967295")
    return ids


def _unsigned(bits: int):
    def parse(text: str) -> int:
        value = int(text)
        if not 0 <= value < 1 << bits:
            raise argparse.ArgumentTypeError(f"{value} does not lie between 0 and 2^{bits} - 1")
        return value
    parse.__name__ = "whole number"
    return parse


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"{text} does not lie between 0 and 86400 seconds")
    return value


def _add_nodes(parser, prefill: bool = True) -> None:
    if prefill:
        parser.add_argument("--prefill", metavar="ADDR", help="prefill node, host:port")
    parser.add_argument("--decode", metavar="ADDR", required=True, help="decode node, host:port")
    group = parser.add_argument_group("TLS")
    group.add_argument("--ca", metavar="FILE", help="PEM: who issues the nodes' certificates; without it "
                       "calls go in clear")
    group.add_argument("--cert", metavar="FILE", help="PEM: a certificate to show to the nodes")
    group.add_argument("--key", metavar="FILE", help="PEM: its private key")
    group.add_argument("--token", metavar="@FILE", help="the file with a token to show to the nodes")


def _add_sampling(parser, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=_unsigned(32), default=max_tokens, metavar="N",
                       help=f"output tokens at most (default {max_tokens})")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T",
                       help="0 takes the most probable token each time (default)")
    group.add_argument("--top-k", type=_unsigned(32), metavar="K",
                       help="sample from the K most probable tokens")
    group.add_argument("--top-p", type=float, metavar="P",
                       help="sample from the fewest tokens whose probabilities reach P")
    group.add_argument("--seed", type=_unsigned(64), metavar="S",
                       help="the same seed and prompt give the same tokens")
    group.add_argument("--stop", action="append", default=[], metavar="TEXT",
                       help="end before this text (may be given several times)")
    group.add_argument("--logprobs", type=_unsigned(32), metavar="N",
                       help="log-probabilities of the chosen token and of the N best")
    group.add_argument("--ignore-eos", action="store_true", help="go on past the model's end token")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/sluice", description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        epilog="tools/sluice COMMAND --help explains a command, with examples.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)

    def command(name, summary, epilog):
        return commands.add_parser(
            name, description=summary, epilog=epilog, allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter)

    p = command("generate", "One prompt in, its continuation out, streaming.", _GENERATE_EXAMPLES)
    _add_nodes(p)
    prompt = p.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt; needs --tokenizer")
    prompt.add_argument("--prompt-ids", type=_ids, metavar="1,2,3", help="the prompt as token ids")
    p.add_argument("--tokenizer", metavar="DIR", help="Hugging Face directory with tokenizer.json")
    p.add_argument("--chat", action="store_true",
                   help="put the prompt into the model's chat template, as the user's message")
    p.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    p.add_argument("--pull", action="store_true",
                   help="the prefill node holds the prompt's caches and the decode node reads them; without it "
                        "they are pushed")
    p.add_argument("--keep", type=float, metavar="SECONDS",
                   help="have the decode node keep the sequence for another turn")
    p.add_argument("--sequence", metavar="ID", help="append the prompt to a sequence that was kept")
    _add_sampling(p, 128)
    p.add_argument("--json", action="store_true", help="print one JSON object at the end")

    p = command("chat", "A conversation on the terminal.", _CHAT_EXAMPLES)
    _add_nodes(p)
    p.add_argument("--tokenizer", metavar="DIR", required=True,
                   help="Hugging Face directory with tokenizer.json and a chat template")
    p.add_argument("--system", metavar="TEXT", help="system message")
    _add_sampling(p, 512)

    p = command("push", "Pushes a recorded KV cache into a decode node and generates from it.",
                _PUSH_EXAMPLES)
    _add_nodes(p, prefill=False)
    p.add_argument("--kv", metavar="FILE", required=True, help="safetensors file with the cache")
    p.add_argument("--case", type=_unsigned(31), required=True, metavar="N", help="which case")
    p.add_argument("--max-tokens", type=_unsigned(32), metavar="N",
                   help="output tokens at most (default: as many as are recorded, else 64)")
    p.add_argument("--first-token", action="store_true",
                   help="hand over the recorded first token, too; otherwise the decode node "
                        "recomputes the last position")
    p.add_argument("--tokenizer", metavar="DIR", help="print text instead of ids")
    p.add_argument("--logprobs", type=_unsigned(32), metavar="N",
                   help="log-probabilities of the chosen token and of the N best")
    p.add_argument("--ignore-eos", action="store_true", help="go on past the model's end token")
    p.add_argument("--json", action="store_true", help="print one JSON object at the end")

    p = command("status", "What a decode node runs and how full it is.", _STATUS_EXAMPLES)
    _add_nodes(p, prefill=False)
    p.add_argument("--json", action="store_true", help="print one JSON object")
    p.add_argument("--watch", action="store_true", help="again and again, until Ctrl-C")
    p.add_argument("--interval", type=float, default=1.0, metavar="S",
                   help="seconds between looks (default 1)")
    p.add_argument("--limit", type=_unsigned(32), default=20, metavar="N",
                   help="sequences shown at most (default 20)")

    p = command("failpoint", "Faults that a decode node can be made to have.", _FAILPOINT_EXAMPLES)
    actions = p.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="what there is, and what it did so far")
    listing.add_argument("--json", action="store_true", help="print one JSON object")
    setting = actions.add_parser("set", help="arm by terms")
    setting.add_argument("terms", nargs="+", metavar="TERM", help="such as kv.reserve=error*1")
    setting.add_argument("--seed", type=_unsigned(64), default=0, metavar="S",
                         help="of the draws under a probability (default 0)")
    for action in (listing, setting, actions.add_parser("clear", help="disarm all")):
        _add_nodes(action, prefill=False)

    p = command("drain", "Takes a decode node out of service: what runs is finished, nothing new is "
                "taken.", _DRAIN_EXAMPLES)
    _add_nodes(p, prefill=False)
    p.add_argument("--timeout", type=_seconds, metavar="S",
                   help="seconds for what runs (default: the node's drain_timeout_seconds)")
    p.add_argument("--no-wait", action="store_true", help="do not wait until it is idle")
    p.add_argument("--json", action="store_true", help="print one JSON object")

    p = command("resume", "Takes a drained decode node back into service.", _RESUME_EXAMPLES)
    _add_nodes(p, prefill=False)
    p.add_argument("--json", action="store_true", help="print one JSON object")

    p = command("trace", "What a decode node's last steps did, as a file for ui.perfetto.dev.", _TRACE_EXAMPLES)
    _add_nodes(p, prefill=False)
    p.add_argument("--steps", type=_unsigned(32), default=0, metavar="N",
                   help="at most so many (default: all that the node keeps, its trace_steps)")
    p.add_argument("--out", metavar="FILE", required=True, help="JSON to write")

    p = command("texts", "Real text as token ids, and pass keys hidden in it.", _TEXTS_EXAMPLES)
    p.add_argument("--tokenizer", metavar="DIR", required=True,
                   help="Hugging Face directory with tokenizer.json and a chat template")
    p.add_argument("--out", metavar="FILE", required=True, help="JSON to write")
    p.add_argument("--text", metavar="FILE", action="append", default=[],
                   help="a document, plain or .gz (may be given several times)")
    p.add_argument("--texts", type=_unsigned(16), default=4, metavar="N", help="texts (default 4)")
    p.add_argument("--tokens", type=_unsigned(20), default=8192, metavar="N",
                   help="tokens of each (default 8192)")
    p.add_argument("--passkeys", type=_unsigned(16), default=20, metavar="N",
                   help="pass keys (default 20)")
    p.add_argument("--passkey-tokens", type=_ids, default=[2048, 4096, 6144, 8000], metavar="2048,4096",
                   help="lengths of their texts, in turn (default 2048,4096,6144,8000)")
    p.add_argument("--seed", type=_unsigned(64), default=1, metavar="S", help="of the keys (default 1)")

    p = command("plot-policies", "Plots of a run of sluice-bench policies, as PNG files in its folder.",
                _PLOT_EXAMPLES)
    p.add_argument("--run", dest="run_folder", metavar="DIR", required=True,
                   help="what --out named")
    return parser


def _check(parser: argparse.ArgumentParser, args) -> None:
    """What argparse cannot say: leaves with status 2."""
    if args.command == "generate":
        if args.prompt is not None and not args.tokenizer:
            parser.error("--prompt needs --tokenizer DIR (the model's Hugging Face directory)")
        if (args.chat or args.system) and args.prompt is None:
            parser.error("--chat and --system need --prompt")
        if args.pull and not args.prefill:
            parser.error("--pull needs --prefill ADDR (who holds the prompt)")
        if args.system and not args.chat:
            parser.error("--system needs --chat")
    if args.command in ("generate", "chat") and args.temperature == 0:
        idle = [f for f in ("top_k", "top_p", "seed") if getattr(args, f) is not None]
        if idle:
            names = ", ".join("--" + f.replace("_", "-") for f in idle)
            print(f"tools/sluice: {names}: no effect at temperature 0; add --temperature 1",
                  file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    _check(parser, args)
    try:
        if "ca" in args:
            rpc.use(rpc.credentials_from(args.ca, args.cert, args.key, args.token))
        return importlib.import_module("sluice_client." + args.command.replace("-", "_")).run(args)
    except ToolError as error:
        print(f"tools/sluice {args.command}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # The reader of our output has gone.
        sys.stderr.close()
        return 1
