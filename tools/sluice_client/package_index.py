"""Finds one file in the package index that pip is configured for, and downloads it with resume."""

import hashlib
import html.parser
import os
import subprocess
import sys
import time
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

import requests
from pip._internal.models.index import PyPI  # pip's own default; pip says it nowhere else
from tqdm import tqdm

from sluice_client.errors import ToolError

_SIMPLE_API = "application/vnd.pypi.simple.v1+json, text/html;q=0.2"
_TIMEOUT_S = 30
_ATTEMPTS = 6
_PIECE_BYTES = 1 << 16


@dataclass(frozen=True)
class IndexFile:
    """A file of a package: where it is, and the SHA-256 (hexadecimal) that the index states."""

    url: str
    name: str
    sha256: str


def _pip_setting(name: str) -> str | None:
    """A setting of pip's, from its environment variable or its configuration files."""
    value = os.environ.get("PIP_" + name.upper().replace("-", "_"))
    if value:
        return value
    got = subprocess.run(
        [sys.executable, "-m", "pip", "config", "get", "global." + name],
        capture_output=True, text=True, check=False)
    return got.stdout.strip() or None if got.returncode == 0 else None


def open_session() -> requests.Session:
    """An HTTP session that trusts what pip trusts."""
    session = requests.Session()
    certificate = _pip_setting("cert")
    if certificate:
        session.verify = certificate
    return session


class _Links(html.parser.HTMLParser):
    """The links of a PEP 503 page."""

    def __init__(self):
        super().__init__()
        self.hrefs = []

    def handle_starttag(self, tag, attrs):
        if tag == "a":
            self.hrefs.extend(value for key, value in attrs if key == "href" and value)


def _files(page: requests.Response) -> list[IndexFile]:
    """The files of a project page, in either form (PEP 691 JSON or PEP 503 HTML)."""
    if "json" in page.headers.get("content-type", ""):
        return [IndexFile(urllib.parse.urljoin(page.url, f["url"]), f["filename"],
                          f.get("hashes", {}).get("sha256", "")) for f in page.json()["files"]]
    links = _Links()
    links.feed(page.text)
    found = []
    for href in links.hrefs:
        url, fragment = urllib.parse.urldefrag(urllib.parse.urljoin(page.url, href))
        name = urllib.parse.unquote(url.rsplit("/", 1)[-1])
        sha256 = fragment.removeprefix("sha256=") if fragment.startswith("sha256=") else ""
        found.append(IndexFile(url, name, sha256))
    return found


def _without_credentials(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def find_wheel(session: requests.Session, package: str, version: str) -> IndexFile:
    """The wheel of `package` `version` in pip's index."""
    index = (_pip_setting("index-url") or PyPI.simple_url).rstrip("/")
    url = f"{index}/{package}/"
    try:
        page = session.get(url, headers={"Accept": _SIMPLE_API}, timeout=_TIMEOUT_S)
        page.raise_for_status()
        files = _files(page)
    except (requests.RequestException, ValueError, KeyError) as error:
        raise ToolError(f"cannot read the package index at {_without_credentials(url)}: "
                        f"{_short(error)}") from error
    prefix = f"{package.replace('-', '_')}-{version}-"
    for file in files:
        if file.name.startswith(prefix) and file.name.endswith(".whl"):
            return file
    raise ToolError(f"the package index at {_without_credentials(url)} has no wheel {prefix}*.whl "
                    f"(it lists {len(files)} files)")


def download(session: requests.Session, file: IndexFile, target: Path) -> None:
    """Fetches `file` to `target`; a broken download goes on from `target`.part, also in a later run."""
    part = target.with_name(target.name + ".part")
    for attempt in range(_ATTEMPTS):
        try:
            _fetch(session, file, part)
            break
        except (requests.RequestException, OSError) as error:
            if attempt == _ATTEMPTS - 1:
                have = part.stat().st_size if part.exists() else 0
                raise ToolError(f"downloading {file.name} failed after {_ATTEMPTS} attempts, "
                                f"{have} bytes are kept in {part}: {_short(error)}") from error
            time.sleep(min(2 ** attempt, 10))
    found = sha256_of(part)
    if file.sha256 and found != file.sha256:
        part.unlink()
        raise ToolError(f"{file.name} came with SHA-256 {found}, the index states {file.sha256}; "
                        "the download was removed, try again")
    part.replace(target)


def _fetch(session: requests.Session, file: IndexFile, part: Path) -> None:
    have = part.stat().st_size if part.exists() else 0
    headers = {"Range": f"bytes={have}-"} if have else {}
    with session.get(file.url, headers=headers, stream=True, timeout=_TIMEOUT_S) as answer:
        if answer.status_code == 416:  # Nothing past `have`: all is here, or too much is.
            if file.sha256 and sha256_of(part) == file.sha256:
                return
            part.unlink()
            raise requests.ConnectionError("the kept part did not fit and was removed")
        answer.raise_for_status()
        if answer.status_code != 206:
            have = 0
        length = answer.headers.get("content-length")
        total = have + int(length) if length else None
        with part.open("ab" if have else "wb") as out, tqdm(
                total=total, initial=have, unit="B", unit_scale=True, desc=file.name,
                disable=None, leave=False) as bar:
            for piece in answer.iter_content(_PIECE_BYTES):
                out.write(piece)
                bar.update(len(piece))
    if total is not None and part.stat().st_size < total:
        raise requests.ConnectionError(f"it ended after {part.stat().st_size} of {total} bytes")


def sha256_of(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def _short(error: Exception) -> str:
    """The innermost cause, in one line: requests wraps the reason several times over."""
    while getattr(error, "args", None) and isinstance(error.args[0], Exception):
        error = error.args[0]
    error = getattr(error, "reason", None) or error
    return str(error).splitlines()[0] if str(error) else type(error).__name__
