"""A model directory that is broken gives one clear sentence and exit status 1."""

import json
import shutil
import struct

import pytest
from nodes import BIN, run


def edit_config(**changes):
    """Changes config.json; None removes a key."""
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
    """Changes the JSON header of model.safetensors; the data stays."""
    def change(model):
        path = model / "model.safetensors"
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8:8 + length])
        edit(header)
        text = json.dumps(header).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length:])
    return change


def drop_tensor(name, instead=None):
    """Takes a tensor and its bytes out of model.safetensors; `instead` is another name for it."""
    def change(model):
        path = model / "model.safetensors"
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
    return lambda model: (model / "model.safetensors").write_bytes(
        (model / "model.safetensors").read_bytes()[:count])


def overwrite(name, data):
    return lambda model: (model / name).write_bytes(data)


def remove(name):
    return lambda model: (model / name).unlink()


def use_index(**weight_map):
    """An index beside the one file, with some entries pointing elsewhere."""
    def change(model):
        data = (model / "model.safetensors").read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        names = [n for n in json.loads(data[8:8 + length]) if n != "__metadata__"]
        (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
        entries = {n: "model-00001-of-00002.safetensors" for n in names}
        entries.update(weight_map)
        (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": entries}))
    return change


Q = "model.layers.1.self_attn.q_proj.weight"
NORM = "model.norm.weight"

# What is done to a good directory, and what the sentence must say.
BROKEN = {
    "no config": (remove("config.json"), ["config.json"]),
    "config is not JSON": (overwrite("config.json", b"{nonsense"), ["config.json", "JSON"]),
    "config is a list": (overwrite("config.json", b"[1]"), ["config.json"]),
    "empty config": (overwrite("config.json", b""), ["config.json"]),
    "unknown architecture": (edit_config(architectures=["MambaForCausalLM"], model_type="mamba"), ["amba"]),
    "missing key": (edit_config(hidden_size=None), ["hidden_size"]),
    "key of a wrong type": (edit_config(num_hidden_layers="three"), ["num_hidden_layers"]),
    "zero layers": (edit_config(num_hidden_layers=0), ["num_hidden_layers"]),
    "negative size": (edit_config(intermediate_size=-256), ["intermediate_size"]),
    "huge size": (edit_config(vocab_size=2**60), ["vocab_size"]),
    "heads do not divide": (edit_config(num_key_value_heads=3), ["num_key_value_heads"]),
    "unknown rope": (edit_config(rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}), ["spiral"]),
    "no weights": (remove("model.safetensors"), ["safetensors"]),
    "empty file": (keep_bytes(0), ["model.safetensors"]),
    "truncated in the header": (keep_bytes(100), ["model.safetensors"]),
    "truncated in the data": (keep_bytes(500_000), ["model.safetensors"]),
    "header longer than the file": (
        overwrite("model.safetensors", struct.pack("<Q", 1 << 40) + b"{}"), ["model.safetensors"]),
    "header length overflows": (
        overwrite("model.safetensors", struct.pack("<Q", 2**64 - 1) + b"{}"), ["model.safetensors"]),
    "header is not JSON": (
        overwrite("model.safetensors", struct.pack("<Q", 8) + b"nonsense"), ["model.safetensors"]),
    "overlapping offsets": (
        edit_header(lambda h: h[Q].update(data_offsets=[o - 2 for o in h[Q]["data_offsets"]])), [Q[:14]]),
    "offsets behind the file": (set_entry(Q, data_offsets=[2**40, 2**40 + 65536]), [Q]),
    "offsets backwards": (
        edit_header(lambda h: h[Q].update(data_offsets=h[Q]["data_offsets"][::-1])), [Q]),
    "wrong dtype": (set_entry(Q, dtype="I16"), [Q, "I16"]),
    "unknown dtype": (set_entry(Q, dtype="Q4"), [Q, "Q4"]),
    "wrong shape": (edit_header(lambda h: h[Q].update(shape=h[Q]["shape"][::-1])), [Q, "256", "128"]),
    "shape of another size": (set_entry(NORM, shape=[64]), [NORM]),
    "missing tensor": (drop_tensor(NORM), [NORM]),
    "misnamed tensor": (drop_tensor(NORM, instead="model.extra.weight"), ["model."]),
    "bytes that belong to no tensor": (edit_header(lambda h: h.pop(NORM)), ["model.safetensors"]),
    "index names an absent file": (
        use_index(**{NORM: "model-00002-of-00002.safetensors"}), ["model-00002-of-00002.safetensors"]),
    "index names a file outside": (use_index(**{NORM: "../../etc/passwd"}), [".."]),
    "index is not JSON": (
        lambda m: (use_index()(m), overwrite("model.safetensors.index.json", b"{")(m)),
        ["model.safetensors.index.json"]),
    "index names a tensor that its shard lacks": (
        use_index(**{"model.extra.weight": "model-00001-of-00002.safetensors"}), ["model.extra.weight"]),
}


def sentence_of(program, model):
    """The last line on standard error, of a start that must fail with status 1."""
    done = run(BIN / program, "--model", model, "--listen", "127.0.0.1:0", "--hbm-bytes", "4MiB",
               *(["--admin-listen", "127.0.0.1:0", "--dram-bytes", "4MiB"] if program == "sluice-server" else []))
    assert done.returncode == 1, (done.returncode, done.stderr)
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert lines
    assert not any(word in done.stderr for word in ("terminate called", "Sanitizer", "Segmentation"))
    return lines[-1]


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_model_directory_is_one_sentence_and_status_1(tiny_models, tmp_path, name):
    change, words = BROKEN[name]
    model = tmp_path / "model"
    shutil.copytree(tiny_models("tiny-llama"), model)
    change(model)
    sentence = sentence_of("sluice-server", model)
    assert all(word in sentence for word in words), sentence


@pytest.mark.parametrize("program", ["sluice-server", "sluice-prefill"])
def test_a_directory_that_is_not_there_is_named(tmp_path, program):
    assert str(tmp_path / "nowhere") in sentence_of(program, tmp_path / "nowhere")


def test_a_directory_given_as_a_file_is_named(tiny_models):
    path = tiny_models("tiny-llama") / "config.json"
    assert str(path) in sentence_of("sluice-server", path)


def test_a_missing_shard_is_named(tiny_models, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_models("tiny-qwen2"), model)
    shard = sorted(model.glob("*.safetensors"))[-1]
    shard.unlink()
    assert shard.name in sentence_of("sluice-server", model)


def test_the_prefill_node_says_it_too(tiny_models, tmp_path):
    model = tmp_path / "model"
    shutil.copytree(tiny_models("tiny-llama"), model)
    drop_tensor(NORM)(model)
    assert NORM in sentence_of("sluice-prefill", model)
