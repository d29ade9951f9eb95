"""Carries SmolLM2 to a GPU machine: the GGUF file in two parts, which are joined and dequantised there."""

import hashlib
import json
import shutil
import sys
from pathlib import Path

PARTS = 2
_NAME = "weights.gguf"


def part_name(part: int) -> str:
    return f"{_NAME}.{part}of{PARTS}"


def sha256_of(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def write_part(gguf: Path, folder: Path, part: int, begin: int, end: int) -> Path:
    """Writes bytes [begin, end) of the file, and beside them the digest of the whole file."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / part_name(part)
    with gguf.open("rb") as source, target.open("wb") as out:
        source.seek(begin)
        out.write(source.read(end - begin))
    (folder / f"{_NAME}.json").write_text(json.dumps({"sha256": sha256_of(gguf)}) + "\n")
    return target


def parts_here(folder: Path) -> list[int]:
    return [n for n in range(1, PARTS + 1) if (folder / part_name(n)).is_file()]


def make_model(folder: Path, tools: Path) -> str:
    """Makes the model's directory from the parts in `folder`. Returns the reason why it cannot, or the empty string.

    `tools` holds sluice_client, which dequantises the weights, and site/, the packages that it needs and that this
    machine may lack.
    """
    if (folder / "model.safetensors").is_file():
        return ""
    here = parts_here(folder)
    if not here:
        return "SmolLM2's weights are not here (tools/fetch-model, or tools/gpu-stage --part 1 and 2)"
    if len(here) < PARTS:
        return f"{len(here)} of {PARTS} parts of SmolLM2's weights are here"
    whole = folder / _NAME
    with whole.open("wb") as out:
        for part in range(1, PARTS + 1):
            with (folder / part_name(part)).open("rb") as source:
                shutil.copyfileobj(source, out, 1 << 20)
    want = json.loads((folder / f"{_NAME}.json").read_text())["sha256"]
    if sha256_of(whole) != want:
        return "the parts of SmolLM2's weights are not of one file: stage both again"
    sys.path[:0] = [str(tools)]
    sys.path.append(str(tools / "site"))
    try:
        from sluice_client import fetch_model
    except ImportError as error:
        return f"SmolLM2's weights need a Python package: {error}"
    try:
        fetch_model.make_from_gguf("smollm2-135m-instruct", folder, whole)
    except (ImportError, fetch_model.ToolError) as error:
        return f"SmolLM2's weights could not be made: {error}"
    for file in (whole, *(folder / part_name(part) for part in here)):
        file.unlink()
    return ""
