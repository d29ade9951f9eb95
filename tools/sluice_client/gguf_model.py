"""Turns a GGUF file of a Llama model into a Hugging Face directory's weights and tokenizer."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tqdm import tqdm

from sluice_client.errors import ToolError
from sluice_client.safetensors_file import SafetensorsFile

_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
# The token type of control tokens in GGUF.
_CONTROL = 3


def huggingface_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
    if name in _NAMES:
        return _NAMES[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{_LAYER_NAMES[rest]}"


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undoes GGUF's order of q and k rows, which interleaves the halves of each head: [2i, 2i+1] <- [i, d/2+i]."""
    out_features, in_features = rows.shape
    half = out_features // heads // 2
    return rows.reshape(heads, half, 2, in_features).swapaxes(1, 2).reshape(rows.shape)


def _field(reader: gguf.GGUFReader, name: str):
    return reader.fields[name].contents()


def write_safetensors(reader: gguf.GGUFReader, path: Path) -> str:
    """Writes every tensor as bfloat16; returns the digest of the weights (see weights_digest)."""
    heads = {"attn_q.weight": _field(reader, "llama.attention.head_count"),
             "attn_k.weight": _field(reader, "llama.attention.head_count_kv")}
    tensors = {}
    for tensor in tqdm(reader.tensors, desc="converting", unit="tensor", disable=None, leave=False):
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        # GGUF lists the fastest dimension first.
        values = values.reshape([int(n) for n in reversed(tensor.shape)])
        permuted_heads = heads.get(tensor.name.split(".", 2)[-1])
        if permuted_heads:
            values = unpermute(values, permuted_heads)
        tensors[huggingface_name(tensor.name)] = values.astype(ml_dtypes.bfloat16)
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o644)  # save_file leaves it to its owner alone
    return _digest((name, tensors[name]) for name in sorted(tensors))


def weights_digest(path: Path) -> str | None:
    """Returns SHA-256 over (name, bytes) in the order of the names; None if `path` is no whole safetensors file."""
    try:
        file = SafetensorsFile(path)
    except ToolError:
        return None
    return _digest((name, file[name]) for name in file.names())


def _digest(tensors: Iterable[tuple[str, np.ndarray]]) -> str:
    digest = hashlib.sha256()
    for name, values in tensors:
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(values).view(np.uint8))
    return digest.hexdigest()


def write_tokenizer(reader: gguf.GGUFReader, path: Path) -> None:
    """Writes the tokenizer.json of a byte-level BPE that splits digits one by one before GPT-2's expression."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = _field(reader, "tokenizer.ggml.tokens")
    types = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(m.split(" ")) for m in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False)
                                  for t, kind in zip(tokens, types) if kind == _CONTROL])
    tokenizer.save(str(path))
