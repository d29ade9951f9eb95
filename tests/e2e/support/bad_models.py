"""Model directories that are broken: the change to a good directory, and the one sentence that the program prints."""

import json
import os
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Callable


@dataclass(frozen=True)
class BadModel:
    """A start with `flags` on a directory to which `change` was done, and the `words` that the program prints, in
    which {dir} is the directory.
    """

    name: str
    change: Callable[[Path], object]
    words: str
    flags: list[str] = field(default_factory=list)
    program: str = "sluice-server"


WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00002.safetensors"
Q = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.norm.weight"


def edit_config(**changes):
    """Changes config.json. A value of None removes the key."""
    def change(model):
        path = model / "config.json"
        config = json.loads(path.read_text())
        for key, value in changes.items():
            config.pop(key, None)
            if value is not None:
                config[key] = value
        path.write_text(json.dumps(config))
    return change


def edit_header(edit):
    """Changes the JSON header of model.safetensors and leaves the data."""
    def change(model):
        path = model / WEIGHTS
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8:8 + length])
        edit(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length:])
    return change


def drop_tensor(name, instead=None):
    """Removes a tensor and its bytes from model.safetensors, or gives it the name `instead`."""
    def change(model):
        path = model / WEIGHTS
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8:8 + length])
        header.pop("__metadata__", None)
        if instead:
            header[instead] = header.pop(name)
        else:
            del header[name]
        parts, at = [], 0
        for entry in header.values():
            begin, end = entry["data_offsets"]
            parts.append(data[8 + length + begin:8 + length + end])
            entry["data_offsets"] = [at, at := at + end - begin]
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))
    return change


def set_entry(name, **changes):
    return edit_header(lambda header: header[name].update(changes))


def keep_bytes(count):
    return lambda model: (model / WEIGHTS).write_bytes(
        (model / WEIGHTS).read_bytes()[:count])


def overwrite(name, data):
    return lambda model: (model / name).write_bytes(data)


def remove(name):
    return lambda model: (model / name).unlink()


def replace(name, make):
    """Replaces the file by what `make(path)` creates."""
    def change(model):
        (model / name).unlink()
        make(model / name)
    return change


def weights_of(header: bytes, size: int | None = None):
    """Writes a file of weights that has only this header; `size` is the length that it claims."""
    return overwrite(WEIGHTS, struct.pack("<Q", len(header) if size is None else size) + header)


def nan_norm(model):
    """Writes weights that give no finite logits."""
    data = bytearray((model / WEIGHTS).read_bytes())
    (length,) = struct.unpack("<Q", data[:8])
    begin, end = json.loads(data[8:8 + length])[NORM]["data_offsets"]
    data[8 + length + begin:8 + length + end] = b"\xc0\x7f" * ((end - begin) // 2)
    (model / WEIGHTS).write_bytes(data)


def use_index(**weight_map):
    """Adds an index beside the one file, with some entries that point elsewhere."""
    def change(model):
        data = (model / WEIGHTS).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        names = [n for n in json.loads(data[8:8 + length]) if n != "__metadata__"]
        (model / WEIGHTS).rename(model / SHARD)
        entries = {n: SHARD for n in names}
        entries.update(weight_map)
        (model / INDEX).write_text(json.dumps({"weight_map": entries}))
    return change


def config(name, words, **changes) -> BadModel:
    return BadModel(f"config: {name}", edit_config(**changes), "{dir}/config.json: " + words)


def config_text(name, text: bytes, words) -> BadModel:
    return BadModel(f"config: {name}", overwrite("config.json", text), "{dir}/config.json: " + words)


CONFIGS = [
    BadModel("config: none", remove("config.json"), "{dir}/config.json: no such file"),
    config_text("not JSON", b"{nonsense", "not valid JSON"), config_text("a list", b"[1]", "expected a JSON object"),
    config_text("empty", b"", "not valid JSON"), config_text("not UTF-8", b'{"a": "\xff"}', "not valid JSON"),
    config_text("NaN", b'{"rms_norm_eps": NaN}', "not valid JSON"),
    config_text("a key twice", b'{"a": 1, "a": 2}', 'the key "a" appears twice'),
    config_text("a million lists", b'{"a":' + b"[" * 1_000_000, "nested more than 64 levels deep"),
    config_text("a million objects", b'{"a":' * 700_000, "nested more than 64 levels deep"),
    config_text("5 MiB", b" " * (5 << 20), "5242880 bytes, expected at most 4194304"),
    BadModel("config: a folder", replace("config.json", Path.mkdir), "{dir}/config.json: not a regular file"),
    BadModel("config: a FIFO", replace("config.json", os.mkfifo), "{dir}/config.json: not a regular file"),
    BadModel("config: a loop of links", replace("config.json", lambda p: p.symlink_to(p)),
             "{dir}/config.json: Too many levels of symbolic links"),
    config("unknown architecture", 'model_type: "mamba" is not supported', model_type="mamba"),
    config("no architecture", "model_type: expected", model_type=None),
    config("classes that are no list", "architectures: expected a list", architectures="LlamaForCausalLM"),
    config("another class", "architectures: ", architectures=["LlamaForSequenceClassification"]),
    config("no hidden_size", "hidden_size: expected an integer from 1 to 131072, found nothing", hidden_size=None),
    config("layers as text", 'num_hidden_layers: expected an integer from 1 to 1024, found "three"',
           num_hidden_layers="three"),
    config("zero layers", "num_hidden_layers: expected an integer", num_hidden_layers=0),
    config("half a layer", "num_hidden_layers: expected an integer", num_hidden_layers=1.5),
    config("a negative size", "intermediate_size: expected an integer", intermediate_size=-256),
    config("a vocabulary of 2^60", "vocab_size: expected an integer", vocab_size=2**60),
    config("2^64 positions", "max_position_embeddings: expected an integer", max_position_embeddings=2**64),
    config("2^40 parameters", "num_hidden_layers: expected sizes that make at most", hidden_size=1 << 17,
           intermediate_size=1 << 20, num_hidden_layers=1024, num_attention_heads=512, num_key_value_heads=512,
           head_dim=256),
    config("heads do not divide", "num_key_value_heads: expected a divisor", num_key_value_heads=3),
    config("head_dim 24", "head_dim: expected a multiple of 16", head_dim=24),
    config("an epsilon of 0", "rms_norm_eps: expected a number", rms_norm_eps=0),
    config("gelu", "hidden_act: ", hidden_act="gelu"), config("quantized", "quantization_config: ",
                                                              quantization_config={"bits": 4}),
    config("layer types", "layer_types: expected a list of 3 names", layer_types=["full_attention"]),
    config("sliding layers", "layer_types: ", layer_types=["sliding_attention"] * 3),
    config("a text of 1 MB", "hidden_act: ", hidden_act="x" * 1_000_000),
    config("an unknown rope", "rope_parameters: rope_type: ", rope_parameters={"rope_type": "spiral"}),
    config("a rope that is none", "rope_parameters: expected an object", rope_parameters=[1]),
    config("a rope factor of 0", "rope_parameters: factor: expected",
           rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 0}),
    BadModel("generation: an EOS id outside", overwrite("generation_config.json", b'{"eos_token_id": 512}'),
             "{dir}/generation_config.json: eos_token_id: expected a token id below vocab_size (512)"),
    BadModel("generation: a negative EOS id", overwrite("generation_config.json", b'{"eos_token_id": [-1]}'),
             "{dir}/generation_config.json: eos_token_id: expected"),
    BadModel("generation: 1,000 EOS ids", overwrite("generation_config.json", json.dumps(
        {"eos_token_id": list(range(500))}).encode()), "{dir}/generation_config.json: eos_token_id: expected"),
    BadModel("generation: not JSON", overwrite("generation_config.json", b"{"), "{dir}/generation_config.json: not"),
]


def weights(name, change, words) -> BadModel:
    return BadModel(f"weights: {name}", change, words)


def entry(name, words, **changes) -> BadModel:
    """Changes one tensor's entry in the header."""
    return weights(name, set_entry(Q, **changes), f"{{dir}}/{WEIGHTS}: tensor {Q}: {words}")


FILE = f"{{dir}}/{WEIGHTS}: "
FILES = [
    weights("none", remove(WEIGHTS), "{dir}: no weights: expected model.safetensors or"),
    weights("an empty file", keep_bytes(0), FILE + "truncated: 0 bytes"),
    weights("cut in the header", keep_bytes(100), FILE + "the header says that it is"),
    weights("cut in the data", keep_bytes(500_000), "lie outside the file"),
    weights("a header longer than the file", weights_of(b"{}", 1 << 20), FILE + "the header says that it is 1048576"),
    weights("a header of 2^40 bytes", weights_of(b"{}", 1 << 40), FILE + "the header says that it is 1099511627776"),
    weights("a header of 2^64 - 1 bytes", weights_of(b"{}", 2**64 - 1), "expected at most 104857600"),
    weights("a header that is no JSON", weights_of(b"nonsense"), FILE + "header: not valid JSON"),
    weights("a header that is a list", weights_of(b"[]"), FILE + "header: expected a JSON object"),
    weights("a header of 50 million lists", weights_of(b'{"a":' + b"[" * 50_000_000), "nested more than 64 levels deep"),
    weights("a tensor twice", weights_of(b'{"a": {}, "a": {}}'), 'header: the key "a" appears twice'),
    weights("no tensor", weights_of(b'{"__metadata__": {}}'), "{dir}: the weights do not fit config.json: tensor"),
    weights("an entry that is no object", weights_of(b'{"a": 1}'), FILE + "tensor a: expected {dtype"),
    weights("an entry without its shape", weights_of(b'{"a": {"dtype": "F32"}}'), FILE + "tensor a: expected {dtype"),
    weights("a name of 1 MB", weights_of(b'{"' + b"n\\n" * 400_000 + b'": 1}'), FILE + "tensor n\\nn\\n"),
    weights("a folder", replace(WEIGHTS, Path.mkdir), FILE + "not a regular file"),
    weights("a FIFO", replace(WEIGHTS, os.mkfifo), FILE + "not a regular file"),
    weights("a loop of links", replace(WEIGHTS, lambda p: p.symlink_to(p)), FILE + "Too many levels"),
    weights("a link to nowhere", replace(WEIGHTS, lambda p: p.symlink_to("blobs/0")), FILE + "No such file"),
    weights("overlapping", edit_header(lambda h: h[Q].update(data_offsets=[o - 2 for o in h[Q]["data_offsets"]])),
            " overlap: one ends at byte "),
    entry("behind the file", "data_offsets [1099511627776,", data_offsets=[2**40, 2**40 + 65536]),
    entry("an offset of 2^63", "data_offsets must be", data_offsets=[0, 2**63]),
    entry("a negative offset", "data_offsets must be", data_offsets=[-2, 65534]),
    entry("one offset", "data_offsets must be", data_offsets=[0]),
    entry("offsets as text", "data_offsets must be", data_offsets="0-65536"),
    weights("offsets backwards", edit_header(lambda h: h[Q].update(data_offsets=h[Q]["data_offsets"][::-1])),
            f"tensor {Q}: data_offsets must be"),
    weights("an integer dtype", set_entry(Q, dtype="I16"), f"tensor {Q}: expected dtype BF16, F16 or F32, found I16"),
    entry("an unknown dtype", 'unknown dtype "Q4"', dtype="Q4"), entry("a dtype that is none", "unknown dtype", dtype=[1]),
    entry("a wider dtype", "data_offsets [", dtype="F32"),
    weights("another shape", edit_header(lambda h: h[Q].update(shape=h[Q]["shape"][::-1])),
            f"tensor {Q}: expected shape ["),
    entry("a larger shape", "data_offsets [", shape=[512, 512]), entry("a negative size", "shape has no size -1", shape=[-1, 128]),
    entry("2^126 elements", "shape [4611686018427387904,", shape=[2**62, 2**62, 4]),
    entry("17 dimensions", "shape must be a list of at most 16", shape=[1] * 17),
    entry("a shape that is none", "shape must be a list", shape="[256, 128]"),
    weights("a missing tensor", drop_tensor(NORM), f"do not fit config.json: tensor {NORM} [128] is missing"),
    weights("a misnamed tensor", drop_tensor(NORM, instead="model.extra.weight"), f"tensor {NORM} [128] is missing"),
    weights("bytes of no tensor", edit_header(lambda h: h.pop(NORM)), "belong to no tensor"),
    weights("NaN", nan_norm, "the canary could not be decoded"),
    weights("a vocabulary that the config doubles", edit_config(vocab_size=1024), "expected shape [1024, 128]"),
    weights("an index that names an absent file", use_index(**{NORM: "model-00002-of-00002.safetensors"}),
            f"{{dir}}/{INDEX}: names the shard model-00002-of-00002.safetensors"),
    weights("an index that leaves the directory", use_index(**{NORM: "../../etc/passwd"}),
            f'{{dir}}/{INDEX}: weight_map["{NORM}"]: expected the name of'),
    weights("an index of a number", use_index(**{NORM: 7}), f'weight_map["{NORM}"]: expected a file name, found 7'),
    weights("an index that is no JSON", lambda m: (use_index()(m), overwrite(INDEX, b"{")(m)),
            f"{{dir}}/{INDEX}: not valid JSON"),
    weights("an index without map", lambda m: (use_index()(m), overwrite(INDEX, b"{}")(m)),
            f'{{dir}}/{INDEX}: expected "weight_map"'),
    weights("an index of a tensor that its shard lacks", use_index(**{"model.extra.weight": SHARD}),
            f"{{dir}}/{INDEX}: tensor model.extra.weight should be in {SHARD}"),
    BadModel("weights: a missing tensor, prefill", drop_tensor(NORM), f"tensor {NORM} [128] is missing",
             program="sluice-prefill"),
]


def tokenizer(name, text: bytes, words) -> BadModel:
    return BadModel(f"tokenizer: {name}", overwrite("tokenizer.json", text), "{dir}/tokenizer.json: " + words)


BYTES = b'{"decoder": {"type": "ByteLevel"}, '
TOKENIZERS = [
    tokenizer("not JSON", b"{", "not valid JSON"), tokenizer("a list", b"[]", "expected a JSON object"),
    tokenizer("no vocabulary", BYTES + b'"model": {}}', "model.vocab: expected an object or a list, found nothing"),
    tokenizer("a stray id", BYTES + b'"model": {"vocab": {"a": 65539}}}', 'token "a": expected an id of 0 to 65538'),
    tokenizer("a negative id", BYTES + b'"model": {"vocab": {"a": -1}}}', 'token "a": expected an id'),
    tokenizer("an entry that is none", BYTES + b'"model": {"vocab": [["a", 0], 7]}}', "model.vocab[1]: expected"),
    tokenizer("added tokens that are no list", BYTES + b'"model": {"vocab": {}}, "added_tokens": 1}',
              "added_tokens: expected a list"),
    tokenizer("an added token without content", BYTES + b'"model": {"vocab": {}}, "added_tokens": [{"id": 1}]}',
              "added_tokens: expected {id, content, ...}"),
    tokenizer("a million lists", BYTES + b'"model": ' + b"[" * 1_000_000, "nested more than 64 levels deep"),
]


def nothing(model):
    pass


# Settings that are right by themselves, but impossible with this model or on this machine.
SETTINGS = [
    BadModel("settings: a context over the model's", nothing, "max_context: ", ["--max-context", "8192"]),
    BadModel("settings: HBM for no block", nothing, "hbm", ["--hbm-bytes", "4096"]),
    BadModel("settings: DRAM for no block", nothing, "dram", ["--dram-bytes", "4096"]),
    BadModel("settings: an address of no machine", nothing, "listen: cannot listen on 203.0.113.7:0",
             ["--listen", "203.0.113.7:0"]),
    BadModel("settings: an admin address of no machine", nothing, "admin_listen: cannot listen on 203.0.113.7:0",
             ["--admin-listen", "203.0.113.7:0"]),
    BadModel("settings: an address file in no folder", nothing, "address_file", ["--address-file", "/no/such/folder/a"]),
    BadModel("settings: a file for the directory", nothing, "/dev/null/config.json: ", ["--model", "/dev/null"]),
    BadModel("settings: a directory that is not there", nothing, "/no/such/model/config.json: no such file",
             ["--model", "/no/such/model"]),
    BadModel("settings: the same, prefill", nothing, "/no/such/model/config.json: no such file",
             ["--model", "/no/such/model"], "sluice-prefill"),
]
MODELS = CONFIGS + FILES + TOKENIZERS + SETTINGS
