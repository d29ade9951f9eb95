"""Safetensors files as numpy arrays, with the errors that people meet in one sentence."""

from pathlib import Path

import ml_dtypes  # noqa: F401 - gives numpy the bfloat16 that safetensors asks it for.
import numpy as np
from safetensors import SafetensorError, safe_open

from sluice_client.errors import ToolError


class SafetensorsFile:
    """The tensors of a file by name."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self._file = safe_open(self.path, "np")
        except OSError as error:
            raise ToolError(f"cannot read {self.path}: {error.strerror or error}") from error
        except SafetensorError as error:
            raise ToolError(f"{self.path} is not a safetensors file: {error}") from error
        self._names = set(self._file.keys())

    def __contains__(self, name: str) -> bool:
        return name in self._names

    def names(self) -> list[str]:
        """Returns the names of all tensors, sorted."""
        return sorted(self._names)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._names:
            raise ToolError(f"{self.path} has no tensor {name}")
        return self._file.get_tensor(name)
