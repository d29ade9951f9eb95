"""tools/gpu-stage: packs all that a GPU machine without build tools needs into one folder."""

import argparse
import io
import lzma
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sluice_gpu import bench, cases, machine, weights
from sluice_gpu.place import PRESET, Place

MIB = 1 << 20
LIMIT_MIB = 60
PAYLOAD = "payload.tar.xz"
MODEL = "smollm2-135m-instruct"

# Programs of bin/ that are carried beside every test program with a CUDA case and every bench of kernels.
PROGRAMS = ("sluice-server", "sluice-prefill", "sluice-bench", "sluice-profile", "sluice-make-fixture")
BENCHES = "sluice-*-bench"
# Libraries that are not carried: those of every Linux with glibc, those of the driver, and cuBLAS, which is too large;
# the GPU machine uses its own, if it has one.
SYSTEM_LIBRARIES = re.compile(r"^(ld-linux.*|libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|"
                              r"libcuda|libnvidia-.*|libcublas|libcublasLt|linux-vdso)\.so")
# sluice-bench loads this library by its name when it is asked for a trace.
CUPTI = "libcupti.so.13"
SOURCES = ("tools/sluice_client", "tests/fixtures", "tests/e2e", "configs/models",
           ".venv/sluice_stubs")
FILES = ("tests/conftest.py", "tests/pytest.ini", "tests/bench/loaded_node.py", "tests/bench/ranks_killed.py")
# Python packages that make the weights and that the end-to-end tests import. A machine that has its own uses those.
PACKAGES = ("gguf", "tqdm", "yaml", "google_crc32c", "google/rpc", "safetensors", "ml_dtypes")
# Packages that are of no use without their compiled part. ml_dtypes needs the same minor version of Python there.
COMPILED = ("safetensors", "ml_dtypes")
# Generated stubs ask for the version of grpcio that made them, though they use only parts that are years older.
STUB_VERSION = re.compile(rb"^GRPC_GENERATED_VERSION = '[^']*'", re.MULTILINE)
OLDEST_GRPC = b"GRPC_GENERATED_VERSION = '1.65.0'"

ABOUT = f"""Puts into one folder what a GPU machine needs that has neither build tools nor a network: stripped
programs and tests of build/release, the shared libraries that they need (not glibc, libstdc++ or the
driver's; no oneDNN), fixtures, and gpu-test, which runs all of it. Copy the folder there and run its
gpu-test. The folder stays below {LIMIT_MIB} MiB.

SmolLM2's weights (a 98 MB GGUF, fetched once into models/) do not fit beside the rest, so they travel in
two parts: --part 1 is everything and their first piece, --part 2 the other piece alone. Part 1's
gpu-test --unpack keeps what it brought; after part 2 its tests run too.
"""
EXAMPLES = """examples:
  tools/gpu-stage                        writes build/stage, with all but SmolLM2
  tools/gpu-stage --part 1               adds the first part of SmolLM2
  tools/gpu-stage --part 2               its second part, which goes to the same folder on the GPU machine
"""


@dataclass(frozen=True)
class Item:
    """A file of the payload: where it comes from, and its name in the archive."""

    source: Path
    name: str
    kind: str  # row of the printed table


def build_staged(place: Place) -> None:
    """Builds everything that is staged: the default build, and the benches, which it leaves out."""
    build = subprocess.run(["cmake", "--build", str(place.root / PRESET), "--target", "all", "benches"])
    if build.returncode != 0:
        raise SystemExit("gpu-stage: the programs or the benches do not build")


def programs(place: Place) -> list[Path]:
    """Returns the programs to carry. A test program is carried as soon as it has a CUDA case."""
    found = [place.bin / name for name in PROGRAMS]
    missing = [p.name for p in found if not p.is_file()]
    if not missing:
        build_staged(place)
    tests = list(dict.fromkeys(program for program, _ in cases.cuda_cases(place))) if not missing else []
    if not missing and not tests:
        missing.append("tests with CUDA cases")
    if missing:
        raise SystemExit(f"gpu-stage: {PRESET}/bin lacks {', '.join(missing)}: build first, with nvcc on "
                         f"PATH (cmake --preset release && cmake --build --preset release)")
    return found + tests + sorted(p for p in place.bin.glob(BENCHES)
                                  if p not in found and p.name not in bench.CPU_BENCHES)


def libraries(files: list[Path]) -> dict[str, Path]:
    """Returns name -> file for every shared library that the programs load and that a system may lack."""
    found: dict[str, Path] = {}
    for file in files:
        done = subprocess.run(["ldd", str(file)], capture_output=True, text=True, check=True)
        for line in done.stdout.splitlines():
            name, _, rest = line.strip().partition(" => ")
            if not rest or SYSTEM_LIBRARIES.match(name):
                continue
            if rest.startswith("not found"):
                raise SystemExit(f"gpu-stage: {file.name} needs {name}, which this machine lacks")
            found[name] = Path(rest.split(" (")[0]).resolve()
    return found


def cupti() -> Path | None:
    nvcc = shutil.which("nvcc")
    homes = [Path(nvcc).resolve().parents[1]] if nvcc else []
    for home in [*homes, Path("/usr/local/cuda")]:
        for folder in ("lib64", "extras/CUPTI/lib64"):
            if (home / folder / CUPTI).is_file():
                return (home / folder / CUPTI).resolve()
    return None


def files_below(root: Path, folder: Path) -> Iterator[Path]:
    for file in sorted((root / folder).rglob("*")):
        if file.is_file() and "__pycache__" not in file.parts and file.suffix not in (".cc", ".h"):
            yield file


def items(place: Place) -> list[Item]:
    out = []
    chosen = programs(place)
    for program in chosen:
        kind = "programs" if program.name in PROGRAMS else "tests and benches"
        out.append(Item(program, f"{PRESET}/bin/{program.name}", kind))
    loaded = libraries(chosen)
    if (trace := cupti()) is not None:
        loaded[CUPTI] = trace
    out += [Item(file, f"{PRESET}/lib/{name}", "libraries") for name, file in sorted(loaded.items())]
    for folder in SOURCES:
        out += [Item(file, str(file.relative_to(place.root)), "fixtures and tools")
                for file in files_below(place.root, Path(folder))]
    out += [Item(place.root / name, name, "fixtures and tools") for name in FILES]
    site = next((place.root / ".venv/lib").glob("python3*/site-packages"), None)
    for package in PACKAGES if site else ():
        out += [Item(file, f"tools/site/{file.relative_to(site)}", "fixtures and tools")
                for file in files_below(site, Path(package))
                if file.suffix == ".py" or (package in COMPILED and file.suffix == ".so")]
    return out


def write_payload(chosen: list[Item], place: Place, target: Path) -> dict[str, tuple[int, int]]:
    """Writes the archive; returns kind -> (files, bytes as unpacked)."""
    sums: dict[str, tuple[int, int]] = {}
    # The dictionary reaches so far back that a program finds the same kernels in the programs before it.
    far = [{"id": lzma.FILTER_LZMA2, "preset": 3, "dict_size": 96 * MIB}]
    with (tempfile.TemporaryDirectory() as scratch, lzma.open(target, "wb", filters=far) as packed,
          tarfile.open(fileobj=packed, mode="w") as archive):
        for item in chosen:
            source = item.source
            if item.name.startswith(f"{PRESET}/"):
                source = Path(scratch) / item.source.name
                subprocess.run(["strip", "--strip-unneeded", "-o", str(source), str(item.source)], check=True)
            elif item.name.endswith("_pb2_grpc.py"):
                source = Path(scratch) / item.source.name
                source.write_bytes(STUB_VERSION.sub(OLDEST_GRPC, item.source.read_bytes()))
            archive.add(source, item.name, filter=_plain)
            files, size = sums.get(item.kind, (0, 0))
            sums[item.kind] = (files + 1, size + source.stat().st_size)
        revision = machine.revision(place).encode()
        info = tarfile.TarInfo("revision")
        info.size = len(revision)
        archive.addfile(info, io.BytesIO(revision))
    return sums


def _plain(info: tarfile.TarInfo) -> tarfile.TarInfo:
    info.uid = info.gid = 0
    info.uname = info.gname = "root"
    return info


def size_of(folder: Path) -> int:
    return sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())


def add_runner(place: Place, out: Path) -> None:
    shutil.copy(place.root / "tools/gpu-test", out / "gpu-test")
    shutil.copytree(place.root / "tools/sluice_gpu", out / "sluice_gpu",
                    ignore=shutil.ignore_patterns("__pycache__"))


def gguf_file(place: Place) -> Path:
    """Returns the GGUF file of the weights, which is fetched once into models/."""
    target = place.root / f"models/{MODEL}.gguf"
    if not target.is_file():
        from sluice_client import fetch_model
        try:
            fetch_model.fetch_gguf(MODEL, target)
        except fetch_model.ToolError as error:
            raise SystemExit(f"gpu-stage: {error}") from error
    return target


def stage(place: Place, out: Path, part: int | None) -> None:
    if out.exists() and not (out / "gpu-test").is_file() and any(out.iterdir()):
        raise SystemExit(f"gpu-stage: {out} is no earlier stage and is not empty: choose another --out")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    add_runner(place, out)
    rows: list[tuple[str, int, int]] = []
    limit = LIMIT_MIB * MIB
    if part != 2:
        sums = write_payload(items(place), place, out / PAYLOAD)
        rows += [(kind, files, size) for kind, (files, size) in sums.items()]
    if part is not None:
        gguf = gguf_file(place)
        whole = gguf.stat().st_size
        # The file is always cut at the same byte, whatever the size of the rest of part 1, because the parts may be
        # staged on different days.
        cut = whole * 2 // 5
        piece = weights.write_part(gguf, out / "model", part, *((0, cut) if part == 1 else (cut, whole)))
        rows.append((f"SmolLM2, part {part} of {weights.PARTS}", 1, piece.stat().st_size))
    total = size_of(out)
    print(f"{'':28} {'files':>6} {'MiB':>8}")
    for kind, files, size in rows:
        print(f"{kind:28} {files:6} {size / MIB:8.1f}")
    if (out / PAYLOAD).is_file():
        print(f"{'all but the model, packed':28} {'':6} {(out / PAYLOAD).stat().st_size / MIB:8.1f}")
    print(f"{'in all, ' + str(out):28} {'':6} {total / MIB:8.1f} of {LIMIT_MIB}")
    if total > limit:
        shutil.rmtree(out)
        raise SystemExit(f"gpu-stage: {total / MIB:.1f} MiB are more than {LIMIT_MIB}: removed again. "
                         f"What is staged is listed at the top of tools/sluice_gpu/stage.py")


def main() -> int:
    parser = argparse.ArgumentParser(prog="tools/gpu-stage", description=ABOUT, epilog=EXAMPLES,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="DIR", default=None,
                        help="folder to write (default build/stage); an earlier stage there is replaced")
    parser.add_argument("--part", type=int, choices=(1, 2), help="which part of SmolLM2 to add")
    args = parser.parse_args()
    place = Place(Path(os.environ["SLUICE_GPU_ROOT"]))
    stage(place, args.out or place.root / "build/stage", args.part)
    return 0


if __name__ == "__main__":
    sys.exit(main())
