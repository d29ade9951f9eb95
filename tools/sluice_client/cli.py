"""The command line of tools/sluice. Each command is the module of its name."""

import argparse
import importlib
import os
import sys

from sluice_client import rpc
from sluice_client.errors import ToolError
from sluice_client.examples import EPILOGS

_DESCRIPTION = """Talks to Sluice: a prefill node computes a prompt and hands its KV cache to a decode node,
which generates.

  generate   streams the continuation of one prompt
  chat       holds a conversation on the terminal
  push       pushes a recorded KV cache (safetensors) and streams its continuation
  prefill-hf lets Hugging Face transformers compute a prompt, and streams the continuation of a decode node
  status     shows which model a node runs and how full the node is
  doctor     checks this machine, its TLS files and its nodes, and says what to do about each problem
  drain      takes a decode node out of service: it finishes what it has and takes nothing new
  resume     takes a drained decode node back into service
  trace      writes what a decode node's last steps did, for ui.perfetto.dev
  failpoint  makes a decode node fail on purpose, for tests of what survives that
  texts      writes real text as token ids, for sluice-bench policies --quality
  plot-policies
             plots the results of sluice-bench policies --out
  plot-heads plots the heads that sluice-profile --clo measured
  plot-simulate
             plots the forecasts of sluice-bench simulate
  plot-fluxion
             plots heads and predictors that sluice-profile fluxion measured
"""

# Commands that need a decode node.
_NEED_DECODE = ("generate", "chat", "push", "prefill-hf", "drain", "resume", "trace", "failpoint")


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
        parser.add_argument("--prefill", metavar="ADDR", help="prefill node, host:port (default: SLUICE_PREFILL)")
    parser.add_argument("--decode", metavar="ADDR", help="decode node, host:port (default: SLUICE_DECODE)")
    group = parser.add_argument_group("TLS")
    group.add_argument("--ca", metavar="FILE", help="PEM: the authority that issues the nodes' certificates; without "
                       "it calls are not encrypted")
    group.add_argument("--cert", metavar="FILE", help="PEM: the certificate to show to the nodes")
    group.add_argument("--key", metavar="FILE", help="PEM: the private key of --cert")
    group.add_argument("--token", metavar="@FILE", help="file with the token to show to the nodes")


def _add_sampling(parser, max_tokens: int) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=_unsigned(32), default=max_tokens, metavar="N",
                       help=f"maximum number of output tokens (default {max_tokens})")
    group.add_argument("--temperature", type=float, default=0.0, metavar="T",
                       help="sampling temperature; 0 takes the most probable token each time (default)")
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


def _add_tokenizer(parser, **kwargs) -> None:
    parser.add_argument("--tokenizer", metavar="DIR", **{
        "help": "the model's directory, with tokenizer.json", **kwargs})


def _add_generate(p) -> None:
    _add_nodes(p)
    prompt = p.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt; needs --tokenizer")
    prompt.add_argument("--prompt-ids", type=_ids, metavar="1,2,3", help="the prompt as token ids")
    _add_tokenizer(p)
    p.add_argument("--chat", action="store_true",
                   help="put the prompt into the model's chat template, as the user's message")
    p.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    p.add_argument("--pull", action="store_true",
                   help="let the prefill node hold the prompt's KV cache until the decode node reads it, instead of "
                        "pushing it")
    p.add_argument("--keep", type=_seconds, metavar="SECONDS",
                   help="let the decode node keep the sequence for another turn")
    p.add_argument("--sequence", metavar="ID", help="append the prompt to a sequence that the decode node keeps")
    _add_sampling(p, 128)
    p.add_argument("--json", action="store_true", help="print one JSON object at the end")


def _add_chat(p) -> None:
    _add_nodes(p)
    _add_tokenizer(p, required=True, help="the model's directory, with tokenizer.json and a chat template")
    p.add_argument("--system", metavar="TEXT", help="system message")
    p.add_argument("--keep", type=_seconds, default=60.0, metavar="SECONDS",
                   help="how long the decode node keeps the conversation for the next message, at most its "
                        "lease_seconds; 0 sends all of it each time (default 60)")
    p.add_argument("--verbose", action="store_true",
                   help="say for each message what was sent, and why, on standard error")
    _add_sampling(p, 512)


def _add_push(p) -> None:
    _add_nodes(p, prefill=False)
    p.add_argument("--kv", metavar="FILE", required=True, help="safetensors file with the recorded KV cache")
    p.add_argument("--case", type=_unsigned(31), required=True, metavar="N", help="number of the case in the file")
    p.add_argument("--max-tokens", type=_unsigned(32), metavar="N",
                   help="maximum number of output tokens (default: as many as are recorded, else 64)")
    p.add_argument("--first-token", action="store_true",
                   help="hand over the recorded first token too; without it the decode node recomputes the last "
                        "position")
    _add_tokenizer(p, help="the model's directory: prints text instead of ids")
    p.add_argument("--logprobs", type=_unsigned(32), metavar="N",
                   help="log-probabilities of the chosen token and of the N best")
    p.add_argument("--ignore-eos", action="store_true", help="go on past the model's end token")
    p.add_argument("--json", action="store_true", help="print one JSON object at the end")


def _add_prefill_hf(p) -> None:
    p.add_argument("model", metavar="MODEL", help="the model's Hugging Face directory, which the decode node has too")
    _add_nodes(p, prefill=False)
    prompt = p.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="the prompt")
    prompt.add_argument("--prompt-ids", type=_ids, metavar="1,2,3", help="the prompt as token ids")
    _add_tokenizer(p, help="directory with tokenizer.json (default: MODEL)")
    p.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template")
    p.add_argument("--system", metavar="TEXT", help="system message, with --chat")
    p.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32",
                   help="in which transformers computes (default float32)")
    p.add_argument("--max-tokens", type=_unsigned(32), default=64, metavar="N",
                   help="maximum number of output tokens (default 64)")
    p.add_argument("--ignore-eos", action="store_true", help="go on past the model's end token")
    p.add_argument("--json", action="store_true", help="print one JSON object at the end")


def _add_status(p) -> None:
    _add_nodes(p)
    p.add_argument("--json", action="store_true", help="print one JSON object for each node")
    p.add_argument("--watch", action="store_true", help="look again and again, until Ctrl-C")
    p.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between looks (default 1)")
    p.add_argument("--limit", type=_unsigned(32), default=20, metavar="N",
                   help="maximum number of sequences shown (default 20)")


def _add_doctor(p) -> None:
    _add_nodes(p)
    group = p.add_argument_group("a node that is to run here")
    group.add_argument("--config", metavar="FILE",
                       help="configuration file of the node: checks its listen, admin_listen, tls_* and access_file")
    group.add_argument("--listen", metavar="ADDR", action="append", default=[],
                       help="address that must be free (may be given several times; default 127.0.0.1:7000 and 7001)")


def _add_failpoint(p) -> None:
    actions = p.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="list all failpoints and how often each has fired")
    listing.add_argument("--json", action="store_true", help="print one JSON object")
    setting = actions.add_parser("set", help="arm failpoints")
    setting.add_argument("terms", nargs="+", metavar="TERM", help="such as kv.reserve=error*1")
    setting.add_argument("--seed", type=_unsigned(64), default=0, metavar="S",
                         help="seed of the draws under a probability (default 0)")
    for action in (listing, setting, actions.add_parser("clear", help="disarm all failpoints")):
        _add_nodes(action, prefill=False)


def _add_drain(p) -> None:
    _add_nodes(p, prefill=False)
    p.add_argument("--timeout", type=_seconds, metavar="S",
                   help="seconds that running sequences get (default: the node's drain_timeout_seconds)")
    p.add_argument("--no-wait", action="store_true", help="return at once, before the node is idle")
    p.add_argument("--json", action="store_true", help="print one JSON object")


def _add_resume(p) -> None:
    _add_nodes(p, prefill=False)
    p.add_argument("--json", action="store_true", help="print one JSON object")


def _add_trace(p) -> None:
    _add_nodes(p, prefill=False)
    p.add_argument("--steps", type=_unsigned(32), default=0, metavar="N",
                   help="maximum number of steps (default: all that the node keeps, its trace_steps)")
    p.add_argument("--out", metavar="FILE", required=True, help="JSON file to write")


def _add_texts(p) -> None:
    _add_tokenizer(p, required=True)
    p.add_argument("--out", metavar="FILE", required=True, help="JSON file to write")
    p.add_argument("--text", metavar="FILE", action="append", default=[],
                   help="a document, plain or .gz, in place of the texts of this machine (may be given several times)")
    p.add_argument("--texts", type=_unsigned(16), default=12, metavar="N", help="maximum number of texts (default 12)")
    p.add_argument("--tokens", type=_unsigned(20), default=8192, metavar="N", help="tokens of each text (default 8192)")
    p.add_argument("--passkeys-per-text", type=_unsigned(16), default=6, metavar="N",
                   help="pass keys of each text: of six, four are single, one is multi, one is topic (default 6)")
    p.add_argument("--passkey-tokens", type=_ids, default=[1200, 7800], metavar="1200,7800",
                   help="tokens of the shortest and of the longest case with a pass key (default 1200,7800)")
    p.add_argument("--seed", type=_unsigned(64), default=1, metavar="S", help="seed of the pass keys (default 1)")


def _add_plot_policies(p) -> None:
    p.add_argument("--run", dest="run_folder", metavar="DIR", required=True,
                   help="the folder that sluice-bench policies --out wrote")


def _add_plot_heads(p) -> None:
    p.add_argument("--profile", metavar="FILE", required=True, help="the file that sluice-profile --clo --out wrote")
    p.add_argument("--out", metavar="PNG", help="the picture (default: the profile's name and .png)")


def _add_plot_simulate(p) -> None:
    p.add_argument("--report", metavar="FILE", required=True, help="the file that sluice-bench simulate --json wrote")
    p.add_argument("--out", metavar="PNG", help="the picture (default: the report's name and .png)")


def _add_plot_fluxion(p) -> None:
    p.add_argument("--summary", metavar="FILE", help="the file that sluice-profile fluxion summary --json wrote")
    p.add_argument("--check", metavar="FILE", help="the file that sluice-profile fluxion check --json wrote")
    p.add_argument("--figures", metavar="FILE", help="the file that sluice-profile fluxion figures --json wrote")
    p.add_argument("--out", metavar="PNG", help="the picture (default: the first file's name and .png)")


_COMMANDS = {
    "generate": ("Streams the continuation of one prompt.", _add_generate),
    "chat": ("Holds a conversation on the terminal.", _add_chat),
    "push": ("Pushes a recorded KV cache into a decode node and streams its continuation.", _add_push),
    "prefill-hf": ("Lets Hugging Face transformers compute a prompt, and streams the continuation of a decode node.",
                   _add_prefill_hf),
    "status": ("Shows which model a node runs and how full the node is.", _add_status),
    "doctor": ("Checks this machine, its TLS files and its nodes, and says what to do about each problem.",
               _add_doctor),
    "failpoint": ("Makes a decode node fail on purpose.", _add_failpoint),
    "drain": ("Takes a decode node out of service: it finishes what it has and takes nothing new.", _add_drain),
    "resume": ("Takes a drained decode node back into service.", _add_resume),
    "trace": ("Writes what a decode node's last steps did, as a file for ui.perfetto.dev.", _add_trace),
    "texts": ("Writes real text as token ids, and texts that hide pass keys.", _add_texts),
    "plot-policies": ("Plots a run of sluice-bench policies, as PNG files in its folder.", _add_plot_policies),
    "plot-heads": ("Plots the heads that sluice-profile --clo measured, as a PNG file.", _add_plot_heads),
    "plot-simulate": ("Plots the forecasts of sluice-bench simulate, as a PNG file.", _add_plot_simulate),
    "plot-fluxion": ("Plots heads and predictors that sluice-profile fluxion measured, as a PNG file.",
                     _add_plot_fluxion),
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tools/sluice", description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
        epilog="tools/sluice COMMAND --help explains a command, with examples.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, (summary, add_flags) in _COMMANDS.items():
        add_flags(commands.add_parser(name, description=summary, epilog=EPILOGS[name], allow_abbrev=False,
                                      formatter_class=argparse.RawDescriptionHelpFormatter))
    return parser


def _take_nodes_from_environment(args) -> None:
    """Fills in the nodes that no flag names. `status` shows the nodes that flags name, where there are any."""
    if args.command == "status" and (args.decode is not None or args.prefill is not None):
        return
    for name in ("decode", "prefill"):
        if name in args and getattr(args, name) is None:
            setattr(args, name, os.environ.get(f"SLUICE_{name.upper()}"))


def _check(parser: argparse.ArgumentParser, args) -> None:
    """Leaves with status 2 where flags do not fit together, which argparse cannot say."""
    if args.command in _NEED_DECODE and not args.decode:
        parser.error(f"{args.command} needs a decode node: give --decode ADDR, or set SLUICE_DECODE in the environment")
    if args.command == "status" and not (args.decode or args.prefill):
        parser.error("status needs a node: give --decode ADDR or --prefill ADDR, or set SLUICE_DECODE or "
                     "SLUICE_PREFILL in the environment")
    if args.command == "plot-fluxion" and not (args.summary or args.check or args.figures):
        parser.error("plot-fluxion needs something to draw: give --summary FILE, --check FILE or --figures FILE")
    if args.command in ("generate", "prefill-hf") and args.system and not args.chat:
        parser.error("--system needs --chat")
    if args.command == "generate":
        if args.prompt is not None and not args.tokenizer:
            parser.error("--prompt needs --tokenizer DIR (the model's directory)")
        if (args.chat or args.system) and args.prompt is None:
            parser.error("--chat and --system need --prompt")
        if args.pull and not args.prefill:
            parser.error("--pull needs the prefill node that holds the prompt: give --prefill ADDR, or set "
                         "SLUICE_PREFILL in the environment")
    if args.command in ("generate", "chat") and args.temperature == 0:
        idle = [f for f in ("top_k", "top_p", "seed") if getattr(args, f) is not None]
        if idle:
            names = ", ".join("--" + f.replace("_", "-") for f in idle)
            print(f"tools/sluice: {names}: no effect at temperature 0; add --temperature 1",
                  file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    parser = build_parser()
    args = parser.parse_args(argv)
    _take_nodes_from_environment(args)
    _check(parser, args)
    try:
        if "ca" in args and args.command != "doctor":
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
