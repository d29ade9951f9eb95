"""Finds programs, fixtures and models, in a checkout or in a folder that tools/gpu-stage packed."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

PRESET = "build/release"


def nccl_folders() -> list[str]:
    """Returns where Python's packages have NCCL's library, which programs load where they are one of several ranks."""
    folders = [Path(entry) / "nvidia/nccl/lib" for entry in sys.path]
    return [str(folder) for folder in folders if (folder / "libnccl.so.2").is_file()][:1]


@dataclass(frozen=True)
class Place:
    """A folder laid out like a checkout. A staged folder has libraries beside its programs."""

    root: Path

    @property
    def bin(self) -> Path:
        return self.root / PRESET / "bin"

    @property
    def lib(self) -> Path:
        return self.root / PRESET / "lib"

    @property
    def fixtures(self) -> Path:
        return self.root / "tests/fixtures"

    @property
    def smollm2(self) -> Path:
        return self.root / "models/smollm2-135m-instruct"

    def program_environment(self) -> dict[str, str]:
        """Returns the environment of Sluice's programs, which refuse variables SLUICE_... that are no settings."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("SLUICE_")}
        # Libraries that are carried or found come last, so that the machine's own (CUDA's) is found first.
        added = nccl_folders() + ([str(self.lib)] if self.lib.is_dir() else [])
        if added:
            paths = [p for p in env.get("LD_LIBRARY_PATH", "").split(":") if p]
            env["LD_LIBRARY_PATH"] = ":".join([*paths, *added])
        return env

    def test_environment(self) -> dict[str, str]:
        """Returns the environment of the test programs."""
        return self.program_environment() | {
            "SLUICE_TEST_FIXTURES": str(self.fixtures),
            "SLUICE_TEST_SMOLLM2": str(self.smollm2),
        }
