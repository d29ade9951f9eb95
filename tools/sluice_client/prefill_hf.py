"""The command `prefill-hf`: Hugging Face transformers computes a prompt, and a decode node goes on with its caches.

It is slow, and an oracle: what transformers computes is what a decode node must go on with. torch and transformers are
not among the packages of tools/setup.
"""

import sys
import time

import numpy as np
from sluice.v1 import common_pb2
from tqdm import tqdm

from sluice_client import generate as gen
from sluice_client import layout
from sluice_client.errors import ToolError
from sluice_client.pusher import Pusher
from sluice_client.text import Text

_LATENT = ("deepseek_v3", "deepseek_v32")


def load(model: str, dtype: str):
    """Returns transformers' model of a directory, on a GPU if there is one. Raises ToolError."""
    try:
        import torch
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise ToolError(f"{error.name or error}: prefill-hf needs torch and transformers: pip install torch transformers") from None
    try:
        made = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ToolError(f"{model}: transformers cannot load it: {error}") from error
    return made.eval().to("cuda" if torch.cuda.is_available() else "cpu")


def _pairs(rope: np.ndarray) -> np.ndarray:
    """Returns [tokens, dim] with the two halves side by side, as DeepSeek's own code has them."""
    return np.stack(np.split(rope, 2, axis=-1), axis=-1).reshape(rope.shape)


def layer_arrays(layer, architecture: str) -> list[np.ndarray]:
    """Returns what Pusher.write_layer or write_latent_layer takes of a layer of transformers' cache."""
    keys, values = (layout.host_array(part[0]) for part in (layer.keys, layer.values))
    if architecture not in _LATENT:
        return [keys.swapaxes(0, 1), values.swapaxes(0, 1)]  # [tokens, heads, dim]
    found = [value for name, value in vars(layer).items() if "index" in name and hasattr(value, "reshape")]
    if architecture == "deepseek_v32" and len(found) != 1:
        raise ToolError("this version of transformers keeps the indexer's keys elsewhere: take 5.17")
    index = [layout.host_array(value[0]).reshape(keys.shape[1], -1) for value in found]
    return [keys[0], _pairs(values[0]), *index]


def push(model, prompt_ids: list[int], decode_address: str, max_new_tokens: int) -> tuple[str, int]:
    """Computes a prompt and hands its caches over; returns the transfer's id and the first token, which is the
    most probable one.
    """
    import torch
    with Pusher(decode_address) as pusher, torch.no_grad():
        architecture = model.config.model_type
        if architecture != pusher.model.architecture or model.config.num_hidden_layers != pusher.model.layers:
            raise ToolError(f"{decode_address} has another model: {pusher.model.architecture} of {pusher.model.layers} "
                            f"layers, not {architecture} of {model.config.num_hidden_layers}")
        pusher.reserve(prompt_ids, max_new_tokens=max_new_tokens)
        answer = model(torch.tensor([prompt_ids], device=model.device), use_cache=True, logits_to_keep=1)
        write = pusher.write_latent_layer if architecture in _LATENT else pusher.write_layer
        for i in tqdm(range(pusher.model.layers), desc="push", unit=" layers", leave=False,
                      disable=not sys.stderr.isatty()):
            write(i, *layer_arrays(answer.past_key_values.layers[i], architecture))
        first = int(answer.logits[0, -1].argmax())
        return pusher.commit([first]), first


def run(args) -> int:
    """The command `prefill-hf`."""
    text = Text(args.tokenizer or args.model) if args.prompt is not None or args.tokenizer else None
    prompt_ids = gen.prompt_from(args, text)
    output = gen.TextOutput(text, [], None if args.json else gen.to_terminal) if text else None

    def on_token(token_id: int) -> None:
        if output:
            output.add(token_id)
        elif not args.json:
            gen.to_terminal(f"{token_id} ")

    model = load(args.model, args.dtype)
    started = time.monotonic()
    transfer_id, _ = push(model, prompt_ids, args.decode, args.max_tokens)
    computed_s = time.monotonic() - started
    sampling = common_pb2.SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=args.ignore_eos)
    result = gen.generate(args.decode, prompt_ids, sampling, transfer_id=transfer_id, on_token=on_token)
    output_text = output.finish() if output else None
    if args.json:
        print(gen.as_json(result, output_text))
    else:
        print()
        print(f"computed and pushed {len(prompt_ids)} tokens in {computed_s:.3f} s; {gen.summary(result)}", file=sys.stderr)
    return 0
