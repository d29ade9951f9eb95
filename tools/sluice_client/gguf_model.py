"""Turns a GGUF file of a Llama model into a Hugging Face directory's weights and tokenizer."""

import hashlib
import json
import struct
from pathlib import Path

import gguf
import numpy as np
from tqdm import tqdm

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
# gguf's token type of a control token.
_CONTROL = 3


def huggingface_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight."""
    if name in _NAMES:
        return _NAMES[name]
    _, layer, rest = name.split(".", 2)
    return f"model.layers.{layer}.{_LAYER_NAMES[rest]}"


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undoes GGUF's order of q and k rows: per head the two halves interleaved, [2i, 2i+1] <- [i, d/2+i]."""
    out_features, in_features = rows.shape
    half = out_features // heads // 2
    return rows.reshape(heads, half, 2, in_features).swapaxes(1, 2).reshape(rows.shape)


def to_bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """float32 -> the bits of bfloat16 as uint16, to nearest, ties to even. No NaN among weights."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)


def _field(reader: gguf.GGUFReader, name: str):
    return reader.fields[name].contents()


def write_safetensors(reader: gguf.GGUFReader, path: Path) -> str:
    """Writes every tensor as bfloat16, one at a time, sorted by name; returns the weights' digest."""
    heads = {"attn_q.weight": _field(reader, "llama.attention.head_count"),
             "attn_k.weight": _field(reader, "llama.attention.head_count_kv")}
    tensors = sorted((huggingface_name(t.name), t) for t in reader.tensors)
    header, offset = {"__metadata__": {"format": "pt"}}, 0
    for name, tensor in tensors:
        end = offset + 2 * int(tensor.n_elements)
        # GGUF lists the fastest dimension first.
        header[name] = {"dtype": "BF16", "shape": [int(n) for n in reversed(tensor.shape)],
                        "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for name, tensor in tqdm(tensors, desc="converting", unit="tensor", disable=None, leave=False):
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            values = values.reshape(header[name]["shape"])
            permuted_heads = heads.get(tensor.name.split(".", 2)[-1])
            if permuted_heads:
                values = unpermute(values, permuted_heads)
            data = to_bfloat16_bits(values).tobytes()
            digest.update(name.encode())
            digest.update(data)
            out.write(data)
    return digest.hexdigest()


def weights_digest(path: Path) -> str | None:
    """SHA-256 over (name, bytes) in sorted order of names; None if the file is no whole safetensors."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as f:
            (length,) = struct.unpack("<Q", f.read(8))
            if length > path.stat().st_size:
                return None
            header = json.loads(f.read(length))
            header.pop("__metadata__", None)
            for name in sorted(header):
                begin, end = header[name]["data_offsets"]
                f.seek(8 + length + begin)
                digest.update(name.encode())
                digest.update(f.read(end - begin))
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None
    return digest.hexdigest()


def write_tokenizer(reader: gguf.GGUFReader, path: Path) -> None:
    """tokenizer.json of a byte-level BPE that splits digits one by one before GPT-2's expression."""
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
