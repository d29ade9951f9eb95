"""Makes the Python stubs of ../proto before setuptools looks for packages."""

from pathlib import Path

from setuptools import setup

_HERE = Path(__file__).resolve().parent
_PROTO = _HERE.parent / "proto"


def make_stubs() -> None:
    """Writes sluice/v1/*_pb2.py and *_pb2_grpc.py to build/stubs. Raises RuntimeError if protoc refuses."""
    from grpc_tools import protoc  # noqa: PLC0415 - a requirement of the build alone
    out = _HERE / "build" / "stubs"
    out.mkdir(parents=True, exist_ok=True)
    files = sorted(str(path.relative_to(_PROTO)) for path in (_PROTO / "sluice" / "v1").glob("*.proto"))
    if not files:
        raise RuntimeError(f"{_PROTO}/sluice/v1 has no protos: install from a checkout of the repository")
    wells = Path(protoc.__file__).parent / "_proto"
    if protoc.main(["protoc", f"-I{_PROTO}", f"-I{wells}", f"--python_out={out}", f"--grpc_python_out={out}", *files]):
        raise RuntimeError("protoc refused proto/sluice/v1")
    for folder in (out / "sluice", out / "sluice" / "v1"):
        (folder / "__init__.py").touch()


make_stubs()
setup()
