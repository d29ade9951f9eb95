"""The texts of the command `texts`: three of each of four kinds, from files that a Debian 12 machine has.

The files come from packages that tools/setup installs (cmake-data, perl-modules, Python's library, base-files), so a
fresh machine has them, also one whose packages were installed without /usr/share/doc. Where /usr/share/doc has a
longer history of releases it is preferred; the name of a text says which file it came from.
"""

import ast
import glob
import gzip
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from sluice_client.errors import ToolError

KINDS = ("licence", "code", "news", "dialogue")
_LICENCES = "/usr/share/common-licenses"
_CMAKE = "/usr/share/cmake-*/Help"
_PERL = "/usr/share/perl/5.*.*"
_PYTHON = "/usr/lib/python3.*"
# Maximum number of characters that are read of one text; 8,192 tokens take 20,000 to 45,000.
_MOST_CHARACTERS = 200_000


def plain(path: Path) -> str:
    """Returns a file's text, unpacked; runs of blanks become one."""
    try:
        data = path.read_bytes()
        if path.suffix == ".gz":
            data = gzip.decompress(data)
    except (OSError, EOFError) as error:
        raise ToolError(f"{path}: {error}") from error
    return re.sub(r"[ \t]+", " ", data.decode("utf-8", "replace"))


def pod(path: Path) -> str:
    """Returns the documentation inside a Perl file, without its markup."""
    parts = re.findall(r"^=(?!cut)[a-z].*?(?=^=cut|\Z)", plain(path), re.MULTILINE | re.DOTALL)
    text = re.sub(r"^=(?:over|back|encoding|pod|for|begin|end)\b.*$", "", "\n".join(parts), flags=re.MULTILINE)
    return re.sub(r"\b[A-Z]<([^<>]*)>", r"\1", re.sub(r"^=(?:head\d|item) +", "", text, flags=re.MULTILINE))


def questions(path: Path) -> str:
    """Returns a FAQ of Perl as a dialogue: its headings are what is asked, and the text below them answers."""
    headed = re.sub(r"^=(?:head[23]|item) +(.*)$", r"Question: \1\n\nAnswer:", plain(path), flags=re.MULTILINE)
    return re.sub(r"\b[A-Z]<([^<>]*)>", r"\1", re.sub(r"^=.*$", "", headed, flags=re.MULTILINE))


def sessions(path: Path) -> str:
    """Returns the docstrings that show a session at Python's prompt: what a person enters, and what is answered."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node) or ""
            if ">>>" in text:
                found.append(text)
    return "\n\n".join(found)


def topics(path: Path) -> str:
    """Returns the pages of Python's language reference that pydoc carries."""
    value = ast.parse(path.read_text()).body[0].value
    pages = ast.literal_eval(value)
    return "\n\n".join(re.sub(r"[ \t]+", " ", pages[name]) for name in sorted(pages))


@dataclass(frozen=True)
class Source:
    """One text: the files of the first set that the machine has, joined in order."""

    kind: str
    name: str
    sets: tuple[tuple[str, ...], ...]  # Absolute patterns; of a set every pattern must match.
    read: Callable[[Path], str] = plain

    def files(self) -> list[Path]:
        """Returns the files, newest version first where a pattern matches several folders."""
        for patterns in self.sets:
            found = []
            for pattern in patterns:
                matches = [p for p in sorted(Path("/").glob(pattern.lstrip("/")))
                           if p.is_file() and not any(part.is_symlink() for part in (p, *p.parents))]
                if not matches:
                    break
                found += matches if "*" in Path(pattern).name else matches[-1:]
            else:
                return found
        wanted = "\n  ".join(", ".join(patterns) for patterns in self.sets)
        raise ToolError(f"this machine lacks the text '{self.name}' ({self.kind}). It needs all of one line:\n  "
                        f"{wanted}\nInstall the packages of tools/setup, or give documents with --text FILE")

    def text(self) -> str:
        parts: list[str] = []
        for path in self.files():
            parts.append(self.read(path))
            if sum(map(len, parts)) > _MOST_CHARACTERS:
                break
        return "\n\n".join(parts)[:_MOST_CHARACTERS]


def _licences(*names: str) -> tuple[tuple[str, ...], ...]:
    return (tuple(f"{_LICENCES}/{name}" for name in names),)


def _releases(first: int, last: int) -> tuple[str, ...]:
    return tuple(f"{_CMAKE}/release/3.{minor}.rst" for minor in range(last, first - 1, -1))


SOURCES = (
    Source("licence", "GPL-3 and Apache-2.0", _licences("GPL-3", "Apache-2.0")),
    Source("code", "Python's language reference", ((f"{_PYTHON}/pydoc_data/topics.py",),), topics),
    Source("news", "CMake 3.25 to 3.18", (_releases(18, 25),)),
    Source("dialogue", "questions about Perl's modules", ((f"{_PERL}/ExtUtils/MakeMaker/FAQ.pod",
           f"{_PERL}/IO/Compress/FAQ.pod", f"{_PERL}/Net/libnetFAQ.pod"),), questions),
    Source("licence", "LGPL-2.1 and GFDL-1.3", _licences("LGPL-2.1", "GFDL-1.3")),
    Source("code", "CMake's manuals", ((f"{_CMAKE}/manual/cmake-language.7.rst",
           f"{_CMAKE}/manual/cmake-buildsystem.7.rst"),)),
    Source("news", "the C library", (("/usr/share/doc/libc6/NEWS.gz",), _releases(9, 17))),
    Source("dialogue", "sessions at Python's prompt", (tuple(f"{_PYTHON}/{name}.py" for name in
           ("difflib", "statistics", "fractions", "doctest")),), sessions),
    Source("licence", "MPL-2.0, MPL-1.1 and Artistic", _licences("MPL-2.0", "MPL-1.1", "Artistic")),
    Source("code", "Perl's modules", ((f"{_PERL}/Pod/Simple/Subclassing.pod", f"{_PERL}/Encode/Supported.pod",
           f"{_PERL}/version/Internals.pod"),), pod),
    Source("news", "Python", (("/usr/share/doc/python3.*/NEWS.gz",), _releases(0, 8))),
    Source("dialogue", "tutorials that talk with their reader", ((f"{_PERL}/Test/Tutorial.pod",
           f"{_PERL}/Locale/Maketext/TPJ13.pod"),), pod),
)


def given(paths: list[str]) -> Iterator[Source]:
    """Returns a source for each file of --text."""
    for path in paths:
        if not Path(path).is_file():
            raise ToolError(f"--text {path}: there is no such file")
        yield Source("given", Path(path).name, ((glob.escape(str(Path(path).resolve())),),))
