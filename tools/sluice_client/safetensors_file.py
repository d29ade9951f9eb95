"""Reads safetensors with bfloat16 tensors as numpy arrays (the safetensors package knows no such dtype)."""

import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np

from sluice_client.errors import ToolError

_DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "F64": np.float64,
           "I32": np.int32, "I64": np.int64, "U8": np.uint8}


class SafetensorsFile:
    """A file's tensors by name, as read-only views of the mapped file."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            with self.path.open("rb") as f:
                (length,) = struct.unpack("<Q", f.read(8))
                if length > self.path.stat().st_size:
                    raise ValueError(f"its header claims {length} bytes")
                self._header = json.loads(f.read(length))
        except OSError as error:
            raise ToolError(f"cannot read {self.path}: {error.strerror}") from error
        except (ValueError, struct.error) as error:
            raise ToolError(f"{self.path} is not a safetensors file: {error}") from error
        self._header.pop("__metadata__", None)
        self._data = np.memmap(self.path, np.uint8, "r", offset=8 + length)

    def __contains__(self, name: str) -> bool:
        return name in self._header

    def names(self) -> list[str]:
        return list(self._header)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._header:
            raise ToolError(f"{self.path} has no tensor {name}")
        entry = self._header[name]
        begin, end = entry["data_offsets"]
        return self._data[begin:end].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
