"""The command `push`: pushes a recorded KV cache into a decode node, which goes on from there."""

import sys
import time

from sluice.v1 import common_pb2
from tqdm import tqdm

from sluice_client import generate as gen
from sluice_client.errors import ToolError
from sluice_client.pusher import Pusher
from sluice_client.safetensors_file import SafetensorsFile
from sluice_client.text import Text

_DEFAULT_MAX_TOKENS = 64


def push_case(file: SafetensorsFile, case: int, decode_address: str, max_new_tokens: int, *,
              with_first_token: bool = False) -> tuple[str, list[int]]:
    """Pushes the recorded caches of a case, `case{case}.PART.{layer}`; returns the transfer id and the prompt's ids.

    The parts are k and v, or latent, rope and index where the node's model keeps those. With `with_first_token` the
    recorded first token is handed over too; without it the decode node recomputes the last position.
    """
    name = f"case{case}"
    if f"{name}.prompt" not in file:
        cases = sorted(n.split(".")[0] for n in file.names() if n.endswith(".prompt"))
        raise ToolError(f"{file.path} has no {name}.prompt: it has {', '.join(cases) or 'no case'}")
    prompt_ids = [int(t) for t in file[f"{name}.prompt"]]
    with Pusher(decode_address) as pusher:
        layers = pusher.model.layers
        is_latent = "latent" in pusher.kinds
        parts = ["latent", "rope", *(["index"] if "index" in pusher.kinds else [])] if is_latent else ["k", "v"]
        recorded = min(sum(n.startswith(f"{name}.{part}.") for n in file.names()) for part in parts)
        if recorded != layers:
            raise ToolError(f"{file.path} has caches of {recorded} layers ({', '.join(parts)}) for {name}, the "
                            f"model at {decode_address} ({pusher.model.name}) has {layers}")
        pusher.reserve(prompt_ids, max_new_tokens=max_new_tokens)
        for layer in tqdm(range(layers), desc="push", unit=" layers", leave=False,
                          disable=not sys.stderr.isatty()):
            write = pusher.write_latent_layer if is_latent else pusher.write_layer
            write(layer, *(file[f"{name}.{part}.{layer}"] for part in parts))
        first = [int(file[f"{name}.tokens"][0])] if with_first_token else []
        return pusher.commit(first), prompt_ids


def run(args) -> int:
    """The command `push`."""
    file = SafetensorsFile(args.kv)
    max_tokens = args.max_tokens
    if max_tokens is None:
        recorded = f"case{args.case}.tokens"
        max_tokens = len(file[recorded]) if recorded in file else _DEFAULT_MAX_TOKENS
    text = Text(args.tokenizer) if args.tokenizer else None
    output = gen.TextOutput(text, [], None if args.json else gen.to_terminal) if text else None

    def on_token(token_id: int) -> None:
        if output:
            output.add(token_id)
        elif not args.json:
            gen.to_terminal(f"{token_id} ")

    started = time.monotonic()
    transfer_id, prompt_ids = push_case(file, args.case, args.decode, max_tokens,
                                        with_first_token=args.first_token)
    pushed_s = time.monotonic() - started
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=max_tokens,
                                         ignore_eos=args.ignore_eos)
    if args.logprobs is not None:
        sampling.logprobs = args.logprobs
    result = gen.generate(args.decode, prompt_ids, sampling, transfer_id=transfer_id,
                          on_token=on_token)
    if result.ttft_seconds is not None:
        result.ttft_seconds += pushed_s  # The time counts from the first byte of the push.
    output_text = output.finish() if output else None
    if args.json:
        print(gen.as_json(result, output_text))
    else:
        print()
        print(f"pushed {len(prompt_ids)} tokens in {pushed_s:.3f} s; {gen.summary(result)}",
              file=sys.stderr)
    return 0
